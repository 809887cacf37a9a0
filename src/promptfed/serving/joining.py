"""A new site joins a finished run: it gets a model of its own, and the run stays as it is.

The site is enrolled as a newcomer after the last round and trains alone, on a copy of the server's state that only its
own updates are aggregated into: a federation of one that starts where the run ended. Whatever a method does with an
update (pFedPG's descriptor moves, DP2FL's data prompt is weighted by validation losses) is done as in a run; no other
client sees any of it. `before` is the model that the site receives, `after` the one it receives when it has trained;
both are adapted where the method adapts.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from .. import files, server
from ..clients.host import Host
from ..clients.local import LocalClients
from ..clients.store import Store
from ..data import Dataset, Federation, site_images
from ..errors import UserError
from ..method import State
from ..runs import build, record
from ..runs.opened import Run, client_params, reading
from ..scoring import Score, Scores
from .images import complain, decode
from .predictor import Predictor
from .runs import predictor

MODEL = "model.safetensors"
_SHOWN = 30  # classes that have bars of their own


@dataclass(frozen=True, eq=False)
class Joined:
    """`numbers` is the join.json of the folder."""

    folder: Path
    numbers: dict[str, Any]
    model: Predictor


def join(
    run: str | Path,
    data: str | Path,
    *,
    rounds: int = 1,
    out: str | Path | None = None,
    device: str = "auto",
    federation: Federation | None = None,
) -> Joined:
    """Trains for a site whose images lie in `data` as class/*.jpg, the classes being some of the run's.

    Into `out` (default: a folder of its own below runs/) go model.safetensors with its card, join.json and join.png.
    """
    if rounds < 1:
        raise UserError(f"rounds = {rounds} must be at least 1")
    data = Path(data).expanduser()
    folder = Path(out).expanduser() if out else _fresh(Path(run), data)
    if (folder / "join.json").exists() or (folder / "config.toml").exists():
        raise UserError(f'--out = "{folder}" is not empty: choose another folder')
    with reading(run, device=device, federation=federation) as held, tempfile.TemporaryDirectory() as scratch:
        dataset, skipped = _dataset(held, data, Path(scratch) / "data")
        joined, before, after, state, store = _train(held, dataset, rounds, Path(scratch) / "clients")
        try:
            client, last = len(joined.federation.sites) - 1, held.round + rounds
            site = joined.federation.sites[client]
            numbers = {
                "run": held.folder.resolve().name,
                "method": joined.config.method.name,
                "client": client,
                "site": site.name,
                "rounds": {"run": held.round, "joined": rounds},
                "n_train": len(site.train),
                "n_val": len(site.val),
                "n_test": len(site.test),
                "skipped": list(skipped),
                "before": _numbers(before, dataset.classes),
                "after": _numbers(after, dataset.classes),
                "versions": record.versions(),
            }
            about = {key: numbers[key] for key in ("client", "site", "n_train")} | {"round": last}
            metrics = {key: numbers[key] for key in ("before", "after")}
            params = client_params(joined, store, joined.method.down(state, client), client, last + 1)
            model = predictor(joined, params, {**about, "metrics": metrics})
        finally:
            store.close()
    model.save(folder / MODEL)
    draw(numbers, folder / "join.png")
    files.write(folder / "join.json", (json.dumps(numbers, indent=1) + "\n").encode())  # last: it says all is there
    return Joined(folder, numbers, model)


def _fresh(run: Path, data: Path) -> Path:
    name = f"{run.resolve().name}-join-{data.resolve().name}"
    path, number = Path("runs") / name, 1
    while path.exists():
        number += 1
        path = Path("runs") / f"{name}-{number}"
    return path


def _train(held: Run, dataset: Dataset, rounds: int, memory: Path) -> tuple[build.Parts, Score, Score, State, Store]:
    """-> parts that include the new site, scores on its test data before and after, the state and what it remembers."""
    parts, client = held.parts, len(held.parts.federation.sites)
    site = site_images.split(dataset, parts.config.seed)
    # Empty sites for the others, so that the newcomer has a number of its own.
    parts = replace(parts, federation=Federation(dataset, (*[build.empty_site()] * client, site), {"name": "join"}))
    method, config = parts.method, parts.config
    store = Store(memory)
    try:
        host = Host(
            method=method,
            model=parts.model,
            federation=parts.federation,
            store=store,
            seed=config.seed,
            device=parts.device,
            frozen_bytes=config.engine.frozen_gb * 1e9,
        )
        clients = LocalClients({client: len(site.train)}, [host])

        def scored(state: State, as_of: int) -> Score:
            down = {client: method.down(state, client)}
            found: list[Scores] = clients.evaluate(down, as_of=as_of, pooled=False, after_local=False)
            return found[0].parts["test"]

        last = held.round + rounds
        plan = server.Plan(last, 1.0, config.seed, after_local="none")
        state = server.admit(method, held.state, clients, [client], held.round + 1)
        before = scored(state, held.round + 1)
        for round in range(held.round + 1, last + 1):
            state, line, _ = server.step(method, parts.init, clients, plan, state, round)
            if line["left_out"]:
                raise UserError(f'the new site cannot train with "{config.method.name}": {line["left_out"][0]["why"]}')
        return parts, before, scored(state, last + 1), state, store
    except BaseException:
        store.close()
        raise


# ---- the new site's data


def _dataset(held: Run, path: Path, where: Path) -> tuple[Dataset, tuple[str, ...]]:
    """The folder's images as the run's own dataset would have them; and those that could not be read."""
    its = held.parts.federation.dataset
    found = site_images.read(path)
    known = site_images.class_indices(path, found.classes, its.classes)
    images, labels, skipped = [], [], []
    for i, label in enumerate(found.labels):
        image = decode(path / found.name(i), held.parts.model.image[0], held.parts.model.resize)
        if image is None:
            skipped.append(found.name(i))
        else:
            images.append(image)
            labels.append(known[label])
    complain(skipped, len(found.labels), f'--data = "{path}"')
    name = path.resolve().name
    made = Dataset.from_arrays(
        name, np.stack(images), np.array(labels), its.classes, mean=its.mean, std=its.std, path=where
    )
    return made, tuple(skipped)


# ---- before and after


def _numbers(score: Score, classes: Sequence[str]) -> dict[str, Any]:
    count = score.tp + score.fn
    return {
        "accuracy": score.accuracy,
        "macro_f1": score.macro_f1,
        "classes": {
            name: {"n": int(n), "accuracy": float(right / n)}
            for name, n, right in zip(classes, count, score.tp, strict=True)
            if n
        },
    }


def draw(numbers: dict[str, Any], path: Path) -> Path:
    """Accuracy before and after, overall and of each class that the site has test images of."""
    import altair as alt  # slow to import

    from ..report import marks, style

    stages = {"before": style.GREY, "after": style.BLUE}
    before, after = (numbers[stage]["classes"] for stage in stages)
    change = {name: abs(after[name]["accuracy"] - before[name]["accuracy"]) for name in before}
    largest = sorted(before, key=lambda name: -change[name])[:_SHOWN]
    shown = [name for name in before if name in largest]
    labels = [f"{short} ({before[name]['n']})" for short, name in zip(style.short(shown, 14), shown, strict=True)]
    y = alt.Y("value:Q", title="test accuracy (%)", scale=alt.Scale(domain=[0, 100]))
    colour = marks.by_colour(stages)
    whole = [{"kind": stage, "value": 100 * numbers[stage]["accuracy"]} for stage in stages if shown]
    total = marks.data(whole).encode(alt.X("kind:N", title=None, sort=list(stages), axis=alt.Axis(labelAngle=0)), y)
    each = [
        {"at": at, "kind": stage, "value": 100 * numbers[stage]["classes"][name]["accuracy"]}
        for stage in stages
        for at, name in enumerate(shown)
    ]
    some = f" with the largest change, of {len(before)}" if len(shown) < len(before) else ""
    across = alt.X(title=f"classes{some} (test images)", **marks.places("at:O", labels, style.WIDTH - 60))
    classes = (
        marks.data(each)
        .mark_bar()
        .encode(across, y.title(None), colour, xOffset=alt.XOffset("kind:N", sort=list(stages)))
    )
    number = total.mark_text(dy=-7).encode(text=alt.Text("value:Q", format=".1f"))
    totals = alt.layer(total.mark_bar().encode(colour), number).properties(width=110)
    chart = alt.hconcat(totals, classes.properties(width=style.WIDTH - 60))
    rounds = numbers["rounds"]
    title = f"{numbers['site']} joins {numbers['run']} ({numbers['method']}) after round {rounds['run']}"
    below = f"training images: {numbers['n_train']}, rounds alone: {rounds['joined']}"
    return style.save(
        style.titled(chart, title, below if shown else f"{below}; no test images: nothing to score"), path
    )
