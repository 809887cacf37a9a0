"""Secure aggregation over Flower's messages, between sites that answer only what was agreed on."""

import pytest

pytest.importorskip("flwr", reason='Flower is not installed: pip install "promptfed[flower]"')

import torch
from deployment import deployed, reference
from deployment import state as deployed_state
from loopback import Loopback, case_of, go, looped, same
from test_flower_sites import command

from promptfed import params as P
from promptfed.clients.local import LocalClients
from promptfed.clients.messages import Keys, Masks, Recipient, Request, Train, Unmask
from promptfed.clients.wire import pack
from promptfed.errors import UserError
from promptfed.flower import consortium as consortia
from promptfed.flower.app import Resident, client_app
from promptfed.flower.clients import FlowerClients
from promptfed.flower.signing import Signer, Verifier
from promptfed.flower.simulation import expected
from promptfed.flower.site import SiteFolder, read_agreed
from promptfed.runs import build
from promptfed.runs import config as C
from promptfed.secure import Secure
from promptfed.server import step
from promptfed.testing import equal
from site_folders import NAMES, consortium, site

CLIENTS = 3
SHORT = {"name": "head-tune", "epochs": 1, "batch_size": 8}


@pytest.fixture
def sites(tmp_path, monkeypatch):
    """Three sites of a consortium with secure aggregation. -> its parts, the sites, and clients over a Grid double
    whose messages are signed"""
    monkeypatch.setenv("PROMPTFED_CACHE", str(tmp_path / "cache"))
    server, parts = consortium(tmp_path, CLIENTS, method=SHORT, secure={"aggregation": True})
    consortia.make_key(server)
    residents = [Resident(SiteFolder.open(site(server, tmp_path, client))) for client in range(CLIENTS)]
    verify = Verifier(residents[0].site.agreed.key)

    def verified(message, context):
        context.run_config = {"run": "first"}
        verify(message, context)

    app = client_app(lambda context: residents[context.node_config["partition-id"]](context), verified)
    grid = Loopback(app, range(CLIENTS))
    sign = Signer(server / consortia.REQUESTS, read_agreed(server)[1].key, "first")
    yield parts, residents, grid, lambda **how: FlowerClients(grid, expected(parts), poll=0.001, sign=sign, **how)
    for resident in residents:
        resident.close()


def begin(parts):
    return parts.method.begin(parts.model, parts.init, parts.config.seed)


def plain_mean(parts, residents, folder, state, there):
    """Of the updates that these sites would send without masks."""
    ups, sizes = [], []
    for client in there:
        config = C.make(parts.config.complete(), {"secure": {"aggregation": False}})
        own = residents[client].parts
        host = build.make_host(
            build.Parts(config, own.federation, own.model, own.method, own.init, own.device),
            build.Store(folder / str(client)),
        )
        sizes.append(len(own.federation.sites[client].train))
        (update,), _ = LocalClients({client: sizes[-1]}, [host]).train({client: state}, 1, score=False)
        ups.append(update.up)
        host.close()
    return P.mean(ups, sizes)


def test_a_run_over_flower_is_bit_identical_to_one_on_this_machine(tmp_path):
    case = case_of("fedper", tmp_path, sizes=(9, 1, 5, 4))
    case.secure = Secure(aggregation=True, neighbours=2)
    with case.clients() as (clients, _):
        here = go(case, clients)
    with looped(case, tmp_path / "there") as (clients, _):
        there = go(case, clients)
    same(here, there)
    assert [line["left_out"] for line in there.lines] == [[], []]


@pytest.mark.parametrize("lost", [None, 1])
def test_sites_answer_and_a_site_that_is_lost_in_mid_round_is_not_missed(sites, tmp_path, lost):
    parts, residents, grid, connect = sites
    clients, state = connect(timeout=0.5 if lost else None), begin(parts)
    train = clients.train

    def lose(*given):
        grid.silent = {lost} if lost else set()
        return train(*given)

    clients.train = lose
    plan = build.rounds(parts.config, parts.federation.sites, ())
    made, line, _ = step(parts.method, parts.init, clients, plan, state, 1)
    assert line["left_out"] == ([{"client": lost, "why": "no answer"}] if lost else [])
    there = [client for client in range(CLIENTS) if client != lost]
    mean = plain_mean(parts, residents, tmp_path / "plain", state, there)
    torch.testing.assert_close(made, mean, rtol=0, atol=1e-6)
    assert {kind for kind, *_ in grid.asked} >= {"train.keys", "train.shares", "train.round", "train.unmask"}


def test_a_round_of_too_few_sites_is_refused(sites):
    parts, _, grid, connect = sites
    clients = connect(timeout=0.3)
    grid.silent = {0, 1}
    state = begin(parts)
    made, line, _ = step(
        parts.method, parts.init, clients, build.rounds(parts.config, parts.federation.sites, ()), state, 1
    )
    assert made is state
    assert line["left_out"][2]["why"] == "1 of 3 clients made keys, and secure.threshold = 0.6 needs 2"


def test_a_site_answers_only_what_secure_aggregation_asks_and_once(sites):
    parts, residents, *_ = sites
    host = residents[0].site.host("other", residents[0].parts)
    down = pack(begin(parts))

    def ask(task, blob=b""):
        return host(Request(task=task, clients=[Recipient(client=0, blob=0)]), [blob])

    with pytest.raises(UserError, match=r"^training in round 1 is refused: secure.aggregation = true in cons"):
        ask(Train(round=1, score=False), down)
    ask(Keys(round=1))
    with pytest.raises(UserError, match=r"^making keys in round 1 is refused: it has been answered in this run"):
        ask(Keys(round=1))
    with pytest.raises(UserError, match=r"^removing masks in round 3 is refused: rounds = 2"):
        ask(Unmask(round=3, answered=[0, 1, 2]))
    (said,) = ask(Train(round=1, score=False, masks=Masks(clients=[0, 1, 2], total=99, largest=50)), down).results
    assert said.error == "secure.aggregation: client 0 is not ready for this message in round 1"
    host.close()


def test_a_site_without_secure_aggregation_refuses_its_messages(tmp_path, monkeypatch):
    monkeypatch.setenv("PROMPTFED_CACHE", str(tmp_path / "cache"))
    server, _ = consortium(tmp_path, CLIENTS, method=SHORT)
    held = SiteFolder.open(site(server, tmp_path, 0))
    host = held.host("first")
    with pytest.raises(UserError, match=r"^making keys in round 1 is refused: secure.aggregation = false in"):
        host(Request(task=Keys(round=1), clients=[Recipient(client=0, blob=0)]), [b""])
    host.close()


def test_a_new_consortium_with_masks_takes_the_mean(tmp_path):
    settings = ("method=head-tune", "backbone=vit-mini", "dataset.size=32", "secure.aggregation=true")
    command("init", tmp_path / "server", *settings, "--clients", 3, "--classes", ",".join(NAMES))
    config, _ = read_agreed(tmp_path / "server")
    assert (config.aggregation.name, config.secure.aggregation) == ("mean", True)


@pytest.mark.slow
def test_three_sites_on_a_superlink_of_which_one_is_lost_in_mid_round(tmp_path, monkeypatch):
    monkeypatch.setenv("PROMPTFED_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    engine = {"patience": 600, "deadline": 60}
    leave = """
    if task.ask == "train" and task.round == 2:
        import os
        os._exit(1)
"""
    with deployed(tmp_path, method=SHORT, secure={"aggregation": True}, engine=engine) as made:
        made.link()
        for client in range(CLIENTS):
            made.admit(client)
            made.node(client, leave if client == 1 else "")
        first, second = made.submit("first")
        assert first["left_out"] == []
        assert [row["client"] for row in second["left_out"]] == [1]
        expected = reference(made, tmp_path / "here", rounds=2, absent={(2, 1)})
        assert equal(deployed_state(made, "first"), expected.state)
