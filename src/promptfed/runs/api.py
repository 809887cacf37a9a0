"""The public way in: run() one configuration, compare() several."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import files, privacy, server
from ..clients import Clients
from ..data import Federation
from ..errors import UserError
from ..method import Method
from ..methods import why_not_cached
from . import build, record
from . import config as C
from .mini import small_scale
from .record import Folder, View
from .trackers import Tracked, Views


@dataclass(frozen=True)
class Result:
    """A finished run: `numbers` is its result.json."""

    folder: Path
    numbers: dict[str, Any]

    @property
    def metrics(self) -> dict[str, Any]:
        """Of the last round, as received from the server: local (mean, std, worst, weighted), global, macro_f1..."""
        found: dict[str, Any] = self.numbers["metrics"]["aggregated"]["last"]
        return found


@dataclass(frozen=True)
class RunPlan:
    """A run that is ready to begin, or to go on."""

    config: C.Config
    folder: Path
    resume: bool = False


def run(
    preset: str | Path | None = None,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    federation: Federation | None = None,
    view: View | None = None,
    mini: bool = False,
    **settings: Any,
) -> Result:
    """Trains and evaluates one configuration.

    run(method="pfedpt", dataset="cifar10", partition={"name": "dirichlet", "alpha": 0.3}, rounds=50)

    `preset` is a preset's name or a TOML file; settings go over it. A section given as a string is its name. `method`
    may also be a class derived from Method. `federation` takes the place of dataset and partition. `mini`: use the
    small scale of the file, its [mini] table.
    """
    plan = prepare(preset, settings, out=Path(out) if out else None, resume=resume, mini=mini)
    return execute(plan, federation, view)


def prepare(
    preset: str | Path | None,
    settings: Mapping[str, Any],
    *,
    out: Path | None = None,
    resume: bool = False,
    mini: bool = False,
) -> RunPlan:
    """Reads and checks the settings, and chooses the folder."""
    given = dict(settings)
    if isinstance(given.get("method"), type) and issubclass(given["method"], Method):
        given["method"] = f"{given['method'].__module__}:{given['method'].__qualname__}"
    source = [C.read(preset)] if preset else []
    tables = [*map(without_compare, source), C.undot(given.items())]
    if mini:
        tables = [small_scale(source, tables)]
    if resume:
        return resumed(out, tables)
    config = C.make(*tables)
    return RunPlan(config, out or fresh(config))


def resumed(out: Path | None, changes: Sequence[Mapping[str, Any]]) -> RunPlan:
    """A run to go on with. More rounds may be asked for, and another engine."""
    if out is None:
        raise UserError("--resume needs --out, the folder of the run to continue")
    file = out / "config.toml"
    if not file.exists():
        raise UserError(f'--out = "{out}" holds no run to resume (it has no config.toml)')
    allowed = {"rounds", "engine"}
    for key in (key for table in changes for key in table):
        if key not in allowed:
            raise UserError(f"{key} cannot be changed when a run is resumed (allowed: {', '.join(sorted(allowed))})")
    config = C.make(C.read(file), *changes)
    done = len(record.read_lines(out))
    if config.rounds < done:
        raise UserError(f"rounds = {config.rounds} must be at least the {done} rounds that the run has completed")
    return RunPlan(config, out, resume=True)


def execute(
    plan: RunPlan,
    federation: Federation | None = None,
    view: View | None = None,
    engine: Callable[[build.Parts, Path], Clients] = build.clients,
) -> Result:
    """One run, in its folder. `engine` makes the clients from the parts and the folder."""
    config, path, resume = plan.config, plan.folder, plan.resume
    if not resume and (path / "config.toml").exists():
        raise UserError(f'--out = "{path}" holds a run already: pass --resume to continue it, or another --out')
    tracked = Tracked(config.engine.trackers, path, config.complete())
    if config.privacy.noise:
        privacy.accounting()
    folder = Folder(path, Views(view, tracked) if view else tracked, ledger=config.privacy.on)
    split = path / "partition.json"
    try:
        parts = build.assemble(config, federation, split if resume and split.exists() else None)
        files.write(path / "config.toml", C.dump(config.complete()).encode())
        if not config.consortium and (not resume or not split.exists()):
            parts.federation.save(split)
        clients = engine(parts, path)
        try:
            rounds = server.Plan(
                config.rounds,
                config.fraction,
                config.seed,
                config.eval.every,
                config.eval.after_local,
                config.eval.pooled,
                parts.newcomers,
                config.join.round,
            )
            server.run(parts.method, parts.model, parts.init, clients, rounds, folder)
        finally:
            sizes = clients.sizes()
            clients.close()
        data = parts.federation.dataset
        about = {
            "method": config.method.name,
            "seed": config.seed,
            "config": config.complete(),
            "dataset": {
                "name": data.name,
                "fingerprint": data.fingerprint,
                "images": len(data),
                "classes": len(data.classes),
            },
            "frozen": _frozen(parts),
            "sites": _sites(parts, sizes, folder.lines()),
        }
        if config.privacy.on:
            seeded = config.consortium is None
            answers = privacy.answers(folder.asked(), seeded)
            about["privacy"] = privacy.statement(config.privacy, answers, len(parts.federation.sites), seeded)
        numbers = record.result(folder.lines(), about)
        files.write(path / "result.json", (json.dumps(numbers, indent=1) + "\n").encode())
        return Result(path, numbers)
    finally:
        tracked.close()
        folder.close()


def _sites(parts: build.Parts, sizes: Mapping[int, int], lines: Sequence[server.Line]) -> list[dict[str, Any]]:
    """How much each client has. Sites of a consortium have told with their scores."""
    told = {row["client"]: row for line in lines if "aggregated" in line for row in line["aggregated"]["clients"]}
    apart = parts.config.consortium is not None
    return [
        {
            "client": i,
            "name": site.name,
            "n_train": sizes[i] if apart else len(site.train),
            "n_val": told.get(i, {}).get("n_val") if apart else len(site.val),
            "n_test": told.get(i, {}).get("n_test") if apart else len(site.test),
        }
        for i, site in enumerate(parts.federation.sites)
    ]


def fresh(config: C.Config) -> Path:
    """A folder of its own below runs/."""
    name = f"{config.method.name}-{Path(config.dataset.name).name}-seed{config.seed}".replace(":", ".").replace(
        "/", "-"
    )
    path, number = Path("runs") / name, 1
    while path.exists():
        number += 1
        path = Path("runs") / f"{name}-{number}"
    return path


def without_compare(table: Mapping[str, Any]) -> dict[str, Any]:
    """A file's settings, without what it says of comparisons and of its mini scale."""
    return {key: value for key, value in table.items() if key not in ("compare", "mini")}


def _frozen(parts: build.Parts) -> dict[str, str | None]:
    """What was computed once per image; or why nothing was."""
    tuning, model = parts.method.tuning, parts.model
    name = tuning.frozen_name(model)
    return {"values": name or None, "why_not": None if name else why_not_cached(tuning)}
