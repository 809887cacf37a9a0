"""Which methods and settings go with secure aggregation, and how a run has it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import promptfed
from fitting import SMALL as FITTING
from fitting import embedded
from promptfed import UserError, methods, models
from promptfed.attacks.clients import Malicious
from promptfed.clients.local import LocalClients
from promptfed.methods import ALIASES, METHODS
from promptfed.runs import config as C
from promptfed.runs.opened import reading
from promptfed.secure import Secure, check
from promptfed.testing import CHECKS, NAMES, Case, tiny_federation
from tiny import linear

SMALL: dict[str, Any] = {
    "dataset": {"name": "digits", "limit": 60, "size": 16},
    "partition": {"name": "iid", "clients": 4},
    "method": {"name": "fedavg", "epochs": 1},
    "engine": {"workers": 1},
    "rounds": 1,
    "secure": {"aggregation": True},
}
# Those that tune heads send sums of features unless they are told not to.
HEADS = {"head-tune", "fedvpt", "fedvpt-d", "fedit", "ffa-lora", "fedsa-lora"}
REFUSED = {
    "its server needs each update": {
        *("scaffold", "feddyn", "fednova", "fedamp", "fedmtl", "pfedme", "sgpt", "pfedpg", "dp2fl", "pfedmoap"),
        "flexlora",
    },
    "its clients send no parameters": {"local", "zero-shot", "class-mean", "fedproto"},
    "a client tells more of its data at first contact than the update that is masked": {"fedmix"},
    "a client tells more of its data with its update than the update that is masked": {"fedem"},
    "it pools the training data of all clients": {"centralised"},
}


@pytest.fixture(autouse=True, scope="module")
def _cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PROMPTFED_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.mark.parametrize(("why", "names"), REFUSED.items())
def test_methods_whose_server_needs_more_than_the_sum_are_refused(why: str, names: set[str]) -> None:
    for name in names:
        with pytest.raises(UserError) as error:
            check(methods.create(name), name, "mean")
        assert str(error.value) == f'secure.aggregation = true: "{name}" cannot be aggregated under masks, since {why}'


def test_all_others_are_taken() -> None:
    for name in {*METHODS, *ALIASES} - set().union(*REFUSED.values()):
        check(methods.create(name, {"standardise": False} if name in HEADS else {}), name, "mean")


def test_heads_do_without_sums_of_features_unless_they_are_asked_for() -> None:
    secure = {"secure": {"aggregation": True}}
    assert not C.make(secure, {"method": "fedvpt"}).method.method.tuning.collects
    with pytest.raises(UserError, match=r"sums of their features .* \(allowed: method.standardise = false\)$"):
        C.make(secure, {"method": {"name": "fedvpt", "standardise": True}})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"aggregation": "median"}, r'^aggregation.name = "median" looks at single updates, .* \(allowed: mean;'),
        (
            {"aggregation": "norm-bound"},
            r'^aggregation.name = "norm-bound" .* privacy.clip bounds norms at',
        ),
        ({"eval.drift": True}, r"^eval.drift = true tells .* which secure.aggregation cannot cover$"),
        ({"secure.threshold": 0.5}, r"^secure.threshold = 0.5 .*greater than 0.5"),
        ({"secure.neighbours": 3}, r"^secure.neighbours = 3 .*multiple of 2"),
        ({"secure.range": 0}, r"^secure.range = 0 .*greater than 0"),
        ({"secure.bits": 8}, r"^secure.bits is not a setting"),
        ({"privacy.together": True}, r"^privacy.together = true needs privacy.noise above 0"),
        (
            {"privacy": {"clip": 1.0, "noise": 1.0, "together": True}, "secure.aggregation": False},
            r"^privacy.together = true needs secure.aggregation = true",
        ),
    ],
)
def test_settings_that_do_not_go_together(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        C.make(SMALL, C.undot(settings.items()))


def test_attacks_need_updates_that_can_be_seen() -> None:
    parts: Any = SimpleNamespace(config=C.make(SMALL))
    with pytest.raises(UserError, match=r"^secure.aggregation = true hides the updates that attacks are made of"):
        Malicious(LocalClients({}, []), parts, [])


@pytest.mark.slow
def test_a_run_in_worker_processes_ends_as_without_masks(tmp_path: Path) -> None:
    """Any process may answer any message of a client."""
    plain = promptfed.run(out=tmp_path / "plain", progress=False, **{**SMALL, "rounds": 2, "secure": {}})
    settings = {**SMALL, "rounds": 2, "engine": {"workers": 2}}
    found = promptfed.run(out=tmp_path / "masked", progress=False, **settings)
    with reading(tmp_path / "plain") as a, reading(tmp_path / "masked") as b:
        torch.testing.assert_close(a.state, b.state, rtol=0, atol=2e-6)
    assert [line["left_out"] for line in found.rounds] == [[], []]
    assert found.rounds[0]["bytes"]["up"] > plain.rounds[0]["bytes"]["up"]


@dataclass
class Masked(Case):
    """All clients mask their updates."""

    secure: Secure = field(default_factory=lambda: Secure(aggregation=True))


@pytest.mark.parametrize("check", CHECKS)
def test_the_conformance_suite_holds_under_masks(tmp_path: Path, check: Callable[[Case], None]) -> None:
    method = methods.create("fedper", {"epochs": 1, "batch_size": 4})
    check(Masked(method, linear(image=(3, 16, 16), classes=4), tiny_federation(tmp_path)))


@pytest.mark.parametrize("name", ["promptfl", "tpfl", "fedvpt"])
def test_prompts_are_those_of_plain_updates(tmp_path: Path, name: str) -> None:
    model = models.build(embedded(name), (3, 32, 32), 4, 5, NAMES)
    short = {"epochs": 1, "standardise": False, **FITTING.get(name, {})}
    method = methods.create(name, {key: value for key, value in short.items() if key in methods.fields(name)})
    case = Case(method, model, tiny_federation(tmp_path, (6, 3, 4), size=32))
    plain = case.run(rounds=1, score_all=False)
    case.secure = Secure(aggregation=True)
    found = case.run(rounds=1, score_all=False)
    assert found.state is not None
    torch.testing.assert_close(found.state, plain.state, rtol=0, atol=1e-6)
