"""The client half of a round, where the data are: answers messages, remembers what is private, sends what is shared."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .. import params as P
from ..data import Federation
from ..method import Method
from ..models import Model
from ..params import Params
from ..phases import Context, Holdings
from ..privacy import Privacy, check_stats, randomness
from ..scoring import Score, evaluate
from ..training import Samples, Trained, Work, chunks, context, train
from .frozen import FrozenValues, normalisation
from .store import Store
from .wire import pack, unpack

Message = tuple[dict[str, Any], list[bytes]]  # a JSON note, and blobs of tensors

_PRIVATE, _MEMORY = "private/", "memory/"


@dataclass
class Host:
    """Holds the data and the memory of some clients (in a simulation: of all)."""

    method: Method
    model: Model
    federation: Federation
    store: Store
    seed: int
    device: torch.device
    block: int = 1  # clients that are trained as one
    frozen_bytes: float = 8e9  # of frozen values that may be kept on disk
    drift: bool = False  # whether answers tell how far parameters moved
    privacy: Privacy | None = None  # what is done to updates before they leave
    noise_seed: int | None = None  # of their noise, in a simulation; none: it comes from the operating system

    def __post_init__(self) -> None:
        self.model.to(self.device)
        self.init = P.to(self.method.tuning.init(self.model, self.seed), self.device)
        self._pooled: Samples | None = None
        self._frozen: FrozenValues | None = None
        if self.method.tuning.frozen_name(self.model):
            data = self.federation.dataset
            self._frozen = FrozenValues(self.method.tuning, self.model, data, self.device, self.frozen_bytes)

    def close(self) -> None:
        self.store.close()

    def __call__(self, note: dict[str, Any], blobs: list[bytes]) -> Message:
        """One request for a block of clients. The only way in and out."""
        clients: list[int] = note["clients"]
        if note["ask"] == "enroll":
            return {}, [pack(self.enroll(client)) for client in clients]
        if note["ask"] == "second":
            for client, place in zip(clients, note["blob"], strict=True):
                self.receive_second(client, unpack(blobs[place])[0], note["round"])
            return {}, []
        for digest, place in note.get("new", {}).items():
            self.store.add(digest, blobs[place])
        received = {place: P.to(unpack(blobs[place])[0], self.device) for place in set(note["blob"])}
        notes: list[dict[str, Any]] = []
        answers: list[bytes] = []
        for i in range(0, len(clients), self.block):
            part = range(i, min(i + self.block, len(clients)))
            once = note.get("once", [{}] * len(clients))
            block = [self.work(clients[j], received[note["blob"][j]], note["round"], once[j]) for j in part]
            if note["ask"] == "train":
                said, sent = self.train(block, note["round"], note["score"])
                answers += sent
            else:
                said = self.evaluate(block, note["round"], note["pooled"], note["after_local"])
            notes += said
        return {"clients": notes}, answers

    def work(self, client: int, down: Params, before: int, once: Mapping[str, str] | None = None) -> Work:
        """The client as it stands at the start of a round. `once` names what was sent before, by its content."""
        private, memory = self.remembers(client, before)
        start = self.method.start(self.init, down, private, memory)
        # A first-time participant remembers what it has just received, so that all clients of a block look alike.
        memory = memory or self.method.remembered(start)
        kept = {name: self.store.once(digest)[name] for name, digest in (once or {}).items()}
        samples = self.samples(self.federation.sites[client].train)
        return Work(client, samples, start, down, memory, P.to(kept, self.device), private)

    def remembers(self, client: int, before: int) -> tuple[Params, Params]:
        """-> what is private, what is memory"""
        state = P.to(self.store.get(client, before), self.device)
        return (
            {k.removeprefix(_PRIVATE): v for k, v in state.items() if k.startswith(_PRIVATE)},
            {k.removeprefix(_MEMORY): v for k, v in state.items() if k.startswith(_MEMORY)},
        )

    def samples(self, index: np.ndarray) -> Samples:
        data = self.federation.dataset
        mean, std = normalisation(self.model, data, self.device)
        labels = torch.from_numpy(data.labels[index]).to(self.device)
        frozen = self._frozen(index) if self._frozen else {}
        if frozen and not self.method.tuning.images:
            return Samples(labels.new_empty(len(labels), 0), labels, mean, std, frozen)
        return Samples(torch.from_numpy(data.images[index]).to(self.device), labels, mean, std, frozen)

    def enroll(self, client: int) -> Params:
        private, _ = self.remembers(client, 1)
        if not private:
            private = self.method.secrets()
            if private:
                self.store.put(0, {client: {_PRIVATE + name: value for name, value in private.items()}})
        site = self.federation.sites[client]
        labels = torch.from_numpy(self.federation.dataset.labels[site.train]).to(self.device)
        counts = torch.bincount(labels, minlength=self.model.classes)
        own = Holdings(
            lambda: chunks(self.samples(site.train)), lambda: chunks(self.samples(site.val)), counts, private
        )
        with torch.no_grad():
            return self.method.enroll(self.model, self.init, own)

    def receive_second(self, client: int, received: Params, round: int) -> None:
        private, memory = self.remembers(client, round + 1)
        settled = self.method.receive_second(received, private)
        self.store.put(round, {client: _prefixed(settled, memory)})

    def train(self, block: Sequence[Work], round: int, score: bool) -> tuple[list[dict[str, Any]], list[bytes]]:
        notes, blobs, memories = [], [], {}
        for work, done in zip(
            block, train(self.method, self.model, block, self.method.schedule(round), self.seed, round), strict=True
        ):
            note: dict[str, Any] = {"client": work.client, "n": len(work.samples), "passes": done.passes}
            finite = math.isfinite(done.loss) and P.finite(done.params)
            if not finite and self.privacy:  # to say so would tell of the data: it is as if nothing had changed
                done = Trained(work.params, {}, 0.0, done.passes)
            elif not finite:
                # Nothing of it is sent or remembered: the client goes on from where it was.
                notes.append({**note, "error": f"non-finite {'loss' if P.finite(done.params) else 'parameters'}"})
                blobs.append(b"")
                continue
            ctx = context(work, self.model, stats=done.stats)
            with torch.no_grad():
                params = self.method.finish(done.params, ctx)
                stats = {**done.stats, **self.method.report(self.model, params, ctx)}
                kept = self.method.keep(self.model, params, ctx)
            if self.drift:
                note["moved"] = moved(self.method, work.params, params)
            if score:
                note["after_local"] = self.scores(work, params, pooled=False)
            further = {name: v for name, v in work.private.items() if name not in self.init}
            private = {**further, **self.method.kept(params), **kept}
            remembered = _prefixed(private, self.method.remembered(params))
            if remembered:
                memories[work.client] = remembered
            up = self.method.upload(params, ctx)
            if self.privacy:
                up = self.released(work, up, stats, round)
            notes.append(note if self.privacy else {**note, "loss": done.loss})
            blobs.append(message(up, stats))
        if memories:
            self.store.put(round, memories)
        return notes, blobs

    def released(self, work: Work, up: Params, stats: Params, round: int) -> Params:
        """What is sent in place of an update where there is privacy."""
        assert self.privacy
        check_stats(self.method, stats)
        none = torch.zeros((), dtype=torch.int64, device=self.device)
        # Of what was received alone, so that it says nothing of the data.
        blank = Context(work.down, {}, None, none, none.expand(self.model.classes), once=work.once)
        with torch.no_grad():
            still = self.method.upload(self.method.start(self.init, work.down, {}, {}), blank)
        return self.privacy.release(up, still, randomness(self.noise_seed, round, work.client))

    def evaluate(self, block: Sequence[Work], round: int, pooled: bool, after_local: bool) -> list[dict[str, Any]]:
        """Scores of each client's model: as received and adapted, or after a round of local training on a copy."""
        phases = self.method.schedule(round) if after_local else self.method.adapt()
        trained = train(self.method, self.model, block, phases, self.seed, round) if phases else None
        notes = []
        for i, work in enumerate(block):
            params = trained[i].params if trained else work.params
            if trained and after_local:
                ctx = context(work, self.model, stats=trained[i].stats)
                params = self.method.finish(params, ctx)
            note = self.scores(work, params, pooled)
            notes.append({"client": work.client, "passes": trained[i].passes if trained else 0, **note})
            groups = self.groups(work, params)
            if groups is not None:
                notes[-1]["groups"] = groups.tolist()
        return notes

    def groups(self, work: Work, params: Params) -> np.ndarray | None:
        """(groups, domains): how many test samples of each domain (or superclass) fall into each of the groups."""
        data, index = self.federation.dataset, self.federation.sites[work.client].test
        if data.domain is None or type(self.method).assign is Method.assign:
            return None
        ctx = context(work, self.model)
        with torch.no_grad():
            found = [self.method.assign(self.model, params, batch, ctx) for batch in chunks(self.samples(index))]
        known = [f.cpu().numpy() for f in found if f is not None]
        if len(known) < len(found):
            return None  # of this setting of the method there are no groups
        groups = np.concatenate([np.zeros(0, np.int64), *known])
        table = np.zeros((int(groups.max(initial=-1)) + 1, len(data.domains)), np.int64)
        np.add.at(table, (groups, data.domain[index]), 1)
        return table

    def scores(self, work: Work, params: Params, pooled: bool) -> dict[str, Any]:
        site = self.federation.sites[work.client]
        parts = {"val": self.samples(site.val), "test": self.samples(site.test)}
        if pooled:
            parts["global"] = self.pooled()
        # The loss on validation data is nobody's business: DP2FL goes to lengths to keep it from the server.
        return {
            name: dump_score(evaluate(self.method, self.model, work, params, part), loss=name != "val")
            for name, part in parts.items()
        }

    def pooled(self) -> Samples:
        """Everybody's test data: a simulation has them, a real site does not."""
        if self._pooled is None:
            self._pooled = self.samples(np.concatenate([site.test for site in self.federation.sites]))
        return self._pooled


def moved(method: Method, before: Params, after: Params) -> dict[str, float]:
    """The Euclidean distance between parameters of each role."""
    squares: dict[str, float] = {}
    for name, p in after.items():
        role = method.tuning.role(name)
        squares[role] = squares.get(role, 0.0) + float((p - before[name]).double().square().sum())
    return {role: math.sqrt(value) for role, value in squares.items()}


def _prefixed(private: Params, memory: Params) -> Params:
    return {**{_PRIVATE + k: v for k, v in private.items()}, **{_MEMORY + k: v for k, v in memory.items()}}


def message(up: Params, stats: Params) -> bytes:
    """What a client sends after training."""
    return pack({**{f"up/{k}": v for k, v in up.items()}, **{f"stats/{k}": v for k, v in stats.items()}})


def read_message(blob: bytes) -> tuple[Params, Params]:
    tensors = unpack(blob)[0]
    return (
        {k.removeprefix("up/"): v for k, v in tensors.items() if k.startswith("up/")},
        {k.removeprefix("stats/"): v for k, v in tensors.items() if k.startswith("stats/")},
    )


def dump_score(score: Score, loss: bool = True) -> dict[str, Any]:
    counts = {name: getattr(score, name).tolist() for name in ("tp", "fp", "fn")}
    return {"n": score.n, **({"loss": score.loss} if loss else {}), **counts}


def parse_score(note: dict[str, Any]) -> Score:
    return Score(
        note["n"], note.get("loss", math.nan), *(np.array(note[name], np.int64) for name in ("tp", "fp", "fn"))
    )
