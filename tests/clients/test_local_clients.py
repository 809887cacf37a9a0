"""Workers, order and stacking change nothing; what clients remember survives."""

import io
import json
import signal
import subprocess
import sys
import time

import pytest
import torch

import promptfed
from limits import HANG
from promptfed import UserError
from promptfed.clients import local
from promptfed.clients.local import LocalClients, Worker, read_frame, write_frame
from promptfed.clients.messages import (
    Answer,
    Enroll,
    EvaluateResult,
    ModelScores,
    Recipient,
    Request,
    SplitScore,
    Train,
)
from promptfed.clients.wire import unpack
from promptfed.runs import build
from promptfed.runs import config as C
from promptfed.testing import Case, Memory, begun, equal, tiny_federation
from promptfed.tuning import Tuning

AS_RECEIVED = {"as_of": 1, "pooled": False, "after_local": False}
SMALL = {
    "dataset": {"name": "digits", "limit": 90, "size": 16},
    "partition": {"name": "dirichlet", "alpha": 1.0, "clients": 4, "min_samples": 5},
    "rounds": 2,
}


@pytest.fixture(autouse=True, scope="module")
def _cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PROMPTFED_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def outcome(folder):
    state, note = unpack((folder / "checkpoint.safetensors").read_bytes())
    lines = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    for line in lines:
        line.pop("seconds")
    return note, state, lines


@pytest.mark.parametrize("method", ["pfedpt", "moon"])
def test_worker_processes_give_the_same_bits(tmp_path, method):
    settings = {"method": {"name": method, "epochs": 1}, **SMALL}
    promptfed.run(**settings, out=tmp_path / "one", engine={"workers": 1})
    promptfed.run(**settings, out=tmp_path / "two", engine={"workers": 2})
    one, two = outcome(tmp_path / "one"), outcome(tmp_path / "two")
    assert equal(one[1], two[1])
    assert one[2] == two[2]


def test_order_of_clients_changes_nothing(tmp_path):
    from promptfed import methods, models

    case = Case(
        methods.create("pfedpt", {"epochs": 1}), models.build("cnn", (3, 16, 16), 4, 0), tiny_federation(tmp_path)
    )
    state = begun(case)
    with case.clients() as (clients, _):
        forward, _ = clients.train(dict.fromkeys(range(5), state), 1, score=False)
    with case.clients() as (_, host):
        answers = {}
        for client in (4, 2, 0, 1, 3):
            single = LocalClients({client: 1}, [host])
            answers[client] = single.train({client: state}, 1, score=False)[0][0]
    for update in forward:
        assert equal(update.up, answers[update.client].up)


def test_stacked_clients_end_within_rounding(tmp_path):
    settings = {"method": {"name": "fedavg", "epochs": 1}, **SMALL}
    promptfed.run(**settings, out=tmp_path / "one", engine={"workers": 1})
    promptfed.run(**settings, out=tmp_path / "four", engine={"workers": 1, "block": 4})
    one, four = outcome(tmp_path / "one")[1], outcome(tmp_path / "four")[1]
    assert max(float((one[name] - four[name]).abs().max()) for name in one) <= 1e-5


def test_many_clients_of_one_model_are_scored_in_full_batches(tmp_path, monkeypatch):
    from promptfed import methods, models

    model, federation = models.build("cnn", (3, 16, 16), 4, 0), tiny_federation(tmp_path, (2,) * 300)
    case, sizes, logits = Case(methods.create("fedavg"), model, federation), [], Tuning.logits

    def counted(self, model, params, batch, ctx):
        sizes.append(len(batch.y))
        return logits(self, model, params, batch, ctx)

    sent = dict.fromkeys(range(300), begun(case))
    with case.clients() as (clients, host):
        alone = [LocalClients({i: 2}, [host]).evaluate({i: sent[i]}, **AS_RECEIVED)[0] for i in sent]
        monkeypatch.setattr(Tuning, "logits", counted)
        together = LocalClients(clients.sizes(), [host], unions=True).evaluate(sent, **AS_RECEIVED)
    images = sum(len(site.val) + len(site.test) for site in federation.sites)
    assert sum(sizes) == images
    assert len(sizes) == 19, "two for 32 clients, which have 192 images, and one for the last 12"
    for one, other in zip(alone, together, strict=True):
        assert one.client == other.client
        for part in ("val", "test"):
            a, b = one.parts[part], other.parts[part]
            assert (a.n, a.tp.tolist(), a.fp.tolist()) == (b.n, b.tp.tolist(), b.fp.tolist())
        assert one.parts["test"].loss == pytest.approx(other.parts["test"].loss, rel=1e-5)


def test_hosts_get_the_largest_clients_first(monkeypatch):
    """Also if a message to a large client takes longer to pack than one to a small client."""
    asked, whole = [], local.Packing.__call__

    def slow(self, group):
        time.sleep(0.05 * (4 - group[0]))
        return whole(self, group)

    def host(request, blobs):
        asked.append(request.clients[0].client)
        time.sleep(0.5)
        none = SplitScore(n=0, tp=[], fp=[], fn=[])
        scores = ModelScores(val=none, test=none)
        return Answer([EvaluateResult(client=to.client, passes=0, scores=scores) for to in request.clients], [])

    monkeypatch.setattr(local.Packing, "__call__", slow)
    engine = LocalClients({0: 90, 1: 80, 2: 20, 3: 10}, [host] * 2)
    assert len(engine.evaluate({i: {} for i in range(4)}, **AS_RECEIVED)) == 4
    assert (set(asked[:2]), set(asked[2:])) == ({0, 1}, {2, 3})
    engine.close()


def test_many_clients_are_scored_in_the_same_groups_by_any_number_of_hosts():
    """Losses of a group depend on who is in it."""

    def groups(clients, hosts, unions=True):
        asked = []

        def host(request, blobs):
            asked.append((request.task.together, [to.client for to in request.clients]))
            none = SplitScore(n=0, tp=[], fp=[], fn=[])
            scores = ModelScores(val=none, test=none)
            return Answer([EvaluateResult(client=to.client, passes=0, scores=scores) for to in request.clients], [])

        engine = LocalClients(dict.fromkeys(range(clients), 1), [host] * hosts, unions=unions)
        engine.evaluate({i: {} for i in range(clients)}, **AS_RECEIVED)
        return sorted(asked)

    assert groups(300, 1) == groups(300, 2) == groups(300, 7)
    assert [len(group) for _, group in groups(300, 1)] == [32] * 9 + [12]
    assert {len(group) for _, group in groups(3200, 2)} == {50}
    assert all(together for together, _ in groups(300, 1))
    assert not any(together for together, _ in [*groups(256, 1), *groups(300, 1, unions=False)])


def test_a_small_client_costs_no_more_than_its_own_work(tmp_path, monkeypatch):
    """Clients of one request read what they all receive once, and make generators for batches and their noise only."""
    from promptfed import methods, models, training
    from promptfed.clients import host

    model = models.build("cnn", (3, 16, 16), 4, 0)
    case = Case(methods.create("fedavg", {"epochs": 1}), model, tiny_federation(tmp_path, (3,) * 16))
    state, made, read = begun(case), [], []
    rng, unpacked = training.rng, host.unpack
    monkeypatch.setattr(training, "rng", lambda *keys: made.append(keys[3]) or rng(*keys))
    monkeypatch.setattr(host, "unpack", lambda blob: read.append(len(blob)) or unpacked(blob))
    with case.clients() as (clients, _):
        clients.train(dict.fromkeys(range(16), state), 1, score=False)
    assert sorted(made) == ["batches"] * 16 + ["noise"] * 16
    assert len(read) == 8, "requests of two clients"


def test_fine_tuning_is_local_training_thrown_away(tmp_path):
    """fedavg+ft with as many epochs as a round scores what fedavg scores after a further round of local training."""
    common = {**SMALL, "engine": {"workers": 1}}
    tuned = promptfed.run(
        method={"name": "fedavg+ft", "epochs": 2, "finetune_epochs": 2}, out=tmp_path / "ft", **common
    )
    plain = promptfed.run(
        method={"name": "fedavg", "epochs": 2}, eval={"after_local": "all"}, out=tmp_path / "plain", **common
    )

    def scores(run, stage):
        return [(row["client"], row["accuracy"], row["loss"]) for row in run.numbers["clients"][stage]]

    assert scores(tuned, "aggregated") == scores(plain, "after_local_all")


def test_a_client_that_diverges_is_left_out_and_the_run_goes_on(tmp_path):
    method = {"name": "fedavg", "epochs": 2, "lr": 1e30}
    result = promptfed.run(method=method, engine={"workers": 1}, out=tmp_path / "run", **SMALL)
    state = unpack((tmp_path / "run" / "checkpoint.safetensors").read_bytes())[0]
    assert len(result.numbers["left_out"]) == 2 * 4
    assert "non-finite" in result.numbers["left_out"][0]["why"]
    assert all(bool(p.isfinite().all()) for p in state.values())


def test_a_diverged_client_keeps_what_it_knew(tmp_path):
    from promptfed import methods, models

    method = methods.create("pfedpt", {"epochs": 1, "batch_size": 4})
    case = Case(method, models.build("cnn", (3, 16, 16), 4, 0), tiny_federation(tmp_path))
    with case.clients() as (clients, host):
        state = begun(case)
        clients.train({0: state}, 1, score=False)
        known = host.store.get(0, as_of=2)
        broken = {name: torch.full_like(p, float("nan")) for name, p in state.items()}
        updates, _ = clients.train({0: broken}, 2, score=False)
        assert updates[0].error
        assert not updates[0].up
        assert equal(host.store.get(0, as_of=3), known)


def test_everyone_diverging_leaves_the_state_as_it_was(tmp_path):
    from promptfed import methods, models

    case = Case(
        methods.create("fedavg", {"lr": 1e30}), models.build("cnn", (3, 16, 16), 4, 0), tiny_federation(tmp_path)
    )
    recorder = case.run(recorder=Memory())
    assert equal(recorder.state, begun(case))


def test_a_dead_worker_is_one_sentence(tmp_path):
    config = C.make(SMALL, {"method": {"name": "fedavg", "epochs": 1}, "engine": {"workers": 2}})
    parts = build.assemble(config)
    parts.federation.save(tmp_path / "partition.json")
    clients = build.clients(parts, tmp_path)
    state = parts.method.begin(parts.model, parts.init, 0)
    try:
        for host in (clients._hosts.get(), clients._hosts.get()):
            host._process.kill()
            host._process.wait()
            clients._hosts.put(host)
        with pytest.raises(UserError, match="worker process ended"):
            clients.train(dict.fromkeys(clients.ids(), state), 1, score=False)
    finally:
        clients.close()


def test_an_error_in_a_worker_reaches_the_caller_with_its_traceback(tmp_path):
    config = C.make(SMALL, {"method": "fedavg", "engine": {"workers": 2}})
    parts = build.assemble(config)
    parts.federation.save(tmp_path / "partition.json")
    clients = build.clients(parts, tmp_path)
    try:
        nobody = [Recipient(client=99, blob=0)]
        with pytest.raises(RuntimeError, match="IndexError"):
            clients._hosts.get()(Request(task=Train(round=1, score=False), clients=nobody), [b""])
    finally:
        clients.close()


def test_device_auto_is_one_that_exists():
    assert build.pick_device("auto").type in ("cuda", "mps", "cpu")
    with pytest.raises(UserError, match=r"engine\.device"):
        build.pick_device("tpu")


def test_a_method_of_the_users_own(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "from promptfed import Method\n\n\nclass Half(Method):\n    shrink: float = 0.5\n\n"
        "    def aggregate(self, state, updates):\n"
        "        new = super().aggregate(state, updates)\n"
        "        return {n: state[n] + self.shrink * (new[n] - state[n]) for n in state}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    result = promptfed.run(method={"name": "mine:Half+pt", "shrink": 0.25, "epochs": 1}, out=tmp_path / "run", **SMALL)
    assert result.numbers["config"]["method"]["shrink"] == 0.25
    assert result.metrics["local"]["mean"] is not None


def test_workers_are_not_more_than_there_is_work():
    config = C.make(SMALL, {"method": "fedavg", "engine": {"workers": 16}})
    assert build.worker_count(build.assemble(config)) == 4


def test_a_method_that_needs_a_head_refuses_a_backbone_without_one():
    from promptfed import methods, models

    model = models.build("cnn", (3, 16, 16), 4, 0)
    headless = {name: p for name, p in model.weights.items() if not name.startswith("head.")}
    with pytest.raises(UserError, match='FedPer needs a "head"'):
        methods.create("fedper").check(model, headless)


def heard_of(method, tmp_path, block=1, workers=1):
    """What is heard of a round's clients, in a run of one round."""
    heard = []

    class Ears:
        def begin(self, round, clients): ...

        def on_notice(self, notice):
            heard.append(notice)

        def end(self, line):
            heard.append(line)

    # With event files there are two views.
    settings = {
        **SMALL,
        "rounds": 1,
        "engine": {"workers": workers, "block": block, "trackers": ["tensorboard"] * (workers == 1)},
    }
    promptfed.run(method=method, out=tmp_path / "run", view=Ears(), **settings)
    return heard[:-1], heard[-1]


@pytest.mark.parametrize("workers", [1, 2])
def test_every_client_is_heard_of_when_it_is_asked_and_when_it_answers(tmp_path, workers):
    begun_at = time.monotonic()
    notices, line = heard_of({"name": "fedmix", "epochs": 1}, tmp_path, workers=workers)
    whole = time.monotonic() - begun_at
    sites = json.loads((tmp_path / "run/result.json").read_text())["sites"]
    for ask in ("enroll", "train", "evaluate"):
        of = [notice for notice in notices if notice.ask == ask]
        assert sorted(notice.client for notice in of if notice.seconds is None) == [0, 1, 2, 3]
        assert sorted(notice.client for notice in of if notice.seconds is not None) == [0, 1, 2, 3]
        assert {notice.asked for notice in of} == {4}
    trained = {n.client: n for n in notices if n.ask == "train" and n.seconds is not None}
    assert [trained[client].samples for client in range(4)] == [site["n_train"] for site in sites]
    assert sum(n.seconds for n in trained.values()) <= workers * line["seconds"]["train"]
    recorded = [(one["client"], one["seconds"]) for one in line["seconds"]["clients"]]
    assert recorded == [(client, pytest.approx(trained[client].seconds, abs=1e-4)) for client in range(4)]
    enrolled = [n.seconds for n in notices if n.ask == "enroll" and n.seconds is not None]
    assert max(enrolled) < whole / 4, "a worker's start, which imports torch, is not its first client's time"


def test_clients_with_nothing_to_tell_are_not_enrolled(tmp_path):
    notices, _ = heard_of({"name": "fedavg", "epochs": 1}, tmp_path)
    assert {notice.ask for notice in notices} == {"train", "evaluate"}


def test_a_failure_is_heard_with_its_reason(tmp_path):
    notices, line = heard_of({"name": "fedavg", "epochs": 2, "lr": 1e30}, tmp_path)
    errors = {n.client: n.error for n in notices if n.ask == "train" and n.seconds is not None}
    assert errors == {one["client"]: one["why"] for one in line["left_out"]}
    assert len(errors) == 4


def test_clients_that_train_as_one_have_the_seconds_and_samples_of_all(tmp_path):
    notices, _ = heard_of({"name": "fedavg", "epochs": 1}, tmp_path, block=4)
    trained = [n for n in notices if n.ask == "train" and n.seconds is not None]
    sizes = [site["n_train"] for site in json.loads((tmp_path / "run/result.json").read_text())["sites"]]
    assert [(n.seconds, n.samples) for n in trained] == [(trained[0].seconds, sum(sizes))] * 4


def test_a_worker_is_interrupted_by_nothing_and_ends_with_its_parent():
    """Ctrl-C in a terminal reaches it in the middle of its imports."""
    worker = Worker({"path": sys.path})
    process = worker._process
    for _ in range(5):
        process.send_signal(signal.SIGINT)
        time.sleep(0.05)
    with pytest.raises(RuntimeError, match="KeyError: 'config'"):  # it has lived to answer that this is no host
        worker(Request(task=Enroll(), clients=[]), [])
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(timeout=HANG) == 0


def test_a_worker_without_a_parent_has_nothing_to_say():
    """Killed, the parent reads no answers any more."""
    command = [sys.executable, "-c", "from promptfed.clients.local import main; main()"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdout.close()
    write_frame(process.stdin, json.dumps({"path": sys.path}).encode())
    write_frame(process.stdin, b"{}")
    assert process.communicate(timeout=HANG)[1] == b""


def test_a_frame_that_is_cut_off_is_the_end_of_the_stream() -> None:
    whole = io.BytesIO()
    write_frame(whole, b"done", b"text" * 100)
    assert read_frame(io.BytesIO(whole.getvalue())) == [b"done", b"text" * 100]
    for size in (0, 3, 12, 21, 30, len(whole.getvalue()) - 1):
        assert read_frame(io.BytesIO(whole.getvalue()[:size])) == []
