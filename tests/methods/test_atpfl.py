"""TPFL and ATPFL: Eq. 2 to 5 against numbers computed apart."""

import math

import numpy as np
import pytest
import torch

from promptfed import models
from promptfed.errors import UserError
from promptfed.methods import create
from promptfed.models.clip import CLIP
from promptfed.params import Params, numel
from promptfed.phases import Batch, Context, Update
from promptfed.runs import config as C
from promptfed.training import Samples, Work, train
from tiny import linear

NAMES = ("circle", "square", "star")
MODEL = models.build("clip-mini", (3, 32, 32), 3, 0, NAMES)
SMALL = {"context": 2, "prompt_size": 3}


def images(n: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, 3, 32, 32, generator=torch.Generator().manual_seed(seed))


def batch_of(x: torch.Tensor, y: list[int], **more: Params) -> Batch:
    return Batch(x, torch.tensor(y), None, torch.zeros(2), more.get("extra", {}))


def context(down: Params | None = None, memory: Params | None = None, reference: Params | None = None) -> Context:
    return Context(down or {}, memory or {}, None, torch.tensor(3), torch.ones(3), reference or {})


def near(params: Params, seed: int, scale: float = 0.1) -> Params:
    g = torch.Generator().manual_seed(seed)
    return {name: p + scale * torch.randn(p.shape, generator=g) for name, p in params.items()}


def unit(x: np.ndarray) -> np.ndarray:
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def both(params: Params, x: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Image features of x + v and text features, by the towers themselves."""
    assert isinstance(MODEL, CLIP)
    v = torch.zeros(3, 32, 32)
    v[:, :3] = params["prompt.top"]
    v[:, -3:] = params["prompt.bottom"]
    v[:, 3:-3, :3] = params["prompt.left"]
    v[:, 3:-3, -3:] = params["prompt.right"]
    sentences = MODEL.sentences(context=2)
    text = MODEL.text_tower.features(MODEL.weights, sentences, params["context"])
    image = MODEL.image_tower.features(MODEL.weights, x + v) @ MODEL.weights["body.image.proj"].T
    return unit(image.numpy()), unit(text.numpy())


def test_prediction_is_the_cosine_of_prompted_image_and_prompted_text() -> None:
    """Eq. 2."""
    method = create("tpfl", SMALL)
    params, x = near(method.tuning.init(MODEL, 0), 1), images(4)
    image, text = both(params, x)
    logits = method.tuning.logits(MODEL, params, batch_of(x, [0, 1, 2, 0]), context())
    expected = math.exp(float(MODEL.weights["body.scale"])) * image @ text.T
    np.testing.assert_allclose(logits.numpy(), expected, rtol=1e-4, atol=1e-4)


def test_both_prompts_are_averaged_by_samples() -> None:
    """Eq. 3."""
    method = create("tpfl", SMALL)
    init = method.tuning.init(MODEL, 0)
    ups = [near(init, seed) for seed in (1, 2)]
    state = method.aggregate(method.begin(MODEL, init, 0), [Update(0, {}, ups[0], 1), Update(1, {}, ups[1], 3)])
    assert state.keys() == init.keys()
    for name, p in state.items():
        np.testing.assert_allclose(p, 0.25 * ups[0][name] + 0.75 * ups[1][name], atol=1e-6)


def info_nce(z: np.ndarray, positive: np.ndarray, negative: np.ndarray, temperature: float) -> np.ndarray:
    near, far = (np.exp((unit(z) * unit(other)).sum(1) / temperature) for other in (positive, negative))
    return -np.log(near / (near + far))


@pytest.mark.parametrize(("mu", "temperature"), [(1.0, 0.5), (0.3, 0.1)])
def test_atpfl_adds_both_contrasts_to_cross_entropy(mu: float, temperature: float) -> None:
    """Eq. 4 and 5."""
    method = create("atpfl", {**SMALL, "mu": mu, "temperature": temperature})
    init = method.tuning.init(MODEL, 0)
    params, received, previous = near(init, 1), near(init, 2), near(init, 3)
    x, y = images(4), [0, 1, 2, 0]
    ctx = context(received, previous)
    reference = method.client_constants(MODEL, params, ctx)
    extra = method.sample_constants(MODEL, params, batch_of(x, y), ctx)
    loss, _ = method.loss(MODEL, params, batch_of(x, y, extra=extra), context(received, previous, reference))

    (image, text), at_global, at_own = both(params, x), both(received, x), both(previous, x)
    logits = math.exp(float(MODEL.weights["body.scale"])) * image @ text.T
    plain = np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1)) + logits.max(1) - logits[range(4), y]
    contrasts = info_nce(image, at_global[0], at_own[0], temperature).mean()
    contrasts += info_nce(text, at_global[1], at_own[1], temperature).mean()
    assert float(loss) == pytest.approx(plain.mean() + mu * contrasts, rel=1e-4)


def test_in_the_first_round_the_contrast_has_no_direction() -> None:
    """Previous = received: both terms are log 2, wherever the prompts go."""
    method, plain = create("atpfl", SMALL), create("tpfl", SMALL)
    init = method.tuning.init(MODEL, 0)
    ctx = context(init, init)
    x, y = images(3), [0, 1, 2]
    batch = batch_of(x, y, extra=method.sample_constants(MODEL, init, batch_of(x, y), ctx))
    ctx = context(init, init, method.client_constants(MODEL, init, ctx))
    params = near(init, 1)
    loss, without = method.loss(MODEL, params, batch, ctx)[0], plain.loss(MODEL, params, batch, ctx)[0]
    assert float(loss - without) == pytest.approx(2 * math.log(2), abs=1e-4)


def test_the_learning_rate_falls_along_a_cosine_over_rounds() -> None:
    method = create("tpfl", {**SMALL, "lr": 1e-3, "cosine_rounds": 4})
    rates = [method.schedule(round)[0].train["body"].lr for round in range(1, 7)]
    cosine = [1e-3 * (1 + math.cos(math.pi * t / 4)) / 2 for t in (0, 1, 2, 3, 3, 3)]
    assert rates == pytest.approx(cosine)
    still = create("tpfl", {**SMALL, "lr": 1e-3, "cosine_rounds": 0})
    assert {still.schedule(round)[0].train["body"].lr for round in (1, 9)} == {1e-3}


@pytest.mark.parametrize("name", ["tpfl", "atpfl"])
def test_published_settings(name: str) -> None:
    """A frame of 30 pixels at 224 px: 69,840 parameters; 16 context vectors. By name alone, both have the optimiser of
    all others on frozen models, so that a comparison is not one of optimisers."""
    method = C.make(C.read(name)).method.method
    model = models.clip.clip(
        (3, 224, 224), 0, patch=32, width=8, depth=1, heads=1, text_width=8, text_depth=1, text_heads=1,
        vocabulary=8, context_length=24, embedding=8,
    )  # fmt: skip
    init = method.tuning.init(model, 0)
    assert numel({name: p for name, p in init.items() if name.startswith("prompt.")}) == 69_840
    assert init["context"].shape[0] == 16
    assert (method.lr, method.optimizer, method.cosine_rounds, method.epochs, method.batch_size) == (
        1e-3, "adam", 20, 5, 32,
    )  # fmt: skip
    shared = ("optimizer", "lr", "momentum", "weight_decay", "cosine_rounds", "epochs", "batch_size")
    assert [getattr(create(name), key) for key in shared] == [getattr(create("promptfl"), key) for key in shared]


@pytest.mark.parametrize(("size", "side"), [(224, 30), (112, 15), (96, 13), (32, 4), (5, 1)])
def test_a_frame_is_as_wide_in_proportion_on_smaller_images(size: int, side: int) -> None:
    assert create("tpfl").tuning.side(linear(image=(3, size, size))) == side
    assert create("tpfl", {"prompt_size": 2}).tuning.side(linear(image=(3, size, size))) == 2


def test_training_moves_both_prompts_and_remembers_them() -> None:
    method = create("atpfl", {**SMALL, "epochs": 1})
    init = method.tuning.init(MODEL, 0)
    x = torch.randint(0, 255, (6, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    data = Samples(x, torch.tensor([0, 1, 2, 0, 1, 2]), torch.full((3, 1, 1), 127.0), torch.full((3, 1, 1), 64.0))
    done = train(method, MODEL, [Work(0, data, init, init, init)], method.schedule(1), 0, 1)[0]
    assert all(not torch.equal(done.params[name], p) for name, p in init.items())
    assert method.remembered(done.params).keys() == init.keys()


def test_a_frame_over_the_whole_image_is_refused() -> None:
    with pytest.raises(UserError, match="prompt_size = 16 covers the whole image"):
        create("tpfl", {"context": 2, "prompt_size": 16}).tuning.check(MODEL)
