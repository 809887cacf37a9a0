"""What is asked of clients and what they answer, the same for every engine.

A request is one `Request` and blobs of safetensors (wire.py), an answer one `Result` per client and, where the
task has them, one blob per client. Between processes and machines the models are sent as JSON. They are strict: an
engine that reads what a stranger sent needs no other schema. Types bound each field; the engine limits the size of a
whole message.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from .. import params as P
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


class Note(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, ser_json_inf_nan="constants")


# ---- requests


class Enroll(Note):
    """First contact: answered with what the client tells about itself."""

    ask: Literal["enroll"] = "enroll"


class Train(Note):
    """A round of local training: answered with an update."""

    ask: Literal["train"] = "train"
    round: Round
    score: bool  # also score the trained model


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


Task = Enroll | Train | Second | Evaluate


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
    """To enroll and second: that it is done."""

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


HAS_BLOBS = (Enroll, Train)  # tasks whose answer has a blob per client
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
