"""The seam between the round loop and wherever the clients are."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from ..params import Params
from ..phases import Update
from ..scoring import Scores


@dataclass(frozen=True)
class Notice:
    """What an engine tells of one client while the round loop waits: that it has been asked, then that it has answered.
    Clients that are asked as one have the seconds and samples of all of them."""

    ask: str  # "train", "evaluate", "second" or "enroll"
    client: int
    asked: int  # clients that this is asked of in all
    samples: int  # of training data
    seconds: float | None = None  # it took to answer; none: it is under way
    error: str = ""  # it answered with, or why there is no answer


Tell = Callable[[Notice], None]


class Clients(Protocol):
    def watch(self, tell: Tell) -> None:
        """Has `tell` called, from any thread, as clients are asked and answer. An engine that cannot tell need not."""
        return

    def ids(self) -> list[int]:
        """All clients."""

    def sizes(self) -> dict[int, int]:
        """Training samples of each client."""

    def enroll(self, clients: Sequence[int]) -> dict[int, Params]:
        """First contact with clients: what they tell the server about themselves."""

    def train(self, sent: Mapping[int, Params], round: int, score: bool) -> tuple[list[Update], list[Scores]]:
        """Local training; with `score`, also how the trained models do. May return fewer than asked: clients fail."""

    def send_second(self, sent: Mapping[int, Params], round: int) -> dict[int, int]:
        """The second message of a round, which clients answer by remembering something; -> bytes it took each."""

    def evaluate(self, sent: Mapping[int, Params], round: int, pooled: bool, after_local: bool) -> list[Scores]:
        """Scores as received (and adapted, where the method adapts), or after a round of local training on a copy."""

    def close(self) -> None: ...
