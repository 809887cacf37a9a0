"""FedSA-LoRA: of LoRA's two matrices A is averaged, and every client has a B of its own.

Guo et al., "Selective Aggregation for Low-Rank Adaptation in Federated Learning" (ICLR 2025). Both are trained
together: A is to learn what clients have in common, B what is a client's own.
"""

from typing import ClassVar

from ..tunings.heads import LinearHead
from ..tunings.lora import Lora
from .on_frozen import OnFrozen


class OwnB(Lora):
    """LoRA in which B has a role of its own."""

    roles: ClassVar[dict[str, str]] = {"lora.a.": "body", "lora.b.": "own", **LinearHead.roles}
    role_words: ClassVar[dict[str, str]] = {"body": "A of LoRA", "own": "B of LoRA"}


class FedSaLora(OnFrozen):
    paper = "Guo et al., ICLR 2025"
    tuned = OwnB
    private = ("own",)
