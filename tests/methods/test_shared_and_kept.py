"""What each method shares, keeps and remembers, and which end with one global model."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from by_hand import MODEL, SIDES, SIZE, WEIGHTS, B, initial, whole

from promptfed.clients.messages import Train, read_update
from promptfed.methods import METHODS, create
from promptfed.phases import Holdings, Update
from promptfed.tuning import Full
from tiny import BODY, HEAD, PLAIN, toy_host

EVERYTHING = set(WEIGHTS) | set(SIDES)


@pytest.mark.parametrize(
    ("name", "shared", "remembered"),
    [
        ("fedavg", WEIGHTS, ()),
        ("fedprox", WEIGHTS, ()),
        ("moon", WEIGHTS, BODY),
        ("perfedavg", WEIGHTS, ()),
        ("fedper", BODY, ()),
        ("fedrep", BODY, ()),
        ("fedbabu", BODY, ()),
        ("lg-fedavg", HEAD, ()),
        ("fedproto", (), ()),
        ("scaffold", WEIGHTS, ()),
        ("feddyn", WEIGHTS, ()),
        ("fedmtl", WEIGHTS, ()),
        ("local", (), ()),
    ],
)
@pytest.mark.parametrize("plugin", ["", "+pt"])
def test_what_is_shared_kept_and_remembered(
    name: str, shared: Sequence[str], remembered: Sequence[str], plugin: str
) -> None:
    method = create(name + plugin, {"prompt_size": SIZE} if plugin else {})
    params = initial(method)
    assert set(params) == (EVERYTHING if plugin else set(WEIGHTS))
    assert set(method.shared(params)) == set(shared)
    assert set(method.kept(params)) == set(params) - set(shared)
    assert set(method.remembered(params)) == set(remembered)


@pytest.mark.parametrize("name", [name for name in PLAIN if name != "centralised"])  # which takes no prompt
def test_everything_a_client_sends_after_a_round_is_shared(name: str, tmp_path: Path) -> None:
    own = {"iterations": 10} if name == "fedmtl" else {}
    method = create(f"{name}+pt", {"batch_size": B, "epochs": 1, "prompt_epochs": 1, "prompt_size": SIZE, **own})
    host = toy_host(method, tmp_path)
    state = method.begin(MODEL, host.init, 0)
    client = host.work(1, method.down(state, 1), 1)
    results, blobs = host.train([[client]], Train(round=1, score=False))
    up, stats = read_update(blobs[0])
    assert set(up) == set(method.shared(client.params))
    assert not stats
    assert results[0].n == 6
    # What is kept is found again at the next round, changed.
    later = host.work(1, method.down(state, 1), 2)
    assert all(not torch.equal(later.params[side], client.params[side]) for side in SIDES)
    host.store.close()


@pytest.mark.parametrize(
    ("name", "personal"),
    [
        ("fedavg", False),
        ("fedprox", False),
        ("moon", False),
        ("fedavg+ft", True),
        ("pfedpt", True),
        ("perfedavg", True),
        ("fedper", True),
        ("fedrep", True),
        ("fedbabu", True),
        ("lg-fedavg", True),
        ("fedproto", True),
        ("fedbn", True),
        ("ditto", True),
        ("apfl", True),
        ("fedamp", True),
        ("scaffold", False),
        ("feddyn", False),
        ("fednova", False),
        ("fedadam", False),
        ("fedmtl", True),
        ("local", True),
    ],
)
def test_which_methods_end_with_one_global_model(name: str, personal: bool) -> None:
    assert create(name).personal is personal


@pytest.mark.parametrize("name", ["fedper", "fedrep", "fedbabu", "lg-fedavg", "fedproto"])
def test_a_method_that_splits_body_and_head_refuses_a_tuning_without_a_head(name: str) -> None:
    class Headless(Full):
        roles = {"body.": "body"}  # noqa: RUF012

    with pytest.raises(ValueError, match='needs a tuning with a "head"'):
        METHODS[name](tuning=Headless())


@pytest.mark.parametrize(
    "name", ["scaffold", "feddyn", "fednova", "fedavgm", "fedyogi", "ditto", "apfl", "fedala", "fedamp", "fedmtl"]
)
def test_the_scale_of_features_is_sent_in_every_round_and_the_sums_never(name: str) -> None:
    method = create(f"{name}+head")
    init = initial(method)
    counts = torch.bincount(whole().y, minlength=MODEL.classes)
    hello = method.enroll(MODEL, init, Holdings(lambda: iter([whole()]), lambda: iter([]), counts, {}))
    state = method.admit(method.begin(MODEL, init, 0), 0, hello, 0)
    for _ in range(2):
        sent = method.down(state, 0)
        assert not torch.equal(sent["scale.std"], init["scale.std"])
        assert not any(key.startswith("sums.") for key in sent)
        assert method.start(init, sent, {}, {}).keys() == init.keys()
        state = method.aggregate(state, [Update(0, sent, method.shared(init), 6)])
