"""Comparisons: what is checked before the first run, whose folder it is, and what is left when a row fails."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from promptfed import compare
from promptfed.errors import UserError
from promptfed.runs import api, comparison, rows
from promptfed.runs import config as C

TINY: dict[str, Any] = {
    "dataset": {"name": "digits", "limit": 90, "size": 16},
    "partition": {"name": "iid", "clients": 3},
    "engine.workers": 1,
    "method.epochs": 1,
    "rounds": 1,
}


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROMPTFED_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


def planned(given: dict[str, Any], methods: tuple[str, ...], file: dict[str, Any] | None = None) -> Any:
    spec = (file or {}).get("compare", {})
    common = [api.without_compare(file or {}), C.undot(given.items())]
    return rows.plan(common, rows.rows(spec, methods), Path("x"), rows.named(spec))


# ---- settings


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "[compare.rows]\nlabel = 'a'",
            r"^compare\.rows must be a list of tables: \[\[compare\.rows\]\], in double brackets$",
        ),
        ("compare.columns = [1]", r"^compare\.columns must be a list of tables"),
        ("[[compare]]\nseeds = [0]", r"^compare must be one table of settings: \[compare\], in single"),
        ("[[compare.rows]]\nlabel = 5", r"^compare\.rows: label = 5 must be text, in quotes$"),
        (
            "compare.tuned = 3",
            r"^compare\.tuned = 3 must be a table with trials and rows, as promptfed tune writes it$",
        ),
        ("[compare.tuned]\ntrials = 2\nrows.a = 3", r"must be a table with trials and rows"),
        (
            "[[compare.rows]]\nlabel = 'A+b'\nmethod = 'local'\n[[compare.rows]]\nlabel = 'a b'\nmethod = 'fedavg'",
            r'and "A\+b" and "a b" have the same letters and digits, which name their folders$',
        ),
    ],
)
def test_a_file_of_another_shape_is_one_sentence(text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(text)
    with pytest.raises(UserError, match=says):
        comparison.prepare(tmp_path / "mine.toml", {}, out=tmp_path / "out")


def test_rows_that_are_left_out_are_not_among_those_without_a_search(tmp_path: Path) -> None:
    text = """compare.rows = [{ method = "fedavg" }, { method = "fedper" }, { method = "class-mean" }]
[compare.tuned]
trials = 2
rows.fedavg.method.lr = 0.1
[join]
clients = 1
"""
    (tmp_path / "mine.toml").write_text(text)
    with pytest.warns(UserWarning, match='left out of the comparison: join.round = 0: "fedper"'):
        plan = comparison.prepare(tmp_path / "mine.toml", {}, out=tmp_path / "out")
    assert plan.budget == "tuned: 2 trials per row on validation data; not tuned: class-mean"


def test_a_row_without_a_search_in_any_column_is_named_once(tmp_path: Path) -> None:
    text = """[compare]
rows = [{ method = "fedavg" }, { method = "fedper" }, { method = "class-mean" }]
columns = [{ label = "few", dataset.limit = 100 }, { label = "many", dataset.limit = 200 }]
[compare.tuned]
trials = 3
rows."fedavg, few".method.lr = 0.1
rows."fedavg, many".method.lr = 0.1
rows."fedper, many".method.lr = 0.1
"""
    (tmp_path / "mine.toml").write_text(text)
    plan = comparison.prepare(tmp_path / "mine.toml", {}, out=tmp_path / "out")
    assert plan.budget == "tuned: 3 trials per row on validation data; not tuned: fedper, few, class-mean"


def test_results_in_another_precision_are_not_reused(tmp_path: Path) -> None:
    settings = {**C.undot(TINY.items()), "progress": False}
    compare(methods=["local"], out=tmp_path / "table", **settings)
    settings["engine"] = {"workers": 1, "precision": "bf16"}
    with pytest.raises(UserError, match=r"holds a run with another engine\.precision: fp32, not bf16"):
        compare(methods=["local"], out=tmp_path / "table", **settings)


@pytest.mark.parametrize(
    ("key", "says"),
    [
        ("method.lrr", 'method.lrr is not a setting of any method that is compared; did you mean "lr"'),
        ("method.epoch", 'did you mean "epochs"'),
        ("method.mu", "method.mu is not a setting"),  # FedProx has it, which is not compared
    ],
)
def test_a_setting_that_no_row_has_is_a_mistake(key: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        planned({key: 1}, ("fedavg", "fedvpt"))
    with pytest.raises(UserError, match=says):
        planned({}, ("fedavg", "fedvpt"), {"method": {key.partition(".")[2]: 1}})


def test_a_setting_that_one_row_has_is_that_rows() -> None:
    avg, prox = planned({"method.mu": 0.25}, ("fedavg", "fedprox"))
    assert "mu" not in avg.config.complete()["method"]
    assert prox.config.complete()["method"]["mu"] == 0.25


@pytest.mark.parametrize(
    ("others", "row"),
    [
        (("class-mean", "fedvpt", "head-tune"), "centralised+vpt"),
        (("local+head",), "centralised+head"),
        (("fedavg", "pfedpt"), "centralised"),
    ],
)
def test_a_centralised_row_tunes_what_the_others_do(others: tuple[str, ...], row: str) -> None:
    assert [one.label for one in rows.rows({}, ("centralised", *others))] == [row, *others]


def test_a_files_settings_may_be_for_methods_that_are_not_compared_now() -> None:
    of_its_method = {"method": {"name": "pfedpt", "prompt_size": 2}}
    of_its_rows = {"method": {"mu": 0.1}, "compare": {"rows": [{"method": "fedprox"}]}}
    for file in (of_its_method, of_its_rows):
        assert planned({}, ("fedavg", "local"), file)
    with pytest.raises(UserError, match=r"method.mu is not a setting"):
        planned({"method.mu": 0.2}, ("fedavg", "local"), of_its_rows)


def test_a_column_has_settings_of_some_method() -> None:
    def file(key: str) -> dict[str, Any]:
        return {"compare": {"columns": [{"label": "A", "method": {key: 2}}]}}

    assert planned({}, ("fedavg",), file("groups"))
    with pytest.raises(UserError, match='did you mean "groups"'):
        planned({}, ("fedavg",), file("gruops"))


# ---- before the first run


@pytest.mark.parametrize(
    ("methods", "settings", "says"),
    [
        (("fedvpt", "promptfl"), {"backbone": "vit-mini"}, 'row "promptfl": .*has no text tower'),
        (
            ("fedvpt", "fedper"),
            {"backbone": "openai/clip-vit-base-patch16", "dataset": {"name": "digits", "size": 40}},
            'row "fedvpt": dataset.size',
        ),
        (
            ("promptfl", "fedper"),
            {"backbone": "openai/clip-vit-base-patch16", "dataset": {"name": "cifar10", "size": 224}},
            'row "fedper": .*needs a "head"',
        ),
        (("fedavg",), {"backbone": {"name": "cnn", "part": "image"}}, "is no CLIP"),
    ],
)
def test_methods_that_do_not_fit_their_backbone_are_refused_before_anything_is_trained_or_fetched(
    tmp_path: Path, methods: tuple[str, ...], settings: dict[str, Any], says: str
) -> None:
    with pytest.raises(UserError, match=says):
        compare(methods=methods, out=tmp_path / "out", **{"dataset": "digits", **settings})
    assert not (tmp_path / "out").exists()


def test_what_only_values_tell_is_left_to_the_run() -> None:
    """FedEM looks at the weights of its models, and a sketch of a published backbone has none."""
    settings = {"backbone": "google/vit-base-patch16-224", "dataset": "cifar10"}  # at the size of the backbone
    comparison.check(planned(settings, ("fedem",)))


# ---- a row that fails


FAILS = """
from promptfed import Method
from promptfed.errors import UserError


class Fails(Method):
    def begin(self, model, init, seed):
        raise KIND("not today")
"""


@pytest.fixture
def failing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    monkeypatch.syspath_prepend(tmp_path)

    def write(kind: str) -> str:
        name = f"fails_by_{kind.lower()}"
        (tmp_path / f"{name}.py").write_text(FAILS.replace("KIND", kind))
        return f"{name}:Fails"

    return write


def labels(out: Path) -> list[str]:
    return [row["label"] for row in json.loads((out / "table.json").read_text())]


def test_a_row_that_fails_does_not_keep_the_others_back(tmp_path: Path, failing: Callable[[str], str]) -> None:
    name = failing("UserError")
    with pytest.raises(UserError, match="has failed, the tables have what is done: not today"):
        compare(methods=["fedavg", name, "local"], out=tmp_path / "out", **TINY)
    assert labels(tmp_path / "out") == ["fedavg", "local"]


def test_behind_a_fault_of_the_program_the_table_of_what_is_done_is_written(
    tmp_path: Path, failing: Callable[[str], str]
) -> None:
    name = failing("ZeroDivisionError")
    with pytest.raises(ZeroDivisionError, match="not today"):
        compare(methods=["fedavg", name, "local"], out=tmp_path / "out", **TINY)
    assert labels(tmp_path / "out") == ["fedavg"]


def test_where_nothing_is_done_the_mistake_is_told_and_no_table_is_written(
    tmp_path: Path, failing: Callable[[str], str]
) -> None:
    with pytest.raises(UserError, match=r"^not today$"):
        compare(methods=[failing("UserError")], out=tmp_path / "out", **TINY)
    assert not (tmp_path / "out" / "table.json").exists()


# ---- whose folder it is


def test_another_comparisons_folder_is_refused_and_a_wider_one_goes_on(tmp_path: Path) -> None:
    out = tmp_path / "out"
    compare(methods=["fedavg"], out=out, **TINY)
    before = (out / "table.json").read_bytes()
    with pytest.raises(
        UserError, match='holds a comparison with a row "fedavg", which is not in this one; name all its rows'
    ):
        compare(methods=["local"], out=out, **TINY)
    assert (out / "table.json").read_bytes() == before
    assert not (out / "local-seed0").exists()
    compare(methods=["local", "fedavg"], seeds=[0, 1], out=out, **TINY)
    assert labels(out) == ["local", "fedavg"]
    with pytest.raises(UserError, match="holds a run with another rounds"):
        compare(methods=["local", "fedavg"], out=out, **{**TINY, "rounds": 2})
    with pytest.raises(UserError, match="holds a run; choose another"):
        compare(methods=["local"], out=out / "local-seed0", **TINY)


def test_a_table_of_somebody_else_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "table.json").write_text('{"price": 3}')
    with pytest.raises(UserError, match="is not the table of a comparison"):
        compare(methods=["local"], out=tmp_path, **TINY)
    assert (tmp_path / "table.json").read_text() == '{"price": 3}'


# ---- the small scale


def test_a_small_scale_is_told_with_its_data_and_rounds() -> None:
    found = rows.rows(
        {
            "rows": [{"method": "fedavg"}],
            "columns": [
                {"label": "CIFAR-10"},
                {"label": "Office", "mini": {"dataset": "shapes", "rounds": 1}},
                {"label": "not done", "mini": {"dataset": "mnist"}},
            ],
        },
        mini={"dataset": "digits", "rounds": 2},
    )
    jobs = rows.plan([{}], found, Path("x"))
    done = dict.fromkeys(("fedavg, CIFAR-10", "fedavg, Office"))
    assert comparison.scale(jobs, done, "/somewhere/pfedpg/table4.toml") == (
        "at the small scale of pfedpg/table4.toml: digits, shapes, 1 to 2 rounds; labels are those of the full scale"
    )
    one = dict.fromkeys(("fedavg, Office",))
    assert comparison.scale(jobs, one, "mine.toml").startswith("at the small scale of mine.toml: shapes, 1 round; ")
    assert comparison.scale(planned({}, ("fedavg",)), {"fedavg": []}, "mine.toml") == ""


def test_what_is_not_trained_is_run_once_for_columns_that_differ_in_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file.toml"
    file.write_text(
        """
        dataset = { name = "shapes", limit = 96 }
        partition = { name = "iid", clients = 2 }
        backbone = "clip-mini"
        engine.workers = 1
        [compare]
        rows = [{ method = "zero-shot" }, { method = { name = "promptfl", epochs = 1 } }]
        columns = [{ label = "short", rounds = 1 }, { label = "long", rounds = 2, fraction = 0.5 }]
        """
    )
    executed: list[str] = []
    real = api.execute

    def execute(plan: api.RunPlan, **how: Any) -> api.Result:
        executed.append(plan.folder.name)
        return real(plan, **how)

    monkeypatch.setattr(api, "execute", execute)
    found = comparison.compare(file, out=tmp_path / "out", progress=False)
    assert executed == ["zero-shot-short-seed0", "promptfl-short-seed0", "promptfl-long-seed0"]
    short, long = (found[f"zero-shot, {column}"][0] for column in ("short", "long"))
    assert long.folder.name == "zero-shot-long-seed0"
    assert len(long.rounds) == 1
    assert short.numbers == long.numbers
    assert comparison.compare(file, out=tmp_path / "out", progress=False).table == found.table, "it can be read again"
    assert len(executed) == 3
