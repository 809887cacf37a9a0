"""Half precision against fp32, and that a step of training never waits for its device."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

import promptfed
from promptfed import methods, models, training
from promptfed.data import shapes
from promptfed.errors import UserError
from promptfed.methods import ALIASES, METHODS, create
from promptfed.models import Model
from promptfed.params import Params
from promptfed.precision import Precision, full, reduced
from promptfed.training import LocalPhase, Samples, Trained, Work, train

CPU = torch.device("cpu")
HALF: list[Precision] = ["bf16", "fp16"]


def model_of(name: str) -> Model:
    return models.build(name, (3, 32, 32), len(shapes.SHAPES), 0, shapes.SHAPES)


def pictures(model: Model, n: int) -> Samples:
    labels, _, images = shapes.sample(n, seed=7)
    assert model.preprocess is not None
    mean, std = (torch.tensor(v).reshape(-1, 1, 1) * 255 for v in (model.preprocess.mean, model.preprocess.std))
    return Samples(torch.from_numpy(images), torch.from_numpy(labels), mean, std)


def block_of(name: str, settings: dict[str, Any], backbone: str, clients: int) -> tuple[Any, Model, list[Work]]:
    method, model = create(name, {"batch_size": 4, "epochs": 1, **settings}), model_of(backbone)
    init = method.tuning.init(model, 0)
    data = pictures(model, 8 * clients)
    works = []
    for i in range(clients):
        part = slice(8 * i, 8 * (i + 1))
        own = Samples(data.x[part], data.y[part], data.mean, data.std)
        works.append(Work(i, own, init, method.shared(init), method.remembered(init)))
    return method, model, works


@pytest.mark.parametrize("precision", HALF)
@pytest.mark.parametrize("name", ["vit-mini", "clip-mini"])
def test_logits_are_within_a_hundredth_and_rank_the_classes_alike(name: str, precision: Precision) -> None:
    model = model_of(name)
    tuning = create("zero-shot" if name == "clip-mini" else "head-tune", {}).tuning
    x = pictures(model, 32).images(slice(None))
    params = tuning.init(model, 0)

    def logits() -> Tensor:
        with torch.no_grad():
            return tuning.head(model, params, model.features(model.weights, x))

    exact = logits()
    with reduced(CPU, precision):
        half = logits()
        with full(CPU):
            assert torch.equal(logits(), exact)
    size = exact.abs().max()
    assert 0 < (half - exact).abs().max() < 0.01 * size
    best = exact.topk(2, dim=1).values
    clear = best[:, 0] - best[:, 1] > 0.01 * size
    assert clear.sum() > 16
    assert torch.equal(half.argmax(1)[clear], exact.argmax(1)[clear])


CASES = [
    ("promptfl", {"context": 2}, "clip-mini"),
    ("fedvpt", {"tokens": 2, "standardise": False}, "vit-mini"),
    ("dp-fpl", {"context": 2, "rank": 1, "noise": 0.0, "clip": 10.0}, "clip-mini"),  # with products in its step
]


@pytest.mark.parametrize(("precision", "clients"), [("bf16", 1), ("fp16", 2)])
@pytest.mark.parametrize(("name", "settings", "backbone"), CASES)
def test_training_moves_fp32_parameters_as_in_fp32(
    name: str, settings: dict[str, Any], backbone: str, precision: Precision, clients: int
) -> None:
    method, model, block = block_of(name, settings, backbone, clients)

    def moved() -> list[Params]:
        done = train(method, model, block, method.schedule(1), seed=0, round=1)
        return [{n: p - work.params[n] for n, p in one.params.items()} for work, one in zip(block, done, strict=True)]

    exact = moved()
    with reduced(CPU, precision):
        half = moved()
    for a, b in zip(exact, half, strict=True):
        for role, p in a.items():
            assert b[role].dtype == torch.float32
            assert float((p - b[role]).norm()) < 0.1 * float(p.norm()), role


@pytest.mark.slow
def test_a_run_in_half_precision(tmp_path) -> None:
    result = promptfed.run(
        method={"name": "fedper+vpt", "epochs": 1, "tokens": 2},
        dataset={"name": "shapes", "limit": 64},
        partition={"name": "dirichlet", "clients": 2},
        backbone="vit-mini",
        rounds=1,
        engine={"workers": 1, "device": "cpu", "precision": "bf16"},
        out=tmp_path / "run",
    )
    assert not result.numbers["left_out"]
    assert result.metrics["global"] is not None


def test_an_unknown_precision_is_refused() -> None:
    with pytest.raises(UserError, match=r"engine\.precision.*fp8.*'fp32', 'bf16' or 'fp16'"):
        promptfed.run(engine={"precision": "fp8"})


class OnTheDevice(TorchDispatchMode):
    """Collects tensors that operations make on the CPU, but for single numbers: these are arguments of a kernel.
    Reading a value from the meta device raises an error, as it has none: a step that runs there waits for nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.here: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        if not any(t.device == CPU for t in inputs):
            found = [t for t in tree_leaves(made) if isinstance(t, Tensor)]
            self.here += [str(func) for t in found if t.device == CPU and t.ndim]
        return made


def on_meta(phase: LocalPhase, method: Any, model: Model) -> None:
    """Moves a phase to a device without values."""
    there = partial(tree_map_only, Tensor, lambda t: t.detach().to("meta").requires_grad_(t.requires_grad))
    model.to(torch.device("meta"))
    s = phase.samples
    phase.samples = Samples(*there((s.x, s.y, s.mean, s.std, s.frozen)))
    phase.state, phase.extra, phase.loss_sums = there(phase.state), there(phase.extra), there(phase.loss_sums)
    phase.optimizers = training.optimizers(method, phase.phase, phase.state.trained)


STEPS = [
    *CASES,
    ("pfedpt", {"prompt_size": 4, "prompt": "random-patch", "joint": True}, "vit-mini"),
    ("fedprox", {"optimizer": "adam"}, "vit-mini"),
    ("dp2fl", {"depth": 2}, "clip-mini"),
]


@pytest.mark.parametrize("clients", [1, 2])
@pytest.mark.parametrize(("name", "settings", "backbone"), STEPS)
def test_a_step_stays_on_its_device(name: str, settings: dict[str, Any], backbone: str, clients: int) -> None:
    method, model, block = block_of(name, settings, backbone, clients)
    before, normal = [Trained(work.params) for work in block], partial(torch.zeros, device="meta")
    phase = LocalPhase(method, model, block, before, method.schedule(1)[0], normal)
    on_meta(phase, method, model)
    indices = [np.arange(4), None][:clients]
    noise = np.zeros((clients, 2), np.float32)
    phase.step(indices, noise, [None] * clients)  # the first one makes sentences, and the state of optimisers
    with OnTheDevice() as seen:
        phase.step(indices, noise, [None] * clients)
    assert not seen.here


@pytest.mark.parametrize("name", [*METHODS, *ALIASES])
def test_initial_values_are_made_wherever_the_model_is(name: str) -> None:
    """An operation on tensors of two devices raises an error."""
    method = methods.create(name)
    method = methods.create(f"{name}+vpt") if methods.lacks_prompts(method) else method
    kind = methods.backbones(method)
    backbone, size = ("cnn", 16) if kind == "any" else ("vit-mini" if kind == "transformers" else "clip-mini", 32)
    model = models.build(backbone, (3, size, size), 4, 0, ("a", "b", "c", "d")).to(torch.device("meta"))
    init = method.tuning.init(model, 0)
    assert all(p.device.type in ("cpu", "meta") for p in init.values())
