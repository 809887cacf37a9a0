"""FFA-LoRA: of LoRA's two matrices A stays as it was drawn; B alone is trained and averaged.

Sun, Li, Li & Ding, "Improving LoRA in Privacy-preserving Federated Learning" (ICLR 2024). With one A for all, the
product of the mean of B with A is the mean of the clients' products: nothing is lost by averaging.
"""

from typing import ClassVar

from ..tuning import FROZEN
from ..tunings.heads import LinearHead
from ..tunings.lora import Lora
from .on_frozen import OnFrozen


class FrozenA(Lora):
    """LoRA in which every client has the same A, from the run's seed."""

    roles: ClassVar[dict[str, str]] = {"lora.a.": FROZEN, "lora.b.": "body", **LinearHead.roles}
    about = "B of LoRA + head"
    role_words: ClassVar[dict[str, str]] = {"body": "B of LoRA"}


class FfaLora(OnFrozen):
    paper = "Sun et al., ICLR 2024"
    tuned = FrozenA
