"""tune(): settings for every row of a comparison, by the same number of trials each, on validation data only.

DIR/tune.json         which comparison is tuned, and what is searched
DIR/study.journal     Optuna's record of the trials
DIR/ROW/trial-NNN/    each trial: an ordinary run, without its heavy files once it has ended
DIR/tuned.toml        the comparison with the chosen settings, for promptfed compare
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table as Rich

from .. import files
from ..errors import UserError
from ..runs import api, comparison, record
from ..runs import config as C
from ..runs.rows import BESIDE, completed
from ..runs.rows import Job as Planned
from . import space as S
from . import study, workers
from .board import Board, percent
from .study import Trial
from .workers import Ended, Job, Pool, Round

ABOUT, TUNED, LOG = "tune.json", "tuned.toml", "workers.log"
_LOOKS = 5  # evaluations per trial, at most, by which it may be pruned


@dataclass(frozen=True)
class Source:
    """What was given: a file or preset and what goes over it."""

    preset: str | Path | None
    settings: Mapping[str, Any]
    methods: Sequence[str] = ()
    seeds: Sequence[int] = ()
    mini: bool = False


@dataclass(frozen=True)
class TunePlan:
    source: Source
    jobs: list[Planned]  # the first seed of each row
    chosen: frozenset[str]  # the labels of those to search now
    spaces: dict[str, S.Space]  # by label; empty: nothing to tune
    trials: int
    folder: Path
    option: str = "--trials"

    @property
    def tuned(self) -> list[Planned]:
        """Those that are searched now."""
        return [job for job in self.jobs if job.row.label in self.chosen and self.spaces[job.row.label]]


@dataclass(frozen=True)
class Tuned:
    """What tune() has found. `file` is for compare()."""

    file: Path
    best: dict[str, Trial]  # by label, of the rows that were searched now
    trials: int


def prepare(
    source: Source,
    *,
    trials: int,
    space: Sequence[str] = (),
    out: Path,
    only: str | Sequence[str] = (),
    option: str = "--trials",
) -> TunePlan:
    """Reads and checks everything before the first trial. `only`: the rows whose label has this, or one of these, in
    it. `option`: what the number of trials is called."""
    if not isinstance(trials, int) or trials < 1:
        raise UserError(f"{option} = {trials} must be at least 1, and whole")
    if isinstance(space, str):
        space = [space]
    given = S.parse(space)
    planned = comparison.prepare(
        source.preset, source.settings, methods=source.methods, seeds=source.seeds, out=out, mini=source.mini, only=only
    )
    chosen = frozenset(job.row.label for job in planned.chosen)
    jobs = comparison.check(job for job in planned.jobs if job.seed == job.row.seeds[0])
    S.check(given, (job.config for job in jobs if job.row.label in chosen))
    plan = TunePlan(
        source, jobs, chosen, {job.row.label: S.of_row(given, job.config) for job in jobs}, trials, out, option
    )
    if not plan.tuned:
        raise UserError("tune: no row trains anything with the settings that are searched")
    return plan


def for_comparison(source: Source, trials: int, folder: Path, only: str | Sequence[str] = ()) -> TunePlan:
    """The search before a comparison in this folder, which must not have begun with the settings of a shorter one."""
    file = folder / comparison.TUNING / ABOUT
    if (folder / "table.json").exists() and file.exists():
        before = json.loads(file.read_text()).get("trials")
        if before != trials:
            raise UserError(
                f'--tune = {trials}: "{folder}" holds a comparison that was tuned by {before} trials per row; '
                "choose another --out"
            )
    return prepare(source, trials=trials, out=folder / comparison.TUNING, only=only, option="--tune")


def execute(plan: TunePlan, console: Console | None = None) -> Tuned:
    """Makes the trials that are not there yet, and writes the file with the chosen settings."""
    try:
        plan.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f'--out = "{plan.folder}" cannot be written: {error.strerror}') from None
    try:
        with files.lock(plan.folder / ".tune.lock", seconds=0.2):
            return _search(plan, console)
    except files.Locked:
        raise UserError(f'--out = "{plan.folder}" is in use by another search') from None


def _search(plan: TunePlan, console: Console | None) -> Tuned:
    for config in {_data(job.config): job.config for job in plan.tuned}.values():
        workers.check(config)
    optuna = _claim(plan, study.has_optuna())
    rows = [_Row(job, plan, optuna) for job in plan.tuned]
    with (
        Pool(plan.tuned[0].config.engine.device, plan.folder / LOG) as pool,
        Board(console, lambda: _table(rows, plan.trials)) as board,
    ):
        if not optuna:
            board.say('Optuna is not installed: a fixed grid without pruning (pip install "promptfed[tune]")')
        waiting: dict[Path, tuple[_Row, Trial]] = {}

        def take() -> Job | None:
            # The row that is furthest behind, so that all have their trials at the same time.
            for row in sorted(rows, key=lambda row: len(row.study.trials())):
                trial = row.study.ask()
                if trial:
                    job = row.job(trial, board.draw)
                    waiting[job.folder] = row, trial
                    board.draw()
                    return job
            return None

        def end(job: Job, ended: Ended) -> None:
            row, trial = waiting.pop(job.folder)
            row.end(trial, ended)
            if ended.how != "killed":
                board.say(row.line(trial))

        pool.run(take, end)
    chosen = {}
    for row in rows:
        found = study.best(row.study)
        if found is None:
            raise row.error or UserError(f'tune: no trial of row "{row.label}" was completed')
        chosen[row.label] = found
    kept = C.read(plan.folder / TUNED)["compare"]["tuned"]["rows"] if (plan.folder / TUNED).exists() else {}
    files.write(plan.folder / TUNED, C.dump(tuned_file(plan, chosen, kept)).encode())
    return Tuned(plan.folder / TUNED, chosen, plan.trials)


def tune(
    preset: str | Path | None = None,
    *,
    methods: Sequence[str] = (),
    seeds: Sequence[int] = (),
    trials: int = 12,
    space: Sequence[str] = (),
    out: str | Path,
    only: str | Sequence[str] = (),
    mini: bool = False,
    **settings: Any,
) -> Tuned:
    """Tunes each row of a comparison on validation data, by the same number of trials, and writes a file for compare().
    `space` has words such as "method.lr=0.001..0.1" or "method.epochs=1|5"; by default the learning rates of each
    row's method are searched, from a tenth to ten times their values. `only`: search only rows whose label has this, or
    one of these, in it. Called again it goes on with what is not done, and with rows that were added.

    tune(methods=["fedvpt", "local+head"], trials=12, out="runs/tuning", dataset="cifar10", rounds=20)
    """
    source = Source(preset, settings, methods, seeds, mini)
    return execute(prepare(source, trials=trials, space=space, out=Path(out), only=only))


class _Row:
    """The search for one row."""

    def __init__(self, job: Planned, plan: TunePlan, optuna: bool) -> None:
        self.label, self._config = job.row.label, job.config
        self._folder = plan.folder / job.row.slug
        self._space = plan.spaces[self.label]
        self.error: UserError | None = None
        self.now: dict[int, int] = {}  # trials under way, and their rounds so far
        own = {key: _own(job.config, key, values) for key, values in self._space.items()}
        given = (self._folder, self._space, own, plan.trials)
        self.study: study.Study = (
            study.Optuna(*given, name=self.label, rounds=job.config.rounds, seed=job.seed)
            if optuna
            else study.Grid(*given)
        )

    def job(self, trial: Trial, draw: Callable[[], None]) -> Job:
        config = S.overlaid(self._config, trial.values)
        often = -(-config.rounds // _LOOKS)
        every = often if config.eval.every == "auto" else max(config.eval.every, often)
        self.now[trial.number] = 0

        def on_round(round: Round) -> bool:
            self.now[trial.number] = round.number
            draw()
            last = round.val is None or round.number == config.rounds
            return last or self.study.report(trial, round.number, round.val or 0.0)

        return Job(workers.as_trial(config, every), study.folder_of(self._folder, trial.number), on_round)

    def end(self, trial: Trial, ended: Ended) -> None:
        self.now.pop(trial.number)
        folder = study.folder_of(self._folder, trial.number)
        if ended.how == "killed":  # it goes on when the search is resumed
            return
        numbers = record.read_result(folder) if ended.how == "done" else None
        if numbers:
            self.study.tell(trial, "done", workers.objective(numbers))
        else:
            self.error = self.error or ended.error
            self.study.tell(trial, "pruned" if ended.how == "stopped" else "failed", None)
        workers.trim(folder)

    def line(self, trial: Trial) -> str:
        """What is to be told at the end of a trial, for a log."""
        now = next(one for one in self.study.trials() if one.number == trial.number)
        result = f"validation {percent(now.value)}" if now.state == "done" else now.state
        return f"{self.label}  trial {trial.number + 1}  {S.words(trial.values)}  {result}"


def _own(config: C.Config, key: str, values: S.Range | S.Choice) -> Any:
    """The row's own value of a setting."""
    section, _, name = key.partition(".")
    found = config.complete()[section]
    found = found[name] if name else found
    return found if isinstance(values, S.Range) else json.dumps(found).strip('"')


def _data(config: C.Config) -> str:
    """Equal for rows with the same data."""
    whole = config.complete()
    return json.dumps({key: whole[key] for key in ("seed", "dataset", "partition", "backbone", "join")})


def _claim(plan: TunePlan, optuna: bool) -> bool:
    """Refuses the folder of another search; -> whether Optuna proposes the trials, as at the beginning. Rows may be
    added to a search; those that are not searched now stay as they are."""
    file = plan.folder / ABOUT
    if file.exists():
        try:
            before = json.loads(file.read_text())
            there, trials, proposed = dict(before["rows"]), int(before["trials"]), before["search"]
        except (ValueError, TypeError, KeyError):
            raise UserError(f'--out: "{file}" is not the record of a search; choose another --out') from None
        rows = _rows(plan, there)
        _same(plan, rows, there, trials)
        if proposed == "optuna" and not optuna:
            raise UserError(f'--out = "{plan.folder}" was begun with Optuna: pip install "promptfed[tune]"')
        optuna = proposed == "optuna"
    elif any((plan.folder / name).exists() for name in (study.JOURNAL, "config.toml", "table.json", "choice.json")):
        raise UserError(f'--out = "{plan.folder}" holds something else than this search; choose another --out')
    else:
        rows = _rows(plan, {})
    about = {"search": "optuna" if optuna else "grid", "trials": plan.trials, "rows": rows}
    files.write(file, (json.dumps(about, indent=1) + "\n").encode())
    return optuna


def _rows(plan: TunePlan, there: Mapping[str, Any]) -> dict[str, Any]:
    """What is searched, by label. `there`: the record of an earlier search, whose other rows may have another space."""
    rows = {}
    for job in plan.jobs:
        label = job.row.label
        if job not in plan.tuned and label not in there:
            continue
        config = record.decisive(job.config.complete())
        if config["engine"] == {"precision": "fp32"}:  # as searches were recorded before there was another
            del config["engine"]
        words = {key: str(values) for key, values in plan.spaces[label].items()}
        rows[label] = {"config": config, "space": words if job in plan.tuned else there[label]["space"]}
    return rows


def _same(plan: TunePlan, rows: Mapping[str, Any], there: Mapping[str, Any], trials: int) -> None:
    """Refuses the folder of another search. `there`: the rows of the one before, which had so many trials."""
    for label, row in there.items():
        if row != rows.get(label):
            raise UserError(
                f'--out = "{plan.folder}" holds the search of another comparison: its row "{label}" '
                f"{_difference(row, rows.get(label))}; choose another --out"
            )
    if plan.trials < trials:
        raise UserError(f"{plan.option} = {plan.trials} must be at least the {trials} per row of the search in --out")
    aside = ", ".join(label for label in there if label not in plan.chosen)
    if aside and plan.trials > trials:
        raise UserError(
            f"{plan.option} = {plan.trials} must be {trials}, as for the rows that --only leaves out: {aside}"
        )


def _difference(there: Any, here: Any) -> str:
    """In what two rows differ."""
    if here is None:
        return "is not in this one"
    for part in ("config", "space"):
        before, now = _flat(there[part]), _flat(here[part])
        for key in {**before, **now}:
            if before.get(key) != now.get(key):
                where = f"space of {key}" if part == "space" else key
                return f"has another {where}: {before.get(key)}, not {now.get(key)}"
    return "differs"


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in table.items():
        found |= _flat(value, f"{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return found


def _table(rows: Sequence[_Row], trials: int) -> Rich:
    shown = Rich(title="tuning on validation data", title_justify="left")
    for header in ("row", "trials", "pruned", "best", "with", "now"):
        shown.add_column(header, justify="right" if header in ("trials", "pruned", "best") else "left", overflow="fold")
    for row in rows:
        known = row.study.trials()
        ended = [trial for trial in known if trial.state != "running"]
        found = study.best(row.study)
        now = ", ".join(f"trial {number + 1} round {round}" for number, round in row.now.items())
        shown.add_row(
            row.label,
            f"{len(ended)}/{trials}",
            str(sum(trial.state == "pruned" for trial in ended)),
            percent(found.value if found else None),
            S.words(found.values) if found else "",
            now,
        )
    return shown


# ---- the file for compare


def tuned_file(plan: TunePlan, chosen: Mapping[str, Trial], kept: Mapping[str, C.Table] | None = None) -> C.Table:
    """The comparison as it was given, with the chosen settings in [compare.tuned], which go over everything else.
    `kept`: those of rows that were searched before."""
    source = plan.source
    file = C.read(source.preset) if source.preset else {}
    given, spec = C.undot(source.settings.items()), dict(file.get("compare", {}))

    def scaled(table: Mapping[str, Any]) -> C.Table:
        """A mini table: given settings go over those that it has."""
        return {
            key: {k: given.get(key, {}).get(k, v) for k, v in value.items()}
            if key in C.SECTIONS
            else given.get(key, value)
            for key, value in C.undot(table.items()).items()
        }

    def part(table: Mapping[str, Any], over: Mapping[str, Any]) -> C.Table:
        """A row or a column, with its settings under the given ones."""
        kept = {key: table[key] for key in BESIDE if key in table}
        if isinstance(kept.get("mini"), Mapping):
            kept["mini"] = scaled(kept["mini"])
        if source.seeds:
            kept.pop("seeds", None)
        return {
            **kept,
            **C.merge(C.undot((k, v) for k, v in table.items() if k not in BESIDE), over),
        }

    rows = [{"method": {"name": name}} for name in completed(source.methods)] or spec.get("rows", [])
    spec["rows"] = [part(row, {}) for row in rows]
    if "columns" in spec:
        spec["columns"] = [part(column, given) for column in spec["columns"]]
    small = dict(file.get("mini", {}))
    small = {**small, **scaled({key: value for key, value in small.items() if key != "seeds"})}
    if source.seeds:
        spec["seeds"] = list(source.seeds)
        small |= {"seeds": list(source.seeds)} if small else {}
    spec["tuned"] = {
        "trials": plan.trials,
        "mini": source.mini,
        "rows": {**(kept or {}), **{label: S.table(trial.values) for label, trial in chosen.items()}},
    }
    whole = C.merge(api.without_compare(file), given)
    return {**whole, **({"mini": small} if small else {}), "compare": spec}
