"""Experiments of the papers at both scales, and what --dry-run says of them, compared with real runs."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from promptfed import methods
from promptfed.cli.main import main
from promptfed.data import CATALOGUE
from promptfed.errors import UserError
from promptfed.models import BACKBONES
from promptfed.models.pretrained.known import KNOWN, fresh
from promptfed.params import numel
from promptfed.runs import api, dryrun, rows
from promptfed.runs import config as C
from promptfed.runs.api import small

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "experiments").rglob("*.toml"))
PAPERS = {
    "pfedpt": ["table1", "table2", "table4", "table5", "table6", "table7", "table8", "fig8", "figures"],
    "sgpt": ["table1", "table2", "table3", "table4", "table5", "fig4"],
    "atpfl": ["table1", "table2", "fig2", "fig3"],
    "pfedpg": ["table1", "table2", "table3", "table4", "table5"],
    "dp2fl": ["table1", "table2", "table3", "table4", "ablations"],
}


def jobs(path: Path, mini: bool, **given: object) -> list[rows.Job]:
    source = C.read(path)
    found = rows.rows(source["compare"], mini=small(source) if mini else None)
    return rows.plan([api.without_compare(source), C.undot(given.items())], found, Path("x"))


def test_every_table_has_a_file() -> None:
    for paper, tables in PAPERS.items():
        for table in tables:
            assert (ROOT / "experiments" / paper / f"{table}.toml") in FILES


# Some files want the folder of a model, which the user gives: here, a tiny one.
INSTEAD: dict[str, dict[str, Any]] = {
    "clip-tin32": {"backbone.name": "clip-mini"},
    "clip-deit-tiny": {"backbone.name": "clip-mini", "dataset.size": 32},
}


# All methods on a large model.
SLOW = {ROOT / "experiments" / "leaderboard" / f"{name}.toml": pytest.mark.slow for name in ("office", "cifar10")}


@pytest.mark.parametrize(
    "path", [pytest.param(path, id=f"{path.parent.name}-{path.stem}", marks=SLOW.get(path, ())) for path in FILES]
)
def test_experiments_at_both_scales(path: Path) -> None:
    source = C.read(path)
    given = INSTEAD.get(source.get("backbone", {}).get("name"), {})
    scales = [False, True] if "mini" in source else [False]
    assert len(scales) == 2 or path.stem not in PAPERS.get(path.parent.name, ())
    for mini in scales:
        planned = jobs(path, mini, **given)
        first = [job for job in planned if job.seed == job.row.seeds[0]]
        labels = [job.row.label for job in first]
        assert len(set(labels)) == len(labels)
        for job in first:
            assert methods.parse(job.config.method.name)
            if mini:
                assert job.config.dataset.name in ("digits", "shapes")
                assert job.config.backbone.name in BACKBONES
                assert job.config.dataset.limit is not None
                assert job.config.rounds <= 3
            found = dryrun.estimate(job.config)
            assert 1 <= found.a_round <= found.clients
            assert found.trained or job.config.method.name in ("zero-shot", "class-mean")


def test_commands_at_the_head_of_experiments() -> None:
    for paper, tables in PAPERS.items():
        for table in tables:
            text = (ROOT / "experiments" / paper / f"{table}.toml").read_text()
            for option in ("--dry-run", "--mini", "--out DIR"):
                assert f"#   promptfed compare experiments/{paper}/{table}.toml {option}\n" in text


# ---- numbers


def test_components_of_a_mixture_are_counted_without_their_values() -> None:
    backbone = "facebook/deit-tiny-patch16-224"
    one, three = (
        dryrun.estimate(C.make({"method": {"name": name}, "dataset": "cifar10", "backbone": backbone}))
        for name in ("fedavg", "fedem")
    )
    assert three.trained == 3 * one.trained


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("google/vit-base-patch16-224-in21k", 85_798_656),
        ("google/vit-base-patch16-224", 85_798_656),
        ("openai/clip-vit-base-patch16", 149_620_737),
        ("openai/clip-vit-base-patch32", 151_277_313),
        ("timm/resnet50_clip.openai", 102_007_137),
    ],
)
def test_known_backbones_have_their_published_size(name: str, count: int) -> None:
    model = fresh(name, 10, [f"class {i}" for i in range(10)])
    body = {name: p for name, p in model.weights.items() if not name.startswith("head.")}
    assert numel(body) == count
    assert all(p.is_meta for p in body.values())
    assert set(KNOWN) >= {"google/vit-base-patch16-224-in21k", "openai/clip-vit-base-patch16"}


def one(path: str, label: str, mini: bool = False) -> dryrun.Estimate:
    (job,) = (j for j in jobs(ROOT / "experiments" / path, mini) if j.row.label == label and j.seed == 0)
    return dryrun.estimate(job.config)


def test_published_numbers() -> None:
    sgpt = one("sgpt/table5.toml", "SGPT")
    assert sgpt.trained == sgpt.up == 140_644
    assert (sgpt.clients, sgpt.a_round, sgpt.rounds) == (100, 5, 60)
    assert sgpt.passes == 50_000 // 100 * 5 * 60 * 10  # the official training set, two blocks of five epochs
    head, keys = 76_900, 20 * 768
    layers = {"s=10": (3, 3), "s=50": (5, 2)}  # of shared and of group prompts
    for column, (shared, group) in layers.items():
        assert one("sgpt/table1.toml", f"FedVPT, CIFAR-100, {column}").trained == head + 768
        prompts = (shared + 20 * group) * 768
        assert one("sgpt/table1.toml", f"SGPT, CIFAR-100, {column}").trained == head + keys + prompts
    assert one("sgpt/table3.toml", "shared only").trained == head + 12 * 768  # FedVPT-D
    assert one("pfedpg/table1.toml", "pFedPG, Office-Caltech10").up == 7_680
    assert one("pfedpg/table1.toml", "FedVPT-D, Office-Caltech10").up == 9_216
    assert one("pfedpg/table1.toml", "FedAvg, Office-Caltech10").up == 85_806_346
    assert one("pfedpg/table1.toml", "pFedPG, DomainNet").passes is None
    for table, row, domains in (("pfedpg/table4", "MLP", (4, 6)), ("pfedpg/table5", "K=5", (4, 6))):
        found = [one(f"{table}.toml", f"{row}, {name}").clients for name in ("Office-Caltech10", "DomainNet")]
        assert tuple(found) == domains
    assert one("sgpt/table2.toml", "SGPT, DomainNet").clients == 6
    assert one("sgpt/table1.toml", "SGPT, Five-Dataset").clients == 20
    assert one("pfedpg/table3.toml", "pFedPG").clients == 4
    assert one("pfedpt/table5.toml", "FedAvg, IID").up == 85_806_346
    assert one("pfedpt/table1.toml", "FedAvg, CIFAR-10, Dirichlet, CNN").up == 815_892
    ours = one("dp2fl/table2.toml", "DP2FL, DTD")
    assert ours.trained == 3_545_856 + 9 * 2 * 512
    assert ours.once > 10 * 38 * 197 * 768 * 4  # everybody's validation embeddings, of 38 of 47 classes at least
    assert one("atpfl/table1.toml", "TPFL, DTD").trained == 69_840 + 16 * 512


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.mark.parametrize("method", ["pfedpt", "fedmtl", "fedrep", "local", "fedmix", "moon"])
def test_estimates_are_what_runs_report(
    method: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PROMPTFED_CACHE", str(cache))
    import promptfed

    settings = {
        "dataset": {"name": "digits", "limit": 120, "size": 16},
        "partition": {"name": "iid", "clients": 4},
        "rounds": 2,
        "fraction": 0.5,
        "method": {"name": method, "epochs": 1, **({"iterations": 20} if method == "fedmtl" else {})},
        "engine.workers": 1,
    }
    check(promptfed.run(out=tmp_path / "run", **settings).numbers, C.make(C.undot(settings.items())))


@pytest.mark.parametrize("method", ["dp2fl", "sgpt", "pfedpg"])
def test_estimates_on_the_embedded_clip(
    method: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PROMPTFED_CACHE", str(cache))
    import promptfed

    settings = {
        "dataset": {"name": "shapes", "limit": 320},
        "partition": {"name": "iid", "clients": 3},
        "rounds": 2,
        "method": {"name": method, "epochs": 1, **({"depth": 2} if method == "dp2fl" else {})},
        "backbone": "clip-mini" if method == "dp2fl" else "vit-mini",
        "engine.workers": 1,
    }
    check(promptfed.run(out=tmp_path / "run", **settings).numbers, C.make(C.undot(settings.items())))


def check(numbers: dict, config: C.Config) -> None:
    found, sent = dryrun.estimate(config), numbers["communication"]["per_client_and_round"]
    assert found.up == sent["parameters_up"]
    assert found.down == pytest.approx(sent["parameters_down"], abs=1)
    assert found.bytes_up == pytest.approx(sent["up"], rel=0.02, abs=1500)
    total = numbers["communication"]["total"]
    assert found.traffic == pytest.approx(total["up"] + total["down"], rel=0.03, abs=20_000)
    assert found.passes == pytest.approx(numbers["passes"]["train"], rel=0.06)  # classes are not all of one size


# ---- [mini] and columns


FILE = """
rounds = 50
dataset = { name = "cifar10", size = 32 }
partition = { name = "dirichlet", clients = 50 }

[[compare.columns]]
label = "A"
rounds = 70
partition = "iid"

[[compare.columns]]
label = "B"
method = { groups = 7 }
mini = false

[[compare.rows]]
label = "one"
method = { name = "pfedpt", epochs = 9 }
mini = { method.epochs = 2 }

[[compare.rows]]
label = "two"
method = "fedavg"
rounds = 60
seeds = [1, 2]

[mini]
rounds = 3
seeds = [4]
dataset = { name = "digits", limit = 100 }
method = { epochs = 1, prompt_epochs = 1 }
partition = { clients = 4, shots = 2 }
"""


@pytest.fixture
def file(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str = FILE) -> Path:
        (tmp_path / "mine.toml").write_text(text)
        return tmp_path / "mine.toml"

    return write


def test_columns_go_under_rows_and_under_what_is_given(file: Callable[..., Path]) -> None:
    planned = {job.row.label: job.config for job in jobs(file(), False)}
    assert list(planned) == ["one, A", "one, B", "two, A", "two, B"]
    assert [c.rounds for c in planned.values()] == [70, 50, 60, 60]
    assert planned["one, A"].partition.name == "iid"
    assert planned["one, A"].partition.partition.clients == 50
    assert [job.config.rounds for job in jobs(file(), False, rounds=5)] == [5, 5, 60, 60, 60, 60]


def test_mini_goes_over_everything_but_what_is_given(file: Callable[..., Path]) -> None:
    planned = {job.row.label: job for job in jobs(file(), True)}
    assert list(planned) == ["one, A", "two, A"]
    assert {(job.seed, job.config.rounds, job.config.dataset.name) for job in planned.values()} == {(4, 3, "digits")}
    epochs = [job.config.method.method.epochs for job in planned.values()]
    assert epochs == [2, 1]
    assert {job.config.rounds for job in jobs(file(), True, rounds=1)} == {1}


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("rounds = 3", "rouns = 3", "rouns is not a setting"),
        ("epochs = 1,", "epohcs = 1,", "mini.method.epohcs is not a setting of any method"),
        ("shots = 2", "shot = 2", "mini.partition.shot is not a setting of any partition"),
        ("seeds = [4]", "seeds = 4", "must be a list of whole numbers"),
        ("limit = 100", "limt = 100", "dataset.limt is not a setting"),
        ("mini = false", "mini = 3", "must be a table of settings, or false"),
        ("mini = { method.epochs = 2 }", "mini = { method.epohcs = 2 }", "epohcs is not a setting"),
        ('label = "B"', "", "compare.columns: each needs a label"),
    ],
)
def test_mistakes_are_told_in_a_sentence(file: Callable[..., Path], old: str, new: str, message: str) -> None:
    assert old in FILE
    with pytest.raises(UserError, match=message):
        jobs(file(FILE.replace(old, new)), True)


@pytest.fixture
def promptfed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("PROMPTFED_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("promptfed.cli.common.console.width", 200, raising=False)

    def call(*words: object) -> str:
        monkeypatch.setattr(sys, "argv", ["promptfed", *map(str, words)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            main()
        said = left.value.code if isinstance(left.value.code, str) else ""
        return "".join(capsys.readouterr()) + said

    return call


def test_settings_of_the_rows_methods_need_not_suit_the_default_one(promptfed: Callable) -> None:
    said = promptfed(
        "compare", "--methods", "promptfl,local+promptfl", "method.context=4", "backbone=clip-mini", "dataset=shapes",
        "--dry-run",
    )  # fmt: skip
    assert said.count("512") >= 2


def test_dry_run_starts_nothing(promptfed: Callable, file: Callable[..., Path], tmp_path: Path) -> None:
    said = promptfed("compare", file(), "--dry-run", "--mini")
    assert "one, A" in said
    assert "2 runs" in said
    assert "one, B" not in said
    said = promptfed("run", file(), "--dry-run", "--mini", "method=fedavg")
    assert "4 of 4" in said
    assert not list(tmp_path.glob("runs*"))
    assert not list(tmp_path.glob("cache*"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "--mini"], "--mini needs a file with a [mini] table"),
        (["compare", "quickstart", "--mini"], "--mini needs a file with a [mini] table"),
        (["compare", "quickstart", "--only", "nobody"], "must be part of the label"),
        (["run", "--dry-run", "dataset.name=someone/something"], "nor in the catalogue"),
        (["run", "--dry-run", "backbone.name=someone/something"], "has shapes that only its files tell"),
        (["run", "--dry-run", "dataset.size=40", "backbone.name=openai/clip-vit-base-patch16"], "multiples of 16, got"),
        (["run", "--dry-run", "dataset.size=32", "backbone.name=timm/resnet50_clip.openai"], "takes images of 224x224"),
        (["run", "--dry-run", "partition=disjoint", "partition.clients=11"], "is more than the 10 classes"),
        (["run", "--dry-run", "backbone.part=image"], "is no CLIP"),
    ],
)
def test_what_a_dry_run_cannot_do(promptfed: Callable, words: list[str], message: str) -> None:
    assert message in promptfed(*words)


def test_the_catalogue_knows_most_datasets() -> None:
    assert sum(entry.images is None for entry in CATALOGUE.values()) <= 3
