"""What a site does to protect itself from a server, on real hosts of sites' folders."""

import json
import socket
import sys
from dataclasses import replace
from importlib.machinery import PathFinder
from itertools import count

import pytest
import torch

from promptfed import UserError
from promptfed.cli.main import main
from promptfed.clients.messages import Evaluate, Recipient, Request, Second, Train
from promptfed.clients.store import Store
from promptfed.clients.wire import pack
from promptfed.flower.site import Ledger, SiteFolder
from promptfed.privacy import Privacy, epsilon
from promptfed.runs import config as C
from site_folders import consortium, site

NOISY = Privacy(clip=1.0, noise=8.0)


@pytest.fixture(autouse=True)
def _apart(tmp_path, monkeypatch):
    monkeypatch.setenv("PROMPTFED_CACHE", str(tmp_path / "cache"))


RUNS = count(1)  # numbers of runs, as Flower gives them


def ask(host, what="train", round=1, blobs=(), new=None):
    host.run = next(RUNS)  # as if the run had been resumed: what was asked before may be asked again
    state = host.method.begin(host.model, host.init, 0)
    for client in range(2):
        state = host.method.admit(state, client, {}, 0)
    task = Train(round=round, score=False)
    if what == "evaluate":
        task = Evaluate(as_of=round, pooled=False, after_local=False)
    request = Request(task=task, clients=[Recipient(client=0, blob=0)], new=new or {})
    return host(request, [pack(host.method.down(state, 0)), *blobs])


# ---- what it has released


def test_a_ledger_counts_over_runs_and_allows_no_more_than_it_may(tmp_path):
    file = tmp_path / "released.json"
    most = epsilon({8.0: 3}, 1e-5)
    held = Ledger(file, NOISY, lambda: most + 0.01)
    for n in range(3):
        held.check()
        assert held.answers() == ({8.0: n} if n else {})
        held.count()
    assert Ledger(file, NOISY).epsilon() == pytest.approx(most)
    with pytest.raises(UserError, match=r"epsilon = 1.708.* in site.toml allows no more updates: one more .* to 1.99"):
        Ledger(file, NOISY, lambda: most + 0.01).check()
    Ledger(file, NOISY).check()  # it only counts
    Ledger(file, Privacy(clip=1.0, noise=16.0)).count()  # a later agreement
    assert Ledger(file, NOISY).answers() == {8.0: 3, 16.0: 1}
    with pytest.raises(UserError, match="allows no more"):
        Ledger(file, Privacy(clip=1.0), lambda: 100.0).check()  # without noise one is too many


@pytest.mark.parametrize("text", ["", "[]", '{"x": 1}', '{"1": null}'])
def test_a_damaged_ledger_is_not_taken_for_an_empty_one(tmp_path, text):
    (tmp_path / "released.json").write_text(text)
    with pytest.raises(UserError, match="is damaged"):
        Ledger(tmp_path / "released.json", NOISY).count()
    assert (tmp_path / "released.json").read_text() == text


def test_a_site_counts_every_update_before_it_leaves_and_then_refuses(tmp_path):
    server, _ = consortium(tmp_path, clients=2, **{"privacy.clip": 1.0, "privacy.noise": 8.0})
    at = site(server, tmp_path, 0, epsilon=epsilon({8.0: 3}, 1e-5) + 0.01)
    place = SiteFolder.open(at)
    parts = place.parts()
    for run, round in (("first", 1), ("first", 1), ("second", 1)):  # the same round again has noise of its own
        host = place.host(run, parts)
        ask(host, round=round)
        host.close()
    assert json.loads((at / "released.json").read_text()) == {"8.0": 3}
    host = place.host("third", parts)
    try:
        ask(host, "evaluate", round=2)  # which releases no update
        with pytest.raises(UserError, match="allows no more updates"):
            ask(host)
        assert len(host.store) == 0  # nor has it trained
    finally:
        host.close()


def test_a_limit_counts_from_the_moment_it_is_written_down(tmp_path):
    server, _ = consortium(tmp_path, clients=2, **{"privacy.clip": 1.0, "privacy.noise": 8.0})
    place = SiteFolder.open(site(server, tmp_path, 0))
    host = place.host("first")
    try:
        ask(host)
        assert place.ledger().told().startswith("updates released so far: 1, which reveal epsilon 0.9")
        file = place.folder / "site.toml"
        file.write_text(file.read_text() + "epsilon = 0.5\n")
        with pytest.raises(UserError, match=r"epsilon = 0.5 in site.toml allows no more"):
            ask(host, round=2)
        with pytest.raises(UserError, match=r"1 updates released so far reveal epsilon 0.9\d+, and .* allows 0.5"):
            place.ledger().told()
    finally:
        host.close()


def test_a_limit_that_no_noise_can_keep_is_refused(tmp_path):
    server, _ = consortium(tmp_path, clients=2)
    with pytest.raises(UserError, match=r"epsilon = 3 in site.toml needs privacy.noise above 0 in consortium.toml"):
        SiteFolder.open(site(server, tmp_path, 0, epsilon=3.0))
    assert SiteFolder.open(site(server, tmp_path, 1)).ledger() is None


# ---- what it answers


@pytest.fixture
def agreed(tmp_path):
    """A site, and what asks it: a task, and what is added to what the method sends."""

    def of(**settings):
        server, _ = consortium(tmp_path, clients=2, **settings)
        place = SiteFolder.open(site(server, tmp_path, 0))
        host = place.host("first")
        hosts.append(host)
        state = host.method.begin(host.model, host.init, 0)
        for client in range(2):
            state = host.method.admit(state, client, {}, 0)
        down = host.method.down(state, 0)

        def asked(task, **more):
            return host(Request(task=task, clients=[Recipient(client=0, blob=0)]), [pack({**down, **more})]).results[0]

        return place, host, asked

    hosts = []
    yield of
    for host in hosts:
        host.close()


def test_a_site_answers_what_was_agreed_on_and_once(agreed):
    place, host, asked = agreed(**{"eval.after_local": "none", "eval.every": 2, "rounds": 3})
    train, score = Train(round=1, score=False), Evaluate(as_of=3, pooled=False, after_local=False)
    refused = {
        "training in round 2 is refused: eval.after_local": Train(round=2, score=True),
        "training in round 4 is refused: rounds = 3": Train(round=4, score=False),
        "after round 2 and local training is refused: eval.after_local": score.model_copy(update={"after_local": True}),
        "after round 1 is refused: eval.every = 2": score.model_copy(update={"as_of": 2}),
        "after round 2 is refused: eval.pooled": score.model_copy(update={"pooled": True}),
        "the second message in round 1 is refused": Second(round=1),
    }
    for why, task in refused.items():
        with pytest.raises(UserError, match=why):
            asked(task)
    assert len(host.store) == 0
    asked(train)
    asked(score)
    host.agreement = replace(host.agreement)  # as if the node had been restarted
    for task in (train, score):
        with pytest.raises(UserError, match="it has been answered in this run already"):
            asked(task)
    host.run += 1  # the run is resumed
    asked(train)
    asked(score)
    assert host.agreement.asked(task="evaluation after round 2") == 2  # of all
    file = place.folder / "consortium.toml"
    file.write_text(file.read_text().replace("rounds = 3", "rounds = 4"))
    asked(Train(round=4, score=False))


def test_a_server_cannot_put_its_own_parameters_in_place_of_private_ones(agreed):
    _, host, asked = agreed()
    name, shared = next(iter(host.method.kept(host.init))), next(iter(host.method.shared(host.init)))
    for task in (Train(round=1, score=False), Evaluate(as_of=2, pooled=False, after_local=False)):
        with pytest.raises(UserError, match=f"it holds {name}, which is private to the site"):
            asked(task, **{name: torch.zeros_like(host.init[name])})
        with pytest.raises(UserError, match=f"{shared} has another shape than agreed"):
            asked(task, **{shared: torch.zeros(3)})
    assert len(host.store) == 0


def test_under_privacy_no_loss_leaves_a_site(agreed):
    _, _, asked = agreed(**{"privacy.clip": 1.0, "privacy.noise": 8.0})
    trained = asked(Train(round=1, score=True))
    scored = asked(Evaluate(as_of=2, pooled=False, after_local=False))
    for scores in (trained.after_local, scored.scores):
        assert (scores.val.loss, scores.test.loss) == (None, None)
        assert scores.test.n


def test_damaged_notes_of_what_was_asked_are_one_sentence(agreed):
    place, _, asked = agreed()
    (place.folder / "asked.jsonl").write_text('{"run": \n')
    with pytest.raises(UserError, match=r"asked.jsonl. is damaged \(line 1 was changed"):
        asked(Train(round=1, score=False))


# ---- whose code it runs


def test_an_agreement_does_not_run_code_that_the_site_has_not_allowed(tmp_path, monkeypatch):
    server, _ = consortium(tmp_path, clients=1)
    at = site(server, tmp_path, 0)
    module = f"helpers_{tmp_path.name}"
    (tmp_path / f"{module}.py").write_text(f"""
from pathlib import Path
from promptfed.method import FedAvg
Path({str(tmp_path / "ran")!r}).touch()
class Mine(FedAvg): pass
""")
    monkeypatch.syspath_prepend(tmp_path)
    file = at / "consortium.toml"
    table = C.read(file)
    for method in (f"{module}:Mine", f"{module}:Mine+pt", {"name": f"{module}:Mine"}):
        file.write_text(C.dump({**table, "method": method}))
        with pytest.raises(UserError, match=rf"would run code of the module .{module}., which modules = \[\]"):
            SiteFolder.open(at)
    assert not (tmp_path / "ran").exists()
    (at / "site.toml").write_text((at / "site.toml").read_text() + f'modules = ["{module}"]\n')
    assert type(SiteFolder.open(at).config.method.method).__name__ == "Mine"


def test_the_hub_is_not_asked_unless_the_site_allows_it(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(socket, "getaddrinfo", lambda *a, **k: asked.append(a) or (_ for _ in ()).throw(OSError()))
    server, _ = consortium(tmp_path, clients=1)
    at = site(server, tmp_path, 0, backbone="owner/name")
    with pytest.raises(UserError, match="the hub cannot be reached"):
        SiteFolder.open(at).parts()
    assert asked == []


def test_no_file_of_the_working_directory_replaces_a_package(tmp_path, monkeypatch):
    (tmp_path / "lmdb.py").write_text("raise SystemExit(7)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", str(tmp_path), *sys.path])  # as python -m has it
    monkeypatch.setattr(sys, "argv", ["promptfed", "--version"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    assert sys.path[-1] == ""  # method=my_module:MyMethod is found all the same
    assert PathFinder.find_spec("lmdb").origin != str(tmp_path / "lmdb.py")


# ---- what it keeps


def test_what_others_could_read_is_told_with_the_remedy(tmp_path):
    server, _ = consortium(tmp_path, clients=2)
    place = SiteFolder.open(site(server, tmp_path, 0))
    place.private()
    (place.folder / "site.key").write_text("secret")
    (place.folder / "site.key").chmod(0o640)
    with pytest.raises(UserError, match=r'site.key" can be read by others: chmod 600 '):
        place.private()
    (place.folder / "site.key").chmod(0o600)
    place.folder.chmod(0o755)
    with pytest.raises(UserError, match=r"can be read by others: chmod 700 "):
        place.private()


@pytest.mark.parametrize("settings", [{}, {"method": "scaffold"}], ids=["private parameters", "a vector"])
def test_a_site_that_has_lost_its_memory_says_so(settings, tmp_path, caplog):
    server, _ = consortium(tmp_path, clients=2, **settings)
    place = SiteFolder.open(site(server, tmp_path, 0))
    parts = place.parts()
    caplog.set_level("WARNING", logger="flwr")
    for run, round, told in (("first", 1, False), ("first", 2, False), ("second", 2, True)):
        host = place.host(run, parts)
        ask(host, round=round)
        host.close()
        assert ("begin anew" in caplog.text) is told


def test_a_server_cannot_fill_a_sites_disk(tmp_path):
    server, _ = consortium(tmp_path, clients=2)
    place = SiteFolder.open(site(server, tmp_path, 0, runs_gb=0.002))
    parts = place.parts()
    host = place.host("first", parts)
    try:
        ask(host)
        kept = pack({"x": torch.zeros(300_000)})
        ask(host, blobs=[kept], new={"a" * 64: 1})
        with pytest.raises(UserError, match=r"runs_gb = 0.002 in site.toml: 0.00\d* GB would be needed; folders of"):
            ask(host, blobs=[kept], new={"b" * 64: 1})
        assert [file.name for file in (place.run("first") / "clients" / "once").iterdir()] == ["a" * 64]
        for i in range(99):
            try:
                place.host(f"run{i}", parts).close()
            except UserError:
                break
        assert 0 < i < 98  # nor by runs that never begin
        assert not place.run(f"run{i}").exists()
    finally:
        host.close()
    assert Store(place.run("first") / "clients").get(0, 2)  # what is private is as it was
