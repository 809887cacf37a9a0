"""Several methods and seeds on the same partition, in one table.

Every (row, seed) is an ordinary run in a folder of its own, so an interrupted comparison goes on where it stopped, and
the same command started twice shares the work: each process takes the runs that no other holds.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console

from ..data import Federation
from ..errors import Unsuited, UserError, unknown
from ..method import Method
from . import api, cells, claims, dryrun, record, sheets, tables
from . import config as C
from .api import Result, small
from .display import bars
from .progress import Live
from .record import Busy, View
from .rows import Job, Row, Table, budget, each_domain, named, plan, rows, shaped, tell_unsuited, trains
from .sections import separated
from .shown import Asked, wanted

TUNING = "tuning"  # the folder in a comparison's where it was tuned


# ---- before the first run


def claim(jobs: Sequence[Job], out: Path) -> None:
    """Refuses a folder that holds something else, which the tables and pictures would replace."""
    file = out / "table.json"
    if (out / "config.toml").exists():
        raise UserError(f'--out = "{out}" holds a run; choose another --out')
    for name in record.visible(out) if not file.exists() else []:
        if name not in ("partition.json", TUNING) and not record.begun(out / name):
            raise UserError(f'--out = "{out}" is not empty and holds no comparison ({name} is in it)')
    try:
        rows = json.loads(file.read_text()) if file.exists() else []
        there = [row["label"] for row in rows if "view" not in row]
    except (ValueError, TypeError, KeyError):
        raise UserError(f'--out: "{file}" is not the table of a comparison; choose another --out') from None
    for label in there:
        if label not in {job.row.label for job in jobs}:
            raise UserError(
                f'--out = "{out}" holds a comparison with a row "{label}", which is not in this one; name all its rows '
                "(--only runs some of them), or choose another --out"
            )
    for job in jobs:
        if (job.folder / "config.toml").exists():
            _same(job)


def _share(federation: Federation, file: Path) -> None:
    """Writes the split of all runs."""
    if file.exists() and file.read_text() != federation.text():
        raise UserError(f'--out: "{file.parent}" holds another partition; choose another --out')
    federation.save(file)


def check(jobs: Iterable[Job]) -> list[Job]:
    """Without those that cannot serve the protocol asked for. Refuses methods that do not fit their backbones, for what
    is not done yet."""
    unable: dict[str, Unsuited] = {}
    jobs = list(jobs)
    for job in jobs:
        config, done = job.config, (job.folder / "result.json").exists()
        if job.seed != job.row.seeds[0] or done or config.consortium:
            continue
        try:
            dryrun.check_fit(config)
        except Unsuited as error:
            unable[job.row.label] = error
        except UserError as error:
            raise UserError(f'row "{job.row.label}": {error}') from None
    tell_unsuited(unable, {job.row.label for job in jobs})
    return [job for job in jobs if job.row.label not in unable]


# ---- the runs

Watch = Callable[[int, Job], AbstractContextManager[View | None]]


def work(jobs: Sequence[Job], watch: Watch) -> list[tuple[Job, Exception]]:
    """Makes what is not there yet and no other process is making; -> the runs that failed, and why. One that fails does
    not keep the others back, but after an error of the program nothing more is tried."""
    failed: list[tuple[Job, Exception]] = []
    for number, job in enumerate(jobs, 1):
        try:
            if finished(job):
                continue
            resume = (job.folder / "config.toml").exists()
            if resume:
                _same(job)
            elif twin := next((other for other in jobs if other.config == job.config and finished(other)), None):
                _copy(twin.folder, job.folder)  # the same in another column
                continue
            with watch(number, job) as view:
                api.execute(api.RunPlan(job.config, job.folder, resume), view=view)
        except Busy:
            continue
        except Exception as error:
            failed.append((job, error))
            if not isinstance(error, UserError):
                break
    return failed


def _copy(run: Path, to: Path) -> None:
    """A finished run, in one step."""
    with TemporaryDirectory(dir=to.parent, prefix=".copy-") as folder:
        copied = shutil.copytree(run, Path(folder) / to.name, ignore=shutil.ignore_patterns(".lock"))
        try:
            copied.rename(to)
        except OSError:
            if not to.exists():
                raise  # otherwise another process makes it, or has made it


def live(console: Console, count: int, number: int, job: Job) -> Live:
    """The progress of one of so many runs."""
    label = f"{job.row.label} (seed {job.seed})" if len(job.row.seeds) > 1 else job.row.label
    return Live(console, f"{number}/{count} {label}", job.config.rounds)


def scale(jobs: Iterable[Job], results: Mapping[str, Any], file: str) -> str:
    """What a table at the small scale has to say of itself: its labels are those of the full scale. Else empty."""
    jobs = [job for job in jobs if job.row.mini and job.row.label in results]
    if not jobs:
        return ""
    data = ", ".join(dict.fromkeys(job.config.dataset.name for job in jobs))
    counts = {job.config.rounds for job in jobs if trains(job.config)} or {1}
    few, many = min(counts), max(counts)
    rounds = cells.rounds(many) if few == many else f"{few} to {cells.rounds(many)}"
    name = "/".join(Path(file).parts[-2:])
    return f"at the small scale of {name}: {data}, {rounds}; labels are those of the full scale"


def collect(jobs: Sequence[Job], excused: set[Path]) -> tuple[dict[str, list[Result]], list[str]]:
    """What is done, by this process or another; and what is not and ought to be, which a warning names."""
    results: dict[str, list[Result]] = {}
    missing: list[str] = []
    for job in jobs:
        done = finished(job)
        if done:
            results.setdefault(job.row.label, []).append(done)
        elif job.folder not in excused:
            missing.append(job.folder.name)
    if missing:
        warnings.warn(f"not in the table, held by another process or not started: {', '.join(missing)}", stacklevel=2)
    return results, missing


def finished(job: Job) -> Result | None:
    numbers = record.read_result(job.folder)
    if numbers is None:
        return None
    _same(job)
    return Result(job.folder, numbers)


def _same(job: Job) -> None:
    """A folder of the same name but another configuration is somebody else's result."""
    saved = record.decisive(C.make(C.read(job.folder / "config.toml")).complete())
    for key, value in record.decisive(job.config.complete()).items():
        if saved[key] != value:
            there, here = saved[key], value
            if isinstance(here, Mapping):
                inner = next(name for name in {**there, **here} if there.get(name) != here.get(name))
                key, there, here = f"{key}.{inner}", there.get(inner), here.get(inner)
            raise UserError(
                f'--out: "{job.folder}" holds a run with another {key}: {there}, not {here}; choose another --out'
            )


# ---- all of it


@dataclass(frozen=True)
class ComparisonPlan:
    """A comparison that is ready to begin, or to go on."""

    jobs: list[Job]
    chosen: list[Job]  # those to run now
    folder: Path
    file: str = ""
    budget: str = ""  # what the settings were tuned with
    federation: Federation | None = None  # of all runs, in place of one that is loaded and split
    against: str = ""  # the row that the others are compared with
    asked: Asked = field(default_factory=Asked)
    claims: Sequence[claims.Claim] = ()  # of papers, to be judged

    @property
    def layout(self) -> tables.Places:
        """Label -> its row and column, in a table with columns."""
        runs = {job.row.label: job.row.place for job in self.jobs}
        placed = {**runs, **{view.label: view.place for view in self.asked.views}}
        return {label: place for label, place in placed.items() if place[1]}


@dataclass(frozen=True)
class Outcome:
    results: dict[str, list[Result]]  # by label
    table: list[Table]  # the rows of table.json
    failed: list[tuple[Job, Exception]]
    missing: list[str]  # runs that another process is making, or that were not started


def prepare(
    preset: str | Path | None,
    settings: Mapping[str, Any],
    *,
    methods: Sequence[str | type[Method]] = (),
    seeds: Sequence[int] = (),
    out: Path,
    mini: bool = False,
    only: str | Sequence[str] = (),
    against: str = "",
    federation: Federation | None = None,
) -> ComparisonPlan:
    """Reads and checks everything before the first run. `only`: the rows whose label has this, or one of these,
    in it. `against`: the row to which the tables have the differences of the others."""
    source = C.read(preset) if preset else {}
    spec = shaped(source.get("compare", {}))
    common = api.common_tables(source, settings, federation)
    methods = separated(methods)
    names = [method if isinstance(method, str) else api.class_name(method) for method in methods]
    spec = each_domain(spec, common, names or named(spec))
    found = rows(spec, methods, seeds, small(source) if mini else None)
    common += [api.saved_split(out)] if federation else []
    jobs = plan(common, found, out, named(spec))
    chosen = _choose(jobs, [only] if isinstance(only, str) else only)
    # Without rows that cannot be run or are left out.
    tuned = budget(spec, (job.row for job in jobs if job in chosen or (job.folder / "result.json").exists()))
    asked, told = wanted(spec, found), claims.read(spec)
    trained, seen = [job.row for job in jobs], asked.views
    _check_against(against, [one.place[0] or one.label for each in (trained, seen) for one in each])
    return ComparisonPlan(jobs, chosen, out, str(preset or ""), tuned, federation, against, asked, told)


def _choose(jobs: list[Job], only: Sequence[str]) -> list[Job]:
    for text in only:
        if not any(text.lower() in job.row.label.lower() for job in jobs):
            labels = ", ".join(dict.fromkeys(job.row.label for job in jobs))
            raise UserError(f'--only = "{text}" must be part of the label of a row ({labels})')
    return [job for job in jobs if not only or any(text.lower() in job.row.label.lower() for text in only)]


def _check_against(against: str, names: Iterable[str]) -> None:
    known = set(names)
    if against and against not in known:
        raise unknown("--against", against, known)


def execute(plan: ComparisonPlan, watch: Watch = lambda number, job: nullcontext()) -> Outcome:
    """Makes the runs that are not there yet, and the tables of all that are."""
    claim(plan.jobs, plan.folder)
    if plan.federation:
        _share(plan.federation, plan.folder / "partition.json")
    chosen = check(plan.chosen)
    failed = work(chosen, watch)
    # Rows that `only` leaves out are in the table too, where they are done.
    aside = {job.folder for job in plan.jobs} - {job.folder for job in chosen}
    results, missing = collect(plan.jobs, aside | {job.folder for job, _ in failed})
    notes = "; ".join(filter(None, (scale(plan.jobs, results, plan.file), plan.budget)))
    if plan.against and plan.against not in {plan.layout.get(label, (label,))[0] for label in plan.asked.seen(results)}:
        warnings.warn(f'--against = "{plan.against}" is not done: there are no differences to it', stacklevel=2)
    rows = tables.save(results, plan.folder, plan.layout, notes, plan.against, plan.asked) if results else []
    return Outcome(results, rows, failed, missing)


def complain(outcome: Outcome) -> None:
    """Raises the error of the first run that failed. The tables are written by then."""
    if outcome.failed:
        job, error = outcome.failed[0]
        if not outcome.results or not isinstance(error, UserError):
            raise error
        more = f", and so have {len(outcome.failed) - 1} more" if len(outcome.failed) > 1 else ""
        raise UserError(f"{job.folder.name} has failed{more}, the tables have what is done: {error}")
    for runs in outcome.results.values():
        for run in runs:
            if why := record.unused(run.numbers):
                raise UserError(f"{run.folder.name}: {why}")
    if not outcome.results:
        raise UserError("every run of the comparison is held by another process")


_WIDTH = 120  # of the tables as text


class Compared(dict[str, list[Result]]):
    """Results by label, one per seed; printed, the tables that the command prints. `table`: the rows of table.json."""

    def __init__(self, results: Mapping[str, list[Result]], table: list[Table]) -> None:
        super().__init__(results)
        self.table = table

    def __repr__(self) -> str:
        if not self.table:
            return super().__repr__()
        text = StringIO()
        plain = Console(
            file=text,
            width=_WIDTH,
            color_system=None,
            force_terminal=False,
            force_jupyter=False,
            markup=False,
            emoji=False,
        )
        plain.print(tables.comparison(self.table))
        return text.getvalue().rstrip("\n")

    def frame(self) -> Any:
        """A pandas DataFrame with the columns of table.csv, a row per label."""
        return sheets.frame(tables.records(self.table))


def read(folder: Path, against: str = "") -> Compared:
    """The comparison in a folder: its runs, or what was kept of them in results.jsonl."""
    file, kept = folder / "table.json", folder / "results.jsonl"
    if not file.exists():
        raise UserError(f'"{folder}" is not the folder of a comparison that has been run: it has no table.json')
    results: dict[str, list[Result]] = {}
    try:
        rows = json.loads(file.read_text())
        places = {row["label"]: (row["row"], row["column"]) for row in rows if "column" in row}
        scale, asked = rows[0].get("scale", "") if rows else "", Asked.told(rows)
        if kept.exists():
            for line in map(json.loads, kept.read_text().splitlines()):
                results.setdefault(line["label"], []).append(Result(folder, line["result"], line["rounds"]))
        else:
            for label in (row["label"] for row in rows if "view" not in row):
                found = sorted(folder.glob(f"{Row(label, {}, ()).slug}-seed*"))
                runs = [Result(path, numbers) for path in found if (numbers := record.read_result(path))]
                results |= {label: runs} if runs else {}
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f'"{folder}" is not the folder of a comparison: its table cannot be read') from None
    if not results:
        raise UserError(f'"{folder}" has no finished run')
    _check_against(against, (places.get(label, (label,))[0] for label in asked.seen(results)))
    return Compared(results, tables.table(results, places, scale, against, asked))


def compare(
    preset: str | Path | None = None,
    *,
    methods: Sequence[str | type[Method]] = (),
    seeds: Sequence[int] = (),
    out: str | Path,
    only: str | Sequence[str] = (),
    against: str = "",
    mini: bool = False,
    federation: Federation | None = None,
    tune: int = 0,
    progress: bool = True,
    **settings: Any,
) -> Compared:
    """Runs several methods and seeds on one partition; -> results by label, and tables in `out`. Methods are names or
    classes derived from Method; `dataset` may be a Dataset, and `federation` takes the place of dataset and partition.
    `only`: run only rows whose label has this, or one of these, in it. `against`: the row whose paired differences to
    the others are in the tables. `mini`: use the small scale of the file, its [mini] table. `tune`: first tune each row
    on validation data, by so many trials. `progress` is shown on standard error and in notebooks.

    compare(methods=["pfedpt", "fedavg", "local"], seeds=[0, 1, 2], out="runs/mine", dataset="cifar10", rounds=50)
    """
    if tune and federation:
        raise UserError("tune and federation cannot both be given: save the split, and give dataset and partition.file")
    if tune:
        from ..search import tune as search  # which imports this module

        names = [method if isinstance(method, str) else api.class_name(method) for method in separated(methods)]
        source = search.Source(preset, settings, names, seeds, mini)
        found = search.execute(search.for_comparison(source, tune, Path(out), only))
        preset, settings, methods, seeds = found.file, {}, (), ()
    wanted: dict[str, Any] = {"methods": methods, "seeds": seeds, "mini": mini, "only": only, "against": against}
    planned = prepare(preset, settings, out=Path(out), federation=federation, **wanted)
    console = Console(stderr=True, markup=False, emoji=False)
    with bars(console) if progress else nullcontext():
        outcome = execute(planned, partial(live, console, len(planned.chosen))) if progress else execute(planned)
    complain(outcome)
    return Compared(outcome.results, outcome.table)
