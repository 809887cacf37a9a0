"""The commands that use what was recorded and trained: table, report, analyse, predict, export and join."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from ..analysis import ANALYSES, Options, make
from ..errors import UserError, unknown
from . import lazy
from .common import console

if TYPE_CHECKING:
    from ..runs import comparison, curves, opened, sheets, tables
    from ..serving import joining, loading
else:
    joining, loading, opened = map(lazy.Module, ("serving.joining", "serving.loading", "runs.opened"))
    comparison, curves, sheets = map(lazy.Module, ("runs.comparison", "runs.curves", "runs.sheets"))
    tables = lazy.Module("runs.tables")

_LIST = "; ".join(f"{name}: {analysis.about}" for name, analysis in ANALYSES.items())
FORMATS = ("table", "json", "csv")

Run = Annotated[Path, typer.Argument(metavar="RUN", help="the folder of a run")]
Model = Annotated[Path, typer.Argument(metavar="RUN", help="the folder of a run, or an exported model")]
Client = Annotated[str | None, typer.Option("--client", help="whose model: a number from 0 on, or the site's name")]
Common = Annotated[bool, typer.Option("--global", help="the global model, where there is one")]
Device = Annotated[str, typer.Option("--device", help="auto, cpu, cuda, cuda:N or mps")]


def predict(
    run: Model,
    images: Annotated[list[Path], typer.Argument(metavar="IMAGES...", help="files, and folders with all below them")],
    client: Client = None,
    common: Common = False,
    form: Annotated[str, typer.Option("--format", help="table, json or csv")] = "table",
    top: Annotated[int, typer.Option("--top", min=1, help="how many classes to print per image")] = 3,
    batch: Annotated[int, typer.Option("--batch", min=1, help="images per forward pass")] = 128,
    backbone: Annotated[
        str | None, typer.Option("--backbone", help="where an exported model finds its pre-trained weights")
    ] = None,
    trust: Annotated[bool, typer.Option("--trust", help="import the module of an exported model's own method")] = False,
    device: Device = "auto",
) -> None:
    """Classify images with the model of one client or the global model."""
    if form not in FORMATS:
        raise unknown("--format", form, FORMATS)
    model = loading.load(run, client=client, common=common, backbone=backbone, device=device, trust=trust)
    found = model.predict(images, batch)
    best = found.top(top)
    if form == "json":
        tops = [[{"class": label, "probability": round(p, 6)} for label, p in ranked] for ranked in best]
        entries = [
            {"image": name, "label": top[0]["class"], "top": top} for name, top in zip(found.names, tops, strict=True)
        ]
        print(json.dumps(entries, indent=1))
    elif form == "csv":
        rows = csv.writer(sys.stdout, lineterminator="\n")
        rows.writerow(["image", "rank", "class", "probability"])
        for name, ranked in zip(found.names, best, strict=True):
            rows.writerows([name, i, label, f"{p:.6f}"] for i, (label, p) in enumerate(ranked, 1))
    else:
        table = Table()
        table.add_column("image", overflow="fold")
        for i in range(len(best[0])):
            table.add_column("class" if i == 0 else f"{i + 1}.")
            table.add_column("%", justify="right")
        for name, ranked in zip(found.names, best, strict=True):
            table.add_row(name, *(cell for label, p in ranked for cell in (label, f"{100 * p:.1f}")))
        console.print(table)


def export(
    run: Run,
    client: Client = None,
    common: Common = False,
    out: Annotated[
        Path | None, typer.Option("--out", help="the .safetensors file (default: below exports/ in the run's folder)")
    ] = None,
    peft: Annotated[
        bool, typer.Option("--peft", help="LoRA or text prompts for the peft library instead: --out is a folder")
    ] = False,
) -> None:
    """Write one model as a file of its own, which promptfed.load() and `promptfed predict` take."""
    file = loading.export(run, out, client=client, common=common, peft=peft)
    about = "adapter_config.json" if peft else file.with_suffix(".json").name
    console.print(f"{file} ({file.stat().st_size:,} bytes), described by {about}", soft_wrap=True)


def join(
    run: Run,
    data: Annotated[Path, typer.Option("--data", help="the new site's images: class/*.jpg")],
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="rounds of local training, alone")] = 1,
    out: Annotated[Path | None, typer.Option("--out", help="the folder to write (default: one below runs/)")] = None,
    device: Device = "auto",
) -> None:
    """Train a model for a new site from a finished run, which is not changed."""
    joined = joining.join(run, data, rounds=rounds, out=out, device=device)
    numbers = joined.numbers
    table = Table(title=f"{numbers['site']}: test accuracy in %, {numbers['n_test']} images", title_justify="left")
    for header in ("class", "images", "before", "after"):
        table.add_column(header, justify="left" if header == "class" else "right")
    before, after = numbers["before"], numbers["after"]
    for name, row in before["classes"].items():
        table.add_row(name, str(row["n"]), _percent(row["accuracy"]), _percent(after["classes"][name]["accuracy"]))
    table.add_row("all", str(numbers["n_test"]), _percent(before["accuracy"]), _percent(after["accuracy"]))
    console.print(table)
    console.print(
        f"everything is in {joined.folder}: {joining.MODEL} for promptfed predict, join.json, join.png", soft_wrap=True
    )


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}"


def analyse(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="the folder of a finished run, or of a comparison")],
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME...]", help=f"which ones; default: all that apply. {_LIST}")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="where to write (default: RUN/analysis)")] = None,
    client: Annotated[
        list[str] | None,
        typer.Option(
            "--client", help="whose models, by number or site, or all; may be given several times (default: some)"
        ),
    ] = None,
    images: Annotated[
        int | None, typer.Option("--images", min=1, help="how many: shown, of pure colours, or of each class")
    ] = None,
    label: Annotated[str, typer.Option("--class", metavar="NAME", help="only images of this class (attention)")] = "",
) -> None:
    """Make pictures, tables and captions of what a finished run, or a comparison, has learnt."""
    everyone = client == ["all"]
    named = tuple(map(opened.Run(run).number, client or ())) if not everyone else ()
    made = make(run, names or (), out, Options(named, images, everyone, label))
    for name, files in made.files.items():
        console.print(f"{name}: {', '.join(str(file) for file in files)}", soft_wrap=True)
    for name, why in made.left_out.items():
        console.print(f"{name} left out: {why.removeprefix(f'{name}: ')}", soft_wrap=True, style="dim")
    if not made.files:
        raise UserError(f'no analysis applies to "{run}"')


def table(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="the folder of a comparison")],
    against: Annotated[str, typer.Option("--against", help="the row to compare the others with")] = "",
    latex: Annotated[bool, typer.Option("--latex", help="as LaTeX, with the rules of booktabs")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="as Markdown")] = False,
    csv: Annotated[bool, typer.Option("--csv", help="as CSV: numbers only, accuracies as fractions")] = False,
    rounds: Annotated[bool, typer.Option("--rounds", help="accuracy by round, in place of that of the last")] = False,
) -> None:
    """Print the tables of a comparison, for people or in a format for papers and programs."""
    if latex + markdown + csv > 1:
        raise UserError("table: choose one of --latex, --markdown and --csv")
    if rounds and against:
        raise UserError("table: --against compares the last round, and cannot be given with --rounds")
    found = comparison.read(folder, against)
    rows = found.table
    if csv:
        print(sheets.csv_of(curves.records(found) if rounds else tables.records(rows)), end="")
        return
    shown = curves.by_round(found, rows) if rounds else tables.sheets(rows)
    if latex or markdown:
        write = sheets.latex if latex else sheets.markdown
        print(write(shown, tables.scales(rows), [] if rounds else tables.notes(rows)), end="")
    else:
        console.print(curves.shown(shown) if rounds else tables.comparison(rows))


def report(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR...", help="folders of runs or comparisons")],
    out: Annotated[Path, typer.Option("--out", help="the page to write")] = Path("report.html"),
    against: Annotated[
        str, typer.Option("--against", help="the row to compare the others with (default: the comparison's)")
    ] = "",
) -> None:
    """Write one HTML page about runs and comparisons; it works offline."""
    with lazy.at_once():
        from ..report.page import write  # altair is slow to import, and not every command draws
    path = write(folders, out, against)
    console.print(f"report: {path} ({path.stat().st_size / 1e6:.1f} MB)", soft_wrap=True)
