"""What the documents show is run."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import promptfed
from promptfed import config as C
from promptfed import methods

ROOT = Path(__file__).parents[1]


def blocks(name: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / name).read_text(), re.DOTALL)


def test_the_method_shown_in_contributing_conforms(tmp_path):
    code, check = blocks("CONTRIBUTING.md", "python")
    (tmp_path / "mine.py").write_text(code)
    assert len(code.splitlines()) <= 32
    done = subprocess.run([sys.executable, "-c", check], cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr


def test_the_snippet_shown_in_the_readme_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PROMPTFED_CACHE", str(tmp_path / "cache"))
    (snippet,) = blocks("README.md", "python")
    real = promptfed.run

    def shorter(**settings):
        return real(**{**settings, "rounds": 1, "dataset": {"name": settings["dataset"], "limit": 200}})

    monkeypatch.setattr(promptfed, "run", shorter)
    exec(snippet, {})
    assert capsys.readouterr().out


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "docs/methods/pfedpt.md", "docs/design.md"])
def test_commands_and_files_that_are_named_exist(name):
    text = (ROOT / name).read_text()
    for link in re.findall(r"\]\((?!http)([^)#]+)\)", text):
        assert (ROOT / name).parent.joinpath(link).exists(), link
    for words in re.findall(r"^promptfed (?:run|compare) (.*)$", text, re.MULTILINE):
        given = [word for word in words.split() if "=" in word and not word.startswith("method=mine")]
        C.make(C.parse_assignments([word for word in given if "mine" not in word and "server_momentum" not in word]))


def test_the_readme_lists_every_method():
    text = (ROOT / "README.md").read_text()
    for method in (*methods.METHODS, *methods.ALIASES):
        assert f"`{method}`" in text, method
    for plugin in (*methods.PROMPTS, *methods.TUNINGS):
        assert f"`+{plugin}`" in text, plugin


@pytest.mark.parametrize("path", sorted((ROOT / "experiments").rglob("*.toml")), ids=lambda path: path.stem)
def test_experiments_are_valid(path, tmp_path):
    from promptfed.comparison import plan, rows, without_compare

    table = C.read(path)
    assert plan([without_compare(table)], rows(table["compare"]), tmp_path)
