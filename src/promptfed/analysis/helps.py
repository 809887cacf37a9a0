"""Who helps whom under DP2FL: the weight of each client's trained data prompt in each client's own (Eq. 9-17).

The weights of a round are not kept. They are computed for the round that would come next: each client trains on a copy,
and its model is evaluated on every validation set.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from .. import params as P
from ..errors import UserError
from ..methods.dp2fl import Dp2fl
from ..methods.dp2fl.data_prompt import distance
from ..methods.dp2fl.weights import local_weights
from ..params import Params
from ..report import marks, style
from ..training import context
from . import Found, Options
from .opened import Opened

MOST = 20


def helps(opened: Opened, options: Options) -> Found:
    method, state, device = opened.method, opened.state, opened.host.device
    if not isinstance(method, Dp2fl):
        raise UserError(
            f'helps: only DP2FL weighs other clients\' prompts, and the run is of "{opened.config.method.name}"'
        )
    helpers = opened.chosen(options, "train", MOST)
    helped = [client for client in helpers if f"val.{client}.x" in state]  # only these have a data prompt of their own
    if not helped:
        raise UserError("helps: no client has validation data")
    sets = {str(j): P.to(P.under(state, f"val.{j}"), device) for j in helped}
    losses = np.zeros((len(helped), len(helpers)))  # [whose set, whose model]
    before: dict[int, float] = {}
    begun: dict[int, Params] = {}
    made: list[Params] = []
    for i, client in enumerate(helpers):
        work, params = opened.after_local(client)
        ctx = context(work, opened.model)
        with torch.no_grad():
            found = method.losses(opened.model, params, sets, ctx)
            if client in helped:
                own = {str(client): sets[str(client)]}
                before[client] = method.losses(opened.model, work.params, own, ctx)[str(client)]
                begun[client] = data_prompt(method, work.params)
        losses[:, i] = [found[str(j)] for j in helped]
        made.append(data_prompt(method, params))
    apart = np.array([[distance(other, begun[client]) for other in made] for client in helped])
    how = {"alpha": method.alpha, "beta": method.beta, "gamma": method.gamma}
    weights = np.array(
        [
            local_weights(before[client], losses[k].tolist(), apart[k].tolist(), rule=method.negatives, **how)
            for k, client in enumerate(helped)
        ]
    )
    rows = [
        {
            "client": client,
            "helper": helper,
            "weight": float(weights[k, i]),
            "loss": float(losses[k, i]),
            "loss_before": before[client],
            "distance": float(apart[k, i]),
            "kind": kind(losses[k, i], before[client], method.alpha),
        }
        for k, client in enumerate(helped)
        for i, helper in enumerate(helpers)
    ]
    own_weight = np.mean([row["weight"] for row in rows if row["client"] == row["helper"]])
    text = (
        f"A row: the weight of each trained data prompt in one client's own data prompt, if {len(helpers)} clients "
        f"take part in the round after the last. The client's own weighs {own_weight:.2f} of "
        f"{weights.sum(1).mean():.2f} on average; {sum(row['kind'] == 'positive' for row in rows)} of {len(rows)} "
        f"pairs lower the loss, {sum(row['kind'] == 'discarded' for row in rows)} are discarded."
    )
    chart = marks.heat_map(
        weights,
        opened.names(helped),
        opened.names(helpers),
        x="helper: client whose trained data prompt is weighed",
        y="client that is helped",
        legend="weight",
        texts=np.vectorize("{:.2f}".format)(weights) if len(helpers) <= 12 else None,
        scheme="greens",
        most=max(float(weights.max()), 1e-9),
    )
    below = "weights in the clients' data prompts, in the round after the last; white: 0"
    return Found(style.titled(chart, opened.title, below), rows, "Who helps whom", text)


def data_prompt(method: Dp2fl, params: Params) -> Params:
    return {name: p for name, p in params.items() if method.tuning.role(name) == "data"}


def kind(loss: float, before: float, alpha: float) -> str:
    """How a model with this loss on a client's validation set counts, given the loss before."""
    if not math.isfinite(before) or not loss < alpha * before:
        return "discarded"
    return "positive" if loss < before else "retained"
