"""What the methods on text prompts of a frozen CLIP have in common."""

from typing import ClassVar

from torch import Tensor

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

    def serve(self, init: Params, down: Params, private: Params, memory: Params) -> Params:
        """A client that has not trained yet has no context of its own."""
        own = {} if "own" in private else {"own": self.instead(down["context"])}
        return self.start(init, {**own, **down}, private, memory)

    def common(self, state: State) -> Params:
        return {**self.down(state, client=0), "own": self.instead(state["context"])}

    def instead(self, shared: Tensor) -> Tensor:
        """What stands in the place of a client's own context for those that never train: the shared one again."""
        return shared
