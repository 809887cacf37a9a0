"""The prompts and the head that pFedPG's clients train."""

from pydantic import Field

from ... import Model, Params
from ...tunings.tokens import Tokens


class Prompts(Tokens):
    """Prompt tokens and a head on features as they are: the published learning rate is for these."""

    standardise: bool = Field(False, description=Tokens.model_fields["standardise"].description)
    prompt_scale: float = Field(1.0, gt=0, description="scale of the prompts' initial values, relative to VPT's")

    def init(self, model: Model, seed: int) -> Params:
        made = super().init(model, seed)
        return {name: self.prompt_scale * p if self.role(name) == "body" else p for name, p in made.items()}
