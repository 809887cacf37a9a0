"""Differential privacy of what clients send: an update is clipped and noised where the data are, before it leaves.

Every client adds all the noise that its own guarantee needs, so neither the server nor the other clients are trusted;
or, under secure aggregation, its part of the noise that their sum needs (Privacy.part).
Two sets of training data of one client give updates that differ by at most 2 clip after clipping, and the noise on each
of their numbers has the deviation noise x clip: an answer is a Gaussian mechanism of multiplier noise / 2. The server
knows who takes part in a round, so that sampling amplifies nothing.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator

from . import Method, Params, UserError
from .seeding import rng

NOT_COVERED = (
    "evaluation: counts on held-out samples, also of models that a client trained or adapted without noise",
    "how many training samples a client has, whether it answers, and how long it takes",
    "classes and normalisation, which are agreed on beforehand",
    "floating-point arithmetic: the bound holds for real numbers",
)
_SUMS = "whoever learns only the sums of masked updates, and works with no client"
_POINTS = 1e-4  # the grid of privacy losses, in parts of their mean and deviation: epsilon is exact to 0.1 %
# Hooks by which a client may send more about its data than the update.
_TELLS = {"enroll": "at first contact", "report": "with its update"}


class Privacy(BaseModel):
    """The [privacy] section: noise on what clients send, and how much they reveal in spite of it."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    clip: float = Field(0.0, ge=0, description="L2 norm that a client's update of a round is clipped to; 0: no privacy")
    noise: float = Field(
        0.0,
        ge=0,
        description="deviation of the noise that a client adds to each number of its update, in units of clip",
    )
    delta: float = Field(1e-5, gt=0, lt=1, description="the delta that epsilon is stated for")
    together: bool = Field(
        False, description="under secure aggregation: clients add together the noise that one alone would add"
    )

    @model_validator(mode="after")
    def _bounded(self) -> Privacy:
        if self.noise and not self.clip:
            raise UserError(f"privacy.noise = {self.noise} needs privacy.clip above 0: noise is in units of it")
        if self.together and not self.noise:
            raise UserError("privacy.together = true needs privacy.noise above 0: the noise that clients add together")
        return self

    @property
    def on(self) -> bool:
        return self.clip > 0

    @staticmethod
    def part(n: int, largest: int, answers: int) -> float:
        """Of the usual noise, what one of `answers` clients adds to its update where a weighted sum of them is all that
        is seen. Weighted by n, the noise of each has the same deviation, and that of all together is at least what the
        client of the `largest` n would add alone; every client's own change weighs less."""
        return largest / n / math.sqrt(answers)

    def release(self, up: Params, still: Params, random: Callable[[int], bytes], part: float = 1.0) -> Params:
        """What is sent instead of `up`. `still` is what would be sent had training changed nothing: it must not depend
        on the client's data. `random` gives that many random bytes. `part`: of the noise."""
        if {name: p.shape for name, p in up.items()} != {name: p.shape for name, p in still.items()}:
            raise UserError("privacy.clip: the method's updates have not the same names and shapes with all data")
        # In float64: rounding for sending comes after the noise.
        change = {name: p.cpu().double() - still[name].cpu().double() for name, p in up.items()}
        norm = math.sqrt(sum(float(c.square().sum()) for c in change.values()))
        # That training has failed would reveal something about the data: it counts as no change.
        scale = min(1.0, self.clip / norm) if norm and math.isfinite(norm) else 0.0
        sent: Params = {}
        deviation = self.noise * self.clip * part
        for name, c in change.items():
            kept = c * scale if scale else torch.zeros_like(c)
            noised = still[name].cpu().double() + kept + deviation * gaussian(c.shape, random)
            sent[name] = noised.to(up[name])
        return sent


def gaussian(shape: torch.Size, random: Callable[[int], bytes]) -> torch.Tensor:
    """Normal numbers from random bytes, eight each: a site's come from the operating system, not from a short seed that
    the server could guess."""
    whole = np.frombuffer(random(8 * shape.numel()), np.uint64)
    uniform = ((whole >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53  # never 0 or 1
    normal: torch.Tensor = torch.special.ndtri(torch.from_numpy(uniform))
    return normal.reshape(shape)


def randomness(seed: int | None, round: int, client: int) -> Callable[[int], bytes]:
    """Random bytes: repeatable ones in a simulation, which protect nobody; without a seed the operating system's."""
    return os.urandom if seed is None else rng(seed, round, client, "privacy").bytes


def tells(method: Method) -> str:
    """When clients may send more about their data than the update, in words; empty: never."""
    own = (when for hook, when in _TELLS.items() if getattr(type(method), hook) is not getattr(Method, hook))
    return next(own, "")


def sums_off(method: Method) -> str:
    """Settings with which clients send no sums of features before training."""
    return "method.standardise = false" + ' and method.head_init = "random"' * bool(method.tuning.started())


def check(method: Method, name: str) -> None:
    """Raises UserError for methods whose clients send more than the update, or nothing at all."""
    if method.centralised:
        raise UserError(f'privacy.clip: "{name}" pools the training data of all clients; leave it at 0')
    if when := tells(method):
        raise UserError(
            f'privacy.clip: "{name}" says more of its data {when} than the update that is clipped and noised; '
            "leave it at 0 or take another method"
        )
    if method.tuning.collects:
        without = "leave it at 0 or take another method" if method.reference else f"set {sums_off(method)}"
        raise UserError(
            f'privacy.clip: "{name}" sends sums of its features before training, which are not clipped and noised; '
            f"{without}"
        )
    if all(role in method.private for role in method.roles()):
        raise UserError(f'privacy.clip: "{name}" sends no update that could be clipped; leave it at 0')


def check_stats(method: Method, stats: Params, setting: str = "privacy.clip", made: str = "clipped and noised") -> None:
    """The same for what only training tells: sums over the samples that its loss sends with the update."""
    if stats:
        raise UserError(
            f"{setting}: {type(method).__name__} sends sums over its samples ({', '.join(stats)}) with the update, "
            f"which are not {made}; leave it at its default or take another method"
        )


# ---- what is revealed


def epsilon(answers: Mapping[float, int], delta: float) -> float:
    """What so many answers of one client with each noise reveal together, by dp-accounting; infinite without noise."""
    if not any(answers.values()):
        return 0.0
    if answers.get(0.0):
        return math.inf
    accounting()
    import dp_accounting

    # The deviation against the largest difference, 2 clip.
    multipliers = {noise / 2: n for noise, n in answers.items() if n}
    # Deviation of the privacy loss; its mean is half the square.
    loss = math.sqrt(sum(n / multiplier**2 for multiplier, n in multipliers.items()))
    accountant = dp_accounting.pld.PLDAccountant(value_discretization_interval=_POINTS * (loss + loss**2 / 2))
    for multiplier, n in multipliers.items():
        accountant.compose(dp_accounting.GaussianDpEvent(multiplier), n)
    return float(accountant.get_epsilon(delta))


def accounting() -> None:
    """Raises UserError if dp-accounting is missing: before a run rather than after it."""
    if find_spec("dp_accounting") is None:
        raise UserError('privacy.noise needs dp-accounting to state epsilon: pip install "promptfed[privacy]"')


def answers(asked: Iterable[tuple[int, Iterable[int]]], seeded: bool) -> Counter[int]:
    """How often each client has answered at most, from the rounds and clients that were asked. A round that is trained
    again after a crash is answered in the same bits where noise is seeded, and with new noise where it is not."""
    times = [(round, client) for round, clients in asked for client in clients]
    return Counter(client for _, client in (set(times) if seeded else times))


def statement(privacy: Privacy, answered: Mapping[int, int], clients: int, seeded: bool) -> dict[str, Any]:
    """What result.json says about it. An epsilon of None is infinite."""
    known = {n: epsilon({privacy.noise: n}, privacy.delta) for n in {0, *answered.values()}}

    def finite(n: int) -> float | None:
        return known[n] if math.isfinite(known[n]) else None

    each = {client: answered.get(client, 0) for client in range(clients)}
    return {
        **privacy.model_dump(),
        "epsilon": finite(max(known)),
        "per_client": {str(client): {"answers": n, "epsilon": finite(n)} for client, n in each.items()},
        "unit": "all training samples of one client, replaced by any others of the same number",
        "covers": "what clients send after local training, over all rounds",
        "against": _SUMS if privacy.together else "everybody",
        "not_covered": list(NOT_COVERED),
        "randomness": "seeded: a simulation, which protects nobody" if seeded else "each site's operating system",
    }


def sentence(stated: Mapping[str, Any]) -> str:
    """For a person, in one line."""
    spent = "infinite (there is no noise)" if stated["epsilon"] is None else f"{stated['epsilon']:.3g}"
    most = max(each["answers"] for each in stated["per_client"].values())
    updates = "one update" if most == 1 else f"at most {most} updates"
    return (
        f"privacy: epsilon {spent} at delta {stated['delta']:g} for a client's training data, over {updates} "
        f"(clip {stated['clip']:g}, noise {stated['noise']:g}); evaluation is not covered"
    )
