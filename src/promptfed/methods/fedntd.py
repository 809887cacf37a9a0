"""FedNTD: a client does not forget what the received model says about the classes that a sample is not of.

Lee et al., "Preservation of the Global Knowledge by Not-True Distillation in Federated Learning" (NeurIPS 2022).
"""

from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from .. import Batch, Context, Method, Model, Params

_NEVER = -1e4  # replaces a logit; finite, as 0 times infinity is not a number


class FedNtd(Method):
    paper = "Lee et al., NeurIPS 2022"

    beta: float = Field(1.0, ge=0, description="weight of the distillation")
    temperature: float = Field(1.0, gt=0, description="temperature of the distillation (tau)")

    def sample_constants(self, model: Model, params: Params, batch: Batch, ctx: Context) -> Params:
        return {"received": self.tuning.logits(model, {**params, **ctx.down}, batch, ctx)}

    def loss(self, model: Model, params: Params, batch: Batch, ctx: Context) -> tuple[Tensor, Params]:
        """Cross-entropy + beta KL(received || own), both over the other classes than the sample's."""
        logits = self.tuning.logits(model, params, batch, ctx)
        own, received = (self.not_true(z, batch.y) for z in (logits, batch.extra["received"]))
        forgotten = (received.exp() * (received - own)).sum(1)
        return batch.mean(F.cross_entropy(logits, batch.y, reduction="none") + self.beta * forgotten), {}

    def not_true(self, logits: Tensor, y: Tensor) -> Tensor:
        """(B, classes): log-probabilities of the classes other than y."""
        true = F.one_hot(y, logits.shape[1]).bool()
        return (logits / self.temperature).masked_fill(true, _NEVER).log_softmax(1)
