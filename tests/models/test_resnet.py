"""CLIP's ResNet against convolution, batch norm, pooling and attention as PyTorch has them."""

from dataclasses import replace

import pytest
import torch
from published import open_clip_resnet, random
from torch import Tensor
from torch.func import vmap
from torch.nn import functional as F

from promptfed import models
from promptfed.methods import create
from promptfed.models.pretrained.layouts import _resnet
from promptfed.models.pretrained.shapes import Convolutions
from promptfed.models.resnet import ResNet
from promptfed.training import Samples, Work, train

BLOCKS, WIDTH, SIDE, JOINT = (2, 1, 2, 1), 8, 64, 20


def theirs() -> dict[str, Tensor]:
    return random(open_clip_resnet(WIDTH, BLOCKS, SIDE, JOINT))


def ours(weights: dict[str, Tensor]) -> ResNet:
    entries = _resnet(Convolutions(SIDE, BLOCKS, WIDTH), JOINT)
    made = {e.ours: e.make(*(weights[name] for name in e.theirs)) for e in entries}
    return ResNet("resnet", (3, SIDE, SIDE), 0, made, blocks=BLOCKS, heads=WIDTH * 32 // 64)


def reference(w: dict[str, Tensor], x: Tensor, blocks: tuple[int, ...], heads: int) -> Tensor:
    def unit(conv: str, bn: str, x: Tensor, stride: int = 1, padding: int = 0) -> Tensor:
        x = F.conv2d(x, w[f"visual.{conv}.weight"], stride=stride, padding=padding)
        mean, var, weight, bias = (
            w[f"visual.{bn}.{part}"] for part in ("running_mean", "running_var", "weight", "bias")
        )
        return F.batch_norm(x, mean, var, weight, bias, training=False)

    x = F.relu(unit("conv1", "bn1", x, 2, 1))
    x = F.relu(unit("conv2", "bn2", x, 1, 1))
    x = F.avg_pool2d(F.relu(unit("conv3", "bn3", x, 1, 1)), 2)
    for stage, count in enumerate(blocks, start=1):
        for block in range(count):
            at, pool = f"layer{stage}.{block}", 2 if stage > 1 and block == 0 else 1
            h = F.relu(unit(f"{at}.conv1", f"{at}.bn1", x))
            h = F.avg_pool2d(F.relu(unit(f"{at}.conv2", f"{at}.bn2", h, 1, 1)), pool)
            h = unit(f"{at}.conv3", f"{at}.bn3", h)
            if block == 0:
                x = unit(f"{at}.downsample.0", f"{at}.downsample.1", F.avg_pool2d(x, pool))
            x = F.relu(h + x)
    tokens = torch.cat([x.mean((2, 3))[:, :, None], x.flatten(2)], 2).permute(2, 0, 1)  # (1 + places, B, C)
    tokens = tokens + w["visual.attnpool.positional_embedding"][:, None]
    pool = {part: w[f"visual.attnpool.{part}"] for part in _pool_parts()}
    pooled, _ = F.multi_head_attention_forward(
        tokens,
        tokens,
        tokens,
        tokens.shape[-1],
        heads,
        None,
        torch.cat([pool["q_proj.bias"], pool["k_proj.bias"], pool["v_proj.bias"]]),
        None,
        None,
        False,
        0.0,
        pool["c_proj.weight"],
        pool["c_proj.bias"],
        training=False,
        need_weights=False,
        use_separate_proj_weight=True,
        q_proj_weight=pool["q_proj.weight"],
        k_proj_weight=pool["k_proj.weight"],
        v_proj_weight=pool["v_proj.weight"],
    )
    return pooled[0]


def _pool_parts() -> list[str]:
    return [f"{part}_proj.{kind}" for part in "qkvc" for kind in ("weight", "bias")]


def test_features_equal_the_reference() -> None:
    weights = theirs()
    model, x = ours(weights), torch.randn(3, 3, SIDE, SIDE)
    expected = reference(weights, x, BLOCKS, WIDTH * 32 // 64)
    assert expected.std() > 0.01
    torch.testing.assert_close(model.features(model.weights, x), expected, rtol=1e-4, atol=1e-5)


def test_the_gradient_reaches_a_pixel_prompt_and_no_weight() -> None:
    weights = theirs()
    model = ours(weights)
    x, prompt = torch.randn(2, 3, SIDE, SIDE), torch.randn(3, SIDE, SIDE, requires_grad=True)
    (found,) = torch.autograd.grad(model.features(model.weights, x + prompt).square().sum(), [prompt])
    (expected,) = torch.autograd.grad(reference(weights, x + prompt, BLOCKS, 4).square().sum(), [prompt])
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5 * float(expected.abs().max()))
    assert not any(p.requires_grad for p in model.weights.values())


def test_stacked_prompts_equal_one_by_one() -> None:
    model = ours(theirs())
    x, prompts = torch.randn(2, 2, 3, SIDE, SIDE), torch.randn(2, 3, SIDE, SIDE)
    together = vmap(lambda x, prompt: model.features(model.weights, x + prompt))(x, prompts)
    for k in range(2):
        alone = model.features(model.weights, x[k] + prompts[k])
        torch.testing.assert_close(together[k], alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("stack", [0, 1])
def test_features_take_any_batch_size(stack: int) -> None:
    model = ours(theirs())
    assert model.features(model.weights, torch.randn(stack + 1, 3, SIDE, SIDE)).shape == (stack + 1, JOINT)


@pytest.mark.parametrize("name", ["tpfl", "atpfl", "promptfl"])
def test_prompts_train_on_a_clip_with_a_resnet(name: str) -> None:
    """The image tower is a ResNet, the text tower that of the embedded CLIP."""
    host = models.build("clip-mini", (3, 32, 32), 3, 0, ("circle", "square", "star"))
    assert isinstance(host, models.CLIP)
    joint = host.weights["body.text.proj"].shape[0]
    entries = _resnet(Convolutions(SIDE, BLOCKS, WIDTH), joint)
    drawn = random(open_clip_resnet(WIDTH, BLOCKS, SIDE, joint))
    image = {e.ours: e.make(*(drawn[name] for name in e.theirs)) for e in entries}
    text = {name: p for name, p in host.weights.items() if not name.startswith("body.image.")}
    tower = ResNet("resnet", (3, SIDE, SIDE), 0, image, blocks=BLOCKS, heads=WIDTH * 32 // 64)
    model = replace(host, image=(3, SIDE, SIDE), weights={**image, **text}, width=None, image_tower=tower)
    settings = {"context": 2, "epochs": 1, **({} if name == "promptfl" else {"prompt_size": 3})}
    method = create(name, settings)
    method.tuning.check(model)
    init = method.tuning.init(model, 0)
    x = torch.randint(0, 255, (5, 3, SIDE, SIDE), dtype=torch.uint8)
    half = torch.full((3, 1, 1), 127.0)
    frozen = method.tuning.frozen(model, (x - half) / half) if method.tuning.frozen_name(model) else {}
    data = Samples(x.new_empty(5, 0) if frozen else x, torch.tensor([0, 1, 2, 0, 1]), half, half, frozen)
    done = train(method, model, [Work(0, data, init, init, init)], method.schedule(1), 0, 1)[0]
    assert all(p.isfinite().all() and not torch.equal(p, init[n]) for n, p in done.params.items())
