"""Methods by name: compositions, settings and their defaults, and mistakes in one sentence."""

import re
from pathlib import Path
from typing import Any

import pytest

from promptfed import methods
from promptfed.errors import UserError
from promptfed.method import FedAvg
from promptfed.methods import ALIASES, METHODS, create, settings
from promptfed.methods.dp2fl import Dp2fl
from promptfed.methods.dp2fl.sealed import SealedDp2fl
from promptfed.phases import Optimizer, Phase
from promptfed.tuning import Full
from tiny import OTHER, PLAIN

COMPOSITIONS = sorted(
    {
        *METHODS,
        *ALIASES,
        *(
            f"{name}+{plugins}"
            for name in (*PLAIN, *OTHER, "pfedpg")
            for plugins in (("pt", "st", "ft", "pt+ft") if name != "centralised" else ("head", "vpt"))
        ),
        *(f"{name}+ft" for name in ("tpfl", *ALIASES)),
    }
)


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_settings_make_the_same_method_again(name: str) -> None:
    other = {"lr": 0.123, "batch_size": 7}
    if "prompt_lr" in methods.fields(name):
        other |= {"prompt_lr": 0.4}
    for method in (create(name), create(name, other)):
        found = settings(method)
        assert found.keys() == methods.fields(name).keys()
        again = create(name, found)
        assert again == method
        assert type(again) is type(method)
        assert type(again.tuning) is type(method.tuning)
    assert create(name, other).lr == 0.123
    assert create(name, other) != create(name)


@pytest.mark.parametrize("name", ["tpfl+pt", "atpfl+st", "sgpt+pt", "dp2fl+st"])
def test_a_method_whose_tuning_cannot_be_wrapped(name: str) -> None:
    """TPFL's own pixel prompt has the names of a private one."""
    base = name.split("+")[0]
    with pytest.raises(UserError, match=rf'"{base}\+..": {base} has a tuning of its own, and takes no other$'):
        create(name)


def test_defaults_are_the_papers() -> None:
    found = settings(create("pfedpt"))
    paper = {"epochs": 5, "prompt_epochs": 5, "lr": 0.005, "prompt_lr": 1.0, "batch_size": 16, "prompt_size": 4}
    assert {key: found[key] for key in paper} == paper
    assert found["prompt"] == "padding"
    assert settings(create("fedprox"))["mu"] == 1e-4
    assert settings(create("moon"))["mu"] == 1.0
    assert settings(create("fedrep"))["head_lr"] == 0.01
    assert settings(create("fedmtl"))["iterations"] == 4000
    assert settings(create("fedbabu"))["finetune_steps"] == 1
    assert settings(create("fedavg+ft"))["finetune_epochs"] == 5


def test_an_alias_is_its_composition() -> None:
    assert create("pfedpt") == create("fedavg+pt")
    assert create("pfedpt-tokens+ft") == create("fedavg+ft+st")


def test_a_plug_ins_default_gives_way_to_a_setting() -> None:
    assert create("fedavg+ft", {"finetune_epochs": 2}).finetune_epochs == 2
    assert methods.fields("fedavg+ft")["finetune_epochs"].default == 5
    assert methods.fields("fedavg")["finetune_epochs"].default == 0


def test_plain_methods_tune_all_weights() -> None:
    assert all(create(name).tuning == Full() for name in PLAIN if METHODS[name].wrapper is None)
    assert type(create("fedavg")) is FedAvg


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("fedavgg", {}, r'^method\.name = "fedavgg" is unknown; did you mean "fedavg"\? \(allowed: .*moon.*pfedpt'),
        ("zzz", {}, r'^method\.name = "zzz" is unknown \(allowed: '),
        ("", {}, r'^method\.name = "" is unknown \(allowed: '),
        (
            "fedavg+pf",
            {},
            r'^method\.name = "fedavg\+pf": plug-in = "pf" is unknown; did you mean "[fp]t"\?.*ft, head',
        ),
        ("fedavg+", {}, r'^method\.name = "fedavg\+": plug-in = "" is unknown'),
        ("fedavg+pt+st", {}, r'^method\.name = "fedavg\+pt\+st": at most one of \+pt, \+st'),
        ("pfedpt+pt", {}, r'^method\.name = "pfedpt\+pt": at most one of'),
        ("fedprox", {"nu": 1}, r'^method\.nu is not a setting of "fedprox"; did you mean "mu"\? \(allowed: .*lr.*mu'),
        ("fedavg", {"mu": 1}, r'^method\.mu is not a setting of "fedavg"'),
        ("fedavg", {"prompt_lr": 1}, r'^method\.prompt_lr is not a setting of "fedavg"'),
        ("fedavg", {"tuning": 1}, r'^method\.tuning is not a setting of "fedavg"'),
        ("pfedpt", {"inner": 1}, r'^method\.inner is not a setting of "pfedpt"'),
        ("fedprox", {"mu": -1}, r"^method\.mu = -1 should be greater than or equal to 0$"),
        ("fedavg", {"lr": 0}, r"^method\.lr = 0 should be greater than 0$"),
        ("fedavg", {"epochs": 1.5}, r"^method\.epochs = 1\.5 should be a valid integer"),
        ("fedavg", {"batch_size": "many"}, r"^method\.batch_size = 'many' should be a valid integer"),
        ("fedavg", {"optimizer": "lion"}, r"^method\.optimizer = 'lion' should be 'sgd', 'adam' or 'adamw'$"),
        ("fedavg", {"momentum": 1}, r"^method\.momentum = 1 should be less than 1$"),
        ("perfedavg", {"order": "third"}, r"^method\.order = 'third' should be 'first' or 'second'$"),
        ("moon", {"temperature": 0}, r"^method\.temperature = 0 should be greater than 0$"),
        ("pfedpt", {"prompt_size": 0}, r"^method\.prompt_size = 0 should be greater than or equal to 1$"),
        (
            "pfedpt",
            {"prompt": "circle"},
            r"^method\.prompt = 'circle' should be 'padding', 'fixed-patch' or 'random-patch'$",
        ),
    ],
)
def test_mistakes_are_told_in_one_sentence_that_names_the_setting(
    name: str, given: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message) as caught:
        create(name, given)
    assert "\n" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_a_method_of_ones_own_is_named_by_module_and_class() -> None:
    name = "promptfed.methods.fedprox:FedProx"
    assert create(name, {"mu": 0.3}) == create("fedprox", {"mu": 0.3})
    assert create(f"{name}+pt+ft", {"prompt_size": 2}) == create("fedprox+pt+ft", {"prompt_size": 2})
    assert methods.fields(name).keys() == methods.fields("fedprox").keys()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_module:Method", "cannot be imported: ModuleNotFoundError: No module named 'no_such_module'"),
        ("promptfed.method:Methud", "cannot be imported: .*Methud"),
        ("promptfed.method:Batch", "is not a class derived from promptfed.Method"),
        ("promptfed.method:annotations", "is not a class derived from promptfed.Method"),
        (":Method", "cannot be imported"),
        ("promptfed.method:", "cannot be imported"),
    ],
)
def test_a_method_that_cannot_be_imported_is_a_user_error(name: str, message: str) -> None:
    with pytest.raises(UserError, match=rf'^method\.name = "{name}" {message}'):
        create(name)


def test_a_setting_without_its_type_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "untyped.py").write_text("from promptfed import Method\nclass Mine(Method):\n    beta = 0.3\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match=r"`beta = 0\.3` \(a setting has its type with it: beta: float = 0\.3\)$"):
        create("untyped:Mine")


def test_what_is_tuned_in_words() -> None:
    assert methods.tunes(create("fedavg")) == "all weights"
    assert methods.tunes(create("fedrep+pt+ft")) == "private pixel prompt + all weights"
    assert methods.tunes(create("pfedpt-tokens")) == "private soft tokens + all weights"


def test_phases_carry_the_methods_optimiser() -> None:
    method = create("fedavg", {"optimizer": "adamw", "lr": 0.2, "weight_decay": 0.1, "momentum": 0.3, "batch_size": 5})
    expected = Optimizer(kind="adamw", lr=0.2, momentum=0.3, weight_decay=0.1)
    assert method.phases(1) == (Phase({"head": expected, "body": expected}, 5, epochs=5),)


def test_a_mode_with_a_class_of_its_own() -> None:
    sealed = create("dp2fl", {"privacy": "sealed", "depth": 2})
    assert type(sealed) is SealedDp2fl
    assert create("dp2fl", settings(sealed)) == sealed
    assert type(create("dp2fl", {"privacy": "open"})) is Dp2fl
    with pytest.raises(ValueError, match=r'method\.privacy = "sealed" is not a mode of Dp2fl, use SealedDp2fl'):
        Dp2fl(privacy="sealed")


FOLDER = Path(methods.__file__).parent


@pytest.mark.parametrize("file", sorted(FOLDER.rglob("*.py")), ids=lambda file: file.relative_to(FOLDER).as_posix())
def test_a_method_can_be_read_at_once(file: Path) -> None:
    if file not in (FOLDER / "__init__.py", FOLDER / "catalogue.py"):  # names of all methods
        assert len(file.read_text().splitlines()) <= 120


class Short(FedAvg):
    def loss(self, model: Any, batch: Any) -> Any: ...


class Long(FedAvg):
    def aggregate(self, state: Any, updates: Any, round: int) -> Any: ...


class Open(FedAvg):
    def loss(self, *given: Any) -> Any: ...

    def aggregate(self, state: Any, updates: Any, extra: Any = None) -> Any: ...


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Short", 'Short": loss(self, model, batch) must take the arguments loss(self, model, params, batch, ctx)'),
        (
            "Long",
            r'Long": aggregate(self, state, updates, round) must take the arguments aggregate(self, state, updates)',
        ),
    ],
)
def test_a_hook_with_other_arguments_is_refused_before_the_first_round(name: str, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        create(f"{__name__}:{name}")
    assert create(f"{__name__}:Open")
