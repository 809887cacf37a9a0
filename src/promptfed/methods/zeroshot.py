"""What CLIP says untrained (Radford et al., ICML 2021): the row that every table of a CLIP needs."""

from typing import ClassVar

from pydantic import Field

from .. import Method, Model, Params, Phase, Tuning, UserError
from ..models import CLIP
from ..tuning import NEEDS_CLIP, Family, OnFeatures


class Nothing(OnFeatures):
    """No parameters: the model as it comes."""

    roles: ClassVar[dict[str, str]] = {}
    about = "nothing"
    family = Family.TEXT
    backbones = "CLIP"

    def check(self, model: Model) -> None:
        if not isinstance(model, CLIP):
            raise UserError(f'backbone.name = "{model.name}" cannot predict untrained: {NEEDS_CLIP}')

    def init(self, model: Model, seed: int) -> Params:
        return {}


class ZeroShot(Method):
    paper = "Radford et al., ICML 2021"
    averages = False
    reference = True
    tuned = Nothing

    tuning: Tuning = Field(default_factory=Nothing, description="what is trained")

    def phases(self, round: int) -> tuple[Phase, ...]:
        return ()
