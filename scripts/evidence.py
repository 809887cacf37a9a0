"""Fills the tables of experiments/evidence/README.md and draws docs/images/claims.svg, from the kept results and
scripts/evidence.toml, which says which rows decide which claim.

A block of the page begins with <!-- evidence: NAME --> and ends with <!-- end -->. NAME is "claims", "images" or the
name of one of [[tables]].
"""

import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from scipy.special import ndtr, ndtri

from promptfed.report.claims import draw_differences
from promptfed.runs import comparison
from promptfed.runs.cells import count, percent, points, size
from promptfed.runs.shown import Asked
from promptfed.runs.statistics import LEVEL, Difference, difference

ROOT = Path(__file__).parents[1]
KEPT = ROOT / "experiments" / "evidence"
PAGE = KEPT / "README.md"
PICTURE = ROOT / "docs" / "images" / "claims.svg"
GIVEN = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
FOUND, OPEN, NOT = "found", "cannot be told", "not found"
ONE_SEED, CORRECTED = "¹", "†"  # after a number
Table = list[Sequence[str]]


@cache
def kept(name: str) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """The rows of a kept table, and result.json of their runs, by label; with views."""
    compared = comparison.read(KEPT / name)
    seen = Asked.told(compared.table).seen(compared)
    return {row["label"]: row for row in compared.table}, {
        label: [run.numbers for run in runs] for label, runs in seen.items()
    }


def between(name: str, ours: str, theirs: str, column: str) -> Difference:
    runs = kept(name)[1]
    for label in (ours, theirs):
        if label not in runs:
            raise SystemExit(f'{name} has no row "{label}"')
    found = difference(runs[ours], runs[theirs], column)
    if found is None:
        raise SystemExit(f'{name}: "{ours}" and "{theirs}" cannot be compared by {column}')
    return found


def shown(found: Difference) -> str:
    """In bold if it is told apart from zero."""
    text = f"{points(found.mean)} [{points(found.low)}, {points(found.high)}]"
    bold = f"**{text}**" if not found.low <= 0 <= found.high else text
    return bold + ONE_SEED * (found.seeds == 1)


# ---- claims


@cache
def surviving() -> frozenset[tuple[str, ...]]:
    """The pairs of all claims that are told apart also after the correction of Benjamini and Hochberg, which expects
    one false difference in twenty of those found. The p-value is that of a normal distribution with the interval."""
    pairs = {tuple(pair[:4]) for given in GIVEN["claims"] for pair in given.get("pairs", ())}
    found = {pair: between(*pair) for pair in pairs}
    scores = {pair: 2 * ndtri((1 + LEVEL) / 2) * one.mean / (one.high - one.low) for pair, one in found.items()}
    ranked = sorted((2 * float(ndtr(-abs(score))), pair) for pair, score in scores.items())
    passed = [n for n, (p, _) in enumerate(ranked, 1) if p <= n / len(ranked) * (1 - LEVEL)]
    return frozenset(pair for _, pair in ranked[: max(passed, default=0)])


def verdict(differences: Iterable[Difference], within: float = 0.0) -> str:
    """Of a claim that a method is ahead in all of them, or level, `within` so many points."""
    words = [_level(found, within / 100) if within else found.word for found in differences]
    ahead, behind = words.count("ahead"), words.count("behind")
    if len(words) in (ahead, behind):
        return FOUND if ahead else NOT
    parts = [f"{word} in {n} of {len(words)}" for word, n in ((FOUND, ahead), (NOT, behind)) if n]
    return ", ".join(parts) or OPEN


def _level(found: Difference, limit: float) -> str:
    if -limit < found.low <= found.high < limit:
        return "ahead"
    return "behind" if found.low > limit or found.high < -limit else ""


def claim(given: Mapping[str, Any]) -> Sequence[str]:
    """The claim, the verdict, the numbers that decide it, and the paper's."""
    pairs = [(between(*pair[:4]), " ".join(pair[4:])) for pair in given.get("pairs", ())]
    marks = [CORRECTED * (tuple(pair[:4]) in surviving()) for pair in given.get("pairs", ())]
    numbers = [
        f"{words}: {shown(found)}{mark}".removeprefix(": ") for (found, words), mark in zip(pairs, marks, strict=True)
    ]
    told = given.get("verdict") or verdict((found for found, _ in pairs), given.get("within", 0.0))
    return (
        f"{given['claim']} ({given.get('of', 'not in the paper')})",
        f"*{told}*",
        "; ".join([*numbers, *filter(None, [given.get("numbers")])]),
        given.get("published", ""),
    )


def claims() -> Table:
    lines: Table = [("method", "claim", "verdict", "difference, in points", "published"), ("---",) * 5]
    last = ""
    for given in GIVEN["claims"]:
        lines.append((given["paper"] * (given["paper"] != last), *claim(given)))
        last = given["paper"]
    return lines


def panels() -> dict[str, dict[str, Difference]]:
    """Of the picture: the differences that decide the claims with a short name, by paper."""
    found: dict[str, dict[str, Difference]] = {}
    for given in GIVEN["claims"]:
        for pair in given["pairs"] if "short" in given else ():
            found.setdefault(given["paper"], {})[": ".join([given["short"], *pair[4:]])] = between(*pair[:4])
    return found


# ---- tables of accuracies


def cell(column: Mapping[str, Any], label: str) -> str:
    """A number of a row, or its difference to another row."""
    rows, runs = kept(column["in"])
    if label not in rows or label == column.get("than"):
        return ""
    if "than" in column:
        return shown(between(column["in"], label, column["than"], column["by"]))
    value = rows[label].get(column["show"])
    if value is None:
        return "-"
    if isinstance(value, float):
        return size(value) if column["show"] == "bytes" else count(value)
    return percent(value).removesuffix(" ±0.0") + ONE_SEED * (len(runs[label]) == 1)


def table(given: Mapping[str, Any]) -> Table:
    """Best row first, except for `last`, which come at the end."""
    columns, names = given["columns"], given.get("names", {})

    def rank(label: str) -> float:
        return -next(float(kept(c["in"])[0][label][c["show"]]["mean"]) for c in columns if label in kept(c["in"])[0])

    labels = [*sorted(given["rows"], key=rank), *given.get("last", [])]
    lines = [(names.get(label, label), *(cell(column, label) for column in columns)) for label in labels]
    return [("", *(column["head"] for column in columns)), ("---", *["---:"] * len(columns)), *lines]


def images() -> Table:
    """How many images each comparison has, of which those for validation chose the rates."""
    heads = ("", "clients", "for training", "for validation", "for testing", "for testing, per client")
    lines: Table = [heads, ("---", *["---:"] * (len(heads) - 1))]
    for name in dict.fromkeys(column["in"] for given in GIVEN["tables"] for column in given["columns"]):
        run = next(iter(kept(name)[1].values()))[0]
        totals = [f"{sum(site[part] for site in run['sites']):,}" for part in ("n_train", "n_val", "n_test")]
        tests = sorted(site["n_test"] for site in run["sites"])
        lines.append((f"[`{name}`]({name}.toml)", str(len(tests)), *totals, f"{tests[0]} to {tests[-1]}"))
    return lines


# ---- the page


def filled(text: str) -> str:
    """The page with its blocks as they should be."""
    tables = {given["name"]: given for given in GIVEN["tables"]}
    made = {"claims": claims, "images": images}

    def block(found: re.Match[str]) -> str:
        lines = made[found[2]]() if found[2] in made else table(tables[found[2]])
        return found[1] + "".join(f"| {' | '.join(line)} |\n" for line in lines) + found[3]

    return re.sub(r"(<!-- evidence: (.*?) -->\n).*?(<!-- end -->)", block, text, flags=re.DOTALL)


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text()))
    draw_differences(panels(), PICTURE, "Each method against others, on photos", room=270, line=17)
