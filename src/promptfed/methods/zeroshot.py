"""What CLIP says untrained (Radford et al., ICML 2021): the row that every table of a CLIP needs."""

from typing import ClassVar

from pydantic import Field

from ..errors import UserError
from ..method import Method
from ..models import CLIP, Model
from ..params import Params
from ..phases import Phase
from ..tuning import OnFeatures, Tuning


class Nothing(OnFeatures):
    """No parameters: the model as it comes."""

    roles: ClassVar[dict[str, str]] = {}
    about: ClassVar[str] = "nothing"
    backbones: ClassVar[str] = "CLIP"

    def check(self, model: Model) -> None:
        if not isinstance(model, CLIP):
            raise UserError(f'backbone.name = "{model.name}" cannot predict untrained: zero-shot needs a CLIP')

    def init(self, model: Model, seed: int) -> Params:
        return {}


class ZeroShot(Method):
    paper: ClassVar[str] = "Radford et al., ICML 2021"
    tuned: ClassVar[type[Tuning]] = Nothing

    tuning: Tuning = Field(default_factory=Nothing, description="what is trained")

    def phases(self, round: int) -> tuple[Phase, ...]:
        return ()
