"""promptfed flower site, check, node: what a site's engineer runs."""

from __future__ import annotations

import re
import shutil
from datetime import datetime
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import UserError
from . import lazy
from .flower import Command, FlowerModule, Insecure, Metrics, app, say

if TYPE_CHECKING:
    from ..flower import audit as audits
    from ..flower import certificates
    from ..flower import node as nodes
    from ..flower import site as sites
    from ..runs import config as C
else:
    C = lazy.Module("runs.config")
    audits, certificates = FlowerModule("audit"), FlowerModule("certificates")
    nodes, sites = FlowerModule("node"), FlowerModule("site")

SiteArgument = Annotated[Path, typer.Argument(metavar="SITE", help="the site's own folder")]


@app.command(cls=Command)
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
        "modules": tuple(module or ()),
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
        say(f"no {certificates.CA} yet: copy it to {authority}")
    say(f"send {folder / certificates.PUBLIC} to the server's engineer; {folder / certificates.KEY} stays here")


def complete(folder: Path) -> sites.SiteFolder:
    """A site that has what it needs to connect with TLS."""
    place = sites.SiteFolder.open(folder)
    whence = {certificates.CA: "it comes with the consortium.toml", certificates.KEY: "promptfed flower site makes it"}
    for name, where in whence.items():
        if not (place.folder / name).exists():
            raise UserError(f'"{place.folder / name}" is missing: {where}')
    certificates.read_authority(place.folder / certificates.CA)
    certificates.check_pair(place.folder)
    return place


@app.command(cls=Command)
def check(folder: SiteArgument) -> None:
    """Check images, weights and keys of this site, and how much its updates have revealed."""
    place = complete(folder)
    place.private()
    _describe(place.parts(), place.settings.client)
    ledger = place.ledger()
    if ledger:
        say(ledger.told())
    say(f"everything is in place; next: promptfed flower node {folder}")


@app.command(cls=Command)
def audit(
    folder: SiteArgument,
    anew: Annotated[bool, typer.Option("--anew", help="move a damaged log away and begin a new one")] = False,
) -> None:
    """Verify and print what was asked of this site and what left it."""
    log = sites.SiteFolder.open(folder).log()
    if anew:
        say(f"the log so far is in {log.begin_anew()}")
    entries = log.entries()
    for entry in entries:
        say(audits.told(entry))
    say(f"{len(entries)} lines, all as they were written")


@app.command(cls=Command)
def node(folder: SiteArgument, insecure: Insecure = False, metrics: Metrics = None) -> None:
    """Take part in runs until stopped."""
    place = sites.SiteFolder.open(folder) if insecure else complete(folder)
    nodes.run(place, insecure, lambda text: say(f"{datetime.now():%Y-%m-%d %H:%M:%S} {text}"), metrics)


def _describe(parts: Any, client: int) -> None:
    from ..flower.app import parts_fingerprint

    mine, data = parts.federation.sites[client], parts.federation.dataset
    held = sorted({data.classes[label] for label in data.labels})
    say(f"client {client}: {len(mine.train)} training, {len(mine.val)} validation and {len(mine.test)} test images")
    say(f"classes here: {len(held)} of {len(data.classes)}" + ("" if len(held) > 20 else f" ({', '.join(held)})"))
    about = parts_fingerprint(parts)
    settings = "".join(about.pop(part) for part in sorted(about) if part.startswith("method."))
    about["method"] = sha256(f"{about['method']}{settings}".encode()).hexdigest()
    say("fingerprint: " + ", ".join(f"{part} {digest[:8]}" for part, digest in about.items()))
