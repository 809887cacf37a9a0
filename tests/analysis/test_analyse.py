"""Analyses that do not apply, the command, and the phase in which all of them look."""

import shutil
import subprocess
import sys

import pytest
import typer
from analysed import read
from typer.testing import CliRunner

from promptfed import UserError
from promptfed.analysis import ANALYSES, make
from promptfed.analysis.opened import Opened
from promptfed.cli.results import analyse


@pytest.mark.parametrize(
    ("run", "name", "sentence"),
    [
        ("mixture", "attention", '"fedem.pt" mixes several models'),
        ("fedavg", "colours-tsne", "all clients have the same features"),
        ("vpt", "colours-tsne", "all clients have the same features"),
        ("mixture", "colours-tsne", "mixes several models"),
        ("fedavg", "colours-labels", "all clients have the same model"),
        ("fedavg", "drift", "eval.drift=true"),
        ("local", "leakage", "upload nothing"),
        ("pfedpt", "groups", "samples have no groups"),
        ("pfedpt", "selection", "no selections are on record"),
        ("sgpt", "selection", "at least two evaluations"),
        ("sgpt", "helps", 'only DP2FL weighs other clients\' prompts, and the run is of "sgpt"'),
        ("pfedpt", "scatter", "is an analysis of a comparison"),
        ("pfedpt", "leakag", 'did you mean "leakage"'),
    ],
)
def test_what_does_not_apply_is_said_in_a_sentence(finished, tmp_path, run, name, sentence):
    with pytest.raises(UserError, match=sentence) as error:
        make(finished(run), [name], tmp_path)
    assert "\n" not in str(error.value)


def test_every_analysis_is_there():
    assert all(callable(analysis.function) for analysis in ANALYSES.values())


def test_the_command_line_starts_without_what_draws():
    code = "import sys, promptfed.cli.results; sys.exit(not {'altair', 'matplotlib', 'torch'}.isdisjoint(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_command(finished, tmp_path):
    app = typer.Typer()
    app.command()(analyse)
    folder = shutil.copytree(finished("fedavg"), tmp_path / "run")
    done = CliRunner().invoke(app, [str(folder), "--images", "5"])
    assert done.exit_code == 0, done.output
    assert {file.stem for file in (folder / "analysis").glob("*.png")} == {"attention", "leakage", "variation"}
    assert "drift left out: " in done.output
    for client, whose in (("client-1", "1"), ("1", "1"), ("all", "0123")):  # by name and by number
        where = ["--client", client, "--images", "5", "--out", str(tmp_path / "elsewhere")]
        some = CliRunner().invoke(app, [str(folder), "leakage", *where])
        assert some.exit_code == 0, some.output
        assert {row["client"] for row in read(tmp_path / "elsewhere" / "leakage.csv")} == set(whose)
    failed = CliRunner().invoke(app, [str(folder), "drift"])
    assert isinstance(failed.exception, UserError)


def test_contexts_are_of_evaluation(finished):
    """Outside of training there is no phase."""
    opened = Opened(finished("sgpt"))
    work, _ = opened.own(0)
    samples = opened.host.samples(opened.federation.sites[0].test)
    _, ctx = next(opened.batches(work, samples))
    assert ctx.phase is None
    opened.close()
