"""Numbers of a SuperLink or of a node for Prometheus, on 127.0.0.1 alone.

They are computed when they are asked for, from what is on disk and what the SuperLink knows: nothing is counted twice,
and a restart loses nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UserError
from ..runs import record
from .audit import Entry
from .consortium import nodes
from .control import HERE, control, node_states

if TYPE_CHECKING:
    from prometheus_client import Metric


class Count:
    """A number that only grows."""

    def __init__(self) -> None:
        self.value = 0

    def add(self) -> None:
        self.value += 1


def serve(port: int, collect: Callable[[], Iterable[Metric]]) -> None:
    """Answers Prometheus at http://127.0.0.1:PORT/metrics for as long as this process runs."""
    try:
        from prometheus_client import CollectorRegistry, start_http_server
        from prometheus_client.registry import Collector
    except ImportError:
        raise UserError('--metrics needs prometheus-client: pip install "promptfed[metrics]"') from None

    class Ours(Collector):
        def collect(self) -> Iterator[Metric]:
            yield from collect()

        def describe(self) -> list[Metric]:  # otherwise numbers are computed once before anybody asks
            return []

    registry = CollectorRegistry()
    registry.register(Ours())
    try:
        start_http_server(port, addr=HERE, registry=registry)
    except OSError as error:
        raise UserError(f"--metrics = {port} cannot be listened on: {error.strerror}") from None


def _family(kind: str, name: str, about: str, label: str, values: Mapping[str, float]) -> Metric:
    """`values`: by the label's values; of a metric without a label, by the empty string."""
    from prometheus_client import core

    made: Any = getattr(core, f"{kind}MetricFamily")(f"promptfed_{name}", about, labels=[label] if label else [])
    for each, value in values.items():
        made.add_metric([each] if label else [], value)
    family: Metric = made
    return family


def of_link(folder: Path, insecure: bool, refused: Count) -> Iterator[Metric]:
    """`refused`: requests that the door has refused so far."""
    with control(folder, insecure) as client:
        states = node_states(client)
    online = {str(n): float(states.get(node, ("",))[0] == "online") for node, n in (nodes(folder) or {}).items()}
    yield _family("Gauge", "node_online", "Whether a client's node is connected.", "client", online)
    runs = {path.name: record.read_lines(path) for path in (folder / "runs").glob("*") if path.is_dir()}
    rounds = {run: float(len(lines)) for run, lines in runs.items()}
    yield _family("Counter", "rounds", "Completed rounds of a run.", "run", rounds)
    missing = {run: float(sum(len(line["left_out"]) for line in lines)) for run, lines in runs.items()}
    yield _family("Counter", "left_out", "Clients left out of a run's rounds.", "run", missing)
    yield _family("Counter", "refused_requests", "Requests refused before Flower read them.", "", {"": refused.value})


def of_node(entries: list[Entry]) -> Iterator[Metric]:
    """By the lines of the site's log."""
    kinds: dict[str, float] = dict.fromkeys(("asked", "refused", "left"), 0)
    for entry in entries:
        if entry["kind"] in kinds:
            kinds[entry["kind"]] += 1
    yield _family("Counter", "requests", "Requests asked, refused and answered (left).", "kind", kinds)
    for kind, way in (("asked", "received"), ("left", "sent")):
        size = sum(entry["bytes"] for entry in entries if entry["kind"] == kind)
        yield _family("Counter", f"{way}_bytes", f"Bytes {way} with requests.", "", {"": size})
    spent = [entry["epsilon"] for entry in entries if entry.get("epsilon") is not None]
    yield _family("Gauge", "epsilon", "Epsilon of all updates released so far.", "", {"": spent[-1]} if spent else {})
