"""FedMix: Mixup with other clients' data, of which only means are known.

Yoon et al., "FedMix: Approximation of Mixup under Mean Augmented Federated Learning" (ICLR 2021), Eq. 3 and
Algorithm 2. Where the last term is written with (1 - lambda) l, as in a public implementation, it differs by
O(lambda^2), which the equation leaves out anyway.

Means of private images and labels are sent to the server, and from there to all clients.
"""

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from .. import Batch, Context, Method, Model, Params, State, UserError
from .. import params as P
from ..method import ONCE
from ..phases import Holdings

_X, _Y = "mean.x", "mean.y"  # (means, C, H, W) normalised, (means, classes)


class FedMix(Method):
    """The mean of a client with a single image would be that image: it sends none, and still receives the others'.
    A newcomer's means are added to the others, and all of them are sent again."""

    paper = "Yoon et al., ICLR 2021"
    sends = "mean images and labels"

    mix: float = Field(0.05, gt=0, lt=1, description="weight of the means in the mixture (lambda)")
    mean_size: int = Field(0, ge=0, description="least number of images per mean (M_k); 0: all images of a client")

    def check(self, model: Model, init: Params) -> None:
        super().check(model, init)
        if self.tuning.frozen_name(model):
            raise UserError(
                "method.name: FedMix mixes images, and this tuning uses only cached outputs of frozen layers"
            )
        if self.mean_size == 1:
            raise UserError("method.mean_size = 1 would send the images themselves: it must be 0 or at least 2")

    def enroll(self, model: Model, init: Params, own: Holdings) -> Params:
        """Sample i belongs to mean i modulo their number, so that each has at least mean_size samples if n allows."""
        told, n = super().enroll(model, init, own), int(own.label_counts.sum())
        if n < 2:
            return told
        groups = max(1, n // (self.mean_size or n))
        sums: Params = {}
        done = 0
        for batch in own.train():
            at = torch.arange(done, done + len(batch.y), device=batch.y.device) % groups
            done += len(batch.y)
            for name, values in ((_X, batch.x), (_Y, F.one_hot(batch.y, model.classes).to(batch.x.dtype))):
                start = sums.get(name, values.new_zeros(groups, *values.shape[1:]))
                sums[name] = start.index_add(0, at, values)
        sizes = torch.bincount(torch.arange(n) % groups, minlength=groups)
        return {**told, **{name: s / sizes.to(s).reshape(-1, *[1] * (s.ndim - 1)) for name, s in sums.items()}}

    def loss(self, model: Model, params: Params, batch: Batch, ctx: Context) -> tuple[Tensor, Params]:
        """(1 - lam) l(f(z), y) + lam l(f(z), y') + lam dl(f(z), y)/dz x', with z = (1 - lam) x and one mean (x', y')
        for the batch."""
        means = len(ctx.once[_X])
        if not means:  # no client has two images
            return super().loss(model, params, batch, ctx)
        # Their sum modulo 1 is uniform and independent of either number, which may place a patch.
        chosen = (batch.noise.sum() % 1 * means).long().clamp(max=means - 1).reshape(1)
        other, label = (ctx.once[name].index_select(0, chosen) for name in (_X, _Y))  # (1, C, H, W), (1, classes)

        def first(z: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
            logits = self.tuning.logits(model, params, batch._replace(x=z), ctx)
            value = batch.mean(F.cross_entropy(logits, batch.y, reduction="none"))
            return value, (value, batch.mean(-(label * logits.log_softmax(1)).sum(1)))

        with sdpa_kernel(SDPBackend.MATH):  # the fused kernels cannot be differentiated twice
            slope, (own, others) = torch.func.grad(first, has_aux=True)((1 - self.mix) * batch.x)
        return (1 - self.mix) * own + self.mix * others + self.mix * (slope * other).sum(), {}

    def begin(self, model: Model, init: Params, seed: int) -> State:
        """The shared parameters, and below `once` the means of all clients."""
        none = {_X: torch.zeros(0, *model.image), _Y: torch.zeros(0, model.classes)}
        return {**super().begin(model, init, seed), **P.nested(ONCE, none)}

    def admit(self, state: State, client: int, hello: Params, round: int) -> State:
        state, known = super().admit(state, client, hello, round), P.under(state, ONCE)
        means = {name: torch.cat([p, hello[name]]) for name, p in known.items() if name in hello}
        return {**state, **P.nested(ONCE, means)}
