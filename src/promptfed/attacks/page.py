"""The outcome of attacks as an HTML page: clean accuracy and success, attack by defence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..report.page.heat import Heat, HeatTable, render
from .outcome import NONE, Cell, attacks, defences, mean, targeted


def page(cells: Sequence[Cell], about: Mapping[str, Any]) -> str:
    columns, seeds = defences(cells), len({cell.seed for cell in cells})
    facts = {
        "method": about["method"],
        "dataset": about["dataset"],
        "malicious clients": f"{about['share']:.0%}",
        "seeds": str(seeds),
    }
    accuracy = HeatTable(
        "Accuracy of honest clients",
        "Mean test accuracy in per cent, below it the difference to no attack under the same defence. The more of it "
        "an attack costs, the stronger the colour.",
        "attack",
        columns,
        {name: [_accuracy(cells, name, defence) for defence in columns] for name in attacks(cells)},
    )
    success = HeatTable(
        "Success of attacks with a target",
        "Share in per cent of honest clients' test images that get the class that the attack wants, of those that "
        "do not belong to it; below it the same under the model that was not attacked. The higher, the stronger the "
        "colour.",
        "attack",
        columns,
        {name: [_success(cells, name, defence) for defence in columns] for name in targeted(cells)},
    )
    lead = "What some malicious clients can do to the model, and what rules of aggregation do about it."
    tables = [accuracy, *([success] if success.rows else [])]
    return render(f"Attacks on {about['method']}", lead, facts, tables)


def _accuracy(cells: Sequence[Cell], attack: str, defence: str) -> Heat:
    value, base = (mean(cells, name, defence, "accuracy") or 0.0 for name in (attack, NONE))
    note = "" if attack == NONE else f"{100 * (value - base):+.1f}"
    return Heat(f"{100 * value:.1f}", max(0.0, 1 - value / base) if base else 0.0, note)


def _success(cells: Sequence[Cell], attack: str, defence: str) -> Heat | None:
    value, chance = (mean(cells, attack, defence, of) for of in ("success", "chance"))
    return None if value is None else Heat(f"{100 * value:.1f}", value, f"without: {100 * (chance or 0):.1f}")
