"""The command line, as a user meets it: real processes, real kills."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import pytest

from limits import HANG
from promptfed.cli.main import main
from promptfed.clients.wire import unpack
from promptfed.runs.record import Folder

TINY = [
    "dataset.limit=90",
    "dataset.size=16",
    "partition=dirichlet",
    "partition.alpha=1.0",
    "partition.clients=4",
    "partition.min_samples=5",
    "method.epochs=1",
    "engine.workers=1",
]


@pytest.fixture(scope="module")
def env(tmp_path_factory):
    return {**os.environ, "PROMPTFED_CACHE": str(tmp_path_factory.mktemp("cache")), "COLUMNS": "200"}


@pytest.fixture
def promptfed(env, tmp_path, monkeypatch, capsys):
    """The command in this process (a fresh one spends seconds on imports), below an empty folder."""
    monkeypatch.chdir(tmp_path)
    for name in ("PROMPTFED_CACHE", "COLUMNS"):
        monkeypatch.setenv(name, env[name])

    def call(*words, code=0):
        monkeypatch.setattr(sys, "argv", ["promptfed", *map(str, words)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            main()
        said = "".join(capsys.readouterr())
        if isinstance(left.value.code, str):  # Python prints it and exits with 1
            said, left.value.code = said + left.value.code, 1
        assert (left.value.code or 0) == code, said
        return said

    return call


COMMAND = [sys.executable, "-m", "promptfed"]


def outcome(folder):
    """All that a run leaves behind but its timings."""
    state = unpack((folder / "checkpoint.safetensors").read_bytes())
    lines = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    result = json.loads((folder / "result.json").read_text())
    for part in (result, *lines):
        part.pop("seconds")
    return {name: p.numpy().tobytes() for name, p in state[0].items()}, state[1], lines, result


def test_a_run_leaves_a_complete_folder(promptfed, tmp_path):
    said = promptfed("run", "method=pfedpt", "rounds=2", *TINY, "--out", "mine")
    folder = tmp_path / "mine"
    names = {path.name for path in folder.iterdir()}
    assert names >= {"config.toml", "partition.json", "rounds.jsonl", "checkpoint.safetensors", "result.json"}
    assert names >= {"curves.png", "partition.png", "prompts.png"}
    assert "pfedpt" in said
    assert re.search(r"\d+ s, \d+% of it evaluation", " ".join(said.split()))
    result = json.loads((folder / "result.json").read_text())
    assert result["rounds"] == 2
    assert set(result["metrics"]["aggregated"]) == {"last", "mean_of_last_10", "chosen_on_validation"}
    assert set(result["metrics"]["aggregated"]["last"]["local"]) == {"mean", "std", "worst", "weighted"}
    assert result["communication"]["per_client_and_round"]["parameters_up"] > 0
    assert result["versions"]["torch"]
    # What is written back is a configuration that makes the same run again.
    promptfed("run", folder / "config.toml", "--out", "again")
    assert outcome(folder) == outcome(tmp_path / "again")


def test_a_folder_is_not_overwritten(promptfed):
    promptfed("run", "method=local", "rounds=1", *TINY, "--out", "mine")
    assert "holds a run already" in promptfed("run", "method=local", "rounds=1", *TINY, "--out", "mine", code=1)


def test_killed_at_any_moment_and_resumed_ends_bit_identical(promptfed, env, tmp_path):
    words = ["run", "method=pfedpt", "rounds=6", "fraction=0.5", *TINY]
    promptfed(*words, "--out", "whole")
    resume, killed = ["run", "--resume"], 0
    for after in (1, 3, 4):  # in the middle of the round after this one
        command = [*COMMAND, *(resume if after > 1 else words), "--out", "killed"]
        process = subprocess.Popen(command, env=env, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wait_for_round(tmp_path / "killed", after, process)
        process.send_signal(signal.SIGKILL)
        process.wait()
        killed += process.returncode == -signal.SIGKILL
    promptfed(*resume, "--out", "killed")
    assert killed
    assert outcome(tmp_path / "whole") == outcome(tmp_path / "killed")


def test_killed_with_its_workers_and_resumed_with_one_process(promptfed, env, tmp_path):
    words = ["run", "method=moon", "rounds=3", *TINY, "engine.workers=2"]
    process = subprocess.Popen(
        [*COMMAND, *words, "--out", "killed"],
        env=env,
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    wait_for_round(tmp_path / "killed", 1, process)
    workers = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.kill()
    assert process.wait() == -signal.SIGKILL
    until = time.monotonic() + HANG
    while any(Path(f"/proc/{worker}").exists() for worker in workers):  # they end by themselves
        assert time.monotonic() < until
        time.sleep(0.01)
    assert len(workers) == 2
    promptfed("run", "--resume", "--out", "killed", "engine.workers=1")
    promptfed(*words, "engine.workers=1", "--out", "whole")
    assert outcome(tmp_path / "whole") == outcome(tmp_path / "killed")


def wait_for_round(folder: Path, round: int, process: subprocess.Popen) -> None:
    until = time.monotonic() + HANG
    while process.poll() is None:
        assert time.monotonic() < until
        file = folder / "rounds.jsonl"
        if file.exists() and file.read_text().count("\n") >= round:
            time.sleep(0.03)
            return
        time.sleep(0.005)


def test_ctrl_c_leaves_a_resumable_run_and_says_how(promptfed, env, tmp_path):
    process = subprocess.Popen(
        [*COMMAND, "run", "method=fedavg", "rounds=5000", *TINY, "--out", "long"],
        env=env,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # Whoever runs the tests in the background has it ignored, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    wait_for_round(tmp_path / "long", 2, process)
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=HANG)[0]
    assert process.returncode == 130
    assert "promptfed run --resume --out long" in said
    assert "Traceback" not in said
    done = (tmp_path / "long" / "rounds.jsonl").read_text().count("\n")
    promptfed("run", "--resume", "--out", "long", f"rounds={done + 1}")
    assert json.loads((tmp_path / "long" / "result.json").read_text())["rounds"] == done + 1


def test_only_rounds_and_engine_change_on_resuming(promptfed):
    out = "m[bold]i:x:n[/b]e"  # not markup
    said = promptfed("run", "method=local", "rounds=1", *TINY, "--out", out)
    assert f"everything is in {out}:" in said
    said = promptfed("run", "--resume", "--out", out, "seed=3", code=1)
    assert "seed cannot be changed when a run is resumed (seed = 3, not 0; allowed: rounds, and those of engine" in said
    said = promptfed("run", "--resume", "--out", out, "engine.precision=bf16", code=1)
    assert "cannot be changed when a run is resumed (engine.precision = bf16, not fp32;" in said
    assert "holds no run to resume" in promptfed("run", "--resume", "--out", "nothing", code=1)
    assert "--resume needs --out" in promptfed("run", "--resume", code=1)
    promptfed("run", "method=local", "rounds=2", *TINY, "--resume", "--out", out)  # the words it began with
    assert "rounds = 1 must be at least the 2 rounds" in promptfed("run", "--resume", "--out", out, "rounds=1", code=1)


def test_compare_makes_one_table_on_one_partition(promptfed, tmp_path):
    words = ["compare", "--methods", "fedavg,local", "--seeds", "0,1", "rounds=2", *TINY, "--out", "both"]
    said = promptfed(*words)
    assert "fedavg" in said
    assert "±" in said
    folders = sorted(path for path in (tmp_path / "both").iterdir() if path.is_dir())
    assert [path.name for path in folders] == ["fedavg-seed0", "fedavg-seed1", "local-seed0", "local-seed1"]
    assert len({(path / "partition.json").read_bytes() for path in folders}) == 1
    names = {path.name for path in (tmp_path / "both").iterdir()}
    assert names >= {"table.json", "table.csv", "table.md", "comparison.png", "curves.png", "communication.png"}
    rows = json.loads((tmp_path / "both" / "table.json").read_text())
    accuracies = [json.loads((path / "result.json").read_text()) for path in folders[:2]]
    mean = sum(a["metrics"]["aggregated"]["last"]["local"]["mean"] for a in accuracies) / 2
    assert rows[0]["local"]["mean"] == pytest.approx(mean)
    before = (folders[0] / "result.json").stat().st_mtime_ns
    promptfed(*words)  # nothing is trained twice
    assert (folders[0] / "result.json").stat().st_mtime_ns == before
    assert "holds a run with another rounds" in promptfed(*(w.replace("rounds=2", "rounds=3") for w in words), code=1)


def test_a_comparison_against_a_row_and_its_table_in_other_formats(promptfed, tmp_path):
    said = promptfed("compare", "--methods", "fedavg,local", "rounds=1", *TINY, "--out", "both", "--against", "fedavg")
    assert "differences to fedavg in points" in said
    found = json.loads((tmp_path / "both" / "table.json").read_text())[1]["against"]
    assert (found["row"], found["column"], found["seeds"]) == ("fedavg", "local", 1)
    assert found["low"] <= found["mean"] <= found["high"]
    assert found["word"] in promptfed("table", "both", "--against", "fedavg")
    assert "differences" not in promptfed("table", "both")
    assert promptfed("table", "both", "--against", "fedavg", "--csv") == (tmp_path / "both" / "table.csv").read_text()
    assert (
        promptfed("table", "both", "--against", "fedavg", "--markdown") == (tmp_path / "both" / "table.md").read_text()
    )
    assert r"\toprule" in promptfed("table", "both", "--latex")
    said = promptfed("table", "both", "--against", "fedavgg", code=1)
    assert said == 'promptfed: --against = "fedavgg" is unknown; did you mean "fedavg"? (allowed: fedavg, local)'
    assert "choose one of --latex, --markdown and --csv" in promptfed("table", "both", "--latex", "--csv", code=1)


def test_only_adds_its_rows_to_the_table(promptfed, tmp_path):
    words = ["compare", "--methods", "fedavg,local", "rounds=1", *TINY, "--out", "both", "--only"]

    def labels():
        return [row["label"] for row in json.loads((tmp_path / "both" / "table.json").read_text())]

    assert "not in the table" not in promptfed(*words, "local")
    assert labels() == ["local"]
    promptfed(*words, "avg")
    assert labels() == ["fedavg", "local"]
    assert "must be part of the label of a row" in promptfed(*words, "moon", code=1)
    assert '--only = "moon" must' in promptfed(*words, "local", "--only", "moon", code=1)


def test_only_may_be_given_several_times(promptfed, tmp_path):
    words = ["compare", "--methods", "fedavg,local,fedper", "rounds=1", *TINY, "--out", "some"]
    promptfed(*words, "--only", "avg", "--only", "per")
    assert [row["label"] for row in json.loads((tmp_path / "some" / "table.json").read_text())] == ["fedavg", "fedper"]


def test_only_the_last_of_processes_that_share_a_comparison_draws(promptfed, tmp_path):
    words = ["compare", "--methods", "fedavg,local", "rounds=1", *TINY, "--out", "both"]
    other = Folder(tmp_path / "both" / "local-seed0")  # as if another process were making this run
    said = promptfed(*words)
    assert "not in the table, held by another process or not started: local-seed0" in " ".join(said.split())
    assert not list((tmp_path / "both").glob("*.png"))
    other.close()
    assert "tables and pictures in both: comparison.png" in promptfed(*words)
    assert (tmp_path / "both" / "comparison.png").exists()


def test_a_comparison_of_claims_draws_them_alone(promptfed, tmp_path):
    (tmp_path / "claims.toml").write_text("""
[[compare.columns]]
label = "here"
claim = "averaging helps."
ours = "averaged"
[[compare.rows]]
label = "averaged"
method = { name = "fedavg", epochs = 1 }
[[compare.rows]]
label = "alone"
method = { name = "local", epochs = 1 }
""")
    said = promptfed("compare", "claims.toml", "rounds=1", *TINY[:6], "engine.workers=1", "--out", "told")
    assert "here: the claim " in said
    assert [path.name for path in (tmp_path / "told").glob("*.png")] == ["claims.png"]


def test_a_comparison_with_misfits_or_for_another_folder_trains_nothing(promptfed, tmp_path):
    promptfed("compare", "--methods", "local", "rounds=1", *TINY, "--out", "mine")
    words = ["compare", "--methods", "fedavg,fedavg+vpt", "rounds=1", "backbone=cnn", *TINY, "--out", "other"]
    said = promptfed(*words, code=1)
    assert 'row "fedavg+vpt": backbone.name = "cnn" takes no tokens' in said
    said = promptfed("compare", "--methods", "fedavg", "rounds=1", *TINY, "--out", "mine", code=1)
    assert 'holds a comparison with a row "local", which is not in this one' in said
    assert sorted(path.name for path in tmp_path.glob("*/*-seed0")) == ["local-seed0"]


def test_a_small_scale_says_so(promptfed, tmp_path):
    (tmp_path / "papers.toml").write_text("""
[[compare.rows]]
label = "AdaIN, CIFAR-10"
method = "local"
[mini]
rounds = 1
dataset = "digits"
""")
    said = promptfed("compare", "papers.toml", "--mini", *TINY)
    told = " ".join(said.split())  # the console may be narrow
    assert "at the small scale of papers.toml: digits, 1 round; labels are those of the full scale" in told


def test_partition_draws_without_training_and_its_file_can_be_used(promptfed, tmp_path):
    promptfed("partition", *TINY[:6], "--out", "split.png", "--save", "split.json")
    assert (tmp_path / "split.png").read_bytes().startswith(b"\x89PNG")
    promptfed(
        "run",
        "method=local",
        "rounds=1",
        *TINY[:2],
        TINY[-1],
        "partition.file=split.json",
        "method.epochs=1",
        "--out",
        "r",
    )
    ours, used = (json.loads((tmp_path / name).read_text()) for name in ("split.json", "r/partition.json"))
    assert ours["clients"] == used["clients"]
    said = promptfed("run", "method=local", "dataset.limit=80", "partition.file=split.json", code=1)
    assert "partition" in said


def test_ctrl_c_while_torch_is_imported_ends_it_without_a_word(env, tmp_path):
    """That takes seconds, and nothing is begun yet."""
    process = subprocess.Popen(
        [*COMMAND, "run", "method=fedavg", "rounds=5000", *TINY, "--out", "long"],
        env=env,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    maps, until = Path(f"/proc/{process.pid}/maps"), time.monotonic() + HANG
    while "libtorch" not in maps.read_text() and time.monotonic() < until:
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    assert (process.communicate(timeout=HANG)[0], process.returncode) == ("", 130)
    assert not (tmp_path / "long").exists()


def test_ctrl_c_in_a_terminal_leaves_no_worker_behind(env, tmp_path):
    """There it goes to all processes, and the parent alone has something to say."""
    process = subprocess.Popen(
        [*COMMAND, "run", "method=fedavg", "rounds=5000", *TINY, "engine.workers=2", "--out", "long"],
        env=env,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    children, until = Path(f"/proc/{process.pid}/task/{process.pid}/children"), time.monotonic() + HANG
    while len(children.read_text().split()) < 2 and time.monotonic() < until:
        time.sleep(0.005)
    workers = children.read_text().split()
    time.sleep(0.3)  # they import
    os.killpg(process.pid, signal.SIGINT)
    said = process.communicate(timeout=HANG)[0]
    assert process.returncode == 130
    assert "promptfed run --resume --out long" in said
    assert "Traceback" not in said
    assert len(workers) == 2
    assert not [worker for worker in workers if Path(f"/proc/{worker}").exists()]


def test_version(promptfed):
    assert promptfed("--version") == f"promptfed {version('promptfed')}\n"


def test_list_of_everything(promptfed):
    lists = json.loads(promptfed("list", "--json"))
    assert list(lists) == ["methods", "protocols", "datasets", "backbones", "partitions", "presets"]
    said = promptfed("list")
    assert all(row["name"] in said for rows in lists.values() for row in rows)
    assert all(f"+{name}" in said for name in ("head", "vpt", "vpt-d", "promptfl", "maple", "pt", "st", "ft"))


def test_the_list_says_what_a_method_needs(promptfed):
    rows = {row["name"]: row for row in json.loads(promptfed("list", "methods", "--json"))}
    assert rows["fedpr"]["tunes"] == "prompts (+vpt, +vpt-d or +promptfl)"
    assert rows["fedpr"]["backbones"] == "transformers"
    assert rows["fedavg"]["tunes"] == "all weights"


def test_a_list_is_a_markdown_table(promptfed):
    said = promptfed("list", "protocols", "--markdown").splitlines()
    assert said[0] == "| name | setting | columns | about |"
    assert said[2].startswith("| `personal` | - | local |")


@pytest.mark.parametrize("what", ["methods", "protocols", "datasets", "backbones", "partitions", "presets"])
def test_list(promptfed, what):
    rows = json.loads(promptfed("list", what, "--json"))
    said = promptfed("list", what)
    assert all(row["name"] in said for row in rows)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["run", "method=pfedtp"], 'did you mean "pfedpt"'),
        (["run", "dataset=cifra10"], 'did you mean "cifar10"'),
        (["run", "dataset=nofolder/"], 'dataset.name = "nofolder/" does not exist'),
        (["run", "method=fedvpt", "method.layers=99"], "method.layers = 99 should be 'first' or 'all' or a list"),
        (["run", "backbone=vit-tny"], 'did you mean "vit-tiny"'),
        (["run", "dataset.size=12"], "dataset.size"),
        (["run", "method.prompt_size=16"], "method.prompt_size = 16"),
        (["run", "method.prompt_size=20"], "method.prompt_size = 20"),
        (["run", "method=fedvpt", "backbone=cnn"], "takes no tokens: a transformer is needed (allowed: vit-mini"),
        (["run", "method=promptfl", "backbone=cnn"], "a CLIP is needed (allowed: clip-mini"),
        (["run", "method.mju=0.1", "method=fedprox"], 'did you mean "mu"'),
        (["run", "method.name=5"], "method.name = 5"),
        (["compare", "--methods", "local,local"], '"local" is there twice'),
        (["compare", "--methods", "local", "--against", "fedavg"], '--against = "fedavg" is unknown'),
        (["table", "nothing"], "is not the folder of a comparison"),
        (["compare", "--methods", "local", "--seeds", "0,0"], "must be different numbers"),
        (["compare", "--methods", "fedavg,local", "method.lrr=0.1"], 'did you mean "lr"'),
        (["compare", "--methods", "fedavg,local", "method.epoch=9", "--dry-run"], 'did you mean "epochs"'),
        (["compare", "--methods", "fedavg,promptfl", "backbone=cnn"], "has no text tower"),
        (["run", "method=pfedpt-tokens", "backbone=cnn"], "backbone.name"),
        (["run", "rounds"], "is neither a file nor a preset"),
        (["list", "methds"], 'did you mean "methods"'),
        (["list", "--markdown"], "--markdown prints one list"),
        (["run", "--rounds", "3"], "--rounds is not an option of run (a setting is written rounds=VALUE)"),
        (["run", "--rezume"], 'did you mean "resume"?'),
        (["run", "partition=domian"], 'did you mean "domain"?'),
        (["run", "backbone=vit"], "a path, a hub id such as"),
        (["partition", "--out", "split.xyz"], '--out = "split.xyz" must end in'),
        (["compare"], "--methods"),
        (["watch", "nothing"], "holds neither a run nor a comparison"),
        (["compare", "--methods", "fedavg", "--seeds", "a"], "--seeds"),
        (["run", "--out", "/proc/nowhere/run"], "--out"),
        (["run", "partition.clients=900"], "partition.min_samples"),
    ],
)
def test_a_mistake_is_one_sentence_and_leaves_nothing_behind(promptfed, tmp_path, words, says):
    said = promptfed(*words, code=1)
    assert says in said
    progress = ("pfedpt  preparing data and model", "pfedpt  decoding digits: ")  # some mistakes are seen with the data
    assert len([line for line in said.strip().splitlines() if not line.startswith(progress)]) == 1
    assert not list(tmp_path.glob("runs/*"))
