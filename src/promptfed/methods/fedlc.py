"""FedLC: logits of a client's rare classes are lowered in training, so that it must separate them by a wider margin.

Zhang et al., "Federated Learning with Label Distribution Skew via Logits Calibration" (ICML 2022).
"""

from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from .. import Batch, Context, Method, Model, Params

# Replaces a class count of 0, whose margin is infinite: the label of padding may be of such a class.
_NONE = 1e-8


class FedLc(Method):
    paper = "Zhang et al., ICML 2022"

    tau: float = Field(1.0, ge=0, description="width of the margins")

    def loss(self, model: Model, params: Params, batch: Batch, ctx: Context) -> tuple[Tensor, Params]:
        """Cross-entropy of the logits minus tau n_c^(-1/4), with n_c the client's samples of class c."""
        margin = self.tau * ctx.label_counts.clamp(min=_NONE) ** -0.25  # (classes,)
        logits = self.tuning.logits(model, params, batch, ctx) - margin
        return batch.mean(F.cross_entropy(logits, batch.y, reduction="none")), {}
