"""What a deployment is made of, without running one: folders, keys, the door, and who is taken for whom."""

import asyncio
import random
import ssl

import pytest

pytest.importorskip("flwr", reason='Flower is not installed: pip install "promptfed[flower]"')

from deployment import mode
from flwr.app import Context, RecordDict
from loopback import Loopback
from test_site_damage import DAMAGES
from typer.testing import CliRunner

from promptfed import UserError
from promptfed.cli import site as site_commands
from promptfed.cli.main import app
from promptfed.clients.store import Store
from promptfed.flower import certificates
from promptfed.flower import site as sites
from promptfed.flower.app import Resident, client_app
from promptfed.flower.clients import FlowerClients
from promptfed.flower.consortium import nodes, remember
from promptfed.flower.door import Door
from promptfed.flower.server import agreed, told
from promptfed.flower.simulation import expected
from promptfed.runs import build
from promptfed.runs import config as C
from site_folders import NAMES, SETTINGS_OF, consortium, pictures, site


@pytest.fixture(autouse=True)
def _apart(tmp_path, monkeypatch):
    monkeypatch.setenv("PROMPTFED_CACHE", str(tmp_path / "cache"))


def command(*words):
    """`promptfed flower ...` in this process; a mistake is raised."""
    said = CliRunner().invoke(app, ["flower", *map(str, words)])
    if said.exception and not isinstance(said.exception, SystemExit):
        raise said.exception
    assert said.exit_code == 0, said.output
    return said.output


# ---- from nothing to a site that can take part


def test_three_commands_make_a_site(tmp_path):
    server = tmp_path / "server"
    settings = ("method=pfedpg", "method.tokens=2", "backbone=vit-mini", "dataset.size=32", "rounds=2")
    command("init", server, *settings, "--clients", 2, "--classes", ",".join(NAMES), "--address", "127.0.0.1:9400")
    assert "certificate is valid for 127.0.0.1, hospital.example" in command(
        "certs", server, "--host", "hospital.example"
    )
    data, at = pictures(tmp_path / "images", classes=(0, 2)), tmp_path / "site"
    options = ("--consortium", server / "consortium.toml", "--ca", server / "tls" / "ca.pem", "--data", data)
    said = command("site", at, *options, "--client", 1)
    assert "client 1: 14 training, 2 validation and 4 test images" in said
    assert "classes here: 2 of 4 (blue sky, grass)" in said
    assert command("check", at).removesuffix(f"everything is in place; next: promptfed flower node {at}\n") in said
    assert [mode(at), mode(at / "site.key"), mode(server / "tls" / "server.key")] == [0o700, 0o600, 0o600]
    assert b"PRIVATE" not in (at / "site.pub").read_bytes()
    with pytest.raises(UserError, match="holds a site already"):
        command("site", at, *options, "--client", 1)
    with pytest.raises(UserError, match="holds a consortium already"):
        command("init", server, *settings, "--classes", "a,b")


def test_mistakes_at_a_site_are_one_sentence(tmp_path):
    server, _ = consortium(tmp_path, clients=2)
    data = pictures(tmp_path / "images")

    def made(**changes):
        options = {"consortium": server / "consortium.toml", "client": 0, "data": data, **changes}
        words = [word for key, value in options.items() for word in (f"--{key}", value)]
        command("site", tmp_path / "site", *words)

    with pytest.raises(UserError, match=r"client = 2 must be 0 to 1"):
        made(client=2)
    with pytest.raises(UserError, match="is not a folder"):
        made(data=tmp_path / "none")
    (data / "water").mkdir()
    (data / "fire" / "0.png").rename(data / "water" / "0.png")
    with pytest.raises(UserError, match='class = "water" is unknown'):
        made()
    with pytest.raises(UserError, match="cannot be read"):
        made(ca=tmp_path / "none.pem")
    (data / "water" / "0.png").rename(data / "fire" / "0.png")
    (data / "water").rmdir()
    with pytest.raises(UserError, match="/none/model"):
        made(backbone="/none/model.safetensors")
    assert not (tmp_path / "site" / "site.toml").exists()  # it can be tried again


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"eval": {"pooled": "last"}}, 'eval.pooled = "last" needs all clients\' test data'),
        ({"dataset": {"size": None}}, "dataset.size must be set"),
        ({"consortium": {"classes": ("a", "a")}}, "names one class twice"),
        ({"consortium": {"classes": ("a",)}}, "consortium.classes"),
        ({"consortium": {"address": "https://x"}}, "consortium.address"),
        ({"backbone": {"name": "cnn"}, "method": {"name": "fedavg"}}, "dataset.mean and dataset.std must be set"),
    ],
)
def test_what_cannot_be_agreed_on_is_one_sentence(changes, complaint):
    base = {**SETTINGS_OF, "consortium": {"clients": 2, "classes": NAMES}}
    with pytest.raises(UserError, match=complaint):
        build.assemble(C.make(base, changes))


def test_a_consortium_is_not_run_on_this_machine(tmp_path):
    _, parts = consortium(tmp_path)
    with pytest.raises(UserError, match="promptfed flower submit runs it"):
        build.clients(parts, tmp_path)


def test_an_agreement_does_not_change_under_a_run(tmp_path):
    server, parts = consortium(tmp_path)
    run = server / "runs" / "first"
    run.mkdir(parents=True)
    (run / "config.toml").write_text(C.dump(parts.config.complete()))
    (run / "checkpoint.safetensors").write_bytes(b"")

    def change(**settings):
        changed = C.make(parts.config.complete(), C.undot(settings.items())).complete()
        (server / "consortium.toml").write_text(C.dump(changed))

    change(rounds=5, **{"engine.deadline": 7})
    assert (agreed(server, run).rounds, agreed(server, run).engine.deadline) == (5, 7)
    change(**{"method.lr": 0.5})
    with pytest.raises(UserError, match=r'method.lr = 0.5 was 0.25 in consortium.toml when run "first" began'):
        agreed(server, run)
    assert agreed(server, server / "runs" / "second").method.method.lr == 0.5


@pytest.mark.parametrize("name", ["", "..", "../x", "a/b", ".hidden", "a" * 101, 3, None, "a\n"])
def test_a_runs_name_is_the_name_of_a_folder(name):
    with pytest.raises(UserError, match="must be letters"):
        sites.run_name(name)


# ---- keys


def test_a_name_that_no_certificate_can_hold_is_one_sentence(tmp_path):
    with pytest.raises(UserError, match=r'--host = "köln.example" must be a name in ASCII'):
        certificates.make_authority(tmp_path / "tls", ["127.0.0.1", "köln.example"])
    assert not (tmp_path / "tls").exists()


def test_the_certificate_is_trusted_through_the_authority_alone(tmp_path):
    certificates.make_authority(tmp_path, ["server.example", "192.0.2.7"])
    context = ssl.create_default_context(cafile=tmp_path / certificates.CA)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(tmp_path / certificates.SERVER, tmp_path / certificates.SERVER_KEY)
    for name, good in {"server.example": True, "192.0.2.7": True, "localhost": True, "other.example": False}.items():
        assert _shake(context, server, name) is good
    certificates.make_authority(tmp_path / "other", ["server.example"])
    assert not _shake(ssl.create_default_context(cafile=tmp_path / "other" / certificates.CA), server, "server.example")


def _shake(context, server, name):
    """Whether a client that trusts the context accepts the server under this name."""
    to, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    asks, answers = context.wrap_bio(back, to, server_hostname=name), server.wrap_bio(to, back, server_side=True)
    for _ in range(4):
        for side in (asks, answers):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLError:
                return False
    return True


def test_a_key_that_is_none_is_one_sentence(tmp_path):
    (tmp_path / "x.pub").write_text("ssh-ed25519 nothing")
    with pytest.raises(UserError, match="is not a public key of a site"):
        certificates.read_public(tmp_path / "x.pub")
    with pytest.raises(UserError, match="cannot be read"):
        certificates.read_public(tmp_path / "none.pub")


@pytest.mark.parametrize("name", [certificates.KEY, certificates.PUBLIC, certificates.CA])
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_keys_are_named(tmp_path, name, damage):
    server, _ = consortium(tmp_path, clients=1)
    at = site(server, tmp_path, 0)
    certificates.make_authority(server / "tls", ["127.0.0.1"])
    (at / certificates.CA).write_bytes((server / "tls" / certificates.CA).read_bytes())
    certificates.make_pair(at)
    site_commands.complete(at)
    DAMAGES[damage](at / name)
    if (name, damage) == (certificates.CA, "flipped"):  # it may still be a certificate, which the server's does not fit
        return
    with pytest.raises(UserError, match=name):
        site_commands.complete(at)


def test_what_is_private_is_its_owners_alone(tmp_path):
    store = Store(tmp_path / "clients")
    store.add("a" * 64, b"large")
    store.close()
    held = {path.relative_to(tmp_path).as_posix(): mode(path) for path in tmp_path.rglob("*")}
    files = {"clients/data.mdb": 0o600, "clients/lock.mdb": 0o600, f"clients/once/{'a' * 64}": 0o600}
    assert held == {"clients": 0o700, "clients/once": 0o700, **files}


# ---- the door


@pytest.mark.parametrize(
    ("client", "path", "status"),
    [
        (("192.0.2.9", 5), "/v1/fleet/pull-messages", 200),
        (("192.0.2.9", 5), "/v1/control/start-run", 403),
        (("192.0.2.9", 5), "/v1/runtime/acquire-task", 403),
        (("192.0.2.9", 5), "/docs", 403),
        (("192.0.2.9", 5), "/v1/fleet", 403),
        (None, "/v1/control/start-run", 403),
        (("127.0.0.1", 5), "/v1/control/start-run", 200),
        (("::1", 5), "/v1/runtime/acquire-task", 200),
    ],
)
def test_other_machines_are_answered_as_nodes_only(client, path, status):
    sent = []

    async def behind(scope, receive, send):
        await send({"type": "http.response.start", "status": 200})

    async def send(event):
        sent.append(event)

    async def receive():
        return {"type": "http.request", "body": b""}

    asyncio.run(Door(behind)({"type": "http", "path": path, "client": client}, receive, send))
    assert sent[0]["status"] == status


def test_without_tls_only_this_machine_is_served(tmp_path):
    server, _ = consortium(tmp_path)
    with pytest.raises(UserError, match=r'--host = "0\.0\.0\.0" needs TLS'):
        command("link", server, "--host", "0.0.0.0", "--insecure")
    with pytest.raises(UserError, match="holds no certificates"):
        command("link", server)


def test_no_superlink_is_one_sentence(tmp_path):
    server, _ = consortium(tmp_path, address="127.0.0.1:1")
    with pytest.raises(UserError, match=r"no SuperLink answers at 127.0.0.1:1 \(ConnectError\)"):
        command("submit", server, "--insecure")


# ---- who is taken for whom


class Sites(Loopback):
    """Nodes of sites, each with its own folder."""

    def __init__(self, residents):
        self.residents = residents
        super().__init__(client_app(self.find), range(len(residents)))

    def find(self, context):
        context.run_config = {"run": "first"}
        return self.residents[context.node_config["partition-id"]](context)


@pytest.fixture
def two(tmp_path):
    server, parts = consortium(tmp_path, clients=2)
    residents = [Resident(sites.SiteFolder.open(site(server, tmp_path, client))) for client in range(2)]
    grid = Sites(residents)
    yield parts, grid, residents
    for resident in residents:
        resident.close()


def test_a_node_is_the_client_it_was_admitted_as(two, tmp_path):
    parts, grid, _ = two
    first, second = sorted(grid.nodes, key=grid.nodes.get)
    for node, client in ((7, 1), (first, 0), (second, 1)):  # a site may come with a new key
        remember(tmp_path, node, client)
    assert nodes(tmp_path) == {first: 0, second: 1}
    assert nodes(tmp_path / "none") is None
    FlowerClients(grid, expected(parts, nodes(tmp_path)), poll=0.001)
    with pytest.raises(UserError, match=r"it says it is client [01], and was admitted as client [01]"):
        FlowerClients(grid, expected(parts, {first: 1, second: 0}), poll=0.001)
    with pytest.raises(
        UserError, match=r"1 of 2 nodes are connected after .*; no node is client 1$"
    ):  # nor is it heard
        FlowerClients(grid, expected(parts, {first: 0}), poll=0.001, patience=0.1)


def test_a_site_that_comes_back_with_another_model_is_left_out(two):
    parts, grid, residents = two
    clients = FlowerClients(grid, expected(parts), poll=0.001)
    state = parts.method.begin(parts.model, parts.init, 0)
    for client, hello in clients.enroll([0, 1]).items():
        state = parts.method.admit(state, client, hello, 0)
    sent = {client: parts.method.down(state, client) for client in range(2)}
    assert [u.error for u in clients.train(sent, 1, score=False)[0]] == ["", ""]
    name = "class_token" if "class_token" in residents[1].parts.model.weights else next(iter(parts.model.weights))
    again = Resident(residents[1].site)
    again.parts.model.weights[name] = again.parts.model.weights[name] + 1
    residents[1].close()
    residents[1] = again
    assert [u.error for u in clients.train(sent, 2, score=False)[0]] == [
        "",
        "client 1 has another backbone than the server",
    ]


def test_a_run_that_has_begun_goes_on_with_those_who_are_there(two):
    parts, grid, _ = two
    node = next(node for node, client in grid.nodes.items() if client == 1)
    del grid.nodes[node]
    with pytest.raises(UserError, match=r"1 of 2 nodes are connected after 0.1 s; no node is client 1"):
        FlowerClients(grid, expected(parts), poll=0.001, patience=0.1)
    clients = FlowerClients(grid, expected(parts), poll=0.001, patience=0.1, enough=1)
    assert clients.sizes() == {0: 28, 1: 0}
    known = FlowerClients(grid, expected(parts), poll=0.001, patience=0.1, enough=1, sizes={0: 1, 1: 28})
    assert known.sizes() == {0: 28, 1: 28}  # so that it is sampled as before, and recorded as not there
    grid.nodes[random.Random(1).getrandbits(60)] = 1
    state = parts.method.begin(parts.model, parts.init, 0)
    for client in range(2):
        state = parts.method.admit(state, client, {}, 0)
    sent = {client: parts.method.down(state, client) for client in range(2)}
    assert [u.client for u in clients.train(sent, 1, score=False)[0]] == [0, 1]
    assert clients.sizes() == {0: 28, 1: 28}


def test_each_run_has_its_own_memory(two):
    _, _, residents = two
    context = Context(1, 5, {}, RecordDict(), {"run": "first"})
    first, _ = residents[0](context)
    first.store.put(1, {0: {"private/x": next(iter(first.init.values()))}})
    context.run_config = {"run": "second"}
    second, _ = residents[0](context)
    assert second.store.get(0, 9) == {}
    assert second.model is first.model
    context.run_config = {"run": "first"}
    assert residents[0](context)[0].store.get(0, 9)


def test_a_round_in_one_line():
    line = {"round": 3, "train_loss": 0.5, "seconds": {"train": 2.0, "evaluate": 1.0}, "left_out": []}
    assert told(line) == "round 3, loss 0.5000, 3.0 s"
    left = [{"client": 1, "why": "no answer"}]
    scored = {"aggregated": {"summary": {"local": {"mean": 0.75}}}}
    assert told({**line, **scored, "train_loss": None, "left_out": left}) == (
        "round 3, mean test accuracy 75.0 %, 3.0 s, without client 1: no answer"
    )


def test_without_flower_the_commands_say_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "flwr", None)
    with pytest.raises(UserError, match=r'needs Flower: pip install "promptfed\[flower\]"'):
        site_commands.check(None)


def test_a_client_that_comes_back_with_another_size_is_refused(two):
    parts, grid, _ = two
    clients = FlowerClients(grid, expected(parts), poll=0.001)
    clients.sizes()[1] = 5  # as it was introduced
    del grid.nodes[next(node for node, client in grid.nodes.items() if client == 1)]
    grid.nodes[random.Random(1).getrandbits(60)] = 1
    state = parts.method.begin(parts.model, parts.init, 0)
    for client in range(2):
        state = parts.method.admit(state, client, {}, 0)
    sent = {client: parts.method.down(state, client) for client in range(2)}
    with pytest.warns(UserWarning, match="client 1 has 28 training samples, and was introduced with 5"):
        assert [u.client for u in clients.train(sent, 1, score=False)[0]] == [0]


def test_a_new_consortium_bounds_norms_unless_told_otherwise(tmp_path):
    words = ("method=fedavg", "dataset.size=8", "dataset.mean=[0.5,0.5,0.5]", "dataset.std=[0.5,0.5,0.5]")
    for folder, more, rule in (("a", (), "norm-bound"), ("b", ("aggregation=median",), "median")):
        command("init", tmp_path / folder, "backbone=vit-tiny", *words, *more, "--classes", "a,b")
        assert C.read(tmp_path / folder / "consortium.toml")["aggregation"]["name"] == rule


def test_a_round_tells_which_updates_were_shortened():
    rows = [{"client": 0, "norm": 1.0, "factor": 1.0}, {"client": 3, "norm": 300.0, "factor": 0.01}]
    line = {"round": 1, "train_loss": None, "seconds": {"train": 2.0}, "left_out": []}
    said = told({**line, "aggregation": {"rule": "norm-bound", "clients": rows}})
    assert said == "round 1, 2.0 s, update of client 3 shortened to 0.01 of its length"
