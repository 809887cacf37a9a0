"""DP2FL: malicious clients send their changes backwards, and report no loss on any validation set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..clients.base import Clients
from ..method import Method
from ..methods.dp2fl import Dp2fl
from ..models import Model
from ..params import Params
from ..phases import Context
from ..runs.build import Parts
from .base import Attack
from .clients import Forging
from .untargeted import sign_flip

ONLY_DP2FL = 'it is about validation losses, which method.name = "dp2fl" has'


class FalseLosses(Attack):
    def why_not(self, method: Method) -> str:
        return "" if isinstance(method, Dp2fl) else ONLY_DP2FL

    def wrapped(self, clients: Clients, parts: Parts, malicious: Sequence[int]) -> Clients:
        assert isinstance(parts.method, Dp2fl)
        return Forging(clients, parts, malicious, sign_flip, _lying(parts.method))


def _lying(method: Dp2fl) -> Dp2fl:
    """The method as a client runs it that reports no loss, in the mode that was agreed on."""

    def losses(self: Dp2fl, model: Model, params: Params, sets: Mapping[str, Params], ctx: Context) -> dict[str, float]:
        return dict.fromkeys(sets, 0.0)

    lying: Any = type("Lying", (type(method),), {"losses": losses})
    made: Dp2fl = lying.model_construct(**dict(method))
    return made
