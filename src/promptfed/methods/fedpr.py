"""FedPR: what a client changes about a prompt stays clear of the directions that the global prompt lies in.

Feng et al., "Learning Federated Visual Prompt in Null Space for MRI Reconstruction" (CVPR 2023). With the right
singular vectors V of the global prompt P (tokens, width), those of its smallest singular values span an approximate
null space V2, and every local update is multiplied by V2 V2^T.

Reconstructed from the authors' code: the null space is a share of the directions (.8) and not a threshold on singular
values; there is none in the first round, whose prompt is random; it is the optimiser's step that is projected.
Otherwise here: classification for reconstruction, so that a head is trained and averaged besides, unprojected; no
division of V2 V2^T by its norm, which changes the learning rate alone; directions in which P is zero anyway are never
closed (which of them the share of closed ones would take is up to the solver).
"""

import math

import torch
from pydantic import Field
from torch import Tensor

from .. import Batch, Context, Method, Model, Params, State, UserError

_LEARNT = "learnt"  # 0 until prompts have been aggregated, then 1


class FedPr(Method):
    """The prompt in use is P + (params - P) V2 V2^T: params collect the steps as the optimiser makes them."""

    paper = "Feng et al., CVPR 2023"
    needs = ("body",)
    takes = "prompts (+vpt, +vpt-d or +promptfl)"

    ratio: float = Field(0.8, gt=0, le=1, description="share of directions that count as the null space")

    def check(self, model: Model, init: Params) -> None:
        super().check(model, init)
        if any(self.tuning.role(name) == "body" and p.ndim != 2 for name, p in init.items()):
            raise UserError(f"method.name: FedPr is for {self.takes}, not for other weights")

    def closed(self, down: Params) -> Params:
        """V1 (width, closed directions) of each prompt: V2 V2^T = 1 - V1 V1^T."""
        found: Params = {}
        for name, p in self.shared({name: p for name, p in down.items() if name != _LEARNT}).items():
            if self.tuning.role(name) == "body" and p.ndim == 2:
                count = p.shape[1] - math.ceil(self.ratio * p.shape[1] - 1e-9)
                found[name] = torch.linalg.svd(p, full_matrices=False).Vh[:count].T * down[_LEARNT]
        return found

    def client_constants(self, model: Model, params: Params, ctx: Context) -> Params:
        return self.closed(ctx.down)

    def loss(self, model: Model, params: Params, batch: Batch, ctx: Context) -> tuple[Tensor, Params]:
        projected = project(params, ctx.down, ctx.reference)
        # The value of the projected prompt, the gradient in it: what the optimiser makes of that is projected next.
        seen = {name: p.detach() + params[name] - params[name].detach() for name, p in projected.items()}
        return super().loss(model, {**params, **seen}, batch, ctx)

    def finish(self, params: Params, ctx: Context) -> Params:
        return {**params, **project(params, ctx.down, self.closed(ctx.down))}

    def begin(self, model: Model, init: Params, seed: int) -> State:
        """The shared parameters, and whether prompts have been aggregated yet."""
        return {**super().begin(model, init, seed), _LEARNT: torch.zeros(())}

    def merge(self, state: State, mean: Params) -> State:
        return {**super().merge(state, mean), _LEARNT: torch.ones(())}


def project(params: Params, down: Params, closed: Params) -> Params:
    """P + (params - P)(1 - V1 V1^T), for each name that has a V1."""
    found: Params = {}
    for name, v in closed.items():
        change = params[name] - down[name]
        found[name] = down[name] + change - change @ v @ v.T
    return found
