"""One HTML file about some runs. It loads nothing: it is read offline, on a phone, in light and dark.

The modules gather what each section says; its words and HTML are in templates/.
"""

from __future__ import annotations

import datetime
import functools
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import vl_convert
from jinja2 import Environment, PackageLoader, StrictUndefined

from ... import files
from ...errors import UserError
from ...runs import record
from .. import gather, style
from ..gather import ReportData
from ..numbers import MEASURES
from . import images, sections
from .head import head
from .table import results


class Section(NamedTuple):
    template: str
    name: str  # in the list of sections
    heading: str
    view: Any  # what the template shows


def write(folders: Sequence[Path], out: Path, against: str = "") -> Path:
    """The report on these folders of runs and comparisons. What cannot be shown is a warning, and noted on the page.
    `against`: the row to compare the others with."""
    files.refuse_foreign(out, b'content="promptfed"', "--out")
    text, problems = build(gather.gather(folders, against), out)
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
    return render(page), page["problems"]


def view(data: ReportData, out: Path) -> dict[str, Any]:
    figures, unseen = images.embed(images.find(data))
    clients, curves, communication = sections.clients(data), sections.curves(data), sections.communication(data)
    partition = sections.partition(data, [figure for figure in figures if figure.partition])
    privacy, looks = sections.privacy(data), style.looks(group.label for group in data.groups)
    who = ("Sites", "Sites: samples per site") if partition["sites"] else ("Partition", "Partition: samples per client")
    each = [
        Section("results", "Results", "Results", results(data)),
        Section("clients", "Clients", "Clients", clients),
        Section("curves", "Curves", "Learning curves", curves),
        Section("communication", "Communication", "Communication against accuracy", communication),
        Section("left_out", "Left out", "Clients left out of a round", sections.left_out(data)),
        Section("privacy", "Privacy", "Privacy", privacy),
        Section("partition", *who, partition),
        Section("analyses", "Analyses", "Analyses", [figure for figure in figures if not figure.partition]),
        Section("reproduce", "Reproduce", "How to reproduce this", sections.reproduce(data, out)),
    ]
    charts = [clients["chart"], curves["chart"], communication["chart"], *(chart for _, chart in partition["charts"])]
    order = list(MEASURES)
    script = {
        "labels": list(looks),
        "dark": style.DARK,
        "measures": [
            {"name": name, "index": order.index(name), "title": measure.title}
            for name, measure in curves["measures"].items()
        ],
        "charts": [chart for chart in charts if chart],
    }
    return {
        "head": head(data),
        "privacy": privacy,
        "problems": [*data.problems, *unseen],
        "sections": [section for section in each if section.view],
        "looks": looks,
        "data": script,
        "made": datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
        "version": record.versions()["promptfed"],
    }


def render(page: Mapping[str, Any]) -> str:
    return environment().get_template("page.html").render(page=page, bundle=bundle())


@functools.cache
def environment() -> Environment:
    env = Environment(
        loader=PackageLoader(__package__), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    env.policies["json.dumps_kwargs"] = {"allow_nan": False, "ensure_ascii": False, "separators": (",", ":")}
    return env


@functools.cache
def bundle() -> str:
    """Vega, Vega-Lite and Vega-Embed, in the version the charts are written for."""
    text: str = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")
    return text.replace("</script", "<\\/script")
