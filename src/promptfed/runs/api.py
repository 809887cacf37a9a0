"""The public way in: run() one configuration, compare() several."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from .. import files, privacy, server
from .. import methods as M
from ..clients import Clients
from ..data import PARTITIONS, Dataset, DatasetConfig, Federation
from ..data.augment import configured
from ..data.datasets import VARIED
from ..errors import UserError, nearest
from ..method import Method
from ..methods import why_not_cached
from . import build, dryrun, record, sheets, unseen
from . import config as C
from .progress import Live
from .record import Folder, View
from .sections import FILE
from .trackers import Tracked

if TYPE_CHECKING:
    from ..report.style import Chart


@dataclass(frozen=True)
class Result:
    """A finished run: `numbers` is its result.json. A notebook shows a table and its curves."""

    folder: Path
    numbers: dict[str, Any]
    kept: Sequence[server.Line] | None = None  # its rounds, where they are not in a folder of its own

    def __repr__(self) -> str:
        n, local = self.numbers, self.metrics["local"]
        scores = ", ".join(f"{key} {local[key]:.1%}" for key in ("mean", "worst") if local.get(key) is not None)
        why = "no update used; " if record.unused(n) else ""
        at = f"{n['method']} on {n['dataset']['name']}, seed {n['seed']}, {n['rounds']} rounds"
        return f"<Result of {at}: {why}local accuracy {scores or 'unknown'}; {self.folder}>"

    def _repr_html_(self) -> str:
        from ..report.cell import html  # altair is slow to import

        return html(self)

    @property
    def rounds(self) -> list[server.Line]:
        """What is recorded of each round: the lines of rounds.jsonl."""
        return record.read_lines(self.folder) if self.kept is None else list(self.kept)

    def plot(self) -> Chart:
        """Accuracies and training loss over the rounds, as an altair chart."""
        from ..report.cell import curves  # altair is slow to import

        return curves(self.folder)

    @property
    def metrics(self) -> dict[str, Any]:
        """Of the last round, as received from the server: local (mean, std, worst, weighted), global, macro_f1..."""
        found: dict[str, Any] = self.numbers["metrics"]["aggregated"]["last"]
        return found

    def frame(self) -> Any:
        """A pandas DataFrame: each client's scores in the last evaluated round, a row per stage and client."""
        clients: dict[str, list[dict[str, Any]]] = self.numbers["clients"]
        return sheets.frame([{"stage": stage, **row} for stage, rows in clients.items() for row in rows])


@dataclass(frozen=True)
class RunPlan:
    """A run that is ready to begin, or to go on."""

    config: C.Config
    folder: Path
    resume: bool = False
    federation: Federation | None = None  # in place of one that is loaded and split


def run(
    preset: str | Path | None = None,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    federation: Federation | None = None,
    view: View | None = None,
    mini: bool = False,
    progress: bool = True,
    **settings: Any,
) -> Result:
    """Trains and evaluates one configuration: run(method="pfedpt", dataset="cifar10", rounds=50)

    `preset` is a preset's name or a TOML file; settings go over it. A section given as a string is its name. `method`
    may also be a class derived from Method, and `dataset` a Dataset. `federation` takes the place of dataset and
    partition, and `mini` uses the small scale of the file, its [mini] table. `progress` is shown on standard error and
    in notebooks, unless it is False or a `view` is told instead: an object with begin(round, clients),
    on_notice(notice) and end(line)."""
    folder = Path(out) if out else None
    plan = prepare(preset, settings, out=folder, resume=resume, mini=mini, federation=federation)
    config = plan.config
    check_fit(plan)
    shown = Live(Console(stderr=True, markup=False, emoji=False), config.method.name, config.rounds)
    with shown if progress and view is None else nullcontext(view) as watching:
        found = execute(plan, watching)
    if why := record.unused(found.numbers):
        warnings.warn(f"{found.folder}: {why}", stacklevel=2)
    return found


def prepare(
    preset: str | Path | None,
    settings: Mapping[str, Any],
    *,
    out: Path | None = None,
    resume: bool = False,
    mini: bool = False,
    federation: Federation | None = None,
) -> RunPlan:
    """Reads and checks the settings, and chooses the folder."""
    source = C.read(preset) if preset else {}
    tables = common_tables(source, settings, None if resume else federation)
    if mini:
        scale = {key: value for key, value in small(source).items() if key != "seeds"}
        tables = [shrunk(tables, [C.undot(scale.items())], tables[1:])]
    if resume:
        plan = resumed(out, tables)
        if federation and federation.dataset.fingerprint != plan.config.dataset.digest:
            raise UserError(f'federation: "{federation.dataset.name}" does not have the images of the run in "{out}"')
        return plan
    if federation is None:
        config = C.make(*tables)
        return RunPlan(config, out or fresh(config))
    config = C.make(*tables)
    if config.eval.novel:
        raise UserError("eval.novel cannot be given with a federation: its clients hold all classes (allowed: dataset)")
    folder = out or fresh(config, federation.dataset.name)
    return RunPlan(C.make(config.complete(), saved_split(folder)), folder, federation=federation)


def check_fit(plan: RunPlan) -> None:
    """Refuses a method that does not fit its backbone before images of the catalogue are loaded, as a comparison does
    for its rows."""
    if not plan.resume and plan.federation is None and not plan.config.consortium:
        dryrun.check_fit(plan.config)


def common_tables(
    source: Mapping[str, Any], settings: Mapping[str, Any], federation: Federation | None
) -> list[dict[str, Any]]:
    """A file's settings and the given ones. Data that are given themselves are in place of those that a file names, and
    a method's class is named by its module."""
    given = dict(settings)
    if isinstance(given.get("method"), type):
        given["method"] = class_name(given["method"])
    own = federation.dataset if federation else given.pop("dataset", None)
    if not isinstance(own, Dataset):
        given |= {"dataset": own} if own is not None else {}
        return [without_compare(source), C.undot(given.items())]
    tables = [without_compare(source), C.undot(given.items())]
    varied = {k: v for table in tables for k, v in table.get("dataset", {}).items() if k in VARIED}
    for table in tables:
        table.pop("dataset", None)
        if federation:
            table.pop("partition", None)
    return [*tables, {"dataset": {**DatasetConfig.of(own).model_dump(exclude_defaults=True), **varied}}]


def class_name(method: type[Method]) -> str:
    """my_module:MyMethod, by which a method is imported again."""
    return f"{method.__module__}:{method.__qualname__}"


def saved_split(folder: Path) -> dict[str, Any]:
    """The settings that use the partition.json of a folder."""
    return {"partition": {"name": FILE, "file": str((folder / "partition.json").absolute())}}


def resumed(out: Path | None, changes: Sequence[Mapping[str, Any]]) -> RunPlan:
    """A run to go on with. More rounds may be asked for, and another engine."""
    if out is None:
        raise UserError("--resume needs --out, the folder of the run to continue")
    file = out / "config.toml"
    if not file.exists():
        raise UserError(f'--out = "{out}" holds no run to resume (it has no config.toml)')
    recorded = C.read(file)
    try:
        before = record.decisive(C.make(recorded).complete())
    except UserError as error:  # not of what was asked for now
        raise UserError(f'"{file}" was changed or damaged: {error}') from None
    config = C.make(recorded, *changes)
    for key, value in record.decisive(config.complete()).items():
        if key != "rounds" and value != before.get(key):
            what = record.difference({key: before.get(key)}, {key: value})
            allowed = "rounds, and those of engine but engine.precision"
            raise UserError(f"{key} cannot be changed when a run is resumed ({what}; allowed: {allowed})")
    done = len(record.read_lines(out))
    if config.rounds < done:
        raise UserError(f"rounds = {config.rounds} must be at least the {done} rounds that the run has completed")
    return RunPlan(config, out, resume=True)


def execute(
    plan: RunPlan,
    view: View | None = None,
    engine: Callable[[build.Parts, Path], Clients] = build.clients,
) -> Result:
    """One run, in its folder. `engine` makes the clients from the parts and the folder."""
    config, path, resume = plan.config, plan.folder, plan.resume
    if not resume:
        _check_free(path)
    tracked = Tracked(config.engine.trackers, path, config.complete())
    if config.privacy.noise:
        privacy.accounting()
    folder = Folder(path, [tracked] if view is None else [view, tracked], ledger=config.privacy.on)
    split = path / "partition.json"
    try:
        if resume:
            folder.verify()
            if len(folder.lines()) < config.rounds:  # what it says is not of the whole run any more
                (path / "result.json").unlink(missing_ok=True)
        parts = build.assemble(config, plan.federation, split if resume and split.exists() else None)
        unseen.prepare(config, parts.federation.dataset)
        files.write(path / "config.toml", C.dump(_recorded(plan)).encode())
        if not config.consortium and (not resume or not split.exists()):
            parts.federation.save(split)
        clients = engine(parts, path)
        try:
            rounds = build.rounds(config, parts.federation.sites, parts.newcomers)
            server.run(parts.method, parts.model, parts.init, clients, rounds, folder)
        finally:
            sizes = clients.sizes()
            clients.close()
        data, classes = parts.federation.dataset, len(parts.federation.dataset.classes)
        about = {
            "method": config.method.name,
            "seed": config.seed,
            "config": config.complete(),
            "dataset": {"name": data.name, "fingerprint": data.fingerprint, "images": len(data), "classes": classes},
            "frozen": _frozen(parts),
            "sites": _sites(parts, sizes, folder.lines()),
            "newcomers": list(parts.newcomers),
        }
        if found := unseen.scores(config, path, folder.lines()):
            about["protocols"] = found
        if config.privacy.on:
            seeded = config.consortium is None
            answers = privacy.answers(folder.asked(), seeded)
            about["privacy"] = privacy.statement(config.privacy, answers, len(parts.federation.sites), seeded)
        numbers = record.result(folder.lines(), about)
        files.write(path / "result.json", (json.dumps(numbers, indent=1) + "\n").encode())
        return Result(path, numbers)
    except OSError as error:
        if error.errno not in files.FULL:
            raise
        raise UserError(
            f'--out = "{path}" cannot be written ({error.strerror}): make room and resume the run; completed rounds '
            "are kept"
        ) from None
    finally:
        tracked.close()
        folder.close()


def _check_free(path: Path) -> None:
    """A run gets a folder of its own."""
    if (path / "config.toml").exists():
        raise UserError(f'--out = "{path}" holds a run already: pass --resume to continue it, or another --out')
    if held := record.visible(path):
        raise UserError(f'--out = "{path}" is not empty and holds no run ({held[0]} is in it); choose another --out')


def _recorded(plan: RunPlan) -> dict[str, Any]:
    """The configuration to write. Of a run that goes on it stays as it is, but for what may change."""
    file, complete = plan.folder / "config.toml", plan.config.complete()
    if not plan.resume or not file.exists():
        return complete
    return {**C.read(file), **{key: complete[key] for key in record.ADJUSTABLE}}


def _sites(parts: build.Parts, sizes: Mapping[int, int], lines: Sequence[server.Line]) -> list[dict[str, Any]]:
    """How much each client has. Sites of a consortium have told with their scores."""
    told = {row["client"]: row for line in lines if "aggregated" in line for row in line["aggregated"]["clients"]}
    found = []
    for i, site in enumerate(parts.federation.sites):
        held = {"n_train": len(site.train), "n_val": len(site.val), "n_test": len(site.test)}
        if parts.config.consortium:
            held = {"n_train": sizes[i], **{key: told.get(i, {}).get(key) for key in ("n_val", "n_test")}}
        found.append({"client": i, "name": site.name, **held})
    return found


def fresh(config: C.Config, dataset: str = "") -> Path:
    """A folder of its own below runs/."""
    name = f"{config.method.name}-{dataset or Path(config.dataset.name).name}-seed{config.seed}"
    path = Path("runs") / name.replace(":", ".").replace("/", "-")
    others = (path.with_name(f"{path.name}-{number}") for number in count(2))
    return next(other for other in chain([path], others) if not other.exists())


def without_compare(table: Mapping[str, Any]) -> dict[str, Any]:
    """A file's settings, without what it says of comparisons and of its mini scale."""
    return C.undot((key, value) for key, value in table.items() if key not in ("compare", "mini"))


def _frozen(parts: build.Parts) -> dict[str, str | None]:
    """What was computed once per image; or why nothing was. Of training images that vary, what their views are."""
    tuning, model, varied = parts.method.tuning, parts.model, configured(parts.config.dataset)
    name = tuning.frozen_name(model)
    why_not = None if name else why_not_cached(tuning)
    return {"values": name or None, "why_not": why_not, "views": varied.sentence(name, why_not) if varied else None}


# ---- the small scale of a file: the settings of its [mini] table


def small(source: Mapping[str, Any]) -> dict[str, Any]:
    """A file's [mini]."""
    mini = source.get("mini")
    if not isinstance(mini, Mapping) or not mini:
        raise UserError("--mini needs a file with a [mini] table, the settings of its small scale")
    return dict(mini)


def shrunk(
    tables: Iterable[Mapping[str, Any]], mini: Iterable[Mapping[str, Any]], given: Iterable[Mapping[str, Any]]
) -> dict[str, Any]:
    """The tables' settings with those of the mini scale over them, and those that are given over both."""
    made, over = C.merge(*tables), C.merge(*given)
    for table in mini:
        for key, value in table.items():
            if key not in C.SECTIONS:
                made[key] = over.get(key, value)
                continue
            section = {k: over.get(key, {}).get(k, v) for k, v in C.undot([(key, value)])[key].items()}
            made = C.merge(made, {key: {"name": section["name"]}} if "name" in section else {})
            made = C.merge(made, {key: _applicable(key, section, made.get(key, {}))})
    return made


def _applicable(section: str, settings: dict[str, Any], old: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the settings that this method or partition has. If none of all has one, it is a mistake."""
    if section not in ("method", "partition"):
        return settings
    always = {"name", "seed", "file"} if section == "partition" else {"name"}
    own = C.settings_of(section, old.get("name") or C.SECTIONS[section].model_fields["name"].default) | always
    known = method_settings() if section == "method" else set().union(*(C.settings_of(section, k) for k in PARTITIONS))
    for key in settings:
        if key not in known | own:
            raise UserError(f"mini.{section}.{key} is not a setting of any {section}{nearest(key, known)}")
    return {key: value for key, value in settings.items() if key in own}


@cache
def method_settings() -> set[str]:
    """Of any method and plug-in."""
    kinds = [*M.PROMPTS.values(), *(kind for kind, _ in M.TUNINGS.values())]
    named = {key for name in (*M.METHODS, *M.ALIASES) for key in M.fields(name)}
    return named | {key for kind in kinds for key in kind.model_fields}
