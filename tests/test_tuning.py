"""Prompts: their pixels, their places, and when they are trained."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from promptfed.errors import UserError
from promptfed.method import FedAvg
from promptfed.models.vit import vit
from promptfed.params import numel
from promptfed.phases import Batch, Context, Optimizer, Phase
from promptfed.tuning import Full, PrivatePrompt, Tuning
from promptfed.tunings.pixels import PixelPrompt
from promptfed.tunings.tokens import TokenPrompt
from tiny import IMAGE, arrays, features, linear, numbers, samples

C, H, W = 2, 7, 10
MODEL = linear(image=(C, H, W))
MIDDLE = torch.tensor([0.5, 0.5])
CTX = Context({}, {}, None, torch.tensor(1), torch.ones(3))


def canvas(tuning: PixelPrompt, noise: Tensor = MIDDLE) -> np.ndarray:
    return tuning.canvas(MODEL, tuning.init(MODEL, 0), noise).numpy()


# ---- pixels


def test_padding_is_a_frame_of_its_four_sides() -> None:
    tuning = PixelPrompt(prompt="padding", prompt_size=2)
    found, prompt = canvas(tuning), numbers(tuning.start(MODEL, 0))
    expected = np.zeros((C, H, W))
    expected[:, :2, :] = prompt["prompt.top"]
    expected[:, H - 2 :, :] = prompt["prompt.bottom"]
    expected[:, 2 : H - 2, :2] = prompt["prompt.left"]
    expected[:, 2 : H - 2, W - 2 :] = prompt["prompt.right"]
    np.testing.assert_array_equal(found, expected)
    assert (found[:, 2:-2, 2:-2] == 0).all()
    assert (found != 0).sum() == C * (H * W - (H - 4) * (W - 4))


def test_a_fixed_patch_lies_in_the_upper_left_corner() -> None:
    tuning = PixelPrompt(prompt="fixed-patch", prompt_size=3)
    expected = np.zeros((C, H, W))
    expected[:, :3, :3] = tuning.start(MODEL, 0)["prompt.patch"].numpy()
    for noise in (MIDDLE, torch.tensor([0.0, 0.99])):
        np.testing.assert_array_equal(canvas(tuning, noise), expected)


def test_a_random_patch_lies_where_the_noise_says() -> None:
    """H - p + 1 = 5 rows and W - p + 1 = 8 columns, each equally likely."""
    tuning = PixelPrompt(prompt="random-patch", prompt_size=3)
    patch = tuning.start(MODEL, 0)["prompt.patch"].numpy()
    for row in range(5):
        for column in range(8):
            expected = np.zeros((C, H, W))
            expected[:, row : row + 3, column : column + 3] = patch
            for inside in (0.001, 0.999):
                noise = torch.tensor([(row + inside) / 5, (column + inside) / 8])
                np.testing.assert_array_equal(canvas(tuning, noise), expected)


@pytest.mark.parametrize("side", [16, 32, 224])
@pytest.mark.parametrize("size", [1, 3, 4, 15])
def test_a_random_patch_stays_inside_at_both_ends_of_the_noise(side: int, size: int) -> None:
    """The largest float below one must not round up to a place outside."""
    model = linear(image=(1, side, side), width=1)
    tuning = PixelPrompt(prompt="random-patch", prompt_size=size)
    prompt = {"prompt.patch": torch.arange(1.0, size**2 + 1).reshape(1, size, size)}
    last = float(np.nextafter(np.float32(1), np.float32(0)))
    low, high = (tuning.canvas(model, prompt, torch.tensor([noise, noise]))[0] for noise in (0.0, last))
    assert torch.equal(low[:size, :size], prompt["prompt.patch"][0])
    assert torch.equal(high[-size:, -size:], prompt["prompt.patch"][0])


def test_gradients_reach_exactly_the_pixels_under_the_patch() -> None:
    tuning = PixelPrompt(prompt="random-patch", prompt_size=2)
    prompt = {"prompt.patch": torch.zeros(C, 2, 2, requires_grad=True)}
    weight = torch.arange(float(C * H * W)).reshape(C, H, W)
    # Row 3 of 6 and column 4 of 9.
    (tuning.canvas(MODEL, prompt, torch.tensor([3.5 / 6, 4.5 / 9])) * weight).sum().backward()
    assert torch.equal(prompt["prompt.patch"].grad, weight[:, 3:5, 4:6])


@pytest.mark.parametrize("size", [1, 2, 3])
def test_parameter_counts(size: int) -> None:
    padding = PixelPrompt(prompt="padding", prompt_size=size).start(MODEL, 0)
    assert numel(padding) == 2 * C * size * (H + W - 2 * size)
    for kind in ("fixed-patch", "random-patch"):
        assert numel(PixelPrompt(prompt=kind, prompt_size=size).start(MODEL, 0)) == C * size**2


def test_the_papers_prompts_at_3x32x32() -> None:
    """2Cp(H + W - 2p): 1,344 at the default p = 4; p = 2 makes 1,076,826 with vit-tiny's 1,076,106."""
    model = linear(image=(3, 32, 32), width=1)
    assert numel(PixelPrompt().start(model, 0)) == 1344
    assert numel(PixelPrompt(prompt_size=2).start(model, 0)) == 1_076_826 - 1_076_106


@pytest.mark.parametrize("kind", ["padding", "fixed-patch", "random-patch"])
def test_the_prompt_is_added_to_the_normalised_image(kind: Any) -> None:
    model, data = linear(), samples(4)
    tuning = PixelPrompt(prompt=kind, prompt_size=2)
    params = tuning.init(model, 0)
    x, _ = arrays(data)
    batch = Batch(data.images(slice(None)), data.y, None, MIDDLE, {})
    p = numbers(params)
    prompted = features(p, x + tuning.canvas(model, params, MIDDLE).numpy())
    np.testing.assert_allclose(tuning.features(model, params, batch, CTX), prompted, rtol=1e-5, atol=1e-5)
    logits = prompted @ p["head.weight"].T + p["head.bias"]
    np.testing.assert_allclose(tuning.logits(model, params, batch, CTX), logits, rtol=1e-5, atol=1e-5)
    assert np.abs(prompted - features(p, x)).max() > 0.1


def test_a_random_patch_changes_the_prediction_with_the_noise() -> None:
    model, data = linear(), samples(4)
    tuning = PixelPrompt(prompt="random-patch", prompt_size=2)
    params = tuning.init(model, 0)
    batch = Batch(data.images(slice(None)), data.y, None, MIDDLE, {})
    moved = batch._replace(noise=torch.tensor([0.0, 0.9]))
    assert not torch.allclose(tuning.logits(model, params, batch, CTX), tuning.logits(model, params, moved, CTX))


@pytest.mark.parametrize(
    ("kind", "most"),
    [("padding", 3), ("fixed-patch", 6), ("random-patch", 6)],  # 7 x 10 pixels: some of them must stay free
)
def test_a_prompt_that_is_too_large_names_the_setting(kind: Any, most: int) -> None:
    largest = PixelPrompt(prompt=kind, prompt_size=most)
    largest.check(MODEL)
    assert (canvas(largest) == 0).any()
    with pytest.raises(UserError, match=rf"method\.prompt_size = {most + 1} .*7x10 pixels may be 1 to {most}"):
        PixelPrompt(prompt=kind, prompt_size=most + 1).check(MODEL)


# ---- initial values


@pytest.mark.parametrize("tuning", [PixelPrompt(prompt_size=2), PixelPrompt(prompt="fixed-patch")])
def test_initial_values_come_from_the_seed_alone(tuning: PixelPrompt) -> None:
    """Every client makes the same ones, wherever it is."""
    torch.manual_seed(1)
    first = tuning.init(MODEL, 4)
    torch.manual_seed(2)
    again, other = tuning.init(MODEL, 4), tuning.init(MODEL, 5)
    for name in first:
        assert torch.equal(first[name], again[name])
        assert torch.equal(first[name], other[name]) == (not name.startswith("prompt."))  # weights: the model's own


@pytest.mark.parametrize("kind", ["padding", "fixed-patch", "random-patch"])
def test_a_prompt_may_start_small(kind: Any) -> None:
    large, small = (
        PixelPrompt(prompt=kind, prompt_size=2, prompt_scale=scale).start(MODEL, 0) for scale in (1.0, 0.02)
    )
    for name, values in numbers(small).items():
        np.testing.assert_allclose(values, 0.02 * numbers(large)[name], rtol=1e-6)


def test_soft_tokens_may_start_small() -> None:
    model = vit((3, 8, 8), 4, 0, width=16, depth=1, heads=2)
    large, small = (TokenPrompt(prompt_scale=scale).start(model, 0)["prompt.tokens"] for scale in (1.0, 0.02))
    torch.testing.assert_close(small, 0.02 * large)


def test_prompts_start_standard_normal() -> None:
    model = linear(image=(3, 64, 64), width=1)
    values = torch.cat([p.flatten() for p in PixelPrompt(prompt_size=10).start(model, 0).values()])
    assert values.mean().item() == pytest.approx(0, abs=0.05)
    assert values.std().item() == pytest.approx(1, abs=0.05)
    sides = PixelPrompt(prompt_size=2).start(linear(image=(1, 8, 8)), 0)
    assert not torch.equal(sides["prompt.top"], sides["prompt.bottom"])


def test_full_trains_a_copy_of_every_weight() -> None:
    init = Full().init(MODEL, 0)
    assert init.keys() == MODEL.weights.keys()
    for name, p in init.items():
        assert torch.equal(p, MODEL.weights[name])
        assert p.data_ptr() != MODEL.weights[name].data_ptr()


# ---- roles


def test_roles_follow_names() -> None:
    assert [Full().role(name) for name in ("head.weight", "body.fc1.bias")] == ["head", "body"]
    prompt = PixelPrompt()
    assert [prompt.role(n) for n in ("prompt.top", "head.bias", "body.x")] == ["private", "head", "body"]
    assert set(Full().role_names()) == {"head", "body"}
    assert set(prompt.role_names()) == {"private", "head", "body"}


@pytest.mark.parametrize("tuning", [Full(), PixelPrompt(), TokenPrompt()])
def test_a_name_without_a_role_is_an_error(tuning: Tuning) -> None:
    with pytest.raises(KeyError, match=r"neck\.weight"):
        tuning.role("neck.weight")


def test_every_initial_parameter_has_a_role() -> None:
    for tuning in (Full(), PixelPrompt(prompt_size=2), PixelPrompt(prompt="random-patch")):
        assert {tuning.role(name) for name in tuning.init(MODEL, 0)} == set(tuning.role_names())


# ---- when the prompt is trained

OPTIMIZER = Optimizer(kind="adam", lr=0.25)
FIRST = Phase({"head": OPTIMIZER}, 8, epochs=3, name="head")
SECOND = Phase({"body": OPTIMIZER}, 8, steps=7, name="body")
THIRD = Phase({"body": OPTIMIZER, "head": OPTIMIZER}, 4, epochs=1, name="both")


def test_the_prompts_phase_comes_before_the_methods_own() -> None:
    tuning = PixelPrompt(prompt_epochs=2, prompt_lr=0.7, prompt_momentum=0.5)
    prompt, *own = tuning.schedule((FIRST, SECOND, THIRD))
    assert own == [FIRST, SECOND, THIRD]
    assert prompt.train == {"private": Optimizer(kind="sgd", lr=0.7, momentum=0.5)}
    assert (prompt.batch_size, prompt.epochs, prompt.steps) == (8, 2, 0)
    assert prompt.plain
    assert not any(phase.plain for phase in own)


def test_the_prompts_phase_is_counted_in_epochs_where_the_method_counts_steps() -> None:
    prompt, own = PixelPrompt(prompt_epochs=2).schedule((SECOND,))
    assert (prompt.epochs, prompt.steps) == (2, 0)
    assert own == SECOND


def test_joint_training_adds_the_prompt_to_every_phase() -> None:
    """Table 8."""
    tuning = PixelPrompt(joint=True, prompt_epochs=2, prompt_lr=0.7)
    own = Optimizer(lr=0.7)
    assert [phase.train for phase in tuning.schedule((FIRST, THIRD))] == [
        {"head": OPTIMIZER, "private": own},
        {"body": OPTIMIZER, "head": OPTIMIZER, "private": own},
    ]
    found = tuning.schedule((FIRST, SECOND))
    assert [(p.epochs, p.steps, p.name, p.plain) for p in found] == [(3, 0, "head", False), (0, 7, "body", False)]


def test_without_phases_or_prompt_epochs_the_prompt_stands_still() -> None:
    assert PixelPrompt().schedule(()) == ()
    assert PixelPrompt(prompt_epochs=0).schedule((FIRST, SECOND)) == (FIRST, SECOND)
    assert PixelPrompt(joint=True).schedule(()) == ()
    assert Full().schedule((FIRST, SECOND)) == (FIRST, SECOND)


@pytest.mark.parametrize(
    "settings",
    [
        {"prompt_size": 0},
        {"prompt_lr": 0},
        {"prompt_epochs": -1},
        {"prompt_momentum": 1},
        {"prompt": "circle"},
        {"sice": 1},
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        PixelPrompt(**settings)


# ---- tokens


def test_tokens_enter_behind_cls() -> None:
    """The same as giving them to the backbone's own slot (whose place is tested with the backbones)."""
    model = vit((1, 8, 8), 3, 0, width=16, depth=1, heads=2)
    tuning = TokenPrompt(prompt_tokens=3)
    tuning.check(model)
    params = tuning.init(model, 0)
    assert params["prompt.tokens"].shape == (3, 16)
    assert params.keys() == {"prompt.tokens", *model.weights}
    x = torch.randn(2, 1, 8, 8)
    batch = Batch(x, torch.zeros(2, dtype=torch.int64), None, MIDDLE, {})
    found = tuning.logits(model, params, batch, CTX)
    expected = model.classify(model.weights, model.features(model.weights, x, params["prompt.tokens"]))
    assert torch.equal(found, expected)
    assert not torch.allclose(found, Full().logits(model, dict(model.weights), batch, CTX))


def test_token_prompts_refuse_a_backbone_without_tokens() -> None:
    with pytest.raises(UserError, match=r'backbone\.name = "linear" takes no tokens: .* transformer'):
        TokenPrompt().check(MODEL)


def test_a_prompt_asks_what_it_wraps_too() -> None:
    with pytest.raises(UserError, match="takes no tokens"):
        PixelPrompt(prompt_size=2, inner=TokenPrompt()).check(MODEL)


def test_trained_weights_take_the_place_of_the_models_own() -> None:
    model, data = linear(), samples(3)
    batch = Batch(data.images(slice(None)), data.y, None, MIDDLE, {})
    only_head = {name: p + 1 for name, p in model.weights.items() if name.startswith("head.")}
    p = numbers({**model.weights, **only_head})
    expected = features(p, arrays(data)[0]) @ p["head.weight"].T + p["head.bias"]
    np.testing.assert_allclose(Full().logits(model, only_head, batch, CTX), expected, rtol=1e-5, atol=1e-5)


def test_prompts_never_travel_under_any_method() -> None:
    method = FedAvg(tuning=PixelPrompt(prompt_size=2))
    params = method.tuning.init(linear(image=IMAGE), 0)
    assert issubclass(PixelPrompt, PrivatePrompt)
    assert not any(name.startswith("prompt.") for name in method.shared(params))
    assert set(method.kept(params)) == {f"prompt.{s}" for s in ("top", "bottom", "left", "right")}
