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
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import altair as alt
import numpy as np

from .. import files, server
from ..clients.local import LocalClients
from ..clients.store import Store
from ..data import Dataset, Federation, site_images
from ..errors import UserError
from ..method import State
from ..privacy import Privacy
from ..report import marks, style
from ..runs import build, record
from ..runs.opened import Run, client_params, reading
from ..scoring import Score
from ..secure import Secure
from .images import complain, decode
from .loading import described, predictor
from .predictor import Predictor

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
    with reading(run, device=device) as held, tempfile.TemporaryDirectory() as scratch:
        dataset, skipped = _dataset(held, data, Path(scratch) / "data")
        with closing(Store(Path(scratch) / "clients")) as store:
            parts, client, last = _joined_parts(held, dataset), len(held.federation.sites), held.round + rounds
            before, after, state = _train(held, parts, rounds, store)
            params = client_params(parts, store, parts.method.down(state, client), client, last + 1)
        site = parts.federation.sites[client]
        metrics = {"before": _numbers(before, dataset.classes), "after": _numbers(after, dataset.classes)}
        numbers = {
            "run": held.folder.resolve().name,
            "method": parts.config.method.name,
            "client": client,
            "site": site.name,
            "rounds": {"run": held.round, "joined": rounds},
            "n_train": len(site.train),
            "n_val": len(site.val),
            "n_test": len(site.test),
            "skipped": list(skipped),
            **metrics,
            "versions": record.versions(),
        }
        model = predictor(parts, params, {**described(parts, client), "round": last, "metrics": metrics})
    model.save(folder / MODEL)
    style.save(chart(numbers), folder / "join.png")
    files.write(folder / "join.json", (json.dumps(numbers, indent=1) + "\n").encode())  # last: it says all is there
    return Joined(folder, numbers, model)


def _fresh(run: Path, data: Path) -> Path:
    """A folder below runs/ that does not exist."""
    name = f"{run.resolve().name}-join-{data.resolve().name}"
    paths = (Path("runs") / (name if number == 1 else f"{name}-{number}") for number in count(1))
    return next(path for path in paths if not path.exists())


def _joined_parts(held: Run, dataset: Dataset) -> build.Parts:
    """The run's, with empty sites for its clients, so that the newcomer has a number of its own."""
    sites = (*[build.empty_site()] * len(held.federation.sites), site_images.split(dataset, held.config.seed))
    config = held.config.model_copy(update={"privacy": Privacy(), "secure": Secure()})  # nothing is sent
    return replace(held.parts, config=config, federation=Federation(dataset, sites, {"name": "join"}))


def _train(held: Run, parts: build.Parts, rounds: int, store: Store) -> tuple[Score, Score, State]:
    """-> scores on the new site's test data before and after, and the server's state."""
    method, client = parts.method, len(parts.federation.sites) - 1
    clients = LocalClients({client: len(parts.federation.sites[client].train)}, [build.make_host(parts, store)])

    def scored(state: State, as_of: int) -> Score:
        found = clients.evaluate({client: method.down(state, client)}, as_of=as_of, pooled=False, after_local=False)
        return found[0].parts["test"]

    first, last = held.round + 1, held.round + rounds
    plan = server.Plan(last, 1.0, parts.config.seed, after_local="none")
    state = server.admit(method, held.state, clients, [client], first)
    before = scored(state, first)
    for round in range(first, last + 1):
        state, line, _ = server.step(method, parts.init, clients, plan, state, round)
        if line["left_out"]:
            why = line["left_out"][0]["why"]
            raise UserError(f'the new site cannot train with "{parts.config.method.name}": {why}')
    return before, scored(state, last + 1), state


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
    return {
        "accuracy": score.accuracy,
        "macro_f1": score.macro_f1,
        "classes": {
            name: {"n": int(n), "accuracy": float(right / n)}
            for name, n, right in zip(classes, score.tp + score.fn, score.tp, strict=True)
            if n
        },
    }


def chart(numbers: dict[str, Any]) -> style.Chart:
    """Accuracy before and after, of all test images and of each class that the site has test images of."""
    stages = {"before": style.GREY, "after": style.BLUE}
    before, after = (numbers[stage]["classes"] for stage in stages)
    largest = sorted(before, key=lambda name: -abs(after[name]["accuracy"] - before[name]["accuracy"]))[:_SHOWN]
    shown = [name for name in before if name in largest]
    labels = [f"{short} ({before[name]['n']})" for short, name in zip(style.short(shown, 14), shown, strict=True)]
    rows = [
        {"at": at, "kind": stage, "value": 100 * score["accuracy"]}
        for stage in stages
        for at, score in enumerate([numbers[stage], *(numbers[stage]["classes"][name] for name in shown)])
        if shown
    ]
    some = f" with the largest change, of {len(before)}" if len(shown) < len(before) else ""
    places = marks.places("at:O", [f"all ({numbers['n_test']})", *labels], style.WIDTH + 60)
    bars = (
        marks.data(rows)
        .mark_bar()
        .encode(
            alt.X(title=f"all, and classes{some} (test images)", **places),
            alt.Y("value:Q", title="test accuracy (%)", scale=alt.Scale(domain=[0, 100])),
            marks.by_colour(stages),
            xOffset=alt.XOffset("kind:N", sort=list(stages)),
        )
        .properties(width=style.WIDTH + 60)
    )
    rounds = numbers["rounds"]
    title = f"{numbers['site']} joins {numbers['run']} ({numbers['method']}) after round {rounds['run']}"
    below = f"training images: {numbers['n_train']}, rounds alone: {rounds['joined']}"
    return style.titled(bars, title, below if shown else f"{below}; no test images: nothing to score")
