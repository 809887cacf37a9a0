"""Backbones against the same networks built from PyTorch's own modules."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.func import vmap

from promptfed.errors import UserError
from promptfed.models import Model, build
from promptfed.models.cnn import cnn
from promptfed.models.vit import ViT, vit
from promptfed.params import Params, numel, stack

torch.set_num_threads(1)


def small_vit(image: tuple[int, int, int] = (3, 8, 12), seed: int = 0) -> ViT:
    return vit(image, 5, seed, width=16, depth=2, heads=4)


def small_cnn(image: tuple[int, int, int] = (3, 16, 20), seed: int = 0) -> Model:
    return cnn(image, 4, seed, filters=(3, 5), hidden=(7, 6))


def with_gradient(weights: Params) -> Params:
    return {name: p.clone().requires_grad_() for name, p in weights.items()}


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("cnn", 815_892),
        ("vit-tiny", 1_076_106),
        # 32 x 3 x 25 + 32, 64 x 32 x 25 + 64, 512 x 1600 + 512, 10 x 512 + 10
        ("cnn-code", 2_432 + 51_264 + 819_712 + 5_130),
    ],
)
def test_parameter_counts_at_3x32x32_with_10_classes(name: str, count: int) -> None:
    assert numel(build(name, (3, 32, 32), 10, 0).weights) == count


class Reference(nn.Module):
    """The CNN in the order of the paper's description: convolution, ReLU, pooling."""

    def __init__(
        self, channels: int, filters: tuple[int, int], inputs: int, hidden: tuple[int, ...], classes: int
    ) -> None:
        super().__init__()
        stages: list[nn.Module] = []
        for i, o in ((channels, filters[0]), filters):
            stages += [nn.Conv2d(i, o, 5), nn.ReLU(), nn.MaxPool2d(2)]
        stages.append(nn.Flatten())
        for units in hidden:
            stages += [nn.Linear(inputs, units), nn.ReLU()]
            inputs = units
        self.net = nn.Sequential(*stages, nn.Linear(inputs, classes))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


@pytest.mark.parametrize("hidden", [(7, 6), (9,)])
def test_cnn_equals_convolution_relu_pooling_in_values_and_gradients(hidden: tuple[int, ...]) -> None:
    model = cnn((3, 18, 22), 4, 0, filters=(3, 5), hidden=hidden)
    reference = Reference(3, (3, 5), 5 * 1 * 2, hidden, 4)
    # Both list their layers from input to head.
    weights = with_gradient(model.weights)
    with torch.no_grad():
        for p, own in zip(reference.parameters(), weights.values(), strict=True):
            p.copy_(own)
    x, y = torch.randn(6, 3, 18, 22), torch.tensor([0, 1, 2, 3, 0, 1])
    logits = model.classify(weights, model.features(weights, x))
    torch.testing.assert_close(logits, reference(x))
    nn.functional.cross_entropy(logits, y).backward()
    nn.functional.cross_entropy(reference(x), y).backward()
    for (name, own), p in zip(weights.items(), reference.parameters(), strict=True):
        assert p.grad.abs().sum() > 0
        torch.testing.assert_close(own.grad, p.grad, msg=name)


def test_the_papers_cnn_has_64_filters_and_layers_of_394_and_192() -> None:
    shapes = [tuple(p.shape) for name, p in build("cnn", (3, 32, 32), 10, 0).weights.items() if name.endswith("weight")]
    assert shapes == [(64, 3, 5, 5), (64, 64, 5, 5), (394, 1600), (192, 394), (10, 192)]


class ReferenceViT(nn.Module):
    """Patches, cls, positions, pre-norm encoder layers, norm, cls to the head."""

    def __init__(self, model: ViT) -> None:
        super().__init__()
        w = model.weights
        width = w["body.cls"].shape[-1]
        self.patch = nn.Conv2d(model.image[0], width, model.patch, model.patch)
        self.cls, self.position = nn.Parameter(w["body.cls"].clone()), nn.Parameter(w["body.position"].clone())
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width,
                model.heads,
                len(w["body.blocks.0.mlp.in.bias"]),
                dropout=0.0,
                activation="gelu",
                layer_norm_eps=1e-6,
                batch_first=True,
                norm_first=True,
            )
            for _ in range(model.depth)
        )
        self.norm, self.head = nn.LayerNorm(width, eps=1e-6), nn.Linear(width, model.classes)
        for name, p in self.named().items():
            with torch.no_grad():
                p.copy_(w[name])

    def named(self) -> dict[str, nn.Parameter]:
        """Its parameters under the backbone's names."""
        found = {"body.cls": self.cls, "body.position": self.position}
        modules = {"body.patch": self.patch, "body.norm": self.norm, "head": self.head}
        for i, layer in enumerate(self.layers):
            at = f"body.blocks.{i}"
            found |= {
                f"{at}.qkv.weight": layer.self_attn.in_proj_weight,
                f"{at}.qkv.bias": layer.self_attn.in_proj_bias,
            }
            modules |= {f"{at}.proj": layer.self_attn.out_proj, f"{at}.norm1": layer.norm1, f"{at}.norm2": layer.norm2}
            modules |= {f"{at}.mlp.in": layer.linear1, f"{at}.mlp.out": layer.linear2}
        for at, module in modules.items():
            found |= {f"{at}.weight": module.weight, f"{at}.bias": module.bias}
        return found

    def forward(self, x: Tensor, tokens: Tensor | None = None) -> Tensor:
        patches = self.patch(x).flatten(2).permute(0, 2, 1)
        sequence = [self.cls.repeat(len(x), 1, 1) + self.position[:, :1], patches + self.position[:, 1:]]
        if tokens is not None:  # without positions of their own
            sequence.insert(1, tokens.repeat(len(x), 1, 1))
        h = torch.cat(sequence, 1)
        for layer in self.layers:
            h = layer(h)
        return self.head(self.norm(h)[:, 0])


@pytest.mark.parametrize("tokens", [0, 3])
def test_vit_equals_pytorchs_encoder_in_values_and_gradients(tokens: int) -> None:
    torch.manual_seed(0)
    model = small_vit()
    # Norms that do nothing and biases of zero would hide a mistake in their place.
    model.weights = {name: p + 0.1 * torch.randn_like(p) for name, p in model.weights.items()}
    reference = ReferenceViT(model)
    assert reference.named().keys() == model.weights.keys()
    x, y = torch.randn(3, 3, 8, 12), torch.tensor([0, 4, 2])
    own_tokens = torch.randn(tokens, 16, requires_grad=True) if tokens else None
    their_tokens = own_tokens.detach().clone().requires_grad_() if own_tokens is not None else None
    weights = with_gradient(model.weights)
    logits = model.classify(weights, model.features(weights, x, own_tokens))
    expected = reference(x, their_tokens)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
    nn.functional.cross_entropy(logits, y).backward()
    nn.functional.cross_entropy(expected, y).backward()
    for name, p in reference.named().items():
        torch.testing.assert_close(weights[name].grad, p.grad, rtol=1e-3, atol=1e-5, msg=name)
    if own_tokens is not None and their_tokens is not None:
        torch.testing.assert_close(own_tokens.grad, their_tokens.grad, rtol=1e-3, atol=1e-6)
        assert own_tokens.grad.abs().sum() > 0


def test_tokens_stand_behind_cls_and_before_the_patches() -> None:
    """Attention does not see an order, so it is looked for where it is made."""
    seen = []

    class Watched(ViT):
        def block(self, weights: Params, at: str, h: Tensor, first_tokens: int | None = None) -> Tensor:
            seen.append(h)
            return h

    small = small_vit()
    model = Watched(small.name, small.image, small.classes, small.weights, small.width, 4, 1, 4)
    x, tokens = torch.randn(2, 3, 8, 12), torch.randn(3, 16)
    model.features(model.weights, x, tokens)
    embedded = model.embed(model.weights, x)
    assert seen[0].shape == (2, 1 + 3 + 6, 16)
    assert torch.equal(seen[0][:, 0], embedded[:, 0])
    assert torch.equal(seen[0][:, 1:4], torch.stack([tokens, tokens]))
    assert torch.equal(seen[0][:, 4:], embedded[:, 1:])


@pytest.mark.parametrize("make", [small_cnn, small_vit])
@pytest.mark.parametrize("own_images", [True, False])
def test_stacked_weights_equal_one_by_one(make: type, own_images: bool) -> None:
    torch.manual_seed(0)
    models = [make(seed=seed) for seed in range(3)]
    x = torch.randn(3, 4, *models[0].image)
    weights = stack([model.weights for model in models])

    def logits(weights: Params, x: Tensor) -> Tensor:
        return models[0].classify(weights, models[0].features(weights, x))

    together = vmap(logits, in_dims=(0, 0 if own_images else None))(weights, x if own_images else x[0])
    for i, model in enumerate(models):
        alone = logits(model.weights, x[i if own_images else 0])
        torch.testing.assert_close(together[i], alone, rtol=1e-4, atol=1e-5)


def test_stacked_vit_has_the_gradients_of_one_by_one() -> None:
    torch.manual_seed(0)
    models = [small_vit(seed=seed) for seed in range(2)]
    x, tokens = torch.randn(2, 3, 3, 8, 12), torch.randn(2, 2, 16)
    stacked = with_gradient(stack([model.weights for model in models]))
    vmap(models[0].features)(stacked, x, tokens).square().sum().backward()
    for i, model in enumerate(models):
        alone = with_gradient(model.weights)
        model.features(alone, x[i], tokens[i]).square().sum().backward()
        for name, p in alone.items():
            if not name.startswith("head."):
                torch.testing.assert_close(stacked[name].grad[i], p.grad, rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("cnn", (15, 32)),
        ("cnn", (32, 15)),
        ("cnn-code", (8, 8)),
        ("vit-tiny", (30, 32)),
        ("vit-tiny", (32, 30)),
        ("vit-tiny", (2, 2)),
    ],
)
def test_an_image_size_that_does_not_fit_names_the_setting(name: str, size: tuple[int, int]) -> None:
    with pytest.raises(UserError, match=rf'dataset\.size: backbone "{name}" .*got {size[0]}x{size[1]}'):
        build(name, (3, *size), 10, 0)


@pytest.mark.parametrize("image", [(1, 28, 28), (3, 16, 16), (4, 20, 32)])
@pytest.mark.parametrize("name", ["cnn", "cnn-code", "vit-tiny"])
def test_other_sizes_and_channel_counts_work(name: str, image: tuple[int, int, int]) -> None:
    model = build(name, image, 7, 0)
    features = model.features(model.weights, torch.randn(2, *image))
    assert model.classify(model.weights, features).shape == (2, 7)
    assert features.isfinite().all()


def test_an_unknown_backbone_is_told_with_the_nearest_name() -> None:
    with pytest.raises(UserError, match=r'backbone\.name = "vit-tinny" is unknown; did you mean "vit-tiny"\?'):
        build("vit-tinny", (3, 32, 32), 10, 0)


@pytest.mark.parametrize("make", [small_cnn, small_vit])
def test_weights_come_from_the_seed_alone(make: type) -> None:
    torch.manual_seed(1)
    first = make(seed=5).weights
    torch.manual_seed(2)
    again, other = make(seed=5).weights, make(seed=6).weights
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first if "norm" not in name)


def test_dense_layers_start_uniform_in_the_inverse_root_of_the_fan_in() -> None:
    weights = build("cnn", (3, 32, 32), 10, 0).weights
    for layer, fan_in in {"body.conv2": 64 * 25, "body.fc1": 1600, "body.fc2": 394}.items():
        bound = 1 / math.sqrt(fan_in)
        for p in (weights[f"{layer}.weight"], weights[f"{layer}.bias"]):
            assert 0.9 * bound < p.abs().max() <= bound
        assert weights[f"{layer}.weight"].std().item() == pytest.approx(bound / math.sqrt(3), rel=0.02)


def test_only_backbones_that_take_tokens_have_a_token_width() -> None:
    assert small_cnn().width is None
    assert small_vit().width == 16
