"""A site's own count of the updates it has released under differential privacy, over all runs.

The server counts too, and states its count in the result; with this a site need not trust it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from .. import files
from ..errors import UserError
from ..privacy import Privacy, epsilon


class Ledger:
    """`most` returns the epsilon that the site must not exceed; it is called every time, since it may change while a
    node is running. None: only count."""

    def __init__(self, file: Path, privacy: Privacy, most: Callable[[], float | None] = lambda: None) -> None:
        self._file, self._privacy, self._most = file, privacy, most

    def answers(self) -> dict[float, int]:
        """Number of updates per noise."""
        try:
            held = json.loads(self._file.read_text()) if self._file.exists() else {}
            return {float(noise): int(n) for noise, n in held.items()}
        except (ValueError, TypeError, AttributeError):
            raise UserError(f'"{self._file}" is damaged: it must hold {{"noise": updates, ...}}') from None

    def epsilon(self, more: int = 0) -> float:
        """What they reveal, together with `more` updates at the present noise."""
        held, noise = self.answers(), self._privacy.noise
        return epsilon({**held, noise: held.get(noise, 0) + more}, self._privacy.delta)

    def check(self) -> None:
        """Raises UserError if another update is not allowed."""
        most = self._most()
        if most is not None and self.epsilon(more=1) > most:
            raise UserError(
                f"epsilon = {most:g} in site.toml allows no more updates: "
                f"one more would bring what they reveal to {self.epsilon(more=1):.3g}"
            )

    def told(self) -> str:
        """What they reveal, in one sentence. Raises UserError if that exceeds the limit."""
        most, spent, n = self._most(), self.epsilon(), sum(self.answers().values())
        if most is not None and spent > most:
            raise UserError(f"{n} updates released so far reveal epsilon {spent:.3g}, and site.toml allows {most:g}")
        limit = "site.toml sets no limit" if most is None else f"site.toml allows {most:g}"
        return f"updates released so far: {n}, which reveal epsilon {spent:.3g}; {limit}"

    def count(self) -> None:
        """Counts an update, before it is sent."""
        held, noise = self.answers(), self._privacy.noise
        files.write(self._file, json.dumps({**held, noise: held.get(noise, 0) + 1}).encode())
