"""All claims of a comparison in one picture: the difference to each baseline, with its interval."""

from collections.abc import Sequence
from pathlib import Path

import altair as alt

from ..runs.claims import Verdict
from . import style
from .marks import data
from .style import BLUE, GREY, VERMILION

_COLOURS = {"ahead": BLUE, "cannot be told apart": GREY, "behind": VERMILION}


def draw_claims(verdicts: Sequence[Verdict], path: Path) -> Path:
    shown = [verdict for verdict in verdicts if verdict.differences]
    title = alt.TitleParams(
        "Each method against its own baselines",
        subtitle="difference in points of accuracy, 95 % interval over seeds and clients",
    )
    panels = alt.vconcat(*(_panel(verdict, verdict is shown[-1]) for verdict in shown), spacing=6)
    return style.save(panels.resolve_scale(x="shared").properties(title=title), path)


def _panel(verdict: Verdict, last: bool) -> style.Chart:
    rows = [
        {"row": row, "mean": 100 * found.mean, "low": 100 * found.low, "high": 100 * found.high, "word": found.word}
        for row, found in verdict.differences.items()
    ]
    y = alt.Y("row:N", sort=None, title=None, axis=alt.Axis(labelLimit=220, minExtent=170))
    x = alt.X("low:Q", title=None, axis=alt.Axis(labels=last, ticks=last, domain=last))
    colour = alt.Color("word:N", scale=alt.Scale(domain=list(_COLOURS), range=list(_COLOURS.values())), title=None)
    base = data(rows).encode(y=y, color=colour)
    zero = data([{"zero": 0}]).mark_rule(color=GREY).encode(x="zero:Q")
    line = base.mark_rule(strokeWidth=2).encode(x=x, x2="high:Q")
    dot = base.mark_circle(size=70, opacity=1).encode(x="mean:Q")
    title = f"{verdict.claim.column}: the claim {verdict.word}"
    return alt.layer(zero, line, dot).properties(title=title, width=style.WIDTH, height=24 * len(rows))
