"""promptfed flower ...: federated learning between real sites. Flower itself is imported when it is needed."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from . import config as C
from .errors import UserError

app = typer.Typer(help="Federated learning between real sites, on Flower.", no_args_is_help=True, rich_markup_mode=None)
console = Console()

Folder = Annotated[Path, typer.Argument(metavar="CONSORTIUM", help="the consortium's folder at the server")]
SiteFolder = Annotated[Path, typer.Argument(metavar="SITE", help="the site's own folder")]
Insecure = Annotated[
    bool, typer.Option("--insecure", help="without TLS and keys, on this machine alone: for trying things out")
]


def _say(text: str) -> None:
    console.print(text, soft_wrap=True, highlight=False, markup=False)


def _needs_flower() -> None:
    try:
        import flwr  # noqa: F401
    except ImportError:
        raise UserError('promptfed flower needs Flower: pip install "promptfed[flower]"') from None


# ---- at the server


@app.command()
def init(
    folder: Folder,
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[CONFIG.toml|PRESET] [key=value ...]", help="a file or preset, then settings"),
    ] = None,
    clients: Annotated[int, typer.Option("--clients", min=1, help="how many sites there are")] = 2,
    classes: Annotated[str, typer.Option("--classes", help="comma-separated, as the sites' folders are called")] = "",
    address: Annotated[str, typer.Option("--address", help="where sites find the server")] = "127.0.0.1:9092",
) -> None:
    """Write down what the sites agree on, and the Flower app."""
    from . import api, consortium

    words = list(words or [])
    source = [api.without_compare(C.read(words.pop(0)))] if words and "=" not in words[0] else []
    agreed: dict[str, Any] = {"clients": clients, "address": address}
    if classes:
        agreed["classes"] = [name.strip() for name in classes.split(",") if name.strip()]
    elif not any("classes" in table.get("consortium", {}) for table in source):
        raise UserError("--classes must name what is told apart, as the sites' folders are called: --classes cat,dog")
    given = {"engine": "flower", "eval": {"pooled": "never"}, "consortium": agreed}
    config = C.make({"dataset": folder.resolve().name}, *source, given, C.parse_assignments(words))
    consortium.create(folder, config)
    _say(f"{folder / 'consortium.toml'}: {config.method.name} on {config.backbone.name}, {clients} sites, {address}")
    _say(f"next: promptfed flower certs {folder}")


@app.command()
def certs(
    folder: Folder,
    host: Annotated[list[str] | None, typer.Option("--host", help="further names and addresses of the server")] = None,
    days: Annotated[int, typer.Option("--days", min=1, help="how long the certificate holds")] = 365,
) -> None:
    """Make the certificate that sites know the server by."""
    _needs_flower()
    from . import certificates, consortium

    agreed = consortium.read(folder).consortium
    assert agreed
    names = [agreed.address.rpartition(":")[0], *(host or [])]
    certificates.make_authority(folder / consortium.TLS, names, days)
    authority = folder / consortium.TLS / certificates.CA
    _say(f"the certificate holds for {', '.join(dict.fromkeys([*names, 'localhost', '127.0.0.1']))}, {days} days")
    _say(f"give every site {folder / 'consortium.toml'} and {authority}; the keys stay here")


@app.command()
def link(
    folder: Folder,
    host: Annotated[
        str, typer.Option("--host", help="the address to listen on; 0.0.0.0: all of this machine's")
    ] = "127.0.0.1",
    insecure: Insecure = False,
) -> None:
    """Run the SuperLink, until it is stopped."""
    _needs_flower()
    from . import consortium
    from .engines import flower_link

    agreed = consortium.read(folder).consortium
    assert agreed
    _say(f"sites find the SuperLink at {agreed.address}; other machines than this one are answered as nodes only")
    flower_link.link(folder, host, insecure)


@app.command()
def admit(
    folder: Folder,
    key: Annotated[Path, typer.Argument(metavar="KEY", help="the public key that the site has sent: site.pub")],
    client: Annotated[int, typer.Option("--client", min=0, help="which client the site is")],
) -> None:
    """Let a site take part, by its public key. The SuperLink must be running."""
    _needs_flower()
    from . import consortium
    from .engines import flower_link
    from .engines.flower_server import NODES

    agreed = consortium.read(folder).consortium
    assert agreed
    if client >= agreed.clients:
        raise UserError(f"--client = {client} must be 0 to {agreed.clients - 1}")
    with flower_link.control(folder, insecure=False) as control:
        node = flower_link.register(control, key)
    consortium.remember(folder / NODES, node, client)
    _say(f"client {client} is admitted as node {node}")


@app.command()
def submit(
    folder: Folder,
    name: Annotated[str, typer.Option("--name", help="of the run; the same name again goes on with it")] = "first",
    insecure: Insecure = False,
) -> None:
    """Start a run, or go on with it, and follow it to its end."""
    _needs_flower()
    from . import record, view
    from .engines import flower_link
    from .engines.flower_server import told
    from .sites import run_name

    path = folder / "runs" / run_name(name)
    done = len(record.read_lines(path))
    with flower_link.control(folder, insecure) as control:
        number = flower_link.start(control, folder, name)
        _say(f"run {number} is submitted" + (f"; {done} rounds are behind it" if done else ""))
        state = ("", "", "")
        try:
            while state[0] != "finished":
                time.sleep(1)
                state = flower_link.status(control, number)
                for line in record.read_lines(path)[done:]:
                    _say(told(line))
                    done += 1
        except KeyboardInterrupt:
            flower_link.stop(control, number)
            again = f"promptfed flower submit {folder} --name {name}"
            _say(f"stopped; all completed rounds are kept. Go on with:\n  {again}")
            raise typer.Exit(130) from None
    if state[1] != "completed":
        raise UserError(state[2].removeprefix("ServerApp failed with exception: ") or f"the run has {state[1]}")
    console.print(view.outcome(json.loads((path / "result.json").read_text())))
    _say(f"everything is in {path}")


# ---- at a site


@app.command()
def site(
    folder: SiteFolder,
    agreed: Annotated[Path, typer.Option("--consortium", help="the consortium.toml that the server's engineer sent")],
    client: Annotated[int, typer.Option("--client", min=0, help="which client of the consortium this is")],
    data: Annotated[Path, typer.Option("--data", help="this site's images: class/*.jpg")],
    ca: Annotated[Path | None, typer.Option("--ca", help="the ca.pem that came with it")] = None,
    backbone: Annotated[str | None, typer.Option("--backbone", help="where the weights are on this machine")] = None,
    device: Annotated[str, typer.Option("--device", help="auto, cpu, cuda, cuda:N or mps")] = "auto",
    epsilon: Annotated[
        float | None, typer.Option("--epsilon", help="what this site's updates may reveal at most, over all runs")
    ] = None,
) -> None:
    """Make this site's folder and its key pair, and look at its images."""
    _needs_flower()
    from . import certificates, sites

    if (folder / sites.SETTINGS).exists():
        raise UserError(f'"{folder}" holds a site already')
    images = str(data.expanduser().absolute())
    settings = {"client": client, "data": images, "backbone": backbone, "device": device, "epsilon": epsilon}
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)
    try:
        shutil.copyfile(agreed, folder / sites.AGREED)
        if ca:
            shutil.copyfile(ca, folder / certificates.CA)
        (folder / sites.SETTINGS).write_text(C.dump(settings))
        found = sites.Place.open(folder).parts()
    except OSError as error:
        raise UserError(f'"{error.filename}" cannot be read: {error.strerror}') from None
    except BaseException:
        (folder / sites.SETTINGS).unlink(missing_ok=True)
        raise
    public = certificates.make_pair(folder)
    _describe(found, client)
    _say(f"send {public} to the server's engineer; {folder / certificates.KEY} stays here")


@app.command()
def check(folder: SiteFolder) -> None:
    """Look whether everything is here: images, weights, keys; and how much has been revealed."""
    _needs_flower()
    from . import certificates, sites

    place = sites.Place.open(folder)
    for name in (certificates.CA, certificates.KEY):
        if not (folder / name).exists():
            raise UserError(f'"{folder / name}" is missing')
    _describe(place.parts(), place.settings.client)
    ledger = place.ledger()
    if ledger:
        limit = "no limit" if place.settings.epsilon is None else f"at most {place.settings.epsilon:g}"
        _say(f"updates released so far: {sum(ledger.answers().values())}, epsilon {ledger.epsilon():.3g} ({limit})")


@app.command()
def node(folder: SiteFolder, insecure: Insecure = False) -> None:
    """Take part, until it is stopped."""
    _needs_flower()
    from . import certificates
    from .engines import flower_node
    from .sites import Place

    place = Place.open(folder)
    if not insecure and not (place.folder / certificates.CA).exists():
        raise UserError(f'"{place.folder / certificates.CA}" is missing: it comes with the consortium.toml')
    flower_node.run(place, insecure, _say)


def _describe(parts: Any, client: int) -> None:
    from .engines.flower_client import fingerprint

    mine, data = parts.federation.sites[client], parts.federation.dataset
    held = sorted({data.classes[label] for label in data.labels})
    _say(f"client {client}: {len(mine.train)} training, {len(mine.val)} validation and {len(mine.test)} test images")
    _say(f"classes here: {len(held)} of {len(data.classes)}" + ("" if len(held) > 20 else f" ({', '.join(held)})"))
    about = fingerprint(parts.method, parts.model, data, parts.config.seed, parts.config.privacy)
    _say("fingerprint: " + ", ".join(f"{part} {digest[:8]}" for part, digest in about.items()))
