"""The commands that train: run and compare; watch follows them, partition shows their data."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from .. import files
from ..errors import UserError
from . import lazy
from .common import Out, Words, console, interruptible, names, numbers, split

if TYPE_CHECKING:
    from .. import privacy
    from ..runs import api, build, claims, comparison, display, dryrun, progress, record, tables
    from ..search import tune as searching
else:
    searching = lazy.Module("search.tune")
    api, build, comparison, dryrun = map(lazy.Module, ("runs.api", "runs.build", "runs.comparison", "runs.dryrun"))
    privacy, progress, record = map(lazy.Module, ("privacy", "runs.progress", "runs.record"))
    claims, display, tables = map(lazy.Module, ("runs.claims", "runs.display", "runs.tables"))

Mini = Annotated[bool, typer.Option("--mini", help="use the small scale of the file, its [mini] table")]
Only = Annotated[
    list[str] | None, typer.Option("--only", help="only rows whose label contains this; may be given several times")
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="print the expected cost and stop; needs no data and no weights")
]
_CLIENTS = 20  # that the table of a partition lists


def run(
    words: Words = None,
    out: Out = None,
    resume: Annotated[bool, typer.Option("--resume", help="resume the run in --out")] = False,
    mini: Mini = False,
    dry_run: DryRun = False,
) -> None:
    """Train and evaluate one configuration."""
    preset, given = split(words)
    plan = api.prepare(preset, given, out=out, resume=resume, mini=mini)
    config, folder = plan.config, plan.folder
    if dry_run:
        console.print(dryrun.table([(config.method.name, 1, config)]))
        return
    api.check_fit(plan)
    with (
        interruptible(f"promptfed run --resume --out {folder}"),
        progress.Live(console, config.method.name, config.rounds) as live,
    ):
        result = api.execute(plan, view=live)
    console.print(tables.outcome(result.numbers))
    if result.numbers["frozen"]["views"]:
        console.print(result.numbers["frozen"]["views"], soft_wrap=True, highlight=False)
    if "privacy" in result.numbers:
        console.print(privacy.sentence(result.numbers["privacy"]), soft_wrap=True, highlight=False)
    from ..report import draw_run  # slow to import, and not every command draws

    pictures = ", ".join(picture.name for picture in draw_run(folder))
    console.print(f"everything is in {folder}: result.json, {pictures}", soft_wrap=True)
    if why := record.unused(result.numbers):
        raise UserError(why)


def compare(
    words: Words = None,
    methods: Annotated[
        str, typer.Option("--methods", help="comma-separated; default: the file's [[compare.rows]]")
    ] = "",
    seeds: Annotated[str, typer.Option("--seeds", help="comma-separated; default: the file's, or 0")] = "",
    only: Only = None,
    against: Annotated[
        str, typer.Option("--against", help="the row to compare the others with: differences and their intervals")
    ] = "",
    out: Out = None,
    mini: Mini = False,
    tune: Annotated[
        int | None, typer.Option("--tune", help="first tune every row on validation data, by this many trials each")
    ] = None,
    dry_run: DryRun = False,
) -> None:
    """Run several methods and seeds on the same partition; the same command again continues with what is not done."""
    preset, given = split(words)
    rows, each, folder = names(methods), numbers("--seeds", seeds), out or folder_for(preset, mini)
    again = " ".join(["promptfed compare", *sys.argv[2:]])
    if tune is not None:
        if dry_run:
            raise UserError("--tune cannot be combined with --dry-run")
        source = searching.Source(preset, given, rows, each, mini)
        wanted = searching.for_comparison(source, tune, folder, only or ())
        with interruptible(again):
            preset, given, rows, each = str(searching.execute(wanted, console).file), {}, [], []
    plan = comparison.prepare(
        preset, given, methods=rows, seeds=each, out=folder, mini=mini, only=only or (), against=against
    )
    jobs = plan.chosen
    if dry_run:
        first = [(job.row.label, len(job.row.seeds), job.config) for job in jobs if job.seed == job.row.seeds[0]]
        console.print(dryrun.table(first))
        return

    with interruptible(again), display.bars(console):
        outcome = comparison.execute(plan, partial(comparison.live, console, len(jobs)))
    if outcome.table and outcome.missing:  # the process that ends last has all of it, and draws
        console.print(tables.comparison(outcome.table))
    elif outcome.table:
        from ..report import draw_claims, draw_comparison  # slow to import, and not every command draws

        if verdicts := claims.judge(plan.claims, outcome.results, plan.layout):
            claims.save(verdicts, plan.folder / "claims.json")
            console.print(claims.show(verdicts))
            drawn = [draw_claims(verdicts, plan.folder / "claims.png")]
        else:
            console.print(tables.comparison(outcome.table))
            drawn = draw_comparison(plan.folder, outcome.results, plan.layout)
        pictures = ", ".join(picture.name for picture in drawn)
        console.print(f"tables and pictures in {plan.folder}: {pictures}", soft_wrap=True)
    comparison.complain(outcome)


def folder_for(preset: str | None, mini: bool) -> Path:
    """runs/pfedpg-table4 of experiments/pfedpg/table4.toml"""
    name = "-".join(filter(None, (Path(preset).parent.name, Path(preset).stem))) if preset else "comparison"
    return Path("runs") / (f"{name}-mini" if mini else name)


def watch(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="the folder of a run or of a comparison")],
) -> None:
    """Follow a run or a comparison of another process until it ends."""
    try:
        progress.watch(folder, console)
    except KeyboardInterrupt:  # the run itself goes on
        raise typer.Exit(lazy.INTERRUPTED) from None


def partition(
    words: Words = None,
    out: Annotated[Path, typer.Option("--out", help="the picture to write")] = Path("partition.png"),
    save: Annotated[Path | None, typer.Option("--save", help="also write the split, for partition.file")] = None,
) -> None:
    """Draw how the data would be split over clients, without training."""
    preset, given = split(words)
    config = api.prepare(preset, given).config
    from ..report import draw_partition, style  # slow to import

    style.check(out)
    files.refuse_foreign(out, style.MARK, "--out")
    if save:
        files.refuse_foreign(save, b'{"format": 1, "dataset": ', "--save")
    with display.bars(console):
        federation = build.split(config)
    draw_partition(federation, out)
    if save:
        federation.save(save)
    table = Table(title=f"{federation.dataset.name}: {len(federation.sites)} clients", title_justify="left")
    for header in ("client", "train", "validation", "test", "classes"):
        table.add_column(header, justify="right" if header != "client" else "left")
    counts = federation.label_counts()
    for site, row in list(zip(federation.sites, counts, strict=True))[:_CLIENTS]:
        table.add_row(site.name, str(len(site.train)), str(len(site.val)), str(len(site.test)), str((row > 0).sum()))
    if len(federation.sites) > _CLIENTS:
        table.caption = f"and {len(federation.sites) - _CLIENTS} more"
    console.print(table)
    console.print(f"picture: {out}", soft_wrap=True)
