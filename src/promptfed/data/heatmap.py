"""A picture of a partition: how many training samples of which class every client has."""

from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure

from ..errors import UserError
from .federation import Federation

_NAMED = 40  # rows or columns up to which each one is labelled
_WRITTEN = 400  # cells up to which each one shows its count
_ROWS = 1000  # clients beyond this are averaged in groups, as no picture has pixels for them


def check(path: Path) -> None:
    """Raises UserError where no picture can be written under this name."""
    formats = FigureCanvasAgg.get_supported_filetypes()
    if path.suffix.lower().removeprefix(".") not in formats:
        raise UserError(f'--out = "{path}" must end in {", ".join(f".{name}" for name in sorted(formats))}')


def draw(federation: Federation, path: Path) -> None:
    """Write a heat map of the training samples, clients down and classes across, and bars of each client's total."""
    check(path)
    train, val, test = (federation.label_counts(split) for split in ("train", "val", "test"))
    clients, classes = train.shape
    names = [site.name for site in federation.sites]
    group = -(-clients // _ROWS)
    edges = np.arange(0, clients, group)
    rows = np.add.reduceat(train, edges) / np.minimum(group, clients - edges)[:, None]  # (rows, classes)

    height = float(np.clip(1.5 + 0.3 * len(rows), 3.2, 9))
    width = float(np.clip(3.2 + 0.5 * classes, 6, 12))
    figure = Figure(figsize=(width, height), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    heat, total = figure.subplots(1, 2, sharey=True, width_ratios=[5, 1])

    # few counts are large under label skew: the root keeps small ones visible
    scale = PowerNorm(0.5, vmin=0, vmax=max(1, rows.max()))
    extent = (-0.5, classes - 0.5, clients - 0.5, -0.5)
    drawn = heat.imshow(rows, aspect="auto", cmap="Blues", norm=scale, interpolation="nearest", extent=extent)
    if train.size <= _WRITTEN and group == 1:
        for client, label in np.argwhere(train > 0):
            dark = scale(train[client, label]) > 0.6
            heat.text(
                label, client, train[client, label], ha="center", va="center", fontsize=7, color="w" if dark else "k"
            )
    if classes <= _NAMED:
        short = [name if len(name) <= 18 else f"{name[:17]}…" for name in federation.dataset.classes]
        tilted = max(map(len, short)) > 4
        heat.set_xticks(
            range(classes), short, fontsize=8, rotation=45 if tilted else 0, ha="right" if tilted else "center"
        )
    if clients <= _NAMED:
        heat.set_yticks(range(clients), names, fontsize=8)
    heat.set_xlabel("class")
    heat.set_ylabel("client")
    heat.tick_params(length=2)
    figure.colorbar(
        drawn,
        ax=heat,
        label="training samples" if group == 1 else f"training samples, mean of {group} clients",
        pad=0.02,
    )

    left = np.zeros(len(rows))
    for part, label, colour in ((train, "train", "#2171b5"), (val, "validation", "#9ecae1"), (test, "test", "#fdae6b")):
        sums = np.add.reduceat(part.sum(1), edges) / np.minimum(group, clients - edges)  # (rows,)
        if clients <= _NAMED:
            total.barh(edges, sums, height=0.8, left=left, color=colour, label=label)
        else:  # one polygon instead of a thousand bars
            borders = np.r_[edges, clients] - 0.5
            total.stairs(
                left + sums, borders, baseline=left, orientation="horizontal", fill=True, color=colour, label=label
            )
        left = left + sums
    if clients <= _NAMED:
        for client, amount in enumerate(left):
            total.text(amount + 0.03 * left.max(), client, f"{amount:.0f}", va="center", fontsize=7)
        total.set_xlim(0, 1.35 * left.max())
    total.set_xlabel("samples in all")
    total.tick_params(labelleft=False, left=False, labelsize=8)
    total.spines[["top", "right", "left"]].set_visible(False)
    handles, labels = total.get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=8, frameon=False, loc="outside upper right", ncols=3)
    kind = federation.about.get("kind", "custom")
    heat.set_title(f"{federation.dataset.name}, {kind}, {clients} client{'s' if clients > 1 else ''}", fontsize=10)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
