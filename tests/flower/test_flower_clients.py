"""Flower changes nothing: parameters, lines and bytes as on this machine, nothing private sent; and who takes part."""

from contextlib import contextmanager

import pytest

pytest.importorskip("flwr", reason='Flower is not installed: pip install "promptfed[flower]"')

from flwr.app import Context, Message, RecordDict
from loopback import FEW, Loopback, Wary, case_of, expected, go, host_of, looped, same

from promptfed import UserError
from promptfed.data.augment import Augment
from promptfed.flower.app import Resident, client_app, fingerprint
from promptfed.flower.clients import Expected, FlowerClients
from promptfed.flower.site import SiteFolder
from promptfed.flower.wire import Identify, read_answer, write_request
from promptfed.method import split_once
from promptfed.methods import ALIASES, METHODS
from promptfed.testing import SIZES, begun, equal, private_values
from site_folders import consortium, site

# ---- fidelity


@pytest.mark.parametrize("name", [*METHODS, *ALIASES, "dp2fl open", "dp2fl sealed"])
def test_every_method_ends_with_the_bits_and_bytes_of_the_local_engine(name, tmp_path):
    name, _, privacy = name.partition(" ")
    given = {"privacy": privacy} if privacy else {}
    if privacy == "sealed":
        # No prompt is discarded: where a client's own is the only one left, what it keeps is what it has sent.
        given["alpha"] = 1e3
    case = case_of(name, tmp_path, FEW, **given)
    hosts = []
    with looped(case, tmp_path / "clients", wrap=lambda host: hosts.append(host) or Wary(host)) as (clients, grid):
        found = go(case, clients, every=2)
        held = [hosts[0].store.get(client, as_of) for client in clients.ids() for as_of in (2, 3)]
    with case.clients() as (local, _):
        same(found, go(case, local, every=2))
    if name == "ditto":  # its two models begin alike, and one step on one batch takes both to the same place
        held = held[1::2]
    kept = [value for state in held for value in private_values(state)]
    if any(map(case.method.stays, case.init)) or privacy == "sealed":
        assert len(kept) >= len(held)
    for said in grid.said:  # every byte that left a node
        for value in kept:
            assert value not in said
    if name == "dp2fl":
        check_once(case, grid)
    assert any(kind == "train.second" for kind, _, _ in grid.asked) is (privacy == "sealed")


@pytest.mark.parametrize(("name", "enrolled"), [("fedavg", []), ("fedmix", [0, 1, 2])])
def test_only_clients_that_have_something_to_tell_are_enrolled(name, enrolled, tmp_path):
    case = case_of(name, tmp_path, FEW)
    with looped(case, tmp_path / "clients") as (clients, grid):
        go(case, clients, rounds=1)
    assert sorted(client for kind, client, _ in grid.asked if kind == "query.enroll") == enrolled


def check_once(case, grid):
    """Validation sets travel with the first message only."""
    down = case.method.down(begun(case), 0)
    large = [p.numpy().tobytes() for name, p in split_once(down)[1].items() if name.endswith(".x")]
    first, second = (sent for kind, client, sent in grid.asked if kind == "train.round" and client == 0)
    assert large
    for value in large:
        assert value in first
        assert value not in second


def test_how_far_parameters_move_is_told_as_on_this_machine(tmp_path):
    case = case_of("fedper", tmp_path, FEW)

    def drifting(host):
        host.drift = True
        return host

    with looped(case, tmp_path / "clients", wrap=drifting) as (clients, _):
        line = go(case, clients, rounds=1).lines[0]
    assert [told["client"] for told in line["moved"]] == [0, 1, 2]
    assert all(told["roles"].keys() == {"body", "head"} and min(told["roles"].values()) > 0 for told in line["moved"])


@pytest.mark.parametrize("augment", [Augment("crop+flip"), Augment("crop+flip", 2)])
def test_training_images_have_the_same_views_at_nodes(augment, tmp_path, monkeypatch):
    monkeypatch.setenv("PROMPTFED_CACHE", str(tmp_path / "cache"))
    case = case_of("head-tune", tmp_path, FEW)
    with case.clients() as (local, _):
        plain = go(case, local)
    case.augment = augment
    with looped(case, tmp_path / "clients") as (clients, _), case.clients() as (local, _):
        found = go(case, clients)
        same(found, go(case, local))
    assert not equal(found.state, plain.state)


def test_few_messages_under_way_change_nothing(tmp_path):
    case = case_of("pfedpt", tmp_path)
    with looped(case, tmp_path / "clients", window=2) as (clients, _), case.clients() as (local, _):
        same(go(case, clients), go(case, local))


# ---- who is there


def test_two_nodes_for_one_client_or_an_unknown_one_are_one_sentence(tmp_path):
    case = case_of("fedavg", tmp_path)
    for last, complaint in ((2, "it says it is client 2, as does node"), (9, "this node is client 9")):
        with (
            pytest.raises(UserError, match=complaint),
            looped_with(case, tmp_path / f"clients{last}", [0, 1, 2, 3, last]),
        ):
            pass


@contextmanager
def looped_with(case, folder, numbers):
    host = host_of(case, folder)
    grid = Loopback(client_app(lambda context: (host, context.node_config["partition-id"])), numbers)
    try:
        yield FlowerClients(grid, expected(case), poll=0.001, patience=0.2)
    finally:
        host.close()


def test_nodes_that_do_not_come_are_one_sentence(tmp_path):
    case = case_of("fedavg", tmp_path)
    with (
        pytest.raises(UserError, match=r"4 of 5 nodes are connected"),
        looped_with(case, tmp_path / "clients", range(4)),
    ):
        pass


@pytest.mark.parametrize("part", ["backbone", "preprocessing", "class list", "method", "seed", "dataset.augment"])
def test_a_node_that_differs_is_refused_and_told_in_what(part, tmp_path):
    case = case_of("fedavg", tmp_path)
    other = Expected(len(SIZES), 4, {}, {**expected(case).fingerprint, part: "0"})
    host = host_of(case, tmp_path / "clients")
    grid = Loopback(client_app(lambda context: (host, context.node_config["partition-id"])), range(len(SIZES)))
    with pytest.raises(UserError, match=f"has another {part} than the server"):
        FlowerClients(grid, other, poll=0.001)
    host.close()


def test_the_fingerprint_tells_weights_settings_and_classes_apart(tmp_path):
    case = case_of("pfedpt", tmp_path)
    data, model = case.federation.dataset, case.model
    base = fingerprint(case.method, model, data, 0)
    name = next(iter(model.weights))
    model.weights[name] = model.weights[name].clone()
    model.weights[name].view(-1)[0] += 1e-6
    assert differing(base, fingerprint(case.method, model, data, 0)) == {"backbone"}
    lr = case.method.model_copy(update={"lr": 0.3})
    flipped = fingerprint(case.method, model, data, 0, augment=Augment("flip"))
    assert differing(fingerprint(case.method, model, data, 0), flipped) == {"dataset.augment"}
    assert differing(fingerprint(case.method, model, data, 0), fingerprint(lr, model, data, 1)) == {"method.lr", "seed"}


def differing(a, b):
    return {part for part in a if a[part] != b[part]}


def test_a_node_that_comes_back_under_another_number_is_known_again(tmp_path):
    case = case_of("pfedpt", tmp_path)
    with looped(case, tmp_path / "clients") as (clients, grid):
        state = begun(case)
        first, _ = clients.train(dict.fromkeys(clients.ids(), state), 1, score=False)
        node = next(n for n, client in grid.nodes.items() if client == 2)
        del grid.nodes[node]
        assert [u.client for u in clients.train(dict.fromkeys(clients.ids(), state), 1, score=False)[0]] == [0, 1, 3, 4]
        grid.nodes[grid.number()] = 2
        again, _ = clients.train(dict.fromkeys(clients.ids(), state), 1, score=False)
        assert [u.client for u in again] == [0, 1, 2, 3, 4]
        assert all(equal(a.up, b.up) for a, b in zip(first, again, strict=True))


def test_nobody_takes_the_place_of_a_node_that_is_there(tmp_path):
    case = case_of("fedavg", tmp_path)
    with looped(case, tmp_path / "clients") as (clients, grid):
        mine = dict(clients._nodes)
        grid.nodes[grid.number()] = 2
        with pytest.warns(UserWarning, match="it says it is client 2, as does node"):
            assert len(clients.train(dict.fromkeys(range(5), begun(case)), 1, score=False)[0]) == 5
        assert clients._nodes == mine


# ---- a site's own description


def test_a_site_loads_its_model_once_and_has_a_folder_for_each_run(tmp_path, monkeypatch):
    monkeypatch.setenv("PROMPTFED_CACHE", str(tmp_path / "cache"))
    folder, server = consortium(tmp_path, clients=2)
    site(folder, tmp_path, client=1)

    resident = Resident(SiteFolder.open(tmp_path / "site1"))
    app = client_app(resident)

    def identified(run="first"):
        context = Context(1, 5, {}, RecordDict(), {"run": run})
        message = Message(write_request(Identify()), 5, "query.identify")
        return read_answer(app(message, context).content, Identify())[0]

    found = identified().result
    assert (found.client, found.n) == (1, 28)
    assert found.fingerprint == fingerprint(server.method, server.model, server.federation.dataset, 0)
    host, _ = resident(Context(1, 5, {}, RecordDict(), {"run": "first"}))
    identified("second")
    assert resident(Context(1, 5, {}, RecordDict(), {"run": "second"}))[0].model is host.model  # it is not loaded again
    assert {path.name for path in (tmp_path / "site1" / "runs").iterdir()} == {"first", "second"}
    assert 'name "../x" must be letters' in identified("../x").error
    resident.close()
    with pytest.raises(UserError, match="is not the folder of a site"):
        SiteFolder.open(tmp_path / "none")
