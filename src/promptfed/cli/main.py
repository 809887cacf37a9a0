"""The command line."""

from __future__ import annotations

import errno
import json
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from typer.core import TyperGroup

from ..errors import UserError, nearest, unknown
from . import flower, interrupts, lazy
from .analyse import analyse
from .serving import export, join, predict

if TYPE_CHECKING:
    from .. import privacy
    from ..runs import api, build, comparison, dryrun, tables
    from ..runs import config as C
    from . import catalog, view
else:
    api, build, catalog, comparison = map(lazy.Module, ("runs.api", "runs.build", "cli.catalog", "runs.comparison"))
    dryrun, privacy, tables, view, C = map(
        lazy.Module, ("runs.dryrun", "privacy", "runs.tables", "cli.view", "runs.config")
    )


class Commands(TyperGroup):
    """Tells how a setting is written where one is taken for an option: --rounds 3 for rounds=3."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except Exception as error:
            option: str | None = getattr(
                error, "option_name", None
            )  # click's own, which typer has in a place of its own
            similar: list[str] | None = getattr(error, "possibilities", None)
            if option is None or similar is None or ctx.invoked_subcommand not in ("run", "compare", "partition"):
                raise
            name = option.lstrip("-")
            like = nearest(name, (other.lstrip("-") for other in similar))
            setting = f"{name.replace('-', '_')}=VALUE"
            raise UserError(
                f"{option} is not an option of {ctx.invoked_subcommand}{like} (a setting is written {setting})"
            ) from None


app = typer.Typer(
    cls=Commands,
    help="Prompt-based federated learning over vision models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
console = Console()

Words = Annotated[
    list[str] | None,
    typer.Argument(metavar="[CONFIG.toml|PRESET] [key=value ...]", help="a file or preset, then settings"),
]
Mini = Annotated[bool, typer.Option("--mini", help="at the small scale that the file has besides, its [mini]")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="print what it would cost, and stop: needs no data and no weights")
]
Out = Annotated[Path | None, typer.Option("--out", help="the folder to write into (default: one below runs/)")]


def _version(wanted: bool) -> None:
    if wanted:
        print(f"promptfed {version('promptfed')}")
        raise typer.Exit()


@app.callback()
def start(
    version: Annotated[
        bool, typer.Option("--version", help="print the version, and stop", is_eager=True, callback=_version)
    ] = False,
) -> None:
    """Prompt-based federated learning over vision models."""


@app.command()
def run(
    words: Words = None,
    out: Out = None,
    resume: Annotated[bool, typer.Option("--resume", help="go on with the run in --out")] = False,
    mini: Mini = False,
    dry_run: DryRun = False,
) -> None:
    """Train and evaluate one configuration."""
    source, given = _split(words)
    tables = [*(api.without_compare(table) for table in source), given]
    if mini:
        tables = [comparison.small_scale(source, tables)]
    if resume:
        config, folder = api.resumed(out, [*source, given])
    else:
        config = C.make(*tables)
        folder = out or api.fresh(config)
    if dry_run:
        console.print(dryrun.table([(config.method.name, 1, config)]))
        return
    with (
        _interruptible(f"promptfed run --resume --out {folder}"),
        view.Live(console, config.method.name, config.rounds, config.eval.every) as live,
    ):
        result = api.execute(config, folder, resume, view=live)
    console.print(view.outcome(result.numbers))
    if "privacy" in result.numbers:
        console.print(privacy.sentence(result.numbers["privacy"]), soft_wrap=True, highlight=False)
    _draw_run(folder)


@app.command()
def compare(
    words: Words = None,
    methods: Annotated[
        str, typer.Option("--methods", help="comma-separated; default: the file's [[compare.rows]]")
    ] = "",
    seeds: Annotated[str, typer.Option("--seeds", help="comma-separated; default: the file's, or 0")] = "",
    only: Annotated[str, typer.Option("--only", help="the rows whose label has this in it")] = "",
    out: Out = None,
    mini: Mini = False,
    dry_run: DryRun = False,
) -> None:
    """Run several methods and seeds on the same partition; the same command again goes on with what is not done."""
    source, given = _split(words)
    file = source[0] if source else {}
    spec: dict[str, Any] = file.get("compare", {})
    name = "comparison"
    if words and "=" not in words[0]:  # of experiments/pfedpg/table4.toml: pfedpg-table4
        name = "-".join(part for part in (Path(words[0]).parent.name, Path(words[0]).stem) if part)
    folder = out or Path("runs") / (f"{name}-mini" if mini else name)
    named = [m.strip() for m in methods.split(",") if m.strip()]
    rows = comparison.rows(spec, named, _numbers("--seeds", seeds), comparison.small(file, mini))
    whole = comparison.plan([api.without_compare(file), given], rows, folder, comparison.named(spec))
    jobs = [job for job in whole if only.lower() in job.row.label.lower()]
    if not jobs:
        raise UserError(f'--only = "{only}" is in no label of a row')
    if dry_run:
        each = [(job.row.label, len(job.row.seeds), job.config) for job in jobs if job.seed == job.row.seeds[0]]
        console.print(dryrun.table(each))
        return
    comparison.claim(whole, folder)
    comparison.check(jobs)

    def watch(number: int, job: comparison.Job) -> view.Live:
        label = f"{job.row.label} (seed {job.seed})" if len(job.row.seeds) > 1 else job.row.label
        return view.Live(console, f"{number}/{len(jobs)} {label}", job.config.rounds, job.config.eval.every)

    again = " ".join(["promptfed compare", *sys.argv[2:]])
    with _interruptible(again):
        failed = comparison.work(jobs, watch)
    # Rows that --only leaves out are in the table all the same, where they are done.
    left_out = (job for job in whole if only.lower() not in job.row.label.lower())
    results = comparison.collect(whole, [*left_out, *(job for job, _ in failed)])
    if results:
        scale = comparison.scale(whole, results, words[0] if words else "")
        _show_comparison(folder, results, comparison.places(rows), scale)
    comparison.complain(failed, results)
    if not results:
        raise UserError(f'--out = "{folder}": every run is held by another process')


def _show_comparison(folder: Path, results: dict[str, list[api.Result]], places: tables.Places, scale: str) -> None:
    from ..report import draw_comparison

    console.print(view.comparison(tables.save(results, folder, places, scale)))
    pictures = draw_comparison(folder, results, places)
    console.print(f"tables and pictures in {folder}: {', '.join(p.name for p in pictures)}", soft_wrap=True)


@app.command()
def watch(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="the folder of a run or of a comparison")],
) -> None:
    """Follow a run or a comparison that another process is at work on, until it ends."""
    with interrupts.at_once():
        from ..runs.watch import watch as follow
    try:
        follow(folder, console)
    except KeyboardInterrupt:  # the run itself goes on
        raise typer.Exit(interrupts.CODE) from None


@app.command()
def partition(
    words: Words = None,
    out: Annotated[Path, typer.Option("--out", help="the picture to write")] = Path("partition.png"),
    save: Annotated[Path | None, typer.Option("--save", help="also write the split, for partition.file")] = None,
) -> None:
    """Draw who would hold what, without training."""
    source, given = _split(words)
    config = C.make(*(api.without_compare(table) for table in source), given)
    from ..report import draw_partition, style  # slow to import

    style.check(out)
    federation = build.split(config)
    draw_partition(federation, out)
    if save:
        federation.save(save)
    table = Table(title=f"{federation.dataset.name}: {len(federation.sites)} clients", title_justify="left")
    for header in ("client", "train", "validation", "test", "classes"):
        table.add_column(header, justify="right" if header != "client" else "left")
    counts = federation.label_counts()
    for site, row in list(zip(federation.sites, counts, strict=True))[:20]:
        table.add_row(site.name, str(len(site.train)), str(len(site.val)), str(len(site.test)), str((row > 0).sum()))
    if len(federation.sites) > 20:
        table.caption = f"and {len(federation.sites) - 20} more"
    console.print(table)
    console.print(f"picture: {out}", soft_wrap=True)


@app.command("list")
def list_(
    what: Annotated[
        str | None, typer.Argument(help="methods, datasets, backbones, partitions or presets; default: all")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="for programs")] = False,
) -> None:
    """Show what there is."""
    if what is not None and what not in catalog.LISTS:
        raise unknown("list", what, catalog.LISTS)
    lists = {name: rows() for name, rows in catalog.LISTS.items() if what in (None, name)}
    if as_json:
        print(json.dumps(lists[what] if what else lists, indent=1))
        return
    for name, rows in lists.items():
        table = Table(title=None if what else name, title_justify="left")
        for key in rows[0]:
            if key != "settings":
                table.add_column(key, overflow="fold", no_wrap=key == "name")
        for row in rows:
            table.add_row(*(str(value) for key, value in row.items() if key != "settings"))
        console.print(table)
        if name == "methods":
            console.print(catalog.PLUG_INS, highlight=False)


@app.command()
def report(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR...", help="folders of runs or comparisons")],
    out: Annotated[Path, typer.Option("--out", help="the page to write")] = Path("report.html"),
) -> None:
    """Put runs and comparisons on one HTML page that is read without a network."""
    with interrupts.at_once():
        from .report import report as write
    write(folders, out)


app.command()(predict)
app.command()(export)
app.command()(join)
app.command()(analyse)
app.add_typer(flower.app, name="flower")


def _split(words: list[str] | None) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The file's or preset's tables, if the first word is one; and the settings."""
    words = list(words or [])
    source = [C.read(words.pop(0))] if words and "=" not in words[0] else []
    return source, C.parse_assignments(words)


def _numbers(option: str, text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise UserError(f'{option} = "{text}" must be whole numbers with commas between them') from None


def _draw_run(folder: Path) -> None:
    from ..report import draw_run  # altair is slow to import, and not every command draws

    pictures = draw_run(folder)
    console.print(f"everything is in {folder}: result.json, {', '.join(p.name for p in pictures)}", soft_wrap=True)


@contextmanager
def _interruptible(again: str) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        console.print(f"\nstopped; all completed rounds are kept. Go on with:\n  {again}", soft_wrap=True)
        raise typer.Exit(interrupts.CODE) from None


def main() -> None:
    warnings.showwarning = lambda message, *_, **__: Console(stderr=True).print(f"warning: {message}", style="yellow")
    if not console.is_terminal:
        os.environ.setdefault("COLUMNS", "120")  # tables in a file or a pipe need not fit a screen
    sys.path.insert(0, "")  # method=my_module:MyMethod, next to where the command is run
    try:
        app()
    except UserError as error:
        sys.exit(f"promptfed: {error}")
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        sys.exit("promptfed: no space left on the device; free some and resume, completed rounds are kept")
