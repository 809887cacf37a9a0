"""The seam between the round loop and wherever the clients are."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from ..errors import UserError
from ..params import Params
from ..phases import Update
from ..scoring import Scores
from . import messages as M


@dataclass(frozen=True)
class Notice:
    """What an engine tells about one client while the round loop waits: that it was asked, then that it answered.
    Clients that train as one block have the seconds and samples of the whole block."""

    ask: str  # the request's: "train", "evaluate" and so on
    client: int
    asked: int  # number of clients that are asked this
    samples: int  # of training data
    seconds: float | None = None  # until it answered; None: not yet
    error: str = ""  # it answered with, or why there is no answer


Tell = Callable[[Notice], None]
Take = Callable[[Update], Update]  # what is kept of an update


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

    def train(
        self,
        sent: Mapping[int, Params],
        round: int,
        score: bool,
        take: Take = lambda update: update,
        masks: M.Masks | None = None,
    ) -> tuple[list[Update], list[Scores]]:
        """Local training; with `score`, also how the trained models do. May return fewer than asked: clients fail.
        Updates are passed to `take` one at a time, as they come, and replaced by what it returns. With `masks`, clients
        mask them."""

    def send_second(self, sent: Mapping[int, Params], round: int) -> dict[int, int]:
        """The second message of a round, which clients answer by remembering something; -> bytes sent to each."""

    def ask(self, task: M.Task, sent: Mapping[int, Params]) -> Iterator[Reply]:
        """Any message: the replies as they come, none of clients that do not answer. For secure aggregation."""

    def evaluate(self, sent: Mapping[int, Params], *, as_of: int, pooled: bool, after_local: bool) -> list[Scores]:
        """Scores as received (and adapted, where the method adapts), or after a round of local training on a copy.
        Clients' own state is that of the start of round `as_of`: after round r it is r + 1."""

    def close(self) -> None: ...


MANY = 256  # clients that are asked at once: more are many


@dataclass(frozen=True)
class Reply:
    """One client's answer, or why there is none."""

    client: int
    result: M.Result | None = None
    tensors: Params = field(default_factory=dict)
    bytes_down: int = 0
    bytes_up: int = 0
    error: str = ""


class MessageClients(Clients):
    """Clients that are asked by messages. An engine delivers them: exchange()."""

    def __init__(self, sizes: dict[int, int]) -> None:
        self._sizes = sizes
        self._once = M.Once()
        self._tell: Tell = lambda notice: None

    @abstractmethod
    def exchange(self, task: M.Task, sent: Mapping[int, Params], order: Sequence[int]) -> Iterator[Reply]:
        """Asks clients, in this order, and yields their replies as they come; none of those that do not answer."""

    def watch(self, tell: Tell) -> None:
        self._tell = tell

    def ids(self) -> list[int]:
        return list(self._sizes)

    def sizes(self) -> dict[int, int]:
        return self._sizes

    def enroll(self, clients: Sequence[int]) -> dict[int, Params]:
        found = {reply.client: reply for reply in self.ask(M.Enroll(), {client: {} for client in clients})}
        for client in clients:
            why = found[client].error if client in found else "no answer; resume the run when its node is there"
            if why:
                raise UserError(f"client {client} cannot be enrolled: {why}")
        return {client: found[client].tensors for client in clients}

    def train(
        self,
        sent: Mapping[int, Params],
        round: int,
        score: bool,
        take: Take = lambda update: update,
        masks: M.Masks | None = None,
    ) -> tuple[list[Update], list[Scores]]:
        updates, scores = [], []
        for reply in self.ask(M.Train(round=round, score=score, masks=masks), sent):
            client, one = reply.client, reply.result
            if one is None:
                updates.append(take(Update(client, sent[client], {}, 0, error=reply.error)))
                continue
            assert isinstance(one, M.TrainResult)
            if one.after_local:
                scores.append(_scores(client, one.after_local, one.passes))
            up, stats = M.split_update(reply.tensors)
            update = Update(
                client=client,
                sent=sent[client],
                up=up,
                n=one.n,
                stats=stats,
                loss=one.loss,
                passes=one.passes,
                bytes_down=reply.bytes_down,
                bytes_up=reply.bytes_up,
                error=one.error,
                moved=one.moved,
            )
            updates.append(take(update))
        return sorted(updates, key=lambda u: u.client), sorted(scores, key=lambda s: s.client)

    def send_second(self, sent: Mapping[int, Params], round: int) -> dict[int, int]:
        replies = self.ask(M.Second(round=round), sent)
        return {reply.client: reply.bytes_down for reply in replies if reply.result}

    def evaluate(self, sent: Mapping[int, Params], *, as_of: int, pooled: bool, after_local: bool) -> list[Scores]:
        found = []
        for reply in self.ask(M.Evaluate(as_of=as_of, pooled=pooled, after_local=after_local), sent):
            if isinstance(reply.result, M.EvaluateResult):
                one = reply.result
                found.append(_scores(reply.client, one.scores, one.passes, one.groups))
        return sorted(found, key=lambda s: s.client)

    def ask(self, task: M.Task, sent: Mapping[int, Params]) -> Iterator[Reply]:
        """Asks the largest clients first, so that no host is left with a long one at the end. Of many clients the last
        matters little: they are asked in their own order, in which the server adds up their updates."""
        many = len(sent) > MANY
        order = sorted(sent) if many else sorted(sent, key=lambda client: (-self._sizes[client], client))
        for reply in self.exchange(task, sent, order):
            if reply.result:
                self._once.delivered(reply.client, task, sent[reply.client])
            else:
                self._once.lost(reply.client)
            yield reply

    def _notify(
        self, task: M.Task, group: Sequence[int], asked: int, seconds: float | None = None, errors: Sequence[str] = ()
    ) -> None:
        """Of clients that are asked as one. `errors`: of each of them, once they have answered."""
        samples = sum(self._sizes[client] for client in group)
        for i, client in enumerate(group):
            self._tell(Notice(task.ask, client, asked, samples, seconds, errors[i] if errors else ""))


def _scores(client: int, scores: M.ModelScores, passes: int, groups: list[list[int]] | None = None) -> Scores:
    held = {"val": scores.val, "test": scores.test, "global": scores.pooled}
    table = None
    if groups is not None:
        table = np.array(groups, np.int64).reshape(len(groups), len(groups[0]) if groups else 0)
    return Scores(client, {name: hits.score() for name, hits in held.items() if hits}, passes, table)
