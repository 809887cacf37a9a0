"""DP2FL's privacy modes: the same bits in each, and what each lets others see."""

import struct
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from dp2fl_toy import CTX, MODEL, SIZES, batch_of, method_of, toy_state
from nacl.public import PrivateKey, SealedBox
from torch.nn import functional as F

from promptfed.clients.local import LocalClients
from promptfed.clients.messages import Answer, Evaluate, Request, Second, Task, Train, TrainResult, read_update
from promptfed.clients.wire import unpack
from promptfed.method import State
from promptfed.methods.dp2fl import Dp2fl
from promptfed.params import Params
from promptfed.phases import Update
from promptfed.server import Plan, run
from promptfed.testing import Case, Memory, tiny_federation

BLIND = 4  # has no validation data
HOLDERS = (0, 1, 2, 3)
MODES = ("open", "embeddings", "sealed")


@dataclass
class Recorded:
    """A run of two rounds, and every byte that went either way."""

    method: Dp2fl
    memory: Memory
    init: Params
    asked: list[tuple[Request, list[bytes]]] = field(default_factory=list)
    said: list[Answer] = field(default_factory=list)
    private: dict[int, Params] = field(default_factory=dict)

    @property
    def state(self) -> State:
        assert self.memory.state is not None
        return self.memory.state

    def answers(self) -> dict[tuple[int, int], Params]:
        """(round, client) -> stats sent after training."""
        found = {}
        for (request, _), answer in zip(self.asked, self.said, strict=True):
            if isinstance(request.task, Train):
                for one, blob in zip(answer.results, answer.blobs, strict=True):
                    found[request.task.round, one.client] = read_update(blob)[1]
        return found


def record(case: Case, rounds: int = 2, fraction: float = 1.0) -> Recorded:
    assert isinstance(case.method, Dp2fl)
    made = Recorded(case.method, Memory(), case.init)
    with case.clients() as (_, host):

        def answer(request: Request, blobs: list[bytes]) -> Answer:
            reply = host(request, blobs)
            made.asked.append((request, blobs))
            made.said.append(reply)
            return reply

        clients = LocalClients(dict(enumerate(SIZES)), [answer])
        run(case.method, case.model, case.init, clients, Plan(rounds, fraction, case.seed), made.memory)
        made.private = {client: host.remembers(client, 99)[0] for client in range(len(SIZES))}
    return made


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Recorded]:
    folder = tmp_path_factory.mktemp("federation")
    return {
        mode: record(Case(method_of(privacy=mode, lr=0.1), MODEL, tiny_federation(folder / mode, SIZES, 32)))
        for mode in MODES
    }


def test_modes_give_the_same_bits(runs: dict[str, Recorded]) -> None:
    first = runs["embeddings"]
    for mode in ("open", "sealed"):
        for name in first.init:
            assert torch.equal(runs[mode].state[name], first.state[name]), (mode, name)
        for stage in ("aggregated", "after_local", "common"):
            assert [line[stage] for line in runs[mode].memory.lines] == [line[stage] for line in first.memory.lines]
    for client in HOLDERS:
        for name in (name for name in first.init if name.startswith("map.")):
            own = first.state[f"own.{client}.{name}"]
            assert torch.equal(runs["open"].state[f"own.{client}.{name}"], own)
            assert torch.equal(runs["sealed"].private[client][f"own.{name}"], own)
            assert not torch.equal(own, first.state[name])
    assert not any(name.startswith("own.") for name in runs["sealed"].state)


def test_modes_agree_under_partial_participation(tmp_path: Path) -> None:
    one, other = (
        record(Case(method_of(privacy=mode), MODEL, tiny_federation(tmp_path / mode, SIZES, 32)), 3, 0.4)
        for mode in ("embeddings", "sealed")
    )
    assert len({tuple(line["clients"]) for line in one.memory.lines}) > 1
    assert all(torch.equal(one.state[name], other.state[name]) for name in one.init)
    assert [line["aggregated"] for line in one.memory.lines] == [line["aggregated"] for line in other.memory.lines]


def test_a_client_without_validation_data_has_no_data_prompt_of_its_own(runs: dict[str, Recorded]) -> None:
    for mode, made in runs.items():
        assert not any(name.startswith((f"val.{BLIND}.", f"own.{BLIND}.")) for name in made.state), mode
        down = made.method.down(made.state, BLIND)
        assert torch.equal(down["map.0.weight"], made.state["map.0.weight"])
        assert set(made.private[BLIND]) == ({"secret"} if mode == "sealed" else set())
        assert not made.memory.lines[-1]["left_out"]


def test_reported_losses_are_those_of_the_trained_and_of_the_received_model(
    runs: dict[str, Recorded], tmp_path: Path
) -> None:
    """Round 1 begins with the initial model; losses again from the images, with the tuning's own logits."""
    made = runs["embeddings"]
    federation = tiny_federation(tmp_path, SIZES, 32)
    case = Case(made.method, MODEL, federation)
    with case.clients() as (_, host):
        held = {j: host.samples(federation.sites[j].val) for j in HOLDERS}
    ups = {}
    for (request, _), answer in zip(made.asked, made.said, strict=True):
        if isinstance(request.task, Train) and request.task.round == 1:
            ups |= {one.client: read_update(blob)[0] for one, blob in zip(answer.results, answer.blobs, strict=True)}

    def loss(params: Params, j: int) -> float:
        batch = batch_of(held[j].images(slice(None)), held[j].y)
        return float(F.cross_entropy(made.method.tuning.logits(MODEL, params, batch, CTX), batch.y))

    for client in range(len(SIZES)):
        stats = made.answers()[1, client]
        expected = {f"loss.{j}": loss(ups[client], j) for j in HOLDERS}
        for name, value in expected.items():
            assert float(stats[name]) == pytest.approx(value, rel=1e-5)
        assert float(stats["total"]) == pytest.approx(sum(expected.values()), rel=1e-5)
        if client == BLIND:
            assert "before" not in stats
        else:
            assert float(stats["before"]) == pytest.approx(loss(made.init, client), rel=1e-5)


def sent_to_clients(made: Recorded, kind: type[Task]) -> list[tuple[Request, list[Params]]]:
    found = [(request, blobs) for request, blobs in made.asked if isinstance(request.task, kind)]
    return [(request, [unpack(blob)[0] for blob in blobs]) for request, blobs in found]


def test_sealed_messages_to_clients_name_no_owner(runs: dict[str, Recorded]) -> None:
    made = runs["sealed"]
    keys = {made.state[f"val.{j}.key"].numpy().tobytes().hex() for j in HOLDERS}
    trained = sent_to_clients(made, Train)
    assert trained
    for request, blobs in trained:
        assert set(request.model_dump()) == {"task", "clients", "new"}
        assert request.task.model_dump().keys() == {"ask", "round", "score", "masks"}
        assert request.task.masks is None
        for to in request.clients:  # names of what is sent once: keys, in the order of keys
            assert set(to.model_dump()) == {"client", "blob", "once"}
            assert list(to.once) == [f"set.{key}.{part}" for key in sorted(keys) for part in "xy"]
        for params in blobs:
            names = {name for name in params if not name.startswith("set.")}
            assert names in (set(), set(made.init))
            assert {name.split(".")[1] for name in params if name.startswith("set.")} <= keys
    settled = sent_to_clients(made, Second)
    assert len(settled) == 2 * len(HOLDERS)
    maps = {name for name in made.init if name.startswith("map.")}
    expected = {f"{i}.{name}" for i in range(len(SIZES)) for name in (*maps, "sealed")}
    for _, (params,) in settled:
        assert set(params) == expected
    evaluated = [set(params) for _, blobs in sent_to_clients(made, Evaluate) for params in blobs]
    assert all(names in (set(made.init), {*made.init, "common"}) for names in evaluated)


def test_sealed_messages_do_not_change_when_clients_change_numbers() -> None:
    """Neither names nor order nor values depend on who is which client."""
    method = method_of(privacy="sealed")
    renumbered = {0: 2, 1: 0, 2: 1}
    hellos = {
        j: {
            "x": torch.full((1, 17, 128), float(j)),
            "y": torch.tensor([j]),
            "key": torch.full((32,), [7, 250, 90][j], dtype=torch.uint8),
        }
        for j in range(3)
    }
    init = method.tuning.init(MODEL, 0)
    ups = {j: {n: p + j + 1 for n, p in init.items()} for j in range(3)}
    stats = {
        i: {f"sealed.{bytes([k] * 32).hex()}": torch.full((56,), 10 * i + at) for at, k in enumerate((7, 250, 90))}
        for i in range(3)
    }
    payloads = []
    for number in ({0: 0, 1: 1, 2: 2}, renumbered):
        state = method.begin(MODEL, init, 0)
        for j in sorted(number, key=lambda j: number[j]):
            state = method.admit(state, number[j], hellos[j], 0)
        updates = sorted((Update(number[j], {}, ups[j], 1, stats[j]) for j in range(3)), key=lambda u: u.client)
        second = method.send_second(state, updates)
        payloads.append([(method.down(state, number[j]), second[number[j]]) for j in range(3)])
    for one, other in zip(*payloads, strict=True):
        for a, b in zip(one, other, strict=True):
            assert list(a) == list(b)
            assert all(torch.equal(a[name], b[name]) for name in a)
    # The order is that of keys and digests, not that of clients: sets 0, 2, 1 by their keys.
    sets = [float(p[0, 0, 0]) for name, p in payloads[0][0][0].items() if name.startswith("once.") and name[-1] == "x"]
    assert sets == [0, 2, 1]


def individual(runs: dict[str, Recorded]) -> dict[tuple[int, int, int], float]:
    """(round, evaluator, owner) -> loss, as told in the open; the sealed run has the same ones to the last bit."""
    return {
        (round, client, j): float(stats[f"loss.{j}"])
        for (round, client), stats in runs["embeddings"].answers().items()
        for j in HOLDERS
    }


def test_single_losses_leave_evaluators_only_sealed(runs: dict[str, Recorded]) -> None:
    losses = individual(runs)
    assert len(losses) == 2 * len(SIZES) * len(HOLDERS)
    open_bytes = [blob for answer in runs["embeddings"].said for blob in answer.blobs]
    assert all(any(struct.pack("<d", loss) in blob for blob in open_bytes) for loss in losses.values())  # it would show
    made = runs["sealed"]
    trained = [
        blob
        for (request, _), answer in zip(made.asked, made.said, strict=True)
        if isinstance(request.task, Train)
        for blob in answer.blobs
    ]
    settled = [blob for request, blobs in made.asked if isinstance(request.task, Second) for blob in blobs]
    assert trained
    assert settled
    for loss in losses.values():
        for blob in trained + settled:
            assert struct.pack("<d", loss) not in blob
            assert struct.pack("<f", loss) not in blob
    for stats in made.answers().values():
        assert "total" in stats
        assert all(name == "total" or name.startswith("sealed.") for name in stats)
        assert all(p.dtype == torch.uint8 and p.shape == (56,) for n, p in stats.items() if n != "total")


def test_scores_tell_no_validation_loss(runs: dict[str, Recorded]) -> None:
    """Notes of a scored run have hits and misses on validation data, and no loss."""
    scores = [
        one.after_local.val
        for answer in runs["sealed"].said
        for one in answer.results
        if isinstance(one, TrainResult) and one.after_local
    ]
    assert scores
    assert all(set(score.model_dump(exclude_none=True)) == {"n", "tp", "fp", "fn"} for score in scores)


def test_only_the_owner_opens_a_sealed_loss(runs: dict[str, Recorded]) -> None:
    made = runs["sealed"]
    secrets = {j: PrivateKey(made.private[j]["secret"].numpy().tobytes()) for j in range(len(SIZES))}
    for (round, client, j), loss in individual(runs).items():
        sealed = made.answers()[round, client][f"sealed.{secrets[j].public_key.encode().hex()}"].numpy().tobytes()
        assert struct.unpack("<d", SealedBox(secrets[j]).decrypt(sealed)) == (loss,)
        with pytest.raises(Exception, match="decrypt"):
            SealedBox(secrets[(j + 1) % len(SIZES)]).decrypt(sealed)


def test_private_keys_never_travel(runs: dict[str, Recorded]) -> None:
    made = runs["sealed"]
    messages = [blob for _, blobs in made.asked for blob in blobs] + [b for answer in made.said for b in answer.blobs]
    notes = repr([request for request, _ in made.asked] + [answer.results for answer in made.said])
    for client in range(len(SIZES)):
        secret = made.private[client]["secret"].numpy().tobytes()
        assert len(secret) == 32
        assert not any(secret in blob for blob in messages)
        assert secret.hex() not in notes
    assert any(made.state["val.0.key"].numpy().tobytes() in blob for blob in messages)  # the public one does
    assert len({made.private[c]["secret"].numpy().tobytes() for c in range(len(SIZES))}) == len(SIZES)


def test_the_server_keeps_no_ciphertext_and_clients_no_traces_of_a_round(runs: dict[str, Recorded]) -> None:
    made = runs["sealed"]
    assert {n.split(".")[-1] for n, p in made.state.items() if p.dtype == torch.uint8} == {"key"}
    for client in HOLDERS:
        assert {name.split(".")[0] for name in made.private[client]} == {"secret", "own"}


def test_sets_travel_once(runs: dict[str, Recorded]) -> None:
    for made in runs.values():
        first, second = (line["bytes"]["down"] for line in made.memory.lines)
        size = sum(p.numel() * p.element_size() for n, p in made.state.items() if n.startswith("val."))
        assert first - second >= (len(SIZES) - 1) * size


def test_a_box_that_does_not_open_is_discarded() -> None:
    method = method_of(privacy="sealed")
    secret = method.secrets()
    key = PrivateKey(secret["secret"].numpy().tobytes()).public_key
    maps = {n: p for n, p in method.tuning.init(MODEL, 0).items() if n.startswith("map.")}

    def settled(second: bytes) -> Params:
        boxes = [SealedBox(key).encrypt(struct.pack("<d", 0.5)), second]
        received = {f"{i}.sealed": torch.frombuffer(bytearray(box), dtype=torch.uint8) for i, box in enumerate(boxes)}
        received |= {f"{i}.{n}": p + i + 1 for i in range(2) for n, p in maps.items()}
        loss = torch.frombuffer(bytearray(struct.pack("<d", 1.0)), dtype=torch.uint8)
        before = {f"before.{n}": p for n, p in maps.items()}
        return method.receive_second(received, {**secret, **before, "before.loss": loss})

    for broken in (bytes(56), b"short", SealedBox(key).encrypt(b"no number")):
        own = settled(broken)
        assert own.keys() == {"secret", *(f"own.{n}" for n in maps)}
        torch.testing.assert_close(own["own.map.0.weight"], maps["map.0.weight"] + 1)
    both = settled(SealedBox(key).encrypt(struct.pack("<d", 0.5)))
    assert not torch.allclose(both["own.map.0.weight"], maps["map.0.weight"] + 1)


def test_a_client_that_has_lost_its_key_goes_on_from_the_global_prompt() -> None:
    method = method_of(privacy="sealed")
    params = method.tuning.init(MODEL, 0)
    down = method.down(toy_state(method), 0)
    once = {name.removeprefix("once."): p for name, p in down.items() if name.startswith("once.")}
    ctx = replace(CTX, down=down, once=once)
    assert method.keep(MODEL, params, ctx) == {}
    assert method.receive_second({"0.sealed": torch.zeros(56, dtype=torch.uint8)}, {}) == {}


def test_the_common_model_is_not_the_clients_own() -> None:
    method = method_of(privacy="sealed")
    init = method.tuning.init(MODEL, 0)
    private = {f"own.{n}": p + 1 for n, p in init.items() if n.startswith("map.")}
    state = method.begin(MODEL, init, 0)
    own = method.start(init, method.down(state, 0), private, {})
    common = method.start(init, method.common(state), private, {})
    assert torch.equal(own["map.0.weight"], init["map.0.weight"] + 1)
    assert torch.equal(own["context"], init["context"])
    assert all(torch.equal(common[name], p) for name, p in init.items())
