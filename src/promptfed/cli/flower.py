"""promptfed flower ...: federated learning between real sites. Flower is imported only when needed."""

from __future__ import annotations

import json
import re
import shutil
import time
from datetime import datetime
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer
from rich.console import Console
from typer.core import TyperCommand

from ..errors import UserError
from . import lazy


class _Module(lazy.Module):
    """A module of promptfed.flower, which needs Flower."""

    def __getattr__(self, name: str) -> Any:
        try:
            import flwr  # noqa: F401
        except ImportError:
            raise UserError('promptfed flower needs Flower: pip install "promptfed[flower]"') from None
        return super().__getattr__(name)


if TYPE_CHECKING:
    from ..flower import certificates, consortium, server
    from ..flower import link as links
    from ..flower import node as nodes
    from ..flower import site as sites
    from ..runs import config as C
else:
    C = lazy.Module("runs.config")
    certificates, consortium, server = (_Module(f"flower.{name}") for name in ("certificates", "consortium", "server"))
    links, nodes, sites = (_Module(f"flower.{name}") for name in ("link", "node", "site"))

app = typer.Typer(help="Federated learning between real sites, on Flower.", no_args_is_help=True, rich_markup_mode=None)
console = Console()

Folder = Annotated[Path, typer.Argument(metavar="CONSORTIUM", help="the consortium's folder at the server")]
SiteArgument = Annotated[Path, typer.Argument(metavar="SITE", help="the site's own folder")]
Insecure = Annotated[
    bool, typer.Option("--insecure", help="without TLS and keys, on this machine alone: for experiments")
]


def _say(text: str) -> None:
    console.print(text, soft_wrap=True, highlight=False, markup=False)


# ---- at the server


@app.command()
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
    _say(f"{folder / 'consortium.toml'}: {config.method.name} on {config.backbone.name}, {clients} sites, {address}")
    _say(f"next: promptfed flower certs {folder}")


@app.command()
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
    _say(f"the certificate is valid for {', '.join(certificates.hosts(made))}, until {certificates.until(made)}")
    if known:
        _say("it is renewed by the same authority" + ("" if changed else ": sites need nothing new"))
        _say("restart a running SuperLink to use it")
        if changed:
            _say(f"sites need {folder / 'consortium.toml'} again: it names the key that signs requests")
    else:
        _say(f"give every site {folder / 'consortium.toml'} and {tls / certificates.CA}; the keys stay here")
    everywhere = "" if names[0] in ("localhost", "127.0.0.1") else " --host 0.0.0.0"
    _say(f"next: promptfed flower link {folder}{everywhere}")


@app.command()
def link(
    folder: Folder,
    host: Annotated[
        str, typer.Option("--host", help="the address to listen on: 127.0.0.1, 0.0.0.0 for all, :: for IPv6 too")
    ] = "127.0.0.1",
    insecure: Insecure = False,
) -> None:
    """Run the SuperLink until it is stopped."""
    links.link(folder, host, insecure, _say)


@app.command()
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
    with links.control(folder, insecure=False) as control:
        node = links.registered(control, key)
        other = consortium.taken(folder, client, node)
        if other is not None and not replace:
            raise UserError(f"--client = {client} is node {other} already: --replace puts this site in its place")
        node = links.register(control, key) if node is None else node
    consortium.remember(folder, node, client)
    _say(f"client {client} is admitted as node {node}" + ("" if other is None else f", in place of node {other}"))


@app.command()
def expel(
    folder: Folder, client: Annotated[int, typer.Option("--client", min=0, help="which client is excluded")]
) -> None:
    """Exclude a site from runs submitted from now on. admit lets it in again."""
    sites.read_agreed(folder)
    node = consortium.forget(folder, client)
    _say(f"client {client}, node {node}, is excluded from runs submitted from now on")


@app.command()
def submit(
    folder: Folder,
    name: Annotated[str, typer.Option("--name", help="of the run; the same name again resumes it")] = "first",
    insecure: Insecure = False,
) -> None:
    """Start or resume a run, and follow it to its end."""
    from .. import privacy
    from ..runs import record, tables

    _, agreed = sites.read_agreed(folder)
    path = folder / "runs" / sites.run_name(name)
    done = len(record.read_lines(path))
    with links.control(folder, insecure) as control:
        number = links.start(control, folder, name)
        _say(f"run {number} is submitted" + (f"; {done} rounds are completed" if done else ""))
        state = ("", "", "")
        try:
            while state[0] != "finished":
                time.sleep(1)
                state = links.status(control, number)
                for line in record.read_lines(path)[done:]:
                    _say(server.told(line, agreed.clients))
                    done += 1
        except KeyboardInterrupt:
            links.stop(control, number)
            again = f"promptfed flower submit {folder} --name {name}"
            _say(f"stopped; all completed rounds are kept. Resume with:\n  {again}")
            raise typer.Exit(130) from None
    if state[1] != "completed":
        raise UserError(state[2].removeprefix("ServerApp failed with exception: ") or f"the run has {state[1]}")
    numbers = json.loads((path / "result.json").read_text())
    console.print(tables.outcome(numbers))
    if "privacy" in numbers:
        _say(privacy.sentence(numbers["privacy"]))
    _say(f"everything is in {path}")


# ---- at a site


@app.command()
def site(
    folder: SiteArgument,
    agreed: Annotated[Path, typer.Option("--consortium", help="the consortium.toml that the server's engineer sent")],
    client: Annotated[int, typer.Option("--client", min=0, help="which client of the consortium this is")],
    data: Annotated[Path, typer.Option("--data", help="this site's images: class/*.jpg")],
    ca: Annotated[Path | None, typer.Option("--ca", help="the ca.pem that came with it")] = None,
    backbone: Annotated[str | None, typer.Option("--backbone", help="where the weights are on this machine")] = None,
    device: Annotated[str, typer.Option("--device", help="auto, cpu, cuda, cuda:N or mps")] = "auto",
    epsilon: Annotated[
        float | None, typer.Option("--epsilon", help="limit of what this site's updates may reveal, over all runs")
    ] = None,
    module: Annotated[
        list[str] | None, typer.Option("--module", help="a module that the agreed method may be imported from")
    ] = None,
    fetch: Annotated[bool, typer.Option("--fetch", help="weights may be fetched from the hub")] = False,
) -> None:
    """Make this site's folder and its key pair, and read its images."""
    if (folder / sites.SETTINGS).exists():
        raise UserError(f'"{folder}" holds a site already')
    if (folder / certificates.KEY).exists():
        raise UserError(f'"{folder / certificates.KEY}" is there already; move it away if there is to be a new one')
    if "consortium" not in C.read(agreed):
        raise UserError(f'--consortium = "{agreed}" is not a consortium.toml: it has no [consortium]')
    chosen: dict[str, Any] = {
        "client": client,
        "data": str(data.expanduser().absolute()),
        "backbone": str(Path(backbone).absolute()) if backbone and Path(backbone).exists() else backbone,
        "device": device,
        "epsilon": epsilon,
        "modules": module or [],
        "fetch": fetch,
    }
    settings = sites.Settings.model_construct(**chosen).model_dump()  # with all that can be set; read back below
    authority = ca or folder / certificates.CA
    trusted = certificates.pem(certificates.read_authority(authority)) if ca or authority.exists() else b""
    try:
        # Made apart and then moved: a failed attempt leaves the folder as it was.
        above = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        with TemporaryDirectory(dir=above, prefix=".site-") as name:
            made = Path(name)
            (made / sites.AGREED).write_bytes(agreed.read_bytes())
            (made / sites.SETTINGS).write_text(C.dump(settings))
            if trusted:
                (made / certificates.CA).write_bytes(trusted)
            found = sites.SiteFolder.open(made).parts()
            certificates.make_pair(made)
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder.chmod(0o700)
            shutil.copytree(made, folder, dirs_exist_ok=True, copy_function=shutil.move)
    except OSError as error:
        raise UserError(f'"{error.filename}" cannot be read: {error.strerror}') from None
    except UserError as error:
        raise UserError(re.sub(r'^dataset\.name = "[^"]*"', lambda _: f'--data = "{data}"', str(error))) from None
    _describe(found, client)
    if not trusted:
        _say(f"no {certificates.CA} yet: copy it to {authority}")
    _say(f"send {folder / certificates.PUBLIC} to the server's engineer; {folder / certificates.KEY} stays here")


def _complete(folder: Path) -> sites.SiteFolder:
    """A site that has what it needs to connect with TLS."""
    place = sites.SiteFolder.open(folder)
    whence = {certificates.CA: "it comes with the consortium.toml", certificates.KEY: "promptfed flower site makes it"}
    for name, where in whence.items():
        if not (place.folder / name).exists():
            raise UserError(f'"{place.folder / name}" is missing: {where}')
    return place


@app.command()
def check(folder: SiteArgument) -> None:
    """Check images, weights and keys of this site, and how much its updates have revealed."""
    place = _complete(folder)
    place.private()
    _describe(place.parts(), place.settings.client)
    ledger = place.ledger()
    if ledger:
        _say(ledger.told())
    _say(f"everything is in place; next: promptfed flower node {folder}")


@app.command()
def node(folder: SiteArgument, insecure: Insecure = False) -> None:
    """Take part in runs until stopped."""
    place = sites.SiteFolder.open(folder) if insecure else _complete(folder)
    nodes.run(place, insecure, lambda text: _say(f"{datetime.now():%Y-%m-%d %H:%M:%S} {text}"))


def _describe(parts: Any, client: int) -> None:
    from ..flower.app import parts_fingerprint

    mine, data = parts.federation.sites[client], parts.federation.dataset
    held = sorted({data.classes[label] for label in data.labels})
    _say(f"client {client}: {len(mine.train)} training, {len(mine.val)} validation and {len(mine.test)} test images")
    _say(f"classes here: {len(held)} of {len(data.classes)}" + ("" if len(held) > 20 else f" ({', '.join(held)})"))
    about = parts_fingerprint(parts)
    settings = "".join(about.pop(part) for part in sorted(about) if part.startswith("method."))
    about["method"] = sha256(f"{about['method']}{settings}".encode()).hexdigest()
    _say("fingerprint: " + ", ".join(f"{part} {digest[:8]}" for part, digest in about.items()))


class _Command(TyperCommand):
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


for _each in app.registered_commands:
    _each.cls = _Command
