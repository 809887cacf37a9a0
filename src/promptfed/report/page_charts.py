"""The charts that a report's page embeds: those of the PNG files, as wide as the page and with its legend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import altair as alt

from . import charts, run_charts, style
from .gather import Group, ReportData
from .marks import client_names
from .numbers import thin

Spec = dict[str, Any]
_SITES = 400  # bars in a chart of a partition

DARK = {**style.PALETTE, style.GREY: "#A3ABB5", style.INK: "#E8EAED"}  # colours on a dark background


@dataclass(frozen=True)
class Chart:
    name: str
    alt: str  # what it shows, for readers who cannot see it
    spec: Spec


def curves(found: ReportData) -> tuple[Chart | None, dict[str, str]]:
    """A measure over rounds; and the measures that are known of some run, by name."""
    chart, known = charts.curves(found)
    about = "Line chart: " + "; ".join(known.values()) + ", over communication rounds."
    return _embedded("curves", about, chart, 340), known


def communication(found: ReportData) -> Chart | None:
    about = "Line chart: local accuracy in per cent over the megabytes that a client has exchanged with the server."
    return _embedded("communication", about, charts.communication(found), 340)


def clients(found: ReportData) -> Chart | None:
    return _embedded("clients", "Dot plot: accuracy of each client, by method.", charts.accuracies(found))


def samples(group: Group, number: int) -> Chart | None:
    """How many samples each client has, by what they are used for."""
    shares = group.first.run.shares
    if not shares:
        return None
    some = thin(range(len(shares)), _SITES)
    shown = [shares[i] for i in some]
    chart = run_charts.samples(client_names([share.name for share in shown], some), shown)
    about = f"Stacked bars: training, validation and test samples of {len(some)} clients."
    return _embedded(f"samples-{number}", about, chart, 220)


def _embedded(name: str, about: str, chart: style.Chart | None, height: int | None = None) -> Chart | None:
    if chart is None:
        return None
    size = {"height": height} if height else {}
    fit = alt.AutoSizeParams(type="fit-x", contains="padding")
    spec: Spec = chart.properties(width="container", autosize=fit, **size).to_dict()
    spec.pop("$schema")
    spec["config"] = {"legend": {"disable": True}}  # of labels: the page has one for all charts
    return Chart(name, about, spec)
