"""Draws the picture of the idea, once for light and once for dark pages: docs/images/idea-light.svg and idea-dark.svg.

python scripts/draw_idea.py
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

IMAGES = Path(__file__).parents[1] / "docs" / "images"
WIDTH, HEIGHT = 960, 404
CARD, GAP, TOP = 284, 34, 144  # width of a site's card, between two of them, and where they begin
SERVER = 20, 10, 920, 60  # x, y, width, height
SITES = (("Site A", "circle"), ("Site B", "triangle"), ("Site C", "square"))


@dataclass(frozen=True)
class Colours:
    ink: str
    soft: str  # of small print
    card: str
    line: str
    frozen: str  # of the backbone
    shared: str  # what travels
    own: tuple[str, str, str]  # what stays at each site


THEMES = {
    "light": Colours(
        "#1f2328", "#59636e", "#ffffff", "#d1d9e0", "#dfe7ef", "#d55e00", ("#0072b2", "#00846a", "#a8477e")
    ),
    "dark": Colours(
        "#f0f6fc", "#9198a1", "#151b23", "#3d444d", "#2b3643", "#f0803c", ("#4ca6dd", "#2dbe93", "#dd97be")
    ),
}


def text(x: float, y: float, words: str, fill: str, size: int = 14, anchor: str = "middle", bold: bool = False) -> str:
    weight = ' font-weight="600"' if bold else ""
    return f'<text x="{x}" y="{y}" fill="{fill}" font-size="{size}" text-anchor="{anchor}"{weight}>{words}</text>'


def box(x: float, y: float, width: float, height: float, fill: str, line: str = "none", radius: int = 8) -> str:
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="{radius}" fill="{fill}" stroke="{line}"/>'


def tokens(x: float, y: float, fill: str, count: int = 4) -> list[str]:
    """A prompt: a row of small squares."""
    return [box(x + 13 * i, y, 10, 10, fill, radius=2) for i in range(count)]


def photo(x: float, y: float, shape: str, fill: str, turn: int) -> list[str]:
    """A private image, in the style of its site."""
    drawn = {
        "circle": f'<circle cx="{x + 21}" cy="{y + 21}" r="{9 + 2 * turn}" fill="{fill}"/>',
        "triangle": f'<path d="M{x + 21},{y + 8 + turn} l{13 - turn},{23 - turn} h-{26 - 2 * turn} z" fill="none" '
        f'stroke="{fill}" stroke-width="3"/>',
        "square": f'<rect x="{x + 11}" y="{y + 11}" width="20" height="20" fill="{fill}" '
        f'transform="rotate({15 + 25 * turn} {x + 21} {y + 21})"/>',
    }
    return [f'<g opacity="{1 - 0.2 * turn:g}">', box(x, y, 42, 42, "none", fill, 5), drawn[shape], "</g>"]


def snowflake(x: float, y: float, stroke: str) -> str:
    arms = "".join(
        f'<path d="M0,-8 V8 M-2.5,-6.5 L0,-4 L2.5,-6.5 M-2.5,6.5 L0,4 L2.5,6.5" transform="rotate({turn})"/>'
        for turn in (0, 60, 120)
    )
    return f'<g transform="translate({x} {y})" stroke="{stroke}" stroke-width="1.4" fill="none">{arms}</g>'


def site(number: int, c: Colours) -> list[str]:
    name, shape = SITES[number]
    x, own = 20 + number * (CARD + GAP), c.own[number]
    parts = [box(x, TOP, CARD, 206, c.card, c.line, 12), text(x + 18, TOP + 30, name, c.ink, 16, "start", bold=True)]
    parts.append(text(x + CARD - 18, TOP + 30, "private images", c.soft, 13, "end"))
    for turn in range(3):
        parts += photo(x + 18 + 52 * turn, TOP + 46, shape, own, turn)
    parts.append(text(x + 182, TOP + 73, "…", c.soft, 18))
    parts += [box(x + 18, TOP + 104, CARD - 36, 40, c.frozen), snowflake(x + 40, TOP + 124, c.soft)]
    parts.append(text(x + CARD / 2 + 10, TOP + 129, "frozen backbone", c.ink))
    parts += [*tokens(x + 18, TOP + 160, c.shared), text(x + 74, TOP + 170, "prompt", c.ink, 13, "start")]
    parts += [*tokens(x + 148, TOP + 160, own, 2), text(x + 178, TOP + 170, "its own part", c.ink, 13, "start")]
    parts.append(text(x + CARD / 2, TOP + 194, "a model that fits its own data", c.soft, 13))
    return parts


def arrows(number: int, c: Colours) -> list[str]:
    """Prompts between the server and a site, in both directions."""
    x, high, low = 20 + number * (CARD + GAP) + CARD / 2, SERVER[1] + SERVER[3] + 6, TOP - 6
    drawn = [
        f'<path d="M{x + side},{start} V{end}" stroke="{c.shared}" stroke-width="2.5" marker-end="url(#head)"/>'
        for side, start, end in ((-34, low, high), (34, high, low))
    ]
    return [*drawn, *tokens(x - 24, (high + low) / 2 - 5, c.shared)]


def picture(c: Colours) -> str:
    left, top, width, height = SERVER
    head = '<marker id="head" viewBox="0 0 8 8" refX="6" refY="4" markerWidth="6" markerHeight="6" orient="auto">'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        'font-family="-apple-system, Segoe UI, Helvetica, Arial, sans-serif" role="img">',
        "<title>Sites exchange small prompts with a server; images and the frozen backbone never move</title>",
        f'<defs>{head}<path d="M0,0 L8,4 L0,8 z" fill="{c.shared}"/></marker></defs>',
        box(left, top, width, height, c.card, c.line, 12),
        text(left + 18, top + 36, "Server", c.ink, 16, "start", bold=True),
        text(left + width / 2, top + 36, "combines the prompts that the sites send", c.ink),
        text(left + width - 18, top + 36, "sees no images", c.soft, 13, "end"),
    ]
    for number in range(len(SITES)):
        parts += [*arrows(number, c), *site(number, c)]
    at = HEIGHT - 24
    parts += [*tokens(76, at, c.shared, 2), text(110, at + 10, "travels: kilobytes per round", c.soft, 13, "start")]
    parts += [box(344 + 13 * i, at, 10, 10, own, radius=2) for i, own in enumerate(c.own)]
    parts.append(text(390, at + 10, "stays: images, private prompts or heads", c.soft, 13, "start"))
    parts += [
        snowflake(692, at + 5, c.soft),
        text(712, at + 10, "the same everywhere, never sent", c.soft, 13, "start"),
    ]
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    for theme, colours in THEMES.items():
        (IMAGES / f"idea-{theme}.svg").write_text(picture(colours))
