"""The client half of a round, where the data are: answers messages, remembers what is private, sends what is shared."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from time import perf_counter

import numpy as np
import torch
from torch import Tensor

from .. import params as P
from ..data import Federation
from ..data.augment import Augment, FixedViews
from ..errors import UserError
from ..method import Method
from ..models import Model
from ..params import Params
from ..phases import Context, Holdings
from ..precision import Precision, reduced
from ..privacy import Privacy, check_stats, randomness
from ..scoring import Pooled, evaluate, evaluate_union, unions
from ..secure.site import Masker, round_context
from ..training import CHUNK, MOMENTUM, Samples, Trained, Work, chunks, context, train
from . import blocks
from . import messages as M
from .frozen import FrozenValues, normalisation
from .store import Store
from .views import NewViews, SomeViews
from .wire import pack, unpack


@dataclass(kw_only=True)
class Host:
    """Holds the data and the private state of some clients (in a simulation: of all)."""

    method: Method
    model: Model
    federation: Federation
    store: Store
    seed: int
    device: torch.device
    precision: Precision = "fp32"  # of passes through the model
    block: int = 1  # clients that are trained together; 0: as many as the memory of the device holds
    frozen_bytes: float = 8e9  # disk space for cached outputs of frozen layers
    augment: Augment | None = None  # how training images vary
    drift: bool = False  # whether answers report how far parameters moved
    privacy: Privacy | None = None  # clipping and noise of updates before they are sent
    noise_seed: int | None = None  # of that noise, in a simulation; None: it comes from the operating system
    masker: Masker | None = None  # masks updates before they are sent

    def __post_init__(self) -> None:
        self.model.to(self.device)
        self.init = P.to(self.method.tuning.init(self.model, self.seed), self.device)
        self._frozen: FrozenValues | None = None
        if self.method.tuning.frozen_name(self.model):
            data = self.federation.dataset
            self._frozen = FrozenValues(self.method.tuning, self.model, data, self.device, self.frozen_bytes)

    def close(self) -> None:
        self.store.close()
        if self.masker:
            self.masker.close()

    def __call__(self, request: M.Request, blobs: list[bytes]) -> M.Answer:
        """One request for a block of clients. The only way in and out."""
        with reduced(self.device, self.precision):
            return self._answer(request, blobs)

    def _answer(self, request: M.Request, blobs: list[bytes]) -> M.Answer:
        begun, task = perf_counter(), request.task
        for digest, index in request.new.items():
            self.store.add(digest, blobs[index])
        received = {index: unpack(blobs[index])[0] for index in {to.blob for to in request.clients}}
        results: list[M.Result] = []
        answers: list[bytes] = []
        if isinstance(task, M.Enroll):
            results += [M.Result(client=to.client) for to in request.clients]
            answers += [pack(self.enroll(to.client)) for to in request.clients]
        elif isinstance(task, M.Second):
            for to in request.clients:
                self.receive_second(to.client, received[to.blob], task.round)
                results.append(M.Result(client=to.client))
        elif isinstance(task, M.SecureTask):
            if self.masker is None:
                raise UserError(f'"{task.ask}" is asked for secure aggregation: secure.aggregation is false here')
            said = self.masker.answer(task, {to.client: received[to.blob] for to in request.clients})
            results += [M.Result(client=to.client) for to in request.clients]
            answers += map(pack, said)
        else:
            received = {index: P.to(down, self.device) for index, down in received.items()}
            as_of = task.round if isinstance(task, M.Train) else task.as_of
            predicts = isinstance(task, M.Evaluate) and not task.after_local
            if isinstance(task, M.Evaluate) and task.together and self._unions(task):
                return M.Answer(self.evaluate_together(request.clients, received, as_of), [], perf_counter() - begun)
            first = request.clients[0]
            size = self.block or self._fitting(self.work(first.client, received[first.blob], as_of, first.once), as_of)
            parts = (request.clients[i : i + size] for i in range(0, len(request.clients), size))
            each = (
                [self.work(to.client, received[to.blob], as_of, to.once, predicts) for to in part] for part in parts
            )
            if isinstance(task, M.Train):
                trained, answers = self.train(each, task)
                results += trained
            else:
                for block in each:
                    results += self.evaluate(block, as_of, task.pooled, task.after_local)
        return M.Answer(results, answers, perf_counter() - begun)

    def work(
        self, client: int, down: Params, as_of: int, once: Mapping[str, str] | None = None, predicts: bool = False
    ) -> Work:
        """The client as of the start of a round, with the parameters that it trains from, or predicts with.
        `once`: digests of what was sent only once, by name."""
        private, memory = self.remembers(client, as_of)
        start = (self.method.serve if predicts else self.method.start)(self.init, down, private, memory)
        # A first-time participant remembers what it has just received, so that all clients of a block look alike.
        memory = memory or self.method.remembered(start)
        kept = {name: self.store.once(digest)[name] for name, digest in (once or {}).items()}
        samples = self.training_samples(self.federation.sites[client].train)
        draws = (self.seed, as_of, client)
        return Work(client, samples, start, down, memory, P.to(kept, self.device), private, draws)

    def _fitting(self, work: Work, round: int) -> int:
        """The size of blocks by the memory that is free before the first one."""
        if not len(work.samples):  # it says nothing of others
            return 1
        free = blocks.free_bytes(self.device)
        self.block = blocks.fitting(self.method, self.model, work, self.method.schedule(round), free)
        return self.block

    def remembers(self, client: int, as_of: int) -> tuple[Params, Params]:
        """-> private values, memory"""
        state = P.to(self.store.get(client, as_of), self.device)
        return P.under(state, "private", "/"), P.under(state, "memory", "/")

    def samples(self, index: np.ndarray) -> Samples:
        data = self.federation.dataset
        mean, std = self._normalisation
        labels = torch.from_numpy(data.labels[index]).to(self.device)
        frozen = self._frozen(index) if self._frozen else {}
        if frozen and not self.method.tuning.images:
            return Samples(labels.new_empty(len(labels), 0), labels, mean, std, frozen)
        return Samples(torch.from_numpy(data.images[index]).to(self.device), labels, mean, std, frozen)

    def training_samples(self, index: np.ndarray) -> Samples:
        """Those that a phase trains on: where images vary, with their views instead of frozen values."""
        if self.augment is None:
            return self.samples(index)
        data, tuning = self.federation.dataset, self.method.tuning
        mean, std = self._normalisation
        labels = torch.from_numpy(data.labels[index]).to(self.device)
        if self.augment.views:
            some = SomeViews(tuning, self.model, index, *self._fixed_views)
            return Samples(labels.new_empty(len(labels), 0), labels, mean, std, views=some)
        new = NewViews(tuning, self.model, len(index), self.augment)
        return Samples(torch.from_numpy(data.images[index]).to(self.device), labels, mean, std, views=new)

    @cached_property
    def _normalisation(self) -> tuple[Tensor, Tensor]:
        return normalisation(self.model, self.federation.dataset, self.device)

    @cached_property
    def _fixed_views(self) -> tuple[FixedViews, FrozenValues | None]:
        """All images in fixed views, and the frozen values of those if the tuning has any."""
        assert self.augment
        data, tuning = self.federation.dataset, self.method.tuning
        fixed = FixedViews(self.augment, data, self.model.resize.interpolation, self.device)
        if not self._frozen:
            return fixed, None
        return fixed, FrozenValues(tuning, self.model, data, self.device, self.frozen_bytes, fixed)

    def enroll(self, client: int) -> Params:
        private, _ = self.remembers(client, 1)
        site = self.federation.sites[client]
        if not private:
            with torch.no_grad():
                stored = self.method.tuning.stored(self.model, self.init, chunks(self.samples(site.train)))
            private = {**self.method.secrets(), **stored}
            if private:
                self.store.put(0, {client: _stored(private, {})})
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
        self.store.put(round, {client: _stored(settled, memory)})

    def train(self, each: Iterable[Sequence[Work]], task: M.Train) -> tuple[list[M.TrainResult], list[bytes]]:
        """Trains one block after another. What they remember is stored in one transaction: each waits for the disk."""
        if (task.masks is None) != (self.masker is None):
            asked, here = ("false", "true") if self.masker else ("true", "false")
            raise UserError(f"the server asks for an update with secure.aggregation = {asked}, and it is {here} here")
        results: list[M.TrainResult] = []
        blobs: list[bytes] = []
        memories: dict[int, Params] = {}
        phases = self.method.schedule(task.round)
        for block in each:
            done = train(self.method, self.model, block, phases, self.seed, task.round)
            for result, blob, remembered in self._answers(block, done, task):
                results.append(result)
                blobs.append(blob)
                if remembered:
                    memories[result.client] = remembered
        if memories:
            self.store.put(task.round, memories)
        return results, blobs

    def _answers(
        self, block: Sequence[Work], trained: Sequence[Trained], task: M.Train
    ) -> Iterator[tuple[M.TrainResult, bytes, Params]]:
        """Of each client of a trained block its result, what it sends and what it remembers."""
        for work, done in zip(block, trained, strict=True):
            result = M.TrainResult(client=work.client, n=len(work.samples), passes=done.passes)
            finite = math.isfinite(done.loss) and P.finite(done.params)
            if not finite and self.privacy:  # reporting it would reveal something about the data: nothing has changed
                done = Trained(work.params, {}, 0.0, done.passes)
            elif not finite:
                # Nothing is sent or stored: the client's state stays as it was.
                result.error = f"non-finite {'loss' if P.finite(done.params) else 'parameters'}"
                yield result, b"", {}
                continue
            ctx = context(work, self.model, stats=done.stats)
            with torch.no_grad():
                params = self.method.finish(done.params, ctx)
                stats = {**done.stats, **self.method.report(self.model, params, ctx)}
            if self.drift:
                result.moved = moved(self.method, work.params, params)
            if task.score:
                result.after_local = self.scores(work, params, pooled=False)
            further = {name: v for name, v in work.private.items() if name not in self.init}
            up, plain = self.method.upload(params, ctx), type(self.method).upload is Method.upload
            if self.privacy:
                up = self.released(work, up, stats, task)
            with torch.no_grad():
                kept = self.method.keep(self.model, {**params, **up} if plain else params, ctx)
            private = {**further, **self.method.kept(params), **kept, **P.nested(MOMENTUM, done.momentum)}
            if self.masker:
                try:
                    up = self._masked(self.masker, work, up, stats, task)
                except UserError as error:
                    result.error = str(error)
                    yield result, b"", {}
                    continue
            if not self.privacy and not self.masker:
                result.loss = done.loss
            yield result, M.pack_update(up, stats), _stored(private, self.method.remembered(params))

    def released(self, work: Work, up: Params, stats: Params, task: M.Train) -> Params:
        """The update that is sent under differential privacy."""
        assert self.privacy
        check_stats(self.method, stats)
        none = torch.zeros((), dtype=torch.int64, device=self.device)
        # Computed from what was received only, so that it reveals nothing about the data.
        counts = none.expand(self.model.classes)
        blank = Context(work.down, {}, None, none, counts, once=work.once, draws=work.draws)
        still = self.method.unmoved(self.init, blank)
        part = 1.0
        if self.privacy.together and self.masker and task.masks:
            answers = self.masker.settings.needed(len(task.masks.clients))
            part = self.privacy.part(len(work.samples), task.masks.largest, answers)
        return self.privacy.release(up, still, randomness(self.noise_seed, task.round, work.client), part)

    def _masked(self, masker: Masker, work: Work, up: Params, stats: Params, task: M.Train) -> Params:
        """The update that is sent under secure aggregation."""
        assert task.masks
        check_stats(self.method, stats, "secure.aggregation", "masked")
        context = round_context(self.method, task.round, task.masks, work.down)
        return masker.mask(work.client, task.round, up, len(work.samples), task.masks, context)

    def evaluate(self, block: Sequence[Work], as_of: int, pooled: bool, after_local: bool) -> list[M.EvaluateResult]:
        """Scores of each client's model: as received and adapted, or after a round of local training on a copy."""
        phases = self.method.schedule(as_of) if after_local else self.method.adapt()
        trained = train(self.method, self.model, block, phases, self.seed, as_of) if phases else None
        results = []
        for i, work in enumerate(block):
            params = trained[i].params if trained else work.params
            if trained and after_local:
                ctx = context(work, self.model, stats=trained[i].stats)
                params = self.method.finish(params, ctx)
            scores, groups = self.scores(work, params, pooled), self.groups(work, params)
            passes = trained[i].passes if trained else 0
            results.append(M.EvaluateResult(client=work.client, passes=passes, scores=scores, groups=groups))
        return results

    def _unions(self, task: M.Evaluate) -> bool:
        return not task.after_local and not task.pooled and unions(self.method)

    def evaluate_together(
        self, recipients: Sequence[M.Recipient], received: Mapping[int, Params], as_of: int
    ) -> list[M.EvaluateResult]:
        """Scores of the models as received, each on the union of the data of all that received it."""
        found: dict[int, M.EvaluateResult] = {}
        for blob, down in received.items():
            clients = [to.client for to in recipients if to.blob == blob]
            sites = [self.federation.sites[client] for client in clients]
            held = [part for site in sites for part in (site.val, site.test)]
            index, first = np.concatenate(held), self.work(clients[0], down, as_of, predicts=True)
            parts = (self.samples(index[i : i + CHUNK]) for i in range(0, len(index), CHUNK))
            each = evaluate_union(self.method, self.model, first, first.params, parts, list(map(len, held)))
            for client, val, test in zip(clients, each[::2], each[1::2], strict=True):
                scores = M.ModelScores(val=M.SplitScore.of(val, loss=False), test=M.SplitScore.of(test, loss=True))
                found[client] = M.EvaluateResult(client=client, passes=0, scores=scores)
        return [found[to.client] for to in recipients]

    def groups(self, work: Work, params: Params) -> list[list[int]] | None:
        """(groups, domains): how many test samples of each domain (or superclass) fall into each of the groups."""
        data, index = self.federation.dataset, self.federation.sites[work.client].test
        if data.domain is None or type(self.method).assign is Method.assign:
            return None
        ctx = context(work, self.model)
        with torch.no_grad():
            found = [self.method.assign(self.model, params, batch, ctx) for batch in chunks(self.samples(index))]
        known = [f.cpu().numpy() for f in found if f is not None]
        if len(known) < len(found):
            return None  # the method has no groups with these settings
        groups = np.concatenate([np.zeros(0, np.int64), *known])
        table = np.zeros((int(groups.max(initial=-1)) + 1, len(data.domains)), np.int64)
        np.add.at(table, (groups, data.domain[index]), 1)
        return table.tolist()

    def scores(self, work: Work, params: Params, pooled: bool) -> M.ModelScores:
        def hits(samples: Samples, loss: bool = True) -> M.SplitScore:
            return M.SplitScore.of(evaluate(self.method, self.model, work, params, samples), loss)

        site = self.federation.sites[work.client]
        # The loss on validation data stays with the client: DP2FL goes to lengths to keep it from the server.
        val, test = hits(self.samples(site.val), loss=False), hits(self.samples(site.test))
        wide = self.pooled.score(self.method, self.model, work, params) if pooled else None
        return M.ModelScores(val=val, test=test, pooled=M.SplitScore.of(wide, loss=True) if wide else None)

    @cached_property
    def pooled(self) -> Pooled:
        """All clients' test data: a simulation has them, a real site does not."""
        return Pooled(self.samples(np.concatenate([site.test for site in self.federation.sites])))


def moved(method: Method, before: Params, after: Params) -> dict[str, float]:
    """The Euclidean distance between parameters of each role."""
    squares: dict[str, float] = {}
    trained = {**method.shared(after), **method.kept(after)}
    for name, p in trained.items():
        role = method.tuning.role(name)
        squares[role] = squares.get(role, 0.0) + float((p - before[name]).cpu().double().square().sum())
    return {role: math.sqrt(value) for role, value in squares.items()}


def _stored(private: Params, memory: Params) -> Params:
    return {**P.nested("private", private, "/"), **P.nested("memory", memory, "/")}
