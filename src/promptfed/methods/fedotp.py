"""FedOTP: a shared and an own text context, between which the patches of an image are divided by optimal transport.

Li et al., "Global and Local Prompts Cooperation via Optimal Transport for Federated Learning" (CVPR 2024).
"""

from collections.abc import Sequence

from pydantic import Field
from torch import Tensor

from .. import Params
from ..tunings.transport import OverPatches
from .text_prompts import TwoContexts, TwoContextsMethod


class Divided(OverPatches, TwoContexts):
    """Each context receives half of what is transported; patches that fit neither are left out."""

    partial = True

    transported: float = Field(0.8, gt=0, le=1, description="share of the image that is transported (gamma)")

    def mass(self) -> float:
        return self.transported

    def contexts(self, params: Params) -> Sequence[Tensor]:
        return params["context"], params["own"]


class FedOtp(TwoContextsMethod):
    paper = "Li et al., CVPR 2024"
    tuned = Divided

    tuning: Divided = Field(default_factory=Divided, description="what is trained")
