"""One HTML file about some runs. It loads nothing: it is read offline, on a phone, in light and dark.

The modules gather what each section says into dataclasses; its words and HTML are in templates/.
"""

from __future__ import annotations

import datetime
import functools
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from ... import files
from ...errors import UserError
from ...runs import record
from .. import gather, numbers, page_charts, style
from ..gather import ReportData
from . import images, sections
from .head import Head, head
from .images import Figure
from .privacy import Privacy, privacy
from .reproduce import reproduce
from .table import results


@dataclass(frozen=True)
class Section:
    template: str
    name: str  # in the list of sections
    heading: str
    view: Any  # what the template shows: a dataclass of its module

    @property
    def anchor(self) -> str:
        return self.name.lower().replace(" ", "-")


@dataclass(frozen=True)
class Page:
    head: Head
    privacy: Privacy | None
    problems: list[str]
    sections: list[Section]
    looks: dict[str, style.Look]  # label -> its colour and line
    data: dict[str, Any]  # for page.js
    made: str
    version: str


def write(folders: Sequence[Path], out: Path) -> Path:
    """The report on these folders of runs and comparisons. What cannot be shown is a warning, and noted on the page."""
    text, problems = build(gather.gather(folders), out)
    for problem in problems:
        warnings.warn(problem, stacklevel=2)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        files.write(out, text.encode())
    except OSError as error:
        raise UserError(f'--out = "{out}" cannot be written: {error.strerror}') from None
    return out


def build(data: ReportData, out: Path = Path("report.html")) -> tuple[str, list[str]]:
    """The page, and sentences on what is missing from it."""
    page = view(data, out)
    return render(page), page.problems


def view(data: ReportData, out: Path) -> Page:
    figures, unseen = images.embed(images.find(data))
    of_kind: dict[str, list[Figure]] = {"partition": [], "analysis": [], "picture": []}
    for figure in figures:
        of_kind[figure.picture.kind].append(figure)
    clients, curves, communication = sections.clients(data), sections.curves(data), sections.communication(data)
    partition, private = sections.partition(data, of_kind["partition"]), privacy(data)
    who = ("Sites", "Sites: samples per site") if partition.sites else ("Partition", "Partition: samples per client")
    each = [
        Section("results", "Results", "Results", results(data)),
        Section("clients", "Clients", "Clients", clients),
        Section("curves", "Curves", "Learning curves", curves),
        Section("communication", "Communication", "Communication against accuracy", communication),
        Section("left_out", "Left out", "Clients left out of a round", sections.left_out(data)),
        Section("privacy", "Privacy", "Privacy", private),
        Section("partition", *who, partition),
        Section("analyses", "Analyses", "Analyses", of_kind["analysis"]),
        Section("pictures", "Pictures", "Pictures", of_kind["picture"]),
        Section("reproduce", "Reproduce", "How to reproduce this", reproduce(data, out)),
    ]
    charts = [clients.chart, curves.chart, communication.chart, *(chart for _, chart in partition.charts)]
    order = list(numbers.MEASURES)
    script = {
        "labels": [group.label for group in data.groups],
        "dark": page_charts.DARK,
        "measures": [{"name": k, "index": order.index(k), "title": title} for k, title in curves.measures.items()],
        "charts": [{"name": chart.name, "alt": chart.alt, "spec": chart.spec} for chart in charts if chart],
    }
    return Page(
        head(data),
        private,
        [*data.problems, *unseen],
        [section for section in each if section.view],
        style.looks(group.label for group in data.groups),
        script,
        datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
        record.versions()["promptfed"],
    )


def render(page: Page) -> str:
    env = Environment(
        loader=PackageLoader(__package__), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    env.policies["json.dumps_kwargs"] = {"allow_nan": False, "ensure_ascii": False, "separators": (",", ":")}
    return env.get_template("page.html").render(page=page, bundle=bundle())


@functools.cache
def bundle() -> str:
    """Vega, Vega-Lite and Vega-Embed, in the version the charts are written for."""
    import vl_convert

    text: str = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")
    return text.replace("</script", "<\\/script")
