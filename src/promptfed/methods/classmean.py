"""Nearest class mean: a sample belongs to the class whose mean of frozen features is nearest.

Mensink et al., "Distance-Based Image Classification: Generalizing to New Classes at Near-Zero Cost" (TPAMI 2013), in
Euclidean distance. Clients send sums and numbers of their features per class at their first contact; the result is that
of all training data in one place, and the rounds that follow change nothing.
"""

from pydantic import Field, model_validator
from torch import Tensor
from torch.nn import functional as F

from .. import Batch, Context, Method, Model, Params, Phase, State, Tuning, UserError
from .. import params as P
from ..method import SUMS
from ..tuning import GIVEN, Family, OnFeatures
from ..tunings.heads import by_class, nearest_mean


class ClassMeans(OnFeatures):
    """The means as a linear head, which is not trained."""

    roles = {"head.": GIVEN}  # noqa: RUF012 - never written to
    about = "class means"
    family = Family.FEATURES
    per_class = True

    def init(self, model: Model, seed: int) -> Params:
        weights = model.weights
        # (classes, d), or of a CLIP (d, text width)
        like = weights["head.weight"][0] if "head.weight" in weights else weights["body.text.proj"][:, 0]
        return {"head.weight": like.new_zeros(model.classes, len(like)), "head.bias": like.new_zeros(model.classes)}

    def head(self, model: Model, params: Params, features: Tensor) -> Tensor:
        return F.linear(features, params["head.weight"], params["head.bias"])

    @property
    def collects(self) -> bool:
        return True

    def sums(self, model: Model, params: Params, batch: Batch, ctx: Context) -> Params:
        return by_class(self.features(model, params, batch, ctx), batch.y, model.classes)

    def constants(self, sums: Params) -> Params:
        means = sums["class.sum"] / sums["class.n"].clamp(min=1)[:, None]
        return nearest_mean(means, sums["class.n"])


class ClassMean(Method):
    paper = "Mensink et al., TPAMI 2013"
    averages = False
    reference = True
    tuned = ClassMeans

    tuning: Tuning = Field(default_factory=ClassMeans, description="what is trained")

    @model_validator(mode="after")
    def _counts_only(self) -> "ClassMean":
        if self.finetune_epochs or not isinstance(self.tuning, ClassMeans):
            raise UserError("method.name: class-mean trains nothing, and takes no plug-in")
        return self

    def phases(self, round: int) -> tuple[Phase, ...]:
        return ()

    def admit(self, state: State, client: int, hello: Params, round: int) -> State:
        """Newcomers are counted too."""
        sums = P.under(hello, SUMS)
        return self.add_sums(state, sums) if sums else state
