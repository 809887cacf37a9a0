"""What the report holds against each other, and what it says of numbers that are not what they seem."""

import json
import re
from collections.abc import Callable
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from handmade import history, line, stage
from PIL import Image

from promptfed import privacy
from promptfed.errors import UserError
from promptfed.report import charts, gather, numbers, page
from promptfed.report.numbers import KINDS
from promptfed.report.page import images, sections
from promptfed.runs.api import Result

Make = Callable[..., Result]
WORDS = "digits, dirichlet (alpha 0.3), 3 clients"


def shown(*folders: Path) -> str:
    """The page without its libraries."""
    text, _ = page.build(gather.gather(folders))
    return re.sub(r"<script>.*?</script>", "", text.replace(page.bundle(), ""), flags=re.DOTALL)


def words(text: str) -> str:
    return unescape(re.sub(r"\s+", " ", re.sub(r"<[^>]*>", "", text)))


def bold(text: str, column: int) -> list[str]:
    """The headline table's bold cells, as "label: value"."""
    table = text.split('data-kind="last"')[1].split("</table>")[0]
    found = []
    for row in re.findall(r"<tr>(.*?)</tr>", table, re.DOTALL)[1:]:
        cells = re.findall(r"<t[hd]([^>]*)>(.*?)</t[hd]>", row, re.DOTALL)
        if "best" in cells[column][0]:
            found.append(f"{words(cells[0][1])}: {words(cells[column][1])}")
    return found


def of(folders: list[Path]) -> list[tuple[str, list[str]]]:
    found = gather.gather(folders)
    return [(task.words, [group.label for group in task.groups]) for task in gather.tasks(found)]


# ---- tasks


def test_rows_of_different_partitions_are_not_ranked_together(make: Make) -> None:
    large = {"dataset": {"name": "digits", "limit": 150}}
    folders = [
        make("a", history(0.5), rounds=4).folder,
        make("b", history(0.4), rounds=4, method="fedper").folder,
        make("c", history(0.8), rounds=4, method="local", **large).folder,
        make("d", history(0.9), rounds=4, method="fedrep", **large).folder,
    ]
    assert of(folders) == [
        (f"{WORDS}, dataset.limit = 120", ["fedavg", "fedper"]),
        (f"{WORDS}, dataset.limit = 150", ["local", "fedrep"]),
    ]
    text = shown(*folders)
    assert bold(text, 4) == ["fedavg: 50.0", "fedrep: 90.0"]
    assert text.count('data-key="setting"') == text.count('data-key="label"')
    lead = words(text.split("<dl")[0])
    assert "2 tasks" in lead
    assert (
        "dataset.limit = 120: Highest local accuracy in the last round: fedavg, 50.0 %, 10.0 points above fedper."
        in lead
    )
    assert "dataset.limit = 150: Highest local accuracy in the last round: fedrep, 90.0 %" in lead
    assert re.findall(r"<h3>(digits.*?)</h3>", text) == [
        f"{WORDS}, dataset.limit = 120",
        f"{WORDS}, dataset.limit = 150",
    ]


def test_words_of_tasks_have_what_tells_them_apart(make: Make) -> None:
    def split(name: str, classes: int) -> Path:
        settings = {"name": "pathological", "classes_per_client": classes, "clients": 3}
        folder = make(name, history(0.5), rounds=4, partition=settings, method=name).folder
        file = folder / "partition.json"
        file.write_text(file.read_text().replace("dirichlet", name))  # another split, of the same images
        return folder

    folders = [split("fedavg", 3), split("fedper", 8), split("local", 8)]
    common = "digits, pathological, 3 clients"
    assert [task for task, _ in of(folders[:2])] == [
        f"{common}, partition.classes_per_client = 3",
        f"{common}, partition.classes_per_client = 8",
    ]
    assert [task for task, _ in of(folders[1:])] == [f"{common}, split 1", f"{common}, split 2"]


def test_seeds_with_partitions_of_their_own_are_one_task(make: Make, tmp_path: Path) -> None:
    for name in ("a", "b"):
        for seed in (0, 1):
            folder = make(f"{name}-seed{seed}", history(0.5), rounds=4, seed=seed).folder
            file = folder / "partition.json"
            file.write_text(file.read_text().replace("dirichlet", f"drawn with {seed}"))
    assert of([tmp_path]) == [(WORDS, ["a", "b"])]
    (tmp_path / "a-seed1" / "rounds.jsonl").unlink()
    (tmp_path / "a-seed1" / "config.toml").unlink()
    (tmp_path / "b-seed0" / "rounds.jsonl").unlink()
    (tmp_path / "b-seed0" / "config.toml").unlink()
    assert of([tmp_path]) == [(WORDS, ["a", "b"])], "no seed is of both: they ask for the same"


def test_runs_in_other_precisions_are_rows_of_their_own(make: Make) -> None:
    runs = [
        make(
            f"run{seed}", history(0.5), rounds=4, seed=seed, engine={"precision": precision, "workers": seed + 1}
        ).folder
        for seed, precision in enumerate(("fp32", "fp32", "bf16"))
    ]
    assert sorted(len(group.entries) for group in gather.gather(runs).groups) == [1, 2]


def test_rounds_that_differ_are_told(make: Make) -> None:
    short = make("short", history(0.5, rounds=2), rounds=2, method="fedper").folder
    text = words(shown(make("long", history(0.6), rounds=4).folder, short))
    assert "Rounds differ: the last ones are 4, 2." in text


def test_what_is_equal_everywhere_is_not_bold(make: Make) -> None:
    folders = [
        make(name, [line(1, [0], aggregated=stage([0.0, best]))], rounds=1, method=name, clients=2).folder
        for name, best in (("fedavg", 0.5), ("local", 0.7))
    ]
    text = shown(*folders)
    assert bold(text, 3) == ["local: 35.0"]
    assert bold(text, 4) == [], "the worst client has nothing under any method"


def test_labels_in_running_text_stand_out(make: Make, tmp_path: Path) -> None:
    for name in ("with-q-g-seed0", "plain-seed0"):
        make(name, history(0.5), rounds=4)
    (tmp_path / "table.json").write_text(json.dumps([{"label": "with q_g"}, {"label": "plain"}]))
    assert "<b>with q_g</b>, 50.0 %, level with <b>plain</b>." in shown(tmp_path)


# ---- a consortium


def sites(make: Make, name: str = "first", rounds: list[dict[str, Any]] | None = None, **more: Any) -> Path:
    """Three sites, of which the last was away in the end."""
    lines = rounds or [*history(0.5)[:3], line(4, [0, 1], aggregated=stage([0.6, 0.8], None))]
    result = make(
        f"{name}",
        lines,
        clients=0,
        rounds=len(lines),
        dataset={"name": "ours", "size": 32},
        eval={"pooled": "never"},
        consortium={"clients": 3, "classes": ["cat", "dog"], "address": "127.0.0.1:9"},
    )
    told = [{"client": i, "name": f"site {i}", "n_train": 100 + i, "n_val": None, "n_test": 30} for i in range(3)]
    content = {**result.numbers, "sites": told, "dataset": {"name": "ours", "fingerprint": "", "images": 0}, **more}
    (result.folder / "result.json").write_text(json.dumps(content))
    return result.folder


def test_nobody_has_partitioned_a_consortium(make: Make) -> None:
    folder = sites(make)
    found = gather.gather([folder])
    text = shown(folder)
    said = words(text)
    assert "fedavg on ours, 3 sites" in said
    assert "dirichlet" not in said.split("first.toml")[0]
    assert "partition.png" not in said
    assert "No partition.json" not in said
    ((_, chart),) = sections.partition(found, [])["charts"]
    rows = next(iter(chart["spec"]["datasets"].values()))
    assert [row["n"] for row in rows if row["part"] == "train"] == [100, 101, 102]
    assert "needs the sites with their own images" in said
    assert "give the same numbers" not in said.replace("does not give the same numbers", "")
    assert "promptfed flower submit" in said
    assert "ours, 393 images" in said


def test_means_over_fewer_clients_are_marked(make: Make) -> None:
    folder = sites(make)
    group = gather.gather([folder]).groups[0]
    last, mean, _ = KINDS
    column = numbers.COLUMNS[0]
    assert numbers.cell(group, column, last).why == "over 2 of 3 clients: the others were not evaluated"
    assert "over fewer than all 3 clients in 1 of these 4" in numbers.cell(group, column, mean).why
    said = words(shown(folder))
    assert "70.0 %, mean over clients (over 2 of 3 clients: the others were not evaluated)" in said
    assert "Not evaluated in the last round of fedavg: site 2." in said
    assert "Some rounds are means over fewer clients" in said
    (folder / "rounds.jsonl").unlink()
    (folder / "result.json").write_text(
        json.dumps(
            {**json.loads((folder / "result.json").read_text()), "clients": {"aggregated": stage([0.6])["clients"]}}
        )
    )
    assert "over 1 of 3 clients" in words(shown(folder)), "from result.json alone"


def test_participants_are_not_everyone(make: Make) -> None:
    scored = line(1, [0, 2], aggregated=stage([0.5] * 3), after_local=stage([0.6, 0.7], None, [0, 2]))
    said = words(shown(make("a", [scored], rounds=1).folder))
    assert "over 2 of 3 clients: the others did not take part in the round" in said
    assert "were not evaluated" not in said


def test_clients_that_come_later_are_not_missed(make: Make) -> None:
    lines = [line(1, [0, 1], aggregated=stage([0.5, 0.6]), newcomers_aggregated=stage([0.4], None, [2]))]
    folder = make("a", lines, rounds=1, join={"clients": [2]}).folder
    assert "were not evaluated" not in shown(folder)


# ---- privacy


def test_privacy_is_told_with_what_it_does_not_cover(make: Make) -> None:
    section = privacy.Privacy(clip=0.5, noise=4.0)
    stated = privacy.statement(section, {0: 3, 1: 1}, 3, seeded=False)
    private = sites(make, "private", history(0.5), privacy=stated)
    said = words(shown(private))
    sentence = privacy.sentence(stated).removeprefix("privacy: ")
    assert said.count(f"Privacy: {sentence}.") == 2, "at the top and in its section"
    for gap in privacy.NOT_COVERED:
        assert gap in said
    each = [stated["per_client"][str(i)]["epsilon"] for i in range(3)]
    assert f"site 03{each[0]:.3g}site 11{each[1]:.3g}site 200" in said, "epsilon is not the same for all"

    both = words(shown(private, sites(make, "open", history(0.6))))
    assert f"fedavg · private{sentence}" in both
    assert "fedavg · openno privacy" in both
    assert "differs between methods" in both


def test_privacy_without_noise_is_infinite(make: Make) -> None:
    stated = privacy.statement(privacy.Privacy(clip=0.5), {0: 1}, 3, seeded=True)
    said = words(shown(sites(make, "private", history(0.5), privacy=stated)))
    assert "epsilon infinite (there is no noise)" in said
    assert "site 01∞site 100" in said
    assert "protects nobody" in said


def test_without_privacy_nothing_is_said_of_it(make: Make) -> None:
    assert "h-privacy" not in shown(make("a", history(0.5), rounds=4).folder)


# ---- pictures


def test_every_partition_is_shown_under_its_heading(make: Make) -> None:
    folder = make("a", history(0.5), rounds=4).folder
    for name, colour in (("partition.png", "blue"), ("partition-2.png", "red"), ("partition-free.png", "green")):
        Image.new("RGB", (300, 200), colour).save(folder / name)
    found = images.find(gather.gather([folder]))
    assert {path.name for path in found} == {"partition.png", "partition-2.png"}


# ---- differences, and rows of different kinds


def shared(accuracies: list[float], wide: float) -> dict[str, Any]:
    """An evaluation of one model for all clients."""
    scored = stage(accuracies, wide)
    for row in scored["clients"]:
        del row["global_accuracy"]
    return scored


def kinds(make: Make, prefix: str = "") -> list[Path]:
    """Two methods with personal models, two with one model for all, and a reference that is better than any."""
    each = {
        "fedper": stage([0.8, 0.9, 0.85], 0.2),
        "local": stage([0.7, 0.8, 0.75], 0.3),
        "fedavg": shared([0.4, 0.5, 0.6], 0.5),
        "fedprox": shared([0.45, 0.54, 0.63], 0.54),
        "zero-shot": shared([0.9, 0.95, 0.99], 0.95),
    }
    backbone = {"name": "clip-mini"}
    return [
        make(prefix + name, [line(1, [0], aggregated=scored)], rounds=1, method=name, backbone=backbone).folder
        for name, scored in each.items()
    ]


def table_of(text: str) -> dict[str, list[str]]:
    """The headline table of the last round, by label."""
    table = text.split('data-kind="last"')[1].split("</table>")[0]
    rows = [
        re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, re.DOTALL)
        for row in re.findall(r"<tr>(.*?)</tr>", table, re.DOTALL)
    ]
    return {words(cells[0]).strip(): [words(cell).strip() for cell in cells[1:]] for cells in rows}


def test_rows_are_ranked_with_models_of_their_kind(make: Make) -> None:
    text = shown(*kinds(make))
    lead = words(text.split("<dl")[0])
    assert "With models of the clients' own: highest local accuracy in the last round: fedper, 85.0 %" in lead
    assert "With one model for all clients: highest global accuracy in the last round: fedprox, 54.0 %" in lead
    assert "zero-shot" not in lead, "a reference is not ranked"
    assert list(table_of(text)) == ["Method", "fedper", "local", "fedprox", "fedavg", "zero-shot"]
    assert bold(text, 4) == ["fedper: 85.0", "fedprox: 54.0"]
    assert [cells[2] for cells in table_of(text).values()] == ["Models", "own", "own", "one", "one", "one"]


def test_charts_rank_no_kind_with_another(make: Make) -> None:
    found = gather.gather(kinds(make))
    chart = charts.accuracies(found)
    assert chart
    sort = chart.to_dict()["layer"][0]["encoding"]["y"]["sort"]
    assert [place.split(",")[0] for place in sort] == [
        *("own models", "fedper", "local"),
        *("one model for all clients", "fedprox", "fedavg", "references", "zero-shot"),
    ]
    legend = charts.curves(found)[0]
    assert legend
    looks = legend.to_dict()["layer"][0]["encoding"]["color"]["scale"]["domain"]
    assert looks == ["fedper", "local", "fedprox", "fedavg", "zero-shot"]
    one_kind = charts.accuracies(gather.gather(kinds(make, "alike-")[:2]))
    assert one_kind
    assert one_kind.to_dict()["layer"][0]["encoding"]["y"]["sort"] == ["fedper", "local"], "needs no headings"


def test_the_lead_says_whether_the_best_can_be_told_apart(make: Make) -> None:
    folders = kinds(make)
    lead = words(shown(*folders[:2]).split("<dl")[0])
    assert "with one seed: [-11.5, +31.5]; the two cannot be told apart." in lead  # all equal, on few images
    far = make("f", [line(1, [0], aggregated=stage([0.1, 0.12, 0.11], 0.2))], rounds=1, method="fedrep")
    lead = words(shown(folders[0], far.folder).split("<dl")[0])
    assert re.search(r"95 % interval of the difference over clients, with one seed: \[\+\d+\.\d, \+\d+\.\d\]\.", lead)
    close = make("c", [line(1, [0], aggregated=stage([0.75, 0.9, 0.8], 0.2))], rounds=1, method="fedrep")
    lead = words(shown(folders[0], close.folder).split("<dl")[0])
    assert "the two cannot be told apart." in lead


def test_differences_to_a_row_are_on_the_page(make: Make) -> None:
    folders = kinds(make)
    text, _ = page.build(gather.gather(folders, "fedavg"))
    found = table_of(text)
    place = found["Method"].index("Against fedavg")
    assert re.fullmatch(r"\+35\.0 \[\+\d+\.\d, \+\d+\.\d\] ahead \(local\)", found["fedper"][place])
    assert re.fullmatch(r"\+4\.0 \[.*\] .* \(global\)", found["fedprox"][place])
    assert found["fedavg"][place] == "–"
    assert "the intervals are over clients only" in words(text.split('id="clients"')[0])
    assert "Against" not in found["Method"][place + 1 :]
    with pytest.raises(UserError, match='--against = "fedavgg" is unknown; did you mean "fedavg"'):
        gather.gather(folders, "fedavgg")


def test_a_comparison_against_a_row_is_shown_against_it(make: Make, tmp_path: Path) -> None:
    for name, mean in (("a", 0.5), ("b", 0.8)):
        make(f"{name}-seed0", history(mean), rounds=4)
    rows = [{"label": "a"}, {"label": "b", "against": {"row": "a", "mean": 0.3}}]
    (tmp_path / "table.json").write_text(json.dumps(rows))
    assert gather.gather([tmp_path]).against == "a"
    assert "Against a" in shown(tmp_path)
