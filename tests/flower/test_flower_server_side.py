"""The server's engineer: certificates that end and are renewed, the SuperLink's start, who is admitted; and how a site
is made. Mistakes are made as they are made by people."""

import re
import socket
import ssl
import threading
from contextlib import contextmanager, suppress

import pytest

pytest.importorskip("flwr", reason='Flower is not installed: pip install "promptfed[flower]"')

from deployment import deployed, free_port, mode
from typer.testing import CliRunner

from limits import HANG
from promptfed import UserError
from promptfed.cli.main import app
from promptfed.flower import certificates, consortium
from promptfed.flower.consortium import nodes
from promptfed.flower.control import control, status
from promptfed.flower.link import _LISTEN, _bound
from promptfed.flower.site import read_agreed
from promptfed.runs import build
from promptfed.runs import config as C
from site_folders import NAMES, SETTINGS_OF, pictures
from site_folders import consortium as agree


@pytest.fixture(autouse=True)
def _apart(tmp_path, monkeypatch):
    monkeypatch.setenv("PROMPTFED_CACHE", str(tmp_path / "cache"))


def command(*words):
    """-> what `promptfed flower ...` has printed, and the sentence it ends with if it fails"""
    said = CliRunner().invoke(app, ["flower", *map(str, words)])
    if isinstance(said.exception, UserError):
        return said.output, str(said.exception)
    assert said.exit_code == 0, said.output
    return said.output, ""


@pytest.fixture
def server(tmp_path):
    return agree(tmp_path, 2, f"127.0.0.1:{free_port()}")[0]


# ---- certificates


def test_a_certificate_is_renewed_and_sites_need_nothing_new(server):
    tls = server / "tls"
    first, _ = command("certs", server, "--host", "hospital.example", "--days", 3)
    assert first.rstrip().endswith(f"next: promptfed flower link {server}")
    kept = {name: (tls / name).read_bytes() for name in (certificates.CA, certificates.CA_KEY, certificates.SERVER_KEY)}
    old = certificates.read_certificate(tls / certificates.SERVER)
    assert f"until {certificates.until(old)}" in first
    said, _ = command("certs", server, "--days", 30)
    new = certificates.read_certificate(tls / certificates.SERVER)
    assert "need nothing new" not in first
    assert "sites need nothing new" in said
    assert certificates.until(new) in said
    assert new.not_valid_after_utc > old.not_valid_after_utc
    assert certificates.hosts(new) == certificates.hosts(old) == ["127.0.0.1", "hospital.example", "localhost"]
    assert {name: (tls / name).read_bytes() for name in kept} == kept
    new.verify_directly_issued_by(certificates.read_authority(tls / certificates.CA))
    assert mode(tls / certificates.SERVER_KEY) == 0o600
    command("certs", server, "--host", "other.example")
    assert certificates.hosts(certificates.read_certificate(tls / certificates.SERVER))[1] == "other.example"


def test_the_authority_outlives_its_certificates(tmp_path):
    certificates.make_authority(tmp_path, ["a.example"], days=9999)
    ca, one = (certificates.read_certificate(tmp_path / name) for name in (certificates.CA, certificates.SERVER))
    assert (ca.not_valid_after_utc - ca.not_valid_before_utc).days == 3650
    assert one.not_valid_after_utc == ca.not_valid_after_utc  # and no certificate outlives it


def test_an_authority_that_cannot_renew_is_one_sentence(server, monkeypatch):
    tls = server / "tls"
    command("certs", server)
    before = (tls / certificates.SERVER).read_bytes()
    key = (tls / certificates.CA_KEY).read_bytes()
    (tls / certificates.CA_KEY).unlink()
    assert "ca.key" in command("certs", server)[1]
    (tls / certificates.CA_KEY).write_bytes((tls / certificates.SERVER_KEY).read_bytes())
    assert command("certs", server)[1].endswith('ca.key" is not the key of ca.pem')
    (tls / certificates.CA_KEY).write_text("nothing")
    assert "is not a private key" in command("certs", server)[1]
    (tls / certificates.CA_KEY).write_bytes(key)
    assert (tls / certificates.SERVER).read_bytes() == before
    monkeypatch.setattr(certificates, "_AUTHORITY_DAYS", 0)
    certificates.make_authority(server / "other", ["127.0.0.1"])
    (tls / certificates.CA).write_bytes((server / "other" / certificates.CA).read_bytes())
    assert re.search(r'ca.pem" expired on \d{4}-\d\d-\d\d: .* every site', command("certs", server)[1])


# ---- the SuperLink's start: nothing is said of it before it can


def refused(server, *words):
    said, why = command("link", server, *words)
    assert said == ""
    return why


def test_a_superlink_is_not_started_with_a_certificate_that_does_not_hold(server):
    tls = server / "tls"
    certificates.make_authority(tls, ["127.0.0.1"], days=0)
    again = f"promptfed flower certs {server}"
    assert re.fullmatch(rf"the server's certificate expired on [\d-]+: {re.escape(again)} renews it", refused(server))
    command("certs", server)
    settings = C.read(server / "consortium.toml")
    settings["consortium"]["address"] = "hospital.example:9092"
    (server / "consortium.toml").write_text(C.dump(settings))
    assert 'is not valid for "hospital.example"' in refused(server)
    command("certs", server)
    (tls / certificates.SERVER_KEY).unlink()
    certificates.make_authority(server / "other", ["127.0.0.1"])
    (tls / certificates.SERVER_KEY).write_bytes((server / "other" / certificates.SERVER_KEY).read_bytes())
    assert "is not the key of the certificate" in refused(server)
    (tls / certificates.SERVER).write_text("nothing")
    assert refused(server).endswith('server.pem" is not a certificate')


@pytest.mark.parametrize("host", ["127.0.0.2", "192.0.2.7", "::1", "fl.example.org", ""])
def test_a_superlink_listens_where_it_is_asked(server, host):
    certificates.make_authority(server / "tls", ["127.0.0.1"])
    assert refused(server, "--host", host).startswith(f'--host = "{host}" must be 127.0.0.1')


def test_all_addresses_are_taken_where_ipv6_is_asked_for():
    port = free_port()
    try:
        taken = [_bound(host, port) for host in _LISTEN["::"]]
    except UserError as error:
        pytest.skip(f"no IPv6 here: {error}")
    assert [one.getsockname()[:2] for one in taken] == [("0.0.0.0", port), ("::", port)]
    for one in taken:
        one.close()


@pytest.mark.parametrize("words", [(), ("--insecure",), ("--host", "0.0.0.0")])
def test_a_port_that_is_taken_is_one_sentence(server, words):
    certificates.make_authority(server / "tls", ["127.0.0.1"])
    consortium.make_key(server)
    port = int(read_agreed(server)[1].address.rpartition(":")[2])
    with socket.create_server(("127.0.0.1", port)):
        why = refused(server, *words)
    assert why == f"port {port} is in use: is this consortium's SuperLink running already?"


# ---- asking it


@contextmanager
def answering(server, tls=None):
    """Something at the consortium's port: with these certificates, or with words that are no TLS."""
    port = int(read_agreed(server)[1].address.rpartition(":")[2])
    listener = socket.create_server(("127.0.0.1", port))

    def serve():
        with suppress(OSError):
            while True:
                one, _ = listener.accept()
                with suppress(OSError), one:
                    if tls:
                        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
                        context.load_cert_chain(tls / certificates.SERVER, tls / certificates.SERVER_KEY)
                        context.wrap_socket(one, server_side=True).close()
                    else:
                        one.recv(1)
                        one.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(HANG)


def unanswered(server, insecure=False):
    with pytest.raises(UserError) as raised, control(server, insecure) as client:
        status(client, 1)
    return str(raised.value)


def test_what_is_wrong_with_tls_is_told_apart_from_nobody_there(server, tmp_path):
    certificates.make_authority(server / "tls", ["127.0.0.1"], days=0)
    certificates.make_authority(tmp_path / "other", ["127.0.0.1"])
    assert "no SuperLink answers" in unanswered(server)
    with answering(server, server / "tls"):
        told = unanswered(server)
        assert "not trusted (certificate has expired): promptfed flower certs" in told
        assert "closes the connection" in unanswered(server, insecure=True)
    certificates.renew(server / "tls", ["127.0.0.1"])
    with answering(server, server / "tls"):  # it was killed in the middle of a request
        assert "no SuperLink answers" in unanswered(server)
    with answering(server, tmp_path / "other"):
        assert "is not trusted (" in unanswered(server)
    with answering(server):
        assert "does not speak TLS: is it a SuperLink that was started with --insecure?" in unanswered(server)


# ---- who is admitted


def test_who_is_which_client_is_kept_in_one_place(tmp_path):
    assert consortium.taken(tmp_path, 0, None) is None
    consortium.remember(tmp_path, 7, 0)
    assert (consortium.taken(tmp_path, 0, 8), consortium.taken(tmp_path, 0, 7), consortium.taken(tmp_path, 1, 8)) == (
        7,
        None,
        None,
    )
    consortium.remember(tmp_path, 7, 1)  # it was given the wrong number
    assert nodes(tmp_path) == {7: 1}
    consortium.remember(tmp_path, 8, 1)
    assert nodes(tmp_path) == {8: 1}
    assert consortium.forget(tmp_path, 1) == 8
    assert nodes(tmp_path) == {}  # and not None, with which everybody would be heard
    with pytest.raises(UserError, match="--client = 1 is not admitted"):
        consortium.forget(tmp_path, 1)
    (tmp_path / "nodes.json").write_text("[]")
    with pytest.raises(UserError, match="is damaged"):
        consortium.remember(tmp_path, 7, 0)


@pytest.mark.slow
def test_a_site_is_admitted_replaced_expelled_and_let_in_again(tmp_path):
    with deployed(tmp_path, clients=2) as made:
        assert "its certificate is valid until 20" in made.link().said()
        zero, one = (at / certificates.PUBLIC for at in made.sites)

        def admit(key, *words):
            return command("admit", made.server, key, "--client", *words)

        assert "client 0 is admitted" in admit(zero, 0)[0]
        (first,) = nodes(made.server)
        assert admit(one, 0) == ("", f"--client = 0 is node {first} already: --replace puts this site in its place")
        assert nodes(made.server) == {first: 0}
        assert "client 1 is admitted" in admit(one, 1)[0]
        second = next(node for node, client in nodes(made.server).items() if client == 1)
        assert f"as node {second}, in place of node {first}" in admit(one, 0, "--replace")[0]
        admit(one, 1)
        admit(zero, 0)
        assert nodes(made.server) == {first: 0, second: 1}
        assert f"client 0, node {first}" in command("expel", made.server, "--client", 0)[0]
        assert nodes(made.server) == {second: 1}
        admit(zero, 0)
        assert nodes(made.server) == {first: 0, second: 1}


# ---- making a site


@pytest.fixture
def made(server, tmp_path):
    certificates.make_authority(server / "tls", ["127.0.0.1"])
    data = pictures(tmp_path / "images")

    def site(at="site", **changes):
        options = {"consortium": server / "consortium.toml", "client": 0, "data": data, **changes}
        return command("site", tmp_path / at, *(word for key, value in options.items() for word in (f"--{key}", value)))

    return site


def test_an_authority_is_a_certificate_and_holds(made, server, tmp_path, monkeypatch):
    tls = server / "tls"
    for name, why in {
        certificates.CA_KEY: "is not a certificate",
        certificates.SERVER: "not the certificate of",
    }.items():
        assert why in made(ca=tls / name)[1]
    monkeypatch.setattr(certificates, "_AUTHORITY_DAYS", 0)
    certificates.make_authority(tmp_path / "old", ["127.0.0.1"])
    assert "expired on" in made(ca=tmp_path / "old" / certificates.CA)[1]
    assert not (tmp_path / "site").exists()
    both = tmp_path / "both.pem"
    both.write_bytes((tls / certificates.CA).read_bytes() + (tls / certificates.CA_KEY).read_bytes())
    assert made(ca=both)[1] == ""
    assert (tmp_path / "site" / certificates.CA).read_bytes() == (tls / certificates.CA).read_bytes()


def test_a_site_without_an_authority_is_told_where_it_belongs(made, server, tmp_path):
    said, _ = made()
    at = tmp_path / "site" / "ca.pem"
    assert f"no ca.pem yet: copy it to {at}" in said
    assert "no ca.pem yet" not in made("other", ca=server / "tls" / "ca.pem")[0]


def test_of_a_failed_attempt_nothing_is_left(made, server, tmp_path):
    (tmp_path / "images" / "fire" / "0.png").write_text("nothing")
    ca = server / "tls" / certificates.CA
    data = tmp_path / "images"
    assert made("deep/site", ca=ca)[1].startswith(f'--data = "{data}": 1 corrupt image (fire/0.png)')
    assert not (tmp_path / "deep").exists()
    at = tmp_path / "site"
    at.mkdir(mode=0o755)
    (at / "notes").mkdir()
    (at / "consortium.toml").write_text("mine")
    assert "corrupt" in made(ca=ca)[1]
    assert sorted(path.name for path in at.iterdir()) == ["consortium.toml", "notes"]
    assert ((at / "consortium.toml").read_text(), mode(at)) == ("mine", 0o755)
    (tmp_path / "images" / "fire" / "0.png").unlink()
    assert made(ca=ca)[1] == ""
    assert (mode(at), mode(at / "site.key")) == (0o700, 0o600)
    (at / "site.toml").unlink()
    assert "site.key" in made(ca=ca)[1]  # a key is not written over


def test_another_file_than_the_agreement_is_one_sentence(made, tmp_path):
    made()
    assert made("other", consortium=tmp_path / "site" / "site.toml")[1].endswith(
        'site.toml" is not a consortium.toml: it has no [consortium]'
    )
    assert "cannot be read" in made("other", consortium=tmp_path / "none.toml")[1]
    assert not (tmp_path / "other").exists()


def test_what_can_be_set_at_a_site_is_in_its_file(made, tmp_path):
    made()
    changeable = {"device", "threads", "runs_gb", "modules", "fetch", "heartbeat"}
    assert set(C.read(tmp_path / "site" / "site.toml")) == {"client", "data", *changeable}


# ---- sentences


@pytest.mark.parametrize(
    "address", ["127.0.0.1", "a.example:99999", "a.example:0", ":9092", "a.example:", "a b:1", "a:1\n"]
)
def test_an_address_is_a_host_and_a_port(address):
    base = {**SETTINGS_OF, "consortium": {"clients": 2, "classes": NAMES, "address": address}}
    with pytest.raises(UserError, match=r"(?s)consortium.address \(--address\) = .* must be host:port"):
        build.assemble(C.make(base))


def test_the_help_says_what_arguments_are():
    for name in (
        "init",
        "certs",
        "link",
        "admit",
        "expel",
        "submit",
        "stop",
        "status",
        "nodes",
        "site",
        "check",
        "audit",
        "node",
    ):
        said = CliRunner().invoke(app, ["flower", name, "--help"]).output
        assert "the consortium's folder at the server" in said or "the site's own folder" in said
        assert "[required]" in said
        assert "\\[" not in said
        assert "Positional" not in said
