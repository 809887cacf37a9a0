"""promptfed flower ...: federated learning between real sites. Flower is imported only when needed."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer
from typer.core import TyperCommand

from ..errors import UserError
from . import lazy
from .common import console


class FlowerModule(lazy.Module):
    """A module of promptfed.flower, which needs Flower."""

    def __init__(self, name: str) -> None:
        super().__init__(f"flower.{name}")

    def __getattr__(self, name: str) -> Any:
        try:
            import flwr  # noqa: F401
        except ImportError:
            raise UserError('promptfed flower needs Flower: pip install "promptfed[flower]"') from None
        return super().__getattr__(name)


if TYPE_CHECKING:
    from ..flower import certificates, consortium, control, server
    from ..flower import link as links
    from ..flower import site as sites
    from ..runs import config as C
else:
    C = lazy.Module("runs.config")
    certificates, consortium = FlowerModule("certificates"), FlowerModule("consortium")
    control, server = FlowerModule("control"), FlowerModule("server")
    links, sites = FlowerModule("link"), FlowerModule("site")


class Command(TyperCommand):
    """Flower asks for an older typer, which a newer click makes forget what arguments are, and which escapes for rich
    what is not printed by it."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        hints = get_type_hints(self.callback, include_extras=True)
        forgotten: list[Any] = [one for one in self.params if one.name in hints and not getattr(one, "help", None)]
        for param in forgotten:
            param.help = hints[param.name].__metadata__[0].help
        super().format_options(ctx, formatter)
        for param in forgotten:
            param.help = None  # otherwise click shows it twice

    def get_help(self, ctx: Any) -> str:
        return super().get_help(ctx).replace("\\[", "[")


app = typer.Typer(help="Federated learning between real sites, on Flower.", no_args_is_help=True, rich_markup_mode=None)

Folder = Annotated[Path, typer.Argument(metavar="CONSORTIUM", help="the consortium's folder at the server")]
Metrics = Annotated[
    int | None, typer.Option("--metrics", min=1, max=65535, help="a port of 127.0.0.1 where Prometheus finds numbers")
]
RunName = Annotated[str, typer.Option("--name", help="of the run; the same name again resumes it")]
Insecure = Annotated[
    bool, typer.Option("--insecure", help="without TLS and keys, on this machine alone: for experiments")
]


def say(text: str) -> None:
    console.print(text, soft_wrap=True, highlight=False)


# ---- at the server


@app.command(cls=Command)
def init(
    folder: Folder,
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[CONFIG.toml|PRESET] [key=value ...]", help="a file or preset, then settings"),
    ] = None,
    clients: Annotated[int, typer.Option("--clients", min=1, help="how many sites there are")] = 2,
    classes: Annotated[str, typer.Option("--classes", help="comma-separated names of the sites' class folders")] = "",
    address: Annotated[str, typer.Option("--address", help="where sites find the server")] = "127.0.0.1:9092",
) -> None:
    """Write down what the sites agree on, and the Flower app."""
    from ..runs import api

    words = list(words or [])
    source = [api.without_compare(C.read(words.pop(0)))] if words and "=" not in words[0] else []
    agreed: dict[str, Any] = {"clients": clients, "address": address}
    if classes:
        agreed["classes"] = [name.strip() for name in classes.split(",") if name.strip()]
    elif not any("classes" in table.get("consortium", {}) for table in source):
        raise UserError("--classes must name the classes, as the sites' folders do: --classes cat,dog")
    given = {"engine": "flower", "eval": {"pooled": "never"}, "consortium": agreed}
    asked = C.merge(*source, given, C.parse_assignments(words))
    masked = asked.get("secure", {}).get("aggregation")  # norms of single updates cannot be seen then
    usual = {"dataset": folder.resolve().name, "aggregation": "mean" if masked else "norm-bound"}
    config = C.make(usual, asked)
    consortium.create(folder, config)
    say(f"{folder / 'consortium.toml'}: {config.method.name} on {config.backbone.name}, {clients} sites, {address}")
    say(f"next: promptfed flower certs {folder}")


@app.command(cls=Command)
def certs(
    folder: Folder,
    host: Annotated[list[str] | None, typer.Option("--host", help="further names and addresses of the server")] = None,
    days: Annotated[int, typer.Option("--days", min=1, max=3650, help="days until the certificate expires")] = 365,
) -> None:
    """Make or renew the server's certificate."""
    _, agreed = sites.read_agreed(folder)
    tls, names = folder / consortium.TLS, [agreed.address.rpartition(":")[0], *(host or [])]
    known = any((tls / name).exists() for name in (certificates.CA, certificates.CA_KEY))
    if known and not host and (tls / certificates.SERVER).exists():
        names += certificates.hosts(certificates.read_certificate(tls / certificates.SERVER))
    (certificates.renew if known else certificates.make_authority)(tls, names, days)
    changed = consortium.make_key(folder)
    made = certificates.read_certificate(tls / certificates.SERVER)
    say(f"the certificate is valid for {', '.join(certificates.hosts(made))}, until {certificates.until(made)}")
    if known:
        say("it is renewed by the same authority" + ("" if changed else ": sites need nothing new"))
        say("restart a running SuperLink to use it")
        if changed:
            say(f"sites need {folder / 'consortium.toml'} again: it names the key that signs requests")
    else:
        say(f"give every site {folder / 'consortium.toml'} and {tls / certificates.CA}; the keys stay here")
    everywhere = "" if names[0] in ("localhost", "127.0.0.1") else " --host 0.0.0.0"
    say(f"next: promptfed flower link {folder}{everywhere}")


@app.command(cls=Command)
def link(
    folder: Folder,
    host: Annotated[
        str, typer.Option("--host", help="the address to listen on: 127.0.0.1, 0.0.0.0 for all, :: for IPv6 too")
    ] = "127.0.0.1",
    insecure: Insecure = False,
    metrics: Metrics = None,
) -> None:
    """Run the SuperLink until it is stopped."""
    links.link(folder, host, insecure, say, metrics)


@app.command(cls=Command)
def admit(
    folder: Folder,
    key: Annotated[Path, typer.Argument(metavar="KEY", help="the public key that the site has sent: site.pub")],
    client: Annotated[int, typer.Option("--client", min=0, help="which client the site is")],
    replace: Annotated[bool, typer.Option("--replace", help="replace the node that is this client now")] = False,
) -> None:
    """Let a site take part, by its public key, or change which client it is. The SuperLink must be running."""
    _, agreed = sites.read_agreed(folder)
    if client >= agreed.clients:
        raise UserError(f"--client = {client} must be 0 to {agreed.clients - 1}")
    with control.control(folder, insecure=False) as superlink:
        node = control.registered(superlink, key)
        other = consortium.taken(folder, client, node)
        if other is not None and not replace:
            raise UserError(f"--client = {client} is node {other} already: --replace puts this site in its place")
        node = control.register(superlink, key) if node is None else node
    consortium.remember(folder, node, client)
    say(f"client {client} is admitted as node {node}" + ("" if other is None else f", in place of node {other}"))


@app.command(cls=Command)
def expel(
    folder: Folder, client: Annotated[int, typer.Option("--client", min=0, help="which client is excluded")]
) -> None:
    """Exclude a site from runs submitted from now on. admit lets it in again."""
    sites.read_agreed(folder)
    node = consortium.forget(folder, client)
    say(f"client {client}, node {node}, is excluded from runs submitted from now on")


@app.command(cls=Command)
def submit(
    folder: Folder,
    name: RunName = "first",
    insecure: Insecure = False,
) -> None:
    """Start or resume a run, or follow one that is under way, to its end."""
    from .. import privacy
    from ..runs import record, tables

    _, agreed = sites.read_agreed(folder)
    path = folder / "runs" / sites.run_name(name)
    done = len(record.read_lines(path))
    with control.control(folder, insecure) as superlink:
        state = control.under_way(superlink, folder, name)
        if state:
            say(f"run {state.number} is under way")
        else:
            state = control.status(superlink, control.start(superlink, folder, name))
            say(f"run {state.number} is submitted" + (f"; {done} rounds are completed" if done else ""))
        try:
            while not state.over:
                time.sleep(1)
                state = control.status(superlink, state.number)
                for line in record.read_lines(path)[done:]:
                    say(server.told(line, agreed.clients))
                    done += 1
        except KeyboardInterrupt:
            control.stop(superlink, state.number)
            again = f"promptfed flower submit {folder} --name {name}"
            say(f"stopped; all completed rounds are kept. Resume with:\n  {again}")
            raise typer.Exit(lazy.INTERRUPTED) from None
    if state.how != "completed":
        raise UserError(state.why or f"the run has {state.how}")
    numbers = json.loads((path / "result.json").read_text())
    console.print(tables.outcome(numbers))
    if "privacy" in numbers:
        say(privacy.sentence(numbers["privacy"]))
    say(f"everything is in {path}")


@app.command(cls=Command)
def stop(folder: Folder, name: RunName = "first", insecure: Insecure = False) -> None:
    """Stop a run after its last completed round. submit resumes it."""
    sites.read_agreed(folder)
    with control.control(folder, insecure) as superlink:
        found = control.under_way(superlink, folder, sites.run_name(name))
        if found is None:
            raise UserError(f'--name = "{name}" is not under way: promptfed flower status {folder} lists all runs')
        control.stop(superlink, found.number)
    say(f"run {found.number} is stopped; all completed rounds are kept")


@app.command(cls=Command)
def status(folder: Folder, insecure: Insecure = False) -> None:
    """List runs: how far they are, and how they have ended."""
    from ..runs import record

    config, _ = sites.read_agreed(folder)
    with control.control(folder, insecure) as superlink:
        latest = {one.name: one for one in reversed(control.submissions(superlink))}
    known = sorted(path.name for path in (folder / "runs").glob("*") if path.is_dir())
    for name in dict.fromkeys([*latest, *known]):
        done, one = len(record.read_lines(folder / "runs" / name)), latest.get(name)
        now = (one.how if one.over else one.status) if one else "not submitted to this SuperLink"
        why = f": {one.why}" if one and one.why else ""
        say(f"{name}: {done} of {config.rounds} rounds, {now}{why}")
    if not latest and not known:
        say(f"no runs yet; next: promptfed flower submit {folder}")


@app.command("nodes", cls=Command)
def list_nodes(folder: Folder) -> None:
    """List the sites' nodes: which client each is, and whether it is connected."""
    _, agreed = sites.read_agreed(folder)
    with control.control(folder, insecure=False) as superlink:
        states = control.node_states(superlink)
    admitted = {number: node for node, number in (consortium.nodes(folder) or {}).items()}
    for number in range(agreed.clients):
        node = admitted.get(number)
        now, since = states.get(node, ("unknown to this SuperLink", "")) if node is not None else ("not admitted", "")
        called = f" (node {node})" if node is not None else ""
        say(f"client {number}{called}: {now}{f' since {since[:19]}' if since else ''}")
    for node in states.keys() - set(admitted.values()):
        say(f"node {node}: {states[node][0]}, excluded")
