"""The report, from folders written by hand to a page in a real browser."""

import base64
import io
import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from handmade import HOSTILE, history, line, stage
from markupsafe import Markup
from PIL import Image, ImageColor

from promptfed.cli.results import report
from promptfed.errors import UserError
from promptfed.privacy import Privacy, statement
from promptfed.report import gather, numbers, page, style
from promptfed.report.page import images, sections
from promptfed.runs.api import Result

Make = Callable[..., Result]


def column(name: str) -> numbers.Column:
    return next(one for one in numbers.COLUMNS if one.key == name)


def shown(*folders: Path) -> str:
    """The page without its libraries."""
    text, _ = page.build(gather.gather(folders))
    return re.sub(r"<script>.*?</script>", "", text.replace(page.bundle(), ""), flags=re.DOTALL)


# ---- numbers


def test_seeds_are_put_together_and_missing_numbers_say_why(comparison: Path) -> None:
    found = gather.gather([comparison])
    assert [group.label for group in found.groups] == [HOSTILE, "FedAvg", "local"]
    assert not found.problems
    first, fedavg, _ = found.groups
    local = numbers.cell(first, column("local"), "last")
    assert (local.mean, local.std) == (pytest.approx(0.65), pytest.approx(np.std([0.6, 0.7], ddof=1)))
    assert numbers.cell(fedavg, column("local"), "mean_of_last_10").mean == pytest.approx(0.5 * 10 / 16, abs=0.01)
    wide = numbers.cell(first, column("global"), "last")
    assert wide.mean is None
    assert 'eval.pooled = "never"' in wide.why
    assert 'eval.after_local = "none"' in numbers.cell(first, column("after"), "last").why
    assert "validation" in numbers.cell(first, column("local"), "chosen_on_validation").why
    assert numbers.cell(fedavg, column("bytes"), "last").mean == 600


def test_columns_of_newcomers_and_common_models_are_there_where_some_run_has_them(make: Make) -> None:
    plain = make("plain", history(0.5), rounds=4)
    assert not {"common", "newcomers"} & {c.key for c in numbers.columns(gather.gather([plain.folder]))}
    more = {"common": stage([0.3, 0.5]), "newcomers_aggregated": stage([0.2])}
    other = make("other", history(0.5, **more), rounds=4, method="fedrod")
    found = gather.gather([plain.folder, other.folder])
    assert {"common", "newcomers"} <= {c.key for c in numbers.columns(found)}
    assert numbers.cell(found.groups[1], column("newcomers"), "last").mean == 0.2
    assert "no common model" in numbers.cell(found.groups[0], column("common"), "last").why


def test_runs_of_one_method_with_other_settings_are_told_apart(make: Make) -> None:
    folders = [
        make("one", history(0.5), rounds=4).folder,
        make("two", history(0.6), rounds=4, seed=1).folder,
        make("three", history(0.7), rounds=4, fraction=0.5).folder,
    ]
    found = gather.gather([*folders, folders[0]])
    assert [(group.label, len(group.entries)) for group in found.groups] == [("fedavg · one", 2), ("fedavg · three", 1)]


# ---- folders as they are


def test_an_unfinished_run_shows_what_it_has(make: Make, tmp_path: Path) -> None:
    make("m-seed0", history(0.5), rounds=4)
    make("m-seed1", history(0.5)[:2], rounds=4, seed=1)
    make("n-seed0", [line(1, [0])], rounds=4)
    found = gather.gather([tmp_path])
    assert [group.label for group in found.groups] == ["m", "m (seed 1, 2 of 4 rounds)", "n (1 of 4 rounds)"]
    assert ["not finished" in one for one in found.problems] == [True, True]
    assert "no round has been evaluated yet" in shown(tmp_path)


@pytest.mark.parametrize(
    ("file", "content", "told"),
    [
        ("config.toml", "rounds = [", "is left out because it cannot be read"),
        ("partition.json", "{", "is left out because it cannot be read"),
        ("rounds.jsonl", '{"round": 1}\n', "is left out because it cannot be read"),
        ("result.json", '{"rounds": 4', "the numbers are taken from rounds.jsonl"),
        ("result.json", '{"rounds": 4, "metrics": {}}', "the numbers are taken from rounds.jsonl"),
    ],
)
def test_a_broken_folder_costs_itself_only(comparison: Path, file: str, content: str, told: str) -> None:
    (comparison / "local-seed0" / file).write_text(content)
    out = comparison / "report.html"
    with pytest.warns(UserWarning, match=told):
        page.write([comparison], out)
    text = out.read_text()
    assert told in text
    assert "FedAvg" in text


def test_lines_behind_a_broken_one_are_missed(comparison: Path) -> None:
    file = comparison / "local-seed0" / "rounds.jsonl"
    first, *_ = file.read_text().splitlines()
    file.write_text(f"{first}\nrubbish\n")
    found = gather.gather([comparison])
    assert len(found.problems) == 2, "the run counts as unfinished too, by its record"
    assert "readable up to round 1 of 4" in found.problems[0]


def test_folders_without_a_run_are_refused(tmp_path: Path, make: Make) -> None:
    with pytest.raises(UserError, match="is not a folder"):
        gather.gather([tmp_path / "nowhere"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="contains no run and no comparison"):
        gather.gather([tmp_path / "empty"])
    result = make("a", history(0.5))
    (result.folder / "config.toml").write_text("[")
    with pytest.raises(UserError, match="cannot be read"):
        gather.gather([result.folder])
    (tmp_path / "file").write_text("")
    (result.folder / "config.toml").unlink()
    with pytest.raises(UserError, match="--out"):
        page.write([result.folder], tmp_path / "file" / "report.html")


# ---- the page


def test_what_the_page_says(comparison: Path, make: Make) -> None:
    lost = make(
        "lost-seed0", [*history(0.3)[:3], line(4, [0, 1], left_out=[1], aggregated=stage([0.1, 0.2, 0.3]))], rounds=4
    )
    analysis = lost.folder / "analysis"
    analysis.mkdir()
    Image.new("RGB", (300, 200), "red").save(analysis / "prompt_drift.png")
    (analysis / "prompt_drift.json").write_text(json.dumps({"title": "Drift <of> prompts", "text": "They drift."}))
    (analysis / "prompt_drift.csv").write_text("round,drift\n1,0.25\n")
    (analysis / "broken.png").write_text("no picture")
    Image.new("RGB", (300, 200), "blue").save(comparison / "partition.png")
    text = shown(comparison)
    assert "<b>&quot;A&quot;" not in text
    assert HOSTILE not in text
    assert "</script><script>boom" not in page.build(gather.gather([comparison]))[0]
    for told in ("Drift &lt;of&gt; prompts", "They drift.", "0.25", "non-finite loss", "client-1"):
        assert told in text
    assert "broken.png cannot be shown as a picture" in text
    assert text.count("<img ") == 2
    assert all('alt="' in one and 'alt=""' not in one for one in re.findall(r"<img [^>]*>", text))
    assert "promptfed run " in text
    assert "[partition]" in text
    fingerprint = json.loads((comparison / "local-seed0" / "partition.json").read_text())["dataset"]["fingerprint"]
    assert fingerprint in text
    assert not re.search(r'(?:src|href)="(?!data:|#)', text)


def test_what_a_comparison_says_of_itself_is_on_the_page(comparison: Path) -> None:
    file, note = comparison / "table.json", "tuned: 3 trials per row on validation data"
    rows = json.loads(file.read_text())
    assert note not in shown(comparison)
    file.write_text(json.dumps([{**row, "scale": note} for row in rows]))
    assert shown(comparison).count(f"{comparison.name}: {note}.") == 1


def test_the_command(comparison: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = comparison / "new" / "page.html"
    report([comparison], out)
    assert out.read_text().startswith("<!doctype html>")
    assert "report:" in capsys.readouterr().out


def test_many_clients_rounds_and_methods_stay_small(make: Make, tmp_path: Path) -> None:
    accuracies = list(np.random.default_rng(0).random(500))
    for i in range(12):
        lines = [line(at, [0], aggregated=stage(accuracies if at == 300 else [0.5])) for at in range(1, 301)]
        make(f"m{i}-seed0", lines, clients=0, rounds=300)
    found = gather.gather([tmp_path])
    charts = [sections.clients(found)["chart"], sections.curves(found)["chart"]]
    assert all(len(json.dumps(chart["spec"])) < 250_000 for chart in charts)
    rows = next(iter(charts[1]["spec"]["datasets"].values()))
    assert {1, 300} <= {row["round"] for row in rows}


def test_thin_keeps_both_ends() -> None:
    assert numbers.thin(range(5), 9) == [0, 1, 2, 3, 4]
    some = numbers.thin(range(1000), 7)
    assert (len(some), some[0], some[-1]) == (7, 0, 999)


def test_ranges() -> None:
    assert sections.ranges([7, 3, 5, 6]) == "3, 5–7"


def test_pictures_are_shown_once_and_in_full_size(comparison: Path) -> None:
    for name in ("local-seed0", "fedavg-seed0"):
        Image.new("RGB", (3000, 200), "blue").save(comparison / name / "partition.png")
    figures, problems = images.embed(images.find(gather.gather([comparison])))
    assert [(one.partition, one.width) for one in figures] == [(True, 3000)]
    assert not problems


def test_colours_of_pictures_survive(tmp_path: Path) -> None:
    """A palette in a picture of many other colours, as beside a photograph."""
    noise = np.random.default_rng(0).integers(0, 255, (64, 200, 3), np.uint8)
    image = Image.fromarray(noise)
    for i, colour in enumerate(style.PALETTE):
        image.paste(ImageColor.getrgb(colour), (20 * i, 0, 20 * i + 20, 20))
    image.save(tmp_path / "a.png")
    (figure,), _ = images.embed({tmp_path / "a.png": ""})
    again = Image.open(io.BytesIO(base64.b64decode(figure.uri.split(",")[1])))
    assert again.tobytes() == image.tobytes()


def test_the_number_of_pictures_is_limited(comparison: Path) -> None:
    (comparison / "analysis").mkdir()
    for i in range(images._MOST + 1):
        Image.new("RGB", (30, 20), (i, 0, 0)).save(comparison / "analysis" / f"picture-{i:02}.png")
    with pytest.warns(UserWarning, match=rf"not shown: .*picture-{images._MOST}\.png"):
        text = page.write([comparison], comparison / "report.html").read_text()
    assert text.count('src="data:image') == images._MOST
    assert "not shown" in text


# ---- markup


class Tags(HTMLParser):
    """The elements of a page, and the names of their attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.seen: list[tuple[str, tuple[str, ...]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, tuple(name for name, _ in attrs if name != "hidden")))


def poisoned(value: Any) -> Any:
    """Any text of the page with markup in front of it, except for what is HTML already."""
    return f"{MARKUP}{value}" if isinstance(value, str | Path) and not isinstance(value, Markup) else value


MARKUP = "</script><b onclick='boom()' id=\"x\">&amp;\u202e\U0001f642{{ 7 * 7 }}"


def test_markup_in_any_text_is_only_text(comparison: Path, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    stated = statement(Privacy(clip=0.5, noise=4.0), {0: 3, 1: 1}, 3, seeded=False)
    lost = make("lost-seed0", [line(1, [0, 1], left_out=[1], aggregated=stage([0.1, 0.2, 0.3]))], rounds=1)
    (lost.folder / "result.json").write_text(json.dumps({**lost.numbers, "privacy": stated}))
    (lost.folder / "analysis").mkdir()
    Image.new("RGB", (30, 20), "red").save(lost.folder / "analysis" / "drift.png")
    (lost.folder / "analysis" / "drift.csv").write_text("round,drift\n1,0.25\n")
    for name in ("partition.png", "prompts.png"):
        Image.new("RGB", (len(name), 20), "blue").save(comparison / name)
    labels = [HOSTILE, "FedAvg", "local", "lost"]
    table = [{"label": label, "row": label, "column": "one"} for label in labels]
    (comparison / "table.json").write_text(json.dumps(table))
    found = page.view(gather.gather([comparison]), Path("report.html")) | {"problems": ["a problem"]}
    assert len(found["sections"]) == 9, "every section has something to say"
    plain = page.render(found).replace(page.bundle(), "")
    hostile = page.environment().overlay(finalize=poisoned)
    monkeypatch.setattr(page, "environment", lambda: hostile)
    found["data"]["labels"].append(MARKUP)
    text = page.render(found).replace(page.bundle(), "")
    assert text.count("{{ 7 * 7 }}") > 300
    assert Tags(text).seen == Tags(plain).seen
    stored = text.split('id="data">')[1].split("</script>")[0]
    assert json.loads(stored) == found["data"]
