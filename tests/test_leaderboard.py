"""scripts/leaderboard.py, on results that are kept with the experiments, and the files it is meant for."""

import json
import re
import runpy
from pathlib import Path

import pytest

from promptfed.methods import ALIASES, METHODS, create
from promptfed.runs import config as C
from promptfed.runs.protocols import wanted

ROOT = Path(__file__).parents[1]
BOARD = runpy.run_path(str(ROOT / "scripts" / "leaderboard.py"))
page = BOARD["page"]
MEASURED = ROOT / "experiments" / "evidence" / "office-domain"
ONE = ("SGPT", "FedVPT", "Head-Tune")  # model for all
OWN = ("pFedPG", "pFedPG, AdaIN", "pFedPG, average", "pFedPG, P_base", "Local VPT", "Local head")
LABELS = {*ONE, *OWN, "class mean", "centralised"}


def measured(folder):
    """Some rows of kept results."""
    folder.mkdir()
    lines = (MEASURED / "results.jsonl").read_text().splitlines(keepends=True)
    (folder / "results.jsonl").write_text("".join(line for line in lines if json.loads(line)["label"] in LABELS))
    table = json.loads((MEASURED / "table.json").read_text())
    (folder / "table.json").write_text(json.dumps([row for row in table if row["label"] in LABELS]))
    (folder / "kept.json").write_text(
        '{"date": "2026-11-17", "commit": "0123abc", "later": {"SGPT": ["2026-11-19", "4567def"]}}'
    )
    return folder


def kept(folder, change, rows=lambda row: row):
    """The same with their first seed three times; `change` edits a result."""
    measured(folder)
    lines = []
    for line in (folder / "results.jsonl").read_text().splitlines():
        for seed in range(3) if json.loads(line)["seed"] == 0 else ():
            run = json.loads(line)
            run["seed"] = run["result"]["seed"] = seed
            change(run["result"], seed)
            lines.append(json.dumps(run) + "\n")
    (folder / "results.jsonl").write_text("".join(lines))
    table = json.loads((folder / "table.json").read_text())
    (folder / "table.json").write_text(json.dumps([rows(row) for row in table]))
    return folder


def test_the_page_is_made_from_the_results_that_are_kept():
    assert (ROOT / "docs" / "leaderboard.md").read_text() == page(BOARD["KEPT"])


@pytest.mark.parametrize("path", sorted((ROOT / "experiments" / "leaderboard").glob("*.toml")), ids=lambda p: p.stem)
def test_a_file_has_every_method_of_the_catalogue(path):
    """In each column, but for those that cannot serve what all of its runs are asked for; as a tuning that can."""
    given = C.read(path)
    rows = given["compare"]["rows"]
    labels = [row.get("label", row["method"]) for row in rows]
    assert len(labels) == len(set(labels))
    assert {method_of(label) for label in labels} <= {*METHODS, *ALIASES}
    for column in given["compare"].get("columns", [{}]):
        asked = wanted({**given["eval"], **column.get("eval", {})}).values()
        present = {
            method_of(label)
            for label, row in zip(labels, rows, strict=True)
            if column.get("label") in row.get("columns", [column.get("label")])
            and not any(one.why_not(create(name_of(row["method"]))) for one in asked)
        }
        assert present >= {name for name in (*METHODS, *ALIASES) if not any(one.why_not(create(name)) for one in asked)}


def method_of(label):
    """`fedavg` of `fedavg+head` and of `fedavg, 2 epochs`."""
    return re.split(r"[+,]", label)[0]


def name_of(method):
    return method if isinstance(method, str) else method["name"]


def test_methods_are_grouped_by_what_they_tune_and_ranked(tmp_path):
    _, text = page([measured(tmp_path / "kept")]).split("## office-caltech10-96, domain, 4 clients\n")
    labels = [line.split(" | ")[0].strip("| ") for line in text.splitlines() if line.startswith("| ")]
    assert labels[2:13] == [
        "*prompt tokens of a vision transformer*",
        *("FedVPT", "SGPT"),  # one model for all, by global accuracy
        *("pFedPG, AdaIN", "pFedPG, average", "Local VPT", "pFedPG, P_base", "pFedPG"),
        "*a head or attention on frozen features*",
        *("Head-Tune", "Local head"),
    ]
    assert "| Head-Tune | one | 3 | 86.1 ±0.8 | 77.0 ±2.7 | 89.9 ±0.6 | 17.5 kB | 4 k |" in text
    assert "- Backbones: facebook/deit-tiny-patch16-224. Rounds: 10.\n- Tuned: 3 trials per row" in text
    assert "- Results of 2026-11-17, commit 0123abc; of 2026-11-19, commit 4567def: SGPT.\n" in text


def test_the_page_begins_with_the_first_of_each_kind_of_models(tmp_path):
    """By hand from the kept results: each kind is ranked by its own column, over all groups."""
    glance = page([measured(tmp_path / "kept")]).split("## ")[0]
    first = "FedVPT 91.0 ±0.0 | pFedPG, AdaIN 89.0 ±0.6 | centralised+vpt 91.7 ±1.5, class mean 88.8 ±0.0"
    assert f"| office-caltech10-96, domain, 4 clients | {first} |\n" in glance


def test_a_classical_method_names_what_it_tunes(tmp_path):
    def tuned(result, seed):
        if result["method"] == "head-tune":
            result["config"]["method"]["name"] = "scaffold+head"

    def labelled(row):
        return {**row, "label": "scaffold"} if row["label"] == "Head-Tune" else row

    folder = kept(tmp_path / "kept", tuned, labelled)
    results = (folder / "results.jsonl").read_text().replace('"label": "Head-Tune"', '"label": "scaffold"')
    (folder / "results.jsonl").write_text(results)
    assert "| scaffold+head | one | 3 | 86.8" in page([folder])  # of the first seed


def test_seeds_have_a_deviation_and_the_page_says_how_results_were_made(tmp_path):
    def vary(result, seed):
        result["metrics"]["aggregated"]["last"]["local"]["mean"] = 0.5 + 0.01 * seed

    folder = kept(tmp_path / "kept", vary, lambda row: {**row, "scale": "tuned: 4 trials per row on validation data"})
    (folder / "kept.json").write_text('{"date": "2026-11-17", "commit": "0123abc"}')
    text = page([folder])
    assert "| Head-Tune | one | 3 | 51.0 ±1.0 |" in text  # of 50, 51 and 52
    assert "- Tuned: 4 trials per row on validation data.\n- Results of 2026-11-17, commit 0123abc.\n" in text


def test_a_protocol_has_a_table_and_says_who_cannot_serve_it(tmp_path):
    def generalise(result, seed):
        result["config"]["eval"]["leave_out"] = "dslr"
        if result["method"] == "head-tune":
            result["protocols"] = {"unseen_domain": {"domain": "dslr", "accuracy": 0.25}}

    text = page([kept(tmp_path / "kept", generalise)])
    table = text.split("Protocol unseen-domain:\n")[1]
    assert "## office-caltech10-96, domain, 4 clients: unseen-domain\n" in text
    assert "| Head-Tune | one | 3 | 25.0 ±0.0 | 17.5 kB |" in table
    assert "| SGPT | one | 3 | - |" in table
    (told,) = (line for line in text.splitlines() if "cannot serve" in line)
    assert told.startswith("- A method cannot serve unseen-domain if it has no model for a client that never trains: ")
    assert "pfedpg" in told
    assert "head-tune" not in told


def test_what_nobody_has_trained_on_ranks_by_its_own_number(tmp_path):
    found = {"fedvpt": 0.2, "sgpt": 0.4, "head-tune": 0.3, "class-mean": 0.35}

    def generalise(result, seed):
        result["config"]["eval"]["leave_out"] = "dslr"
        if result["method"] in found:
            result["protocols"] = {"unseen_domain": {"domain": "dslr", "accuracy": found[result["method"]]}}

    text = page([kept(tmp_path / "kept", generalise)])
    glance = "SGPT 40.0 ±0.0, Head-Tune 30.0 ±0.0, FedVPT 20.0 ±0.0 | class mean 35.0 ±0.0"
    assert f"| office-caltech10-96, domain, 4 clients: unseen-domain | unseen | {glance} |\n" in text
    table = text.split("Protocol unseen-domain:\n")[1]
    assert table.index("| SGPT |") < table.index("| FedVPT |")  # by global accuracy it is the other way round


def test_domains_that_are_left_out_in_turn_share_a_table_ranked_by_their_mean(tmp_path):
    """Columns of a comparison, made here of one run: SGPT is better on dslr, the other in the mean. A row with the name
    of a method says what it tunes."""
    found = {"amazon": {"fedvpt": 0.7, "sgpt": 0.3}, "dslr": {"fedvpt": 0.4, "sgpt": 0.6}}
    lines, table = [], []
    for line in (MEASURED / "results.jsonl").read_text().splitlines():
        for domain, accuracies in found.items():
            run = json.loads(line)
            if run["seed"] == 0 and run["label"] in ("FedVPT", "SGPT"):
                row = {"FedVPT": "fedavg"}.get(run["label"], run["label"])
                run["label"] = f"{row}, {domain}"
                run["result"]["config"]["eval"]["leave_out"] = domain
                run["result"]["config"]["method"]["name"] = {"fedavg": "fedavg+vpt"}.get(row, "sgpt")
                accuracy = accuracies[run["result"]["method"]]
                run["result"]["protocols"] = {"unseen_domain": {"domain": domain, "accuracy": accuracy}}
                lines.append(json.dumps(run) + "\n")
                table.append({"label": run["label"], "row": row, "column": domain})
    (tmp_path / "results.jsonl").write_text("".join(lines))
    (tmp_path / "table.json").write_text(json.dumps(table))
    text = page([tmp_path])
    (title,) = (line for line in text.splitlines() if line.startswith("## "))
    assert title == "## office-caltech10-96, domain, 4 clients: unseen-domain"
    assert "| method | models | seeds | mean | amazon | dslr | bytes | passes |" in text
    first, second = (line for line in text.splitlines() if line.startswith(("| fedavg", "| SGPT")))
    assert first.startswith("| fedavg+vpt | one | 1 | 55.0 | 70.0 | 40.0 |")
    assert second.startswith("| SGPT | one | 1 | 45.0 | 30.0 | 60.0 |")
    assert "| mean | fedavg+vpt 55.0, SGPT 45.0 | - |" in text


def test_newcomers_have_a_table(tmp_path):
    def joined(result, seed):
        result["config"]["join"]["clients"] = [3]
        result["metrics"]["newcomers_aggregated"] = {"last": {"local": {"mean": 0.5, "weighted": 0.5}}}

    text = page([kept(tmp_path / "kept", joined, lambda row: {**row, "newcomers": {"mean": 0.5, "std": 0.0}})])
    table = text.split("Protocol newcomers:\n")[1]
    assert "| Head-Tune | one | 3 | 50.0 ±0.0 | 17.5 kB |" in table
    assert "A method cannot serve newcomers if it has no model for a client that never trains: " in table
    assert "Protocol newcomers" not in page([MEASURED])


def test_a_folder_without_a_comparison_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["leaderboard.py", str(tmp_path), "--out", str(tmp_path / "page.md")])
    with pytest.raises(SystemExit, match="is not the folder of a comparison that has been run"):
        BOARD["main"]()
    assert not (tmp_path / "page.md").exists()
