"""Code, commands and settings shown in the documentation are executed or checked."""

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import promptfed
from limits import HANG
from promptfed import methods, models
from promptfed.cli.listing import LISTS
from promptfed.cli.main import app
from promptfed.data import PARTITIONS
from promptfed.runs import config as C

ROOT = Path(__file__).parents[1]
DIFFERENCE = r"[-+][\d.]+ \[[-+][\d.]+, [-+][\d.]+\]"
PAGES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))


def blocks(name: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / name).read_text(), re.DOTALL)


@pytest.fixture
def alone(tmp_path, monkeypatch):
    """A separate working directory and cache."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PROMPTFED_CACHE", str(tmp_path / "cache"))
    return tmp_path


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "docs/add-a-method.md"])
def test_the_method_shown_conforms(name, monkeypatch):
    code, check = blocks(name, "python")
    assert len(code.splitlines()) <= 32
    mine = ModuleType("mine")
    monkeypatch.setitem(sys.modules, "mine", mine)
    exec(code, vars(mine))
    exec(check, {})


def test_the_trimmed_mean_shown_also_trims_few_clients():
    shown: dict = {}
    exec(blocks("docs/add-a-method.md", "python")[0], shown)
    method = shown["TrimmedMean"]()
    for values, mean in (([5.0], 5), ([1.0, 3], 2), ([1.0, 2, 90], 2), ([-70.0, 1, 2, 3, 90], 2)):
        updates = [promptfed.Update(i, {}, {"body.w": torch.tensor([v])}, 1) for i, v in enumerate(values)]
        assert method.aggregate({}, updates)["body.w"].item() == mean


@pytest.mark.parametrize("name", ["docs/add-a-dataset.md", "docs/add-a-backbone.md"])
def test_the_script_shown_prints_what_is_shown(name, alone, monkeypatch, capsys):
    (code,) = blocks(name, "python")
    (shown,) = blocks(name, "text")
    monkeypatch.setattr(models, "BACKBONES", dict(models.BACKBONES))  # a script may add its own
    (alone / "script.py").write_text(code)
    runpy.run_path("script.py", run_name="__main__")
    said, told = capsys.readouterr().out.split(), shown.split()
    assert [len(word) for word in said] == [len(word) for word in told]  # other processors may round differently
    assert said[:-2] == told[:-2]


@pytest.mark.parametrize(("name", "function"), [("README.md", "run"), ("docs/index.md", "compare")])
def test_the_snippet_shown_on_the_first_page_runs(name, function, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (snippet,) = blocks(name, "python")
    assert len([line for line in snippet.splitlines() if line]) <= 12
    real = getattr(promptfed, function)

    def shorter(**settings):
        small = {"rounds": 1, "dataset": {**settings["dataset"], "limit": 200}, "engine": {"workers": 1}}
        small |= (
            {"methods": settings["methods"][:2], "against": settings["methods"][0]} if "methods" in settings else {}
        )
        return real(**{**settings, **small})

    monkeypatch.setattr(promptfed, function, shorter)
    loaded = promptfed.load_dataset
    monkeypatch.setattr(promptfed, "load_dataset", lambda name: loaded(promptfed.DatasetConfig(name=name, limit=200)))
    exec(snippet, {})
    assert capsys.readouterr().out


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", *PAGES])
def test_commands_and_files_that_are_named_exist(name):
    text = (ROOT / name).read_text()
    for link in re.findall(r"\]\((?!http)([^)#]+)\)", text):
        assert (ROOT / name).parent.joinpath(link).exists(), link
    commands = {command.name or command.callback.__name__ for command in app.registered_commands}
    commands |= {group.name or group.typer_instance.info.name for group in app.registered_groups}
    fenced = "\n".join(re.findall(r"^```\w*\n(.*?)^```", text, re.DOTALL | re.MULTILINE)).replace("\\\n", "")
    for line in re.findall(r"^(?:\$ )?promptfed (.*)$", fenced, re.MULTILINE):
        command, *words = line.partition("#")[0].split()
        assert command in commands, line
        if command in ("run", "compare", "tune", "choose", "partition") and "mine:" not in line:
            C.make(C.parse_assignments([word for word in words if "=" in word and "..." not in word]))


@pytest.mark.parametrize("name", PAGES)
def test_configurations_that_are_shown_are_valid(name, tmp_path):
    from promptfed.runs.api import without_compare
    from promptfed.runs.rows import plan, rows

    for text in blocks(name, "toml"):
        (tmp_path / "shown.toml").write_text(text)
        table = C.read(tmp_path / "shown.toml")
        assert C.make(without_compare(table))
        if "compare" in table:
            assert plan([without_compare(table)], rows(table["compare"]), tmp_path)
            assert plan([without_compare(table)], rows(table["compare"], mini=table.get("mini")), tmp_path)


def test_counts_in_the_readme_are_true():
    found = {
        "methods": len(methods.METHODS) + len(methods.ALIASES),
        "plug-ins": len(methods.PROMPTS) + len(methods.TUNINGS) + len(methods.FINE_TUNED),
        "protocols": len(LISTS["protocols"]()),
        "tests": sum(file.read_text().count("\ndef test_") for file in (ROOT / "tests").rglob("*.py")),
        "tables": len([path for path in (ROOT / "experiments").rglob("*.toml") if path.stem[:3] in ("tab", "fig")]),
    }
    for number, more, what in re.findall(
        r"([\d,]+)(\+?) (?:evaluation )?(methods|plug-ins|protocols|tests|tables)\b", (ROOT / "README.md").read_text()
    ):
        stated = int(number.replace(",", ""))
        assert stated <= found[what] if more else stated == found[what], what


def test_methods_that_the_readme_recommends_exist_and_serve_newcomers_where_it_says_so():
    text = (ROOT / "README.md").read_text()
    section = text.split("## Which method?")[1].split("\n## ")[0]
    for line in section.splitlines():
        first = line.split("|")[2] if line.startswith("|") else line
        for name in re.findall(r"`([a-z][\w+-]*)`", line):
            method = methods.create(name)
            assert method.serves or "join later" not in line or f"`{name}`" not in first, name


def test_rows_that_the_readme_quotes_are_on_the_leaderboard():
    lines = (ROOT / "docs" / "leaderboard.md").read_text().splitlines()
    quoted = re.findall(r"`([\w-]+)`, ([\d.]+ [kM]B)\) (?:has )?(\d+\.\d ±\d+\.\d)", (ROOT / "README.md").read_text())
    assert len(quoted) == 3
    for name, bytes_, local in quoted:
        assert any(line.startswith(f"| {name} |") and f" | {local} | " in line and bytes_ in line for line in lines)


def test_differences_in_the_readme_are_those_of_make_run():
    """experiments/papers.json is claims.json of `make run`."""
    told = json.loads((ROOT / "experiments" / "papers.json").read_text())
    found = {points(each["mean"], each["low"], each["high"]) for one in told for each in one["differences"].values()}
    shown = re.findall(DIFFERENCE, (ROOT / "README.md").read_text().split("On photos")[0])
    assert len(shown) == 9
    assert set(shown) <= found
    verdicts = {one["label"]: one["verdict"].removesuffix(" here") for one in told}
    for label, verdict in re.findall(
        r"^\| (\w+) \|.* \| ([a-z ]+) here \|$", (ROOT / "README.md").read_text(), re.MULTILINE
    ):
        assert verdicts.pop(label) == verdict
    assert set(verdicts) == {"prompts"}


def points(mean: float, low: float, high: float) -> str:
    return f"{100 * mean:+.1f} [{100 * low:+.1f}, {100 * high:+.1f}]"


def test_the_picture_of_the_idea_is_what_its_script_draws():
    drawn = runpy.run_path(str(ROOT / "scripts" / "draw_idea.py"))
    for theme, colours in drawn["THEMES"].items():
        assert (ROOT / "docs" / "images" / f"idea-{theme}.svg").read_text() == drawn["picture"](colours)


def test_the_site_is_built_without_a_warning_and_is_read_offline(tmp_path):
    """One test for everything: a build takes most of a minute."""
    command = [sys.executable, "-m", "sphinx", "-E", "-W", "--keep-going", "-n", "-q", str(ROOT / "docs"), "site"]
    environment = {**os.environ, "PROMPTFED_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=HANG)
    assert done.returncode == 0, done.stderr
    pages = {path.relative_to(tmp_path / "site").as_posix(): path.read_text() for path in tmp_path.rglob("*.html")}

    for name, text in pages.items():
        loaded = re.findall(
            r'<(?:script|img|iframe)[^>]*\ssrc="([^"]+)"|<link[^>]*rel="stylesheet"[^>]*href="([^"]+)"', text
        )
        assert not [one for pair in loaded for one in pair if one.startswith(("http", "//"))], name

    settings = pages["reference/config.html"]
    for section, kind in C.SECTIONS.items():
        assert f'id="{section}"' in settings
        assert all(f">{key}</span>" in settings for key in kind.model_fields)
    for name in (*methods.METHODS, *methods.ALIASES, *PARTITIONS):
        assert f">{name}</span>" in settings, name
    for name in promptfed.__all__:
        assert f">{name}</span>" in pages["reference/python.html"], name
    assert all(
        f">{command.name or command.callback.__name__}</span>" in pages["reference/cli.html"]
        for command in app.registered_commands
    )

    for name in (
        *methods.METHODS,
        *methods.ALIASES,
        *(f"+{plugin}" for plugin in (*methods.PROMPTS, *methods.TUNINGS)),
    ):
        assert f">{name}</span>" in pages["methods/index.html"], name

    links = re.findall(
        r'href="\.\./(source/[\w/]+\.html)#(L-\d+)">.{0,99}?>([\w.]+)</span></code>', pages["methods/sgpt.html"]
    )
    assert "Sgpt.loss" in {name for _, _, name in links}
    for page, line, name in links:
        assert f">{name.rpartition('.')[2]}<" in re.split(r'id="L-\d+"', pages[page].split(f'id="{line}"')[1])[0], name
    assert pages["quickstart.html"].count("<img") >= 4  # drawn by the notebook


@pytest.mark.parametrize("path", sorted((ROOT / "experiments").rglob("*.toml")), ids=lambda path: path.stem)
def test_experiments_are_valid(path, tmp_path):
    from promptfed.runs.api import without_compare
    from promptfed.runs.rows import plan, rows

    table = C.read(path)
    assert plan([without_compare(table)], rows(table["compare"]), tmp_path)
