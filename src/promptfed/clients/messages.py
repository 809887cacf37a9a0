"""What is asked of clients and what they answer, the same for every engine.

A request is one `Request` and blobs of safetensors (wire.py), an answer one `Result` per client and, where the
task has them, one blob per client. Between processes and machines the models are sent as JSON. They are strict: an
engine that reads what a stranger sent needs no other schema. Types bound each field; the engine limits the size of a
whole message.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Annotated, Generic, Literal, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, model_validator
from torch import Tensor

from .. import params as P
from ..method import split_once
from ..params import Params
from ..scoring import Score
from .wire import pack, unpack

Count = Annotated[int, Field(ge=0, le=1 << 53)]
Round = Annotated[int, Field(ge=0, lt=1 << 32)]  # fits a key of the store
BlobIndex = Annotated[int, Field(ge=0, lt=4096)]
Digest = Annotated[str, Field(pattern=r"\A[0-9a-f]{64}\z")]  # becomes the name of a file
Name = Annotated[str, Field(min_length=1, max_length=1000)]
Sentence = Annotated[str, Field(max_length=4000)]
# fail_fast: otherwise each of a million mistakes is collected.
Counts = Annotated[list[Count], Field(max_length=1_000_000, fail_fast=True)]
ClientList = Counts  # client numbers


class Note(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, ser_json_inf_nan="constants")


# ---- requests


class Enroll(Note):
    """First contact: answered with what the client tells about itself."""

    ask: Literal["enroll"] = "enroll"


class Masks(Note):
    """Of which an update is masked."""

    clients: ClientList  # that have shared the secrets of their masks
    total: Count  # their samples
    largest: Count  # of one of them


class Train(Note):
    """A round of local training: answered with an update."""

    ask: Literal["train"] = "train"
    round: Round
    score: bool  # also score the trained model
    masks: Masks | None = None  # None: the update is sent as it is


class Second(Note):
    """The second message of a round: the client remembers something."""

    ask: Literal["second"] = "second"
    round: Round


class Evaluate(Note):
    """Scores of the model as received, or after a round of local training on a copy."""

    ask: Literal["evaluate"] = "evaluate"
    as_of: Round  # the client's state is that of the start of this round
    pooled: bool  # also on all clients' test data
    after_local: bool
    # Clients that received the same are scored in batches of their union: losses then depend on who is asked at once.
    together: bool | None = None


class Keys(Note):
    """Secure aggregation, before training: the client makes new keys, and answers with the public ones."""

    ask: Literal["keys"] = "keys"
    round: Round


class Shares(Note):
    """The public keys of its neighbours: answered with shares of its secrets, encrypted for each of them."""

    ask: Literal["shares"] = "shares"
    round: Round
    clients: ClientList  # that made keys


class Unmask(Note):
    """Shares that its neighbours have encrypted for it: answered with those that remove the masks of the sum."""

    ask: Literal["unmask"] = "unmask"
    round: Round
    answered: ClientList  # whose updates are in the sum


SecureTask = Keys | Shares | Unmask
Task = Enroll | Train | Second | Evaluate | SecureTask


class Recipient(Note):
    client: Count
    blob: BlobIndex  # what it receives
    once: dict[Name, Digest] = {}  # what it is sent only once, now or earlier: digests by name


class Request(Note):
    task: Annotated[Task, Field(discriminator="ask")]
    clients: list[Recipient]
    new: dict[Digest, BlobIndex] = {}  # blobs to keep, by their digest


# ---- answers


class SplitScore(Note):
    """A Score as lists."""

    n: Count
    loss: float | None = None  # may be NaN: the model may have diverged
    tp: Counts
    fp: Counts
    fn: Counts

    @model_validator(mode="after")
    def _possible(self) -> SplitScore:
        """Each sample is either a hit or both a false positive of one class and a missed one of another."""
        hits = sum(self.tp)
        if not hits + sum(self.fp) == hits + sum(self.fn) == self.n:
            raise ValueError(f"counts that do not add up to n = {self.n}")
        if self.loss is not None and self.loss < 0:
            raise ValueError(f"loss = {self.loss:g} must not be negative")
        return self

    @classmethod
    def of(cls, score: Score, loss: bool) -> SplitScore:
        counts = {name: getattr(score, name).tolist() for name in ("tp", "fp", "fn")}
        return cls(n=score.n, loss=score.loss if loss else None, **counts)

    def score(self) -> Score:
        counts = (np.array(count, np.int64) for count in (self.tp, self.fp, self.fn))
        return Score(self.n, math.nan if self.loss is None else self.loss, *counts)


class ModelScores(Note):
    """Scores of one model."""

    val: SplitScore
    test: SplitScore
    pooled: SplitScore | None = None  # on all clients' test data


class Result(Note):
    """To what is not training or evaluation: that it is done."""

    client: Count


class TrainResult(Result):
    n: Count
    passes: Count
    loss: float | None = None  # None: not reported
    error: Sentence = ""  # why there is no update
    after_local: ModelScores | None = None
    moved: Annotated[dict[Name, float], Field(max_length=100)] = {}  # role -> L2 change in training


class EvaluateResult(Result):
    passes: Count
    scores: ModelScores
    groups: Annotated[list[Counts], Field(max_length=100_000, fail_fast=True)] | None = None

    @model_validator(mode="after")
    def _grouped(self) -> EvaluateResult:
        if self.groups is not None and sum(map(sum, self.groups)) != self.scores.test.n:
            raise ValueError(f"groups that do not add up to the {self.scores.test.n} test samples")
        return self


HAS_BLOBS = (Enroll, Train, Keys, Shares, Unmask)  # tasks whose answer has a blob per client
RESULTS = TypeAdapter(list[TrainResult | EvaluateResult | Result])


@dataclass(frozen=True)
class Answer:
    """A host's answer, in the order of the request's clients."""

    results: Sequence[Result]
    blobs: list[bytes]
    seconds: float = 0.0  # of work


Ask = Callable[[Request, list[bytes]], Answer]  # a host, or a process that has one


def pack_update(up: Params, stats: Params) -> bytes:
    """What a client sends after training."""
    return pack({**P.nested("up", up, "/"), **P.nested("stats", stats, "/")})


def read_update(blob: bytes) -> tuple[Params, Params]:
    return split_update(unpack(blob)[0])


def split_update(tensors: Params) -> tuple[Params, Params]:
    return P.under(tensors, "up", "/"), P.under(tensors, "stats", "/")


# ---- packing

Blob = TypeVar("Blob")  # bytes, or what an engine carries them in


class Once:
    """Which clients already have the large tensors that are sent only once."""

    def __init__(self) -> None:
        self._digests: dict[int, tuple[Tensor, str]] = {}  # by a tensor's id: it is kept, so that the id stays its own
        self._delivered: set[tuple[int, str]] = set()

    def named(self, task: Task, down: Params) -> dict[str, str]:
        """The digest of each tensor of a request that is sent only once, by its name. Only training needs them."""
        needed = isinstance(task, Train) or (isinstance(task, Evaluate) and task.after_local)
        return {name: self._digest(name, p) for name, p in split_once(down)[1].items()} if needed else {}

    def has(self, client: int, digest: str) -> bool:
        return (client, digest) in self._delivered

    def delivered(self, client: int, task: Task, down: Params) -> None:
        self._delivered.update((client, digest) for digest in self.named(task, down).values())

    def lost(self, client: int) -> None:
        """The client may have lost all of it: it is sent again."""
        self._delivered = {(c, digest) for c, digest in self._delivered if c != client}

    def _digest(self, name: str, p: Tensor) -> str:
        if id(p) not in self._digests:
            self._digests[id(p)] = (p, sha256(pack({name: p})).hexdigest())
        return self._digests[id(p)][1]


class Packing(Generic[Blob]):
    """Makes the requests of one exchange. Of clients that are sent the same object, the blob is packed once."""

    def __init__(self, task: Task, sent: Mapping[int, Params], once: Once, carry: Callable[[bytes], Blob]) -> None:
        self._task, self._sent, self._once, self._carry = task, sent, once, carry
        self._last: tuple[Params, tuple[Blob, int]] | None = None  # all clients are often sent one object
        self._kept: dict[str, tuple[Blob, int]] = {}  # by digest

    def __call__(self, clients: Sequence[int]) -> tuple[Request, list[Blob], dict[int, int]]:
        """-> a request to these clients, its blobs, and how many bytes each of them receives"""
        # With their bytes, by the id of what is sent or by the digest of what is sent once.
        blobs: dict[int | str, tuple[Blob, int]] = {}
        recipients, received = [], {}
        for client in clients:
            down = self._sent[client]
            once = self._once.named(self._task, down)
            missing = [digest for digest in once.values() if not self._once.has(client, digest)]
            blobs[id(down)] = self._always(down)
            blobs |= {digest: self._large(name, digest, down) for name, digest in once.items() if digest in missing}
            recipients.append(Recipient(client=client, blob=list(blobs).index(id(down)), once=once))
            received[client] = blobs[id(down)][1] + sum(blobs[digest][1] for digest in missing)
        new = {key: index for index, key in enumerate(blobs) if isinstance(key, str)}
        request = Request(task=self._task, clients=recipients, new=new)
        return request, [blob for blob, _ in blobs.values()], received

    def _always(self, down: Params) -> tuple[Blob, int]:
        last = self._last  # several threads may be here: at worst, something is packed twice
        if last is None or last[0] is not down:
            last = self._last = down, self._carried(split_once(down)[0])
        return last[1]

    def _large(self, name: str, digest: str, down: Params) -> tuple[Blob, int]:
        if digest not in self._kept:
            self._kept[digest] = self._carried({name: split_once(down)[1][name]})
        return self._kept[digest]

    def _carried(self, params: Params) -> tuple[Blob, int]:
        blob = pack(params)
        return self._carry(blob), len(blob)
