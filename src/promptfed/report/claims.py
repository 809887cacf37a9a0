"""All claims of a comparison in one picture: the difference to each baseline, with its interval."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import altair as alt

from ..runs.claims import BESIDE, Verdict
from ..runs.statistics import Difference
from . import style
from .marks import data
from .style import BLUE, GREY, VERMILION

_COLOURS = {"ahead": BLUE, "cannot be told apart": GREY, "behind": VERMILION}


def draw_claims(verdicts: Sequence[Verdict], path: Path) -> Path:
    panels = {
        f"{each.claim.column}: the claim {each.word}": {each.claim.name(row): d for row, d in each.differences.items()}
        for each in verdicts
        if each.differences
    }
    beside = any(not each.claim.decided_by(row) for each in verdicts for row in each.differences)
    note = f"; {BESIDE}: not part of the claim" * beside
    return draw_differences(panels, path, "Each method against its own baselines", note=note)


def draw_differences(
    panels: Mapping[str, Mapping[str, Difference]],
    path: Path,
    title: str,
    room: int = 170,
    line: int = 24,
    note: str = "",
) -> Path:
    """A panel for each title, with a line for each name; `room` for the names and a `line`'s height, in pixels. `note`:
    what else the subtitle says."""
    one = any(found.seeds == 1 for each in panels.values() for found in each.values())
    head = alt.TitleParams(
        title,
        subtitle="difference in points of accuracy, 95 % interval over seeds and clients"
        + "; hollow: one seed" * one
        + note,
    )
    last = [*panels][-1:]
    drawn = alt.vconcat(*(_panel(name, panels[name], name in last, room, line) for name in panels), spacing=6)
    return style.save(drawn.resolve_scale(x="shared").properties(title=head), path)


def _panel(title: str, differences: Mapping[str, Difference], last: bool, room: int, height: int) -> style.Chart:
    rows = [
        {
            **{"row": row, "mean": 100 * found.mean, "low": 100 * found.low, "high": 100 * found.high},
            **{"word": found.word, "one_seed": found.seeds == 1},
        }
        for row, found in differences.items()
    ]
    y = alt.Y("row:N", sort=None, title=None, axis=alt.Axis(labelLimit=room + 50, minExtent=room))
    x = alt.X("low:Q", title=None, axis=alt.Axis(labels=last, ticks=last, domain=last))
    colour = alt.Color("word:N", scale=alt.Scale(domain=list(_COLOURS), range=list(_COLOURS.values())), title=None)
    base = data(rows).encode(y=y, color=colour)
    zero = data([{"zero": 0}]).mark_rule(color=GREY).encode(x="zero:Q")
    line = base.mark_rule(strokeWidth=2).encode(x=x, x2="high:Q")
    hollow = alt.condition("datum.one_seed", alt.value("white"), colour)
    dot = base.mark_point(size=60, opacity=1).encode(x="mean:Q", fill=hollow)
    return alt.layer(zero, line, dot).properties(title=title, width=style.WIDTH, height=height * len(rows))
