"""A result in the cell of a notebook: a small table, and the curves of its rounds."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

import altair as alt
import vl_convert

from ..errors import UserError
from ..runs.opened import Run
from . import run_charts, style

if TYPE_CHECKING:
    from ..runs.api import Result


def curves(folder: Path) -> style.Chart:
    """Accuracies and training loss over the rounds, as they look in a report."""
    chart = run_charts.curves(Run(folder))
    if chart is None:
        raise UserError(f'"{folder}" has no evaluated round to plot')
    found: style.Chart = alt.Chart.from_dict({**chart.to_dict(), "config": style.THEME})
    return found


def html(result: Result) -> str:
    rows = []
    for stage, kinds in result.numbers["metrics"].items():
        local, whole = kinds["last"]["local"], kinds["last"]["global"]
        values = ("–" if value is None else f"{value:.1%}" for value in (local["mean"], local["worst"], whole))
        cells = "".join(f"<td>{cell}</td>" for cell in (escape(stage.replace("_", " ")), *values))
        rows.append(f"<tr>{cells}</tr>")
    head = "".join(f"<th>{name}</th>" for name in ("", "local", "worst", "global"))
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    chart = run_charts.curves(Run(result.folder))
    picture = vl_convert.vegalite_to_svg({**chart.to_dict(), "config": style.THEME}) if chart else ""
    return f"<p>{escape(repr(result)[1:-1])}</p>{table}{picture}"
