"""Who helps whom under DP2FL: what every client's trained data prompt weighs in every client's own one (Eq. 9-17).

The weights of a round are not kept. They are made again for the round that would come next: every client trains on a
copy, and its model is tried on every validation set.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from matplotlib.figure import Figure

from .. import params as P
from ..errors import UserError
from ..methods.dp2fl import Dp2fl
from ..methods.dp2fl.weights import distance, local_weights
from ..params import Params
from ..report import style
from ..training import context
from .base import Found, Options
from .opened import Opened

MOST = 20


def helps(opened: Opened, options: Options) -> Found:
    method, state, device = opened.method, opened.state, opened.host.device
    if not isinstance(method, Dp2fl):
        raise UserError(
            f'helps: weights of other clients are DP2FL\'s, and the run is of "{opened.config.method.name}"'
        )
    helpers = opened.chosen(options, "train", MOST)
    helped = [client for client in helpers if f"val.{client}.x" in state]  # nobody else has a data prompt of its own
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
    weights = np.array(
        [
            local_weights(
                before[client],
                losses[k].tolist(),
                apart[k].tolist(),
                alpha=method.alpha,
                beta=method.beta,
                rule=method.negatives,
                gamma=method.gamma,
            )
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
        f"A row: what each trained data prompt weighs in one client's own data prompt, if {len(helpers)} clients take "
        f"part in the round after the last. What the client has trained itself weighs {own_weight:.2f} of "
        f"{weights.sum(1).mean():.2f} in the mean; {sum(row['kind'] == 'positive' for row in rows)} of {len(rows)} "
        f"pairs lower the loss, {sum(row['kind'] == 'discarded' for row in rows)} are discarded."
    )
    return Found(draw(opened, helped, helpers, weights), rows, "Who helps whom", text)


def data_prompt(method: Dp2fl, params: Params) -> Params:
    return {name: p for name, p in params.items() if method.tuning.role(name) == "data"}


def kind(loss: float, before: float, alpha: float) -> str:
    """Of a client whose model has this loss on a set on which there was another before."""
    if not math.isfinite(before) or not loss < alpha * before:
        return "discarded"
    return "positive" if loss < before else "retained"


def draw(opened: Opened, helped: list[int], helpers: list[int], weights: np.ndarray) -> Figure:
    figure = style.blank(float(np.clip(2.2 + 0.42 * len(helped), 3.6, 8)))
    axes = figure.subplots()
    most = max(float(weights.max()), 1e-9)
    drawn = axes.imshow(weights, cmap="Greens", vmin=0, vmax=most, aspect="auto", interpolation="nearest")
    for (k, i), weight in np.ndenumerate(weights) if len(helpers) <= 12 else ():
        colour = "w" if weight > 0.6 * most else "k" if weight else "0.6"
        axes.text(i, k, f"{weight:.2f}" if weight else "0", ha="center", va="center", fontsize=8, color=colour)
    across, down = ([style.plain(name) for name in opened.names(ids)] for ids in (helpers, helped))
    tilted = max(map(len, across)) * len(across) > 80
    axes.set_xticks(range(len(across)), across, fontsize=9, rotation=90 if tilted else 0)
    axes.set_yticks(range(len(down)), down, fontsize=9)
    axes.tick_params(length=2)
    axes.set_xlabel("helper: client whose trained data prompt is weighed", fontsize=10)
    axes.set_ylabel("client that is helped", fontsize=10)
    figure.colorbar(drawn, ax=axes, label="weight", pad=0.02).ax.tick_params(labelsize=8)
    style.title(figure, f"{opened.title}\nweights in the clients' data prompts, in the round after the last")
    return figure
