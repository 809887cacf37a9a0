"""What the methods on text prompts of a frozen CLIP have in common."""

from typing import ClassVar

from .. import Model, Params, State, Tuning
from ..models.base import normal
from ..seeding import torch_rng
from ..tuning import as_clip
from ..tunings.text import TextContext
from .on_frozen import OnFrozen


class TextMethod(OnFrozen):
    tuned: ClassVar[type[Tuning]] = TextContext


class TwoContexts(TextContext):
    """A context that all clients share, and one of the client's own."""

    roles: ClassVar[dict[str, str]] = {"context": "body", "own": "own"}
    about = "shared text context + own text context"
    role_words: ClassVar[dict[str, str]] = {"body": "text context", "own": "second text context"}

    def init(self, model: Model, seed: int) -> Params:
        own = normal(torch_rng(seed, "own context"), self.context, as_clip(model).text_width)
        return {**super().init(model, seed), "own": own}


class TwoContextsMethod(TextMethod):
    """Both contexts are trained together; the shared one is averaged."""

    tuned = TwoContexts
    private = ("own",)

    def common(self, state: State) -> Params:
        """The shared context in both places."""
        return {**self.down(state, client=0), "own": state["context"]}
