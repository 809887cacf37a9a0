"""What privacy does to an update on a real Host, what it claims against an independent bound, and whom it refuses."""

import json
import math

import numpy as np
import pytest
import torch
from scipy.optimize import brentq
from scipy.stats import kstest, norm

import promptfed
from promptfed import UserError, methods, models
from promptfed.clients.messages import Recipient, Request, Train, read_update
from promptfed.clients.store import Store
from promptfed.clients.wire import pack, unpack
from promptfed.method import FedAvg
from promptfed.methods import ALIASES, METHODS
from promptfed.privacy import NOT_COVERED, Privacy, answers, epsilon, sentence, statement
from promptfed.runs import build
from promptfed.runs import config as C
from promptfed.runs.record import Folder, View
from promptfed.testing import NAMES, Case, begun, equal, tiny_federation
from tiny import toy_host

COVERED = {
    *("fedavg", "fedprox", "moon", "perfedavg", "fedper", "fedrep", "fedmtl", "fedbabu", "fedrod", "pfedme", "fedpr"),
    *("scaffold", "feddyn", "fednova", "fedavgm", "fedadagrad", "fedadam", "fedyogi", "fedlc", "fedntd"),
    *("lg-fedavg", "fedbn", "ditto", "apfl", "fedala", "fedamp"),
    *("tpfl", "atpfl", "pfedpg", "pfedpt", "pfedpt-tokens", "head-tune", "fedvpt", "fedvpt-d", "promptfl"),
    *("kgcoop", "prograd", "promptfolio", "fedpgp", "cocoop", "fedclip", "plot", "fedotp", "fedtpg"),
    *("promptsrc", "pfedprompt", "pfedmoap", "dp-fpl", "fedmgp", "fedpha"),
    *("fedit", "ffa-lora", "fedsa-lora", "flexlora"),
}
SMALL = {
    "dataset": {"name": "digits", "limit": 60, "size": 16},
    "partition": {"name": "iid", "clients": 4},
    "method": {"name": "fedavg", "epochs": 1},
    "engine": {"workers": 1},
    "fraction": 0.5,
    "privacy": {"clip": 1.0, "noise": 2.0},
}


@pytest.fixture(autouse=True, scope="module")
def _cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PROMPTFED_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


class Changes(FedAvg):
    """What goes up is a change, as of pFedPG."""

    def upload(self, params, ctx):
        return {name: p - ctx.down[name] for name, p in self.shared(params).items()}


class Counting(FedAvg):
    """A sum over samples goes up besides."""

    def loss(self, model, params, batch, ctx):
        return super().loss(model, params, batch, ctx)[0], {"seen": batch.y.sum()}


def asked(host, down, round=1, clients=(0, 1), score=False):
    to = [Recipient(client=client, blob=0) for client in clients]
    said = host(Request(task=Train(round=round, score=score), clients=to), [pack(down)])
    return [one.model_dump(exclude_defaults=True) for one in said.results], [read_update(blob) for blob in said.blobs]


def trained(path, privacy=None, method=FedAvg, noise_seed=7, round=1, block=1, **settings):
    """-> what the two clients of the toy say, what they send, and what they had received"""
    host = toy_host(method(**{"epochs": 2, "batch_size": 4, "lr": 0.5, **settings}), path, block=block)
    host.privacy, host.noise_seed = privacy, noise_seed
    down = host.method.shared(host.init)
    notes, sent = asked(host, down, round)
    host.close()
    return notes, [up for up, _ in sent], down


def flat(params):
    return np.concatenate([p.double().numpy().ravel() for _, p in sorted(params.items())])


# ---- the bound


def gaussian_mechanism(multiplier, delta):
    """Balle & Wang (2018), Theorem 8, solved for epsilon: by nothing of dp-accounting."""

    def excess(eps):
        a, b = 0.5 / multiplier - eps * multiplier, -0.5 / multiplier - eps * multiplier
        return norm.cdf(a) - math.exp(eps + norm.logcdf(b)) - delta

    return brentq(excess, 0, 10 / multiplier**2 + 50, xtol=1e-10)


@pytest.mark.parametrize("noise", [0.3, 1.0, 2.0, 8.0, 100.0])
@pytest.mark.parametrize("rounds", [1, 7, 150])
def test_epsilon_is_that_of_the_analytic_gaussian_mechanism(noise, rounds):
    # Replacing the data moves a clipped update by 2 clip at most; k answers are one with noise less by sqrt(k).
    exact = gaussian_mechanism(noise / 2 / math.sqrt(rounds), 1e-5)
    assert exact <= epsilon({noise: rounds}, 1e-5) <= exact * 1.001


def test_no_noise_is_no_bound_and_no_answer_reveals_nothing():
    assert epsilon({0.0: 3}, 1e-5) == math.inf
    assert epsilon({1.0: 0, 0.0: 0}, 1e-5) == 0


def test_answers_with_different_noise_add_up_as_normal_noise_does():
    exact = gaussian_mechanism((3 / 1.0**2 + 40 / 4.0**2) ** -0.5, 1e-5)
    assert exact <= epsilon({2.0: 3, 8.0: 40, 5.0: 0}, 1e-5) <= exact * 1.001
    assert epsilon({2.0: 3, 0.0: 1}, 1e-5) == math.inf


# ---- on a real host


def test_an_update_is_shortened_to_clip_and_keeps_its_direction(tmp_path):
    clip = 0.05
    _, plain, down = trained(tmp_path / "plain")
    _, sent, _ = trained(tmp_path / "clipped", Privacy(clip=clip))
    for a, b in zip(plain, sent, strict=True):
        change, kept = flat(a) - flat(down), flat(b) - flat(down)
        assert np.linalg.norm(change) > 2 * clip  # else nothing is tested
        assert np.linalg.norm(kept) == pytest.approx(clip, rel=1e-4)  # float32 on the way
        np.testing.assert_allclose(kept, change * clip / np.linalg.norm(change), atol=1e-7)


def test_an_update_that_is_short_enough_stays_as_it_is(tmp_path):
    _, plain, _ = trained(tmp_path / "plain")
    _, sent, _ = trained(tmp_path / "clipped", Privacy(clip=1e3))
    assert all(equal(a, b) for a, b in zip(plain, sent, strict=True))


def test_what_goes_up_as_a_change_is_clipped_as_one(tmp_path):
    _, plain, down = trained(tmp_path / "plain", Privacy(clip=0.05))
    _, sent, _ = trained(tmp_path / "changes", Privacy(clip=0.05), method=Changes)
    for a, b in zip(plain, sent, strict=True):
        np.testing.assert_allclose(flat(b), flat(a) - flat(down), atol=1e-6)


@pytest.mark.parametrize("noise_seed", [7, None], ids=["seeded", "system"])
def test_the_noise_is_normal_with_the_deviation_that_is_claimed(tmp_path, noise_seed):
    privacy = Privacy(clip=0.05, noise=3.0)
    found = []
    for round in range(1, 11):
        _, clipped, _ = trained(tmp_path / f"clipped{round}", replaced(privacy, noise=0.0), round=round)
        _, sent, _ = trained(tmp_path / f"sent{round}", privacy, noise_seed=noise_seed, round=round)
        found += [(flat(a) - flat(b)) / 0.15 for a, b in zip(sent, clipped, strict=True)]
    values = np.concatenate(found)  # 20 answers of 259 numbers
    assert values.std() == pytest.approx(1.0, abs=0.05)  # five times its own deviation
    assert abs(values.mean()) < 0.07
    assert kstest(values, "norm").pvalue > 1e-4
    # No two answers share noise.
    assert np.abs(np.corrcoef(found) - np.eye(len(found))).max() < 0.4


def replaced(privacy, **changes):
    return privacy.model_copy(update=changes)


def test_seeded_noise_is_repeated_and_that_of_the_system_is_not(tmp_path):
    privacy = Privacy(clip=0.05, noise=1.0)
    seeded = [trained(tmp_path / f"seeded{i}", privacy)[1] for i in range(2)]
    system = [trained(tmp_path / f"system{i}", privacy, noise_seed=None)[1] for i in range(2)]
    assert all(equal(a, b) for a, b in zip(*seeded, strict=True))
    assert not any(equal(a, b) for a, b in zip(*system, strict=True))
    stacked = trained(tmp_path / "stacked", privacy, block=2)[1]
    for a, b in zip(seeded[0], stacked, strict=True):
        np.testing.assert_allclose(flat(a), flat(b), atol=1e-5)


def test_sites_take_noise_of_the_system_and_simulations_that_of_the_seed(tmp_path):
    assert toy_host(FedAvg(), tmp_path / "toy").noise_seed is None
    table = {"method": "fedavg", "seed": 5, "privacy": {"clip": 1.0, "noise": 1.0}, "eval": {"pooled": "never"}}
    here = tiny_federation(tmp_path)
    apart = {"dataset": {"size": 16, "mean": (0.5,) * 3, "std": (0.5,) * 3}}
    apart |= {"consortium": {"clients": 2, "classes": NAMES}}
    for config, federation, seed in ((C.make(table), here, 5), (C.make(table, apart), None, None)):
        host = build.make_host(build.assemble(config, federation), Store(tmp_path / f"store {seed}"))
        assert host.privacy == config.privacy
        assert host.noise_seed == seed
        host.close()


def test_nothing_else_of_training_is_told(tmp_path):
    plain, _, _ = trained(tmp_path / "plain")
    notes, _, _ = trained(tmp_path / "private", Privacy(clip=0.05, noise=1.0))
    for a, b in zip(plain, notes, strict=True):
        assert set(a) == {"client", "n", "passes", "loss"}
        assert b == {key: a[key] for key in ("client", "n", "passes")}


def test_training_that_fails_is_not_told_and_sends_noise_alone(tmp_path):
    plain, _, _ = trained(tmp_path / "plain", lr=1e30)
    notes, sent, down = trained(tmp_path / "private", Privacy(clip=0.05, noise=1.0), lr=1e30)
    assert all("error" in note for note in plain)
    assert all(set(note) == {"client", "n", "passes"} for note in notes)
    for up in sent:
        noise = (flat(up) - flat(down)) / 0.05
        assert np.isfinite(noise).all()
        assert noise.std() == pytest.approx(1.0, abs=0.25)


def test_privacy_that_is_off_changes_no_bit(tmp_path):
    settings = {key: value for key, value in SMALL.items() if key != "privacy"}
    promptfed.run(**settings, rounds=2, out=tmp_path / "plain")
    found = promptfed.run(**settings, rounds=2, out=tmp_path / "off", privacy={"clip": 0})
    assert "privacy" not in found.numbers
    assert not (tmp_path / "off" / "asked.jsonl").exists()
    states = [unpack((tmp_path / name / "checkpoint.safetensors").read_bytes())[0] for name in ("plain", "off")]
    assert equal(*states)


# ---- a run


def test_a_run_states_what_each_client_revealed(tmp_path):
    found = promptfed.run(**SMALL, rounds=3, out=tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()]
    took_part = [sum(client in line["clients"] for line in lines) for client in range(4)]
    assert sum(took_part) == 6
    stated = json.loads((tmp_path / "run" / "result.json").read_text())["privacy"]
    assert stated == found.numbers["privacy"]
    assert [each["answers"] for each in stated["per_client"].values()] == took_part
    assert stated["per_client"]["0"]["epsilon"] == epsilon({2.0: took_part[0]}, 1e-5)
    assert stated["epsilon"] == max(each["epsilon"] for each in stated["per_client"].values())
    assert (stated["clip"], stated["noise"], stated["delta"]) == (1.0, 2.0, 1e-5)
    assert stated["not_covered"] == list(NOT_COVERED)
    assert "simulation" in stated["randomness"]
    assert all(line["train_loss"] is None and not line["left_out"] for line in lines)


class Stopping(View):
    """Somebody who presses Ctrl-C as a round begins."""

    def __init__(self, round):
        self._round = round

    def begin(self, round, clients):
        if round == self._round:
            raise KeyboardInterrupt

    def end(self, line): ...


def test_a_resumed_run_counts_a_repeated_round_once_and_ends_like_one_that_was_not_stopped(tmp_path):
    whole = promptfed.run(**SMALL, rounds=4, out=tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        promptfed.run(**SMALL, rounds=3, out=tmp_path / "cut", view=Stopping(2))
    promptfed.run(resume=True, out=tmp_path / "cut")  # to round 3
    again = promptfed.run(resume=True, rounds=4, out=tmp_path / "cut")
    assert again.numbers["privacy"] == whole.numbers["privacy"]
    states = [unpack((tmp_path / name / "checkpoint.safetensors").read_bytes())[0] for name in ("whole", "cut")]
    assert equal(*states)
    folder = Folder(tmp_path / "cut", ledger=True)
    ledger = folder.asked()
    folder.close()
    assert [round for round, _ in ledger] == [1, 2, 2, 3, 4]
    # Between sites the second answer of round 2 had noise of its own.
    extra = answers(ledger, seeded=False) - answers(ledger, seeded=True)
    assert set(extra) == set(ledger[1][1])


def test_a_ledger_that_was_cut_off_loses_nothing_that_was_asked(tmp_path):
    folder = Folder(tmp_path, ledger=True)
    folder.begin(1, [0, 1])
    with (tmp_path / "asked.jsonl").open("a") as file:
        file.write('\n{"round": 2, "cli')
    folder.begin(2, [1])
    assert folder.asked() == [(1, [0, 1]), (2, [1])]
    folder.close()


def test_worker_processes_add_the_same_noise(tmp_path):
    states = []
    for workers in (1, 2):
        promptfed.run(
            **{**SMALL, "fraction": 1.0, "engine": {"workers": workers}}, rounds=1, out=tmp_path / str(workers)
        )
        states.append(unpack((tmp_path / str(workers) / "checkpoint.safetensors").read_bytes())[0])
    assert equal(*states)


def test_clipping_alone_states_no_epsilon():
    stated = statement(Privacy(clip=1.0), {0: 3}, 2, seeded=True)
    assert stated["epsilon"] is None
    assert stated["per_client"]["1"] == {"answers": 0, "epsilon": 0.0}
    assert "infinite" in sentence(stated)


def test_the_line_for_a_person():
    stated = statement(Privacy(clip=1.0, noise=4.0), {0: 1, 1: 1}, 2, seeded=False)
    assert sentence(stated) == (
        "privacy: epsilon 1.99 at delta 1e-05 for a client's training data, over one update (clip 1, noise 4); "
        "evaluation is not covered"
    )
    assert "operating system" in stated["randomness"]


# ---- who is refused


@pytest.mark.parametrize("name", [*METHODS, *ALIASES])
def test_every_method_is_covered_or_refused(name):
    table = {"method": name, "privacy": {"clip": 1.0}}
    if name in COVERED or name == "sgpt":  # which says what it counts only when it trains
        assert C.make(table).privacy.on
    else:
        with pytest.raises(UserError, match=rf'^privacy\.clip: "{name}" [^\n]+$'):
            C.make(table)


def test_sums_that_training_sends_are_refused_before_they_leave(tmp_path):
    with pytest.raises(UserError, match=r"^privacy.clip: Counting sends sums over its samples \(seen\)"):
        trained(tmp_path, Privacy(clip=1.0), method=Counting)


def test_sgpt_is_refused_when_it_trains(tmp_path):
    method = methods.create(
        "sgpt", {"groups": 3, "rare": 4, "shared_layers": (0,), "group_layers": (4, 5), "epochs": 1}
    )
    model = models.build("vit-mini", (3, 32, 32), 4, 5, NAMES)
    case = Case(method, model, tiny_federation(tmp_path, size=32))
    with case.clients() as (clients, host):
        host.privacy = Privacy(clip=1.0)
        with pytest.raises(UserError, match=r"^privacy.clip: Sgpt sends sums"):
            clients.train({0: begun(case, clients)}, 1, score=False)


@pytest.mark.parametrize("name", sorted(COVERED))
def test_covered_methods_train_and_only_noise_reaches_the_server(name, tmp_path):
    """With noise that drowns everything, what goes up does not depend on what a client has learnt."""
    needed = methods.backbones(methods.create(name))
    backbone = "clip-mini" if needed.startswith("CLIP") else "vit-mini" if needed == "transformers" else "cnn"
    name = "fedpr+vpt" if name == "fedpr" else name
    backbone = "vit-mini" if name == "fedpr+vpt" else backbone
    size = 16 if backbone == "cnn" else 32
    short = {
        "epochs": 1,
        "prompt_epochs": 1,
        "head_epochs": 1,
        "iterations": 4,
        "context": 2,
        "tokens": 2,
        "prompt_size": 2,
    }
    given = {key: value for key, value in short.items() if key in methods.fields(name)}
    model = models.build(backbone, (3, size, size), 4, 5, NAMES)
    case = Case(methods.create(name, given), model, tiny_federation(tmp_path, (9, 1, 5), size=size))
    with case.clients() as (clients, host):
        state = begun(case, clients)
        sent = {client: case.method.down(state, client) for client in (0, 1)}
        plain, _ = clients.train(sent, 1, score=False)
        host.privacy, host.noise_seed = Privacy(clip=1e-3), 7
        clipped, _ = clients.train(sent, 1, score=False)
        host.privacy = Privacy(clip=1e-3, noise=1e3)
        noised, _ = clients.train(sent, 1, score=False)
    for a, b, c in zip(plain, clipped, noised, strict=True):
        still = a.sent if name != "pfedpg" else {key: torch.zeros_like(p) for key, p in a.up.items()}
        change = flat(b.up) - flat({key: still[key] for key in b.up})
        assert np.linalg.norm(change) <= 1e-3 * (1 + 1e-2)
        assert not equal(a.up, c.up)
        assert np.std(flat(c.up) - flat(b.up)) == pytest.approx(1.0, abs=0.35)
        assert c.loss is None
        assert not c.stats


@pytest.mark.parametrize(
    ("table", "complaint"),
    [
        ({"noise": 1.0}, "privacy.noise = 1.0 needs privacy.clip above 0"),
        ({"clip": -1.0}, "privacy.clip = -1.0 should be greater than or equal to 0"),
        ({"clip": 1.0, "delta": 0.0}, "privacy.delta = 0.0 should be greater than 0"),
        ({"clip": float("inf")}, "privacy.clip = inf"),
        ({"clip": 1.0, "epsilon": 3}, "privacy.epsilon is not a setting"),
        ({"clipp": 1.0}, 'privacy.clipp is not a setting; did you mean "privacy.clip"'),
    ],
)
def test_mistakes_are_one_sentence(table, complaint):
    with pytest.raises(UserError) as error:
        C.make({"method": "fedavg", "privacy": table})
    assert str(error.value).startswith(complaint)
    assert "\n" not in str(error.value)


def test_distances_that_clients_would_tell_are_refused():
    with pytest.raises(UserError, match=r"^eval.drift = true tells how far"):
        C.make({"method": "fedavg", "privacy": {"clip": 1.0}, "eval": {"drift": True}})


def test_a_missing_accountant_is_told_before_anything_is_trained(tmp_path, monkeypatch):
    monkeypatch.setattr("promptfed.privacy.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r'pip install "promptfed\[privacy\]"'):
        promptfed.run(**SMALL, rounds=1, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_updates_whose_shape_depends_on_the_data_are_refused(tmp_path):
    class Odd(FedAvg):
        def upload(self, params, ctx):
            return {name: p for name, p in params.items() if ctx.n or name != "head.bias"}

    with pytest.raises(UserError, match=r"^privacy.clip: the method's updates have not the same names"):
        trained(tmp_path, Privacy(clip=1.0), method=Odd)


def test_nodes_of_flower_must_agree_on_it(tmp_path):
    pytest.importorskip("flwr", reason='Flower is not installed: pip install "promptfed[flower]"')
    from promptfed.flower.app import fingerprint

    data, model = tiny_federation(tmp_path).dataset, models.build("cnn", (3, 16, 16), 4, 5, NAMES)
    off, also_off, on, other = (
        fingerprint(FedAvg(), model, data, 0, privacy)
        for privacy in (None, Privacy(), Privacy(clip=1.0), Privacy(clip=1.0, noise=1.0))
    )
    assert off == also_off
    assert {part for part in off if off[part] != on[part]} == {"privacy"}
    assert {part for part in on if on[part] != other[part]} == {"privacy"}
