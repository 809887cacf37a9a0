"""Prompts at any layer, in each mode, against plain re-implementations; and where the backward pass ends."""

from dataclasses import replace

import pytest
import torch
from reference import layer, norm, parts, shaken
from torch import Tensor
from torch.func import vmap

from promptfed.models.transformer import norm_weights
from promptfed.models.vit import ViT, vit
from promptfed.params import Params

PATCHES, WIDTH, DEPTH = 6, 16, 6


def small(pre_norm: bool = False, bias: bool = True, **fields: object) -> ViT:
    """In double precision, so that a mistake cannot hide in rounding."""
    model = vit((3, 8, 12), 5, 0, width=WIDTH, depth=DEPTH, heads=4)
    weights = dict(model.weights)
    if pre_norm:
        weights |= norm_weights("body.norm_pre", WIDTH)
    if not bias:
        del weights["body.patch.bias"]
    return replace(model, weights=shaken(weights, dtype=torch.float64), **fields)


def tensor(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def embedded(model: ViT, x: Tensor) -> Tensor:
    """Patch by patch: a linear map of its pixels."""
    w, rows = model.weights, []
    bias = w.get("body.patch.bias", torch.zeros(WIDTH, dtype=torch.float64))
    for top in range(0, 8, 4):
        for left in range(0, 12, 4):
            pixels = x[:, :, top : top + 4, left : left + 4].flatten(1)
            rows.append(pixels @ w["body.patch.weight"].flatten(1).T + bias)
    h = torch.stack([w["body.cls"][0, 0].expand(len(x), -1), *rows], dim=1)
    return h + w["body.position"]


def plain(model: ViT, x: Tensor, prompts: dict[int, Tensor], mode: str) -> list[Tensor]:
    """Inputs of all layers and the output of the last one, each sample on its own, as lists of tokens."""
    w = model.weights
    states: list[list[Tensor]] = [[] for _ in range(model.depth + 1)]
    for b, start in enumerate(embedded(model, x)):
        cls, standing, patches = start[0], [], list(start[1:])
        for i in range(model.depth):
            states[i].append(torch.stack([cls, *standing, *patches]))
            if i in prompts:
                new = list(prompts[i] if prompts[i].ndim == 2 else prompts[i][b])
                standing = new + standing if mode == "stay" else new
            h = torch.stack([cls, *standing, *patches])[None]
            if i == 0 and "body.norm_pre.weight" in w:
                h = norm(h, w["body.norm_pre.weight"], w["body.norm_pre.bias"], model.eps)
            h = layer(h, parts(w, f"body.blocks.{i}"), 4, model.eps, model.activation == "quick_gelu")[0]
            cls, standing, patches = h[0], list(h[1:-PATCHES]), list(h[-PATCHES:])
        states[-1].append(torch.stack([cls, *standing, *patches]))
    return [torch.stack(s) for s in states]


PROMPTS = {
    "none": {},
    "shallow": {0: tensor(3, WIDTH)},
    "every layer": {i: tensor(2, WIDTH, seed=i) for i in range(DEPTH)},
    "some layers": {1: tensor(2, WIDTH), 2: tensor(3, WIDTH, seed=1), 4: tensor(1, WIDTH, seed=2)},
    "one a sample": {0: tensor(2, WIDTH), 3: tensor(4, 1, WIDTH, seed=1)},
}


@pytest.mark.parametrize("mode", ["deep", "stay"])
@pytest.mark.parametrize("case", PROMPTS)
def test_prompts_enter_their_layers(case: str, mode: str) -> None:
    model, x, prompts = small(), tensor(4, 3, 8, 12), PROMPTS[case]
    states = plain(model, x, prompts, mode)
    h = model.encode(model.weights, model.embed(model.weights, x), prompts, mode)
    torch.testing.assert_close(h, states[-1])
    expected = norm(states[-1][:, 0], model.weights["body.norm.weight"], model.weights["body.norm.bias"], 1e-6)
    torch.testing.assert_close(model.features(model.weights, x, prompts, mode), expected)


def test_modes_differ_in_the_length_of_the_sequence() -> None:
    model, prompts = small(), PROMPTS["some layers"]
    h = model.embed(model.weights, tensor(2, 3, 8, 12))
    assert model.encode(model.weights, h, prompts, "stay").shape[1] == 1 + 2 + 3 + 1 + PATCHES
    assert model.encode(model.weights, h, prompts, "deep").shape[1] == 1 + 1 + PATCHES


@pytest.mark.parametrize("fields", [{"eps": 0.1}, {"activation": "quick_gelu"}, {"pre_norm": True}, {"bias": False}])
def test_variants_of_the_architecture(fields: dict[str, object]) -> None:
    model, x, prompts = small(**fields), tensor(2, 3, 8, 12), PROMPTS["every layer"]
    h = model.encode(model.weights, model.embed(model.weights, x), prompts)
    torch.testing.assert_close(h, plain(model, x, prompts, "deep")[-1])


@pytest.mark.parametrize("mode", ["deep", "stay"])
@pytest.mark.parametrize("cut", range(DEPTH + 1))
def test_a_pass_can_be_cut_anywhere(cut: int, mode: str) -> None:
    model, x, prompts = small(pre_norm=True), tensor(2, 3, 8, 12), PROMPTS["some layers"]
    w, states = model.weights, plain(model, x, prompts, mode)
    first = model.encode(w, model.embed(w, x), prompts, mode, stop=cut)
    torch.testing.assert_close(first, states[cut])
    torch.testing.assert_close(model.encode(w, first, prompts, mode, start=cut), states[-1])


def test_nothing_is_computed_backwards_before_the_first_prompt() -> None:
    """What autograd keeps of a pass with prompts at layer 4 of 6 is what it keeps of the last two layers."""
    model = small()
    x, prompt = tensor(2, 3, 8, 12), tensor(2, WIDTH).requires_grad_()
    assert not any(p.requires_grad for p in model.weights.values())
    h = model.embed(model.weights, x)
    before = model.encode(model.weights, h, {4: prompt}, stop=4)
    assert before.grad_fn is None
    whole = model.encode(model.weights, h, {4: prompt}).sum()
    rest = model.encode(model.weights, before, {4: prompt}, start=4).sum()
    every = model.encode(model.weights, h, {0: prompt}).sum()
    assert nodes(whole) == nodes(rest)
    # A layer has the same nodes wherever it stands.
    assert products(every) == 3 * products(whole) == 6 * 4
    assert leaves(whole) == [id(prompt)]
    (gradient,) = torch.autograd.grad(whole, [prompt])
    assert gradient.abs().min() > 0


def graph(value: Tensor) -> list[torch.autograd.graph.Node]:
    seen, open_ = [], [value.grad_fn]
    while open_:
        node = open_.pop()
        if node is not None and node not in seen:
            seen.append(node)
            open_ += [child for child, _ in node.next_functions]
    return seen


def nodes(value: Tensor) -> list[str]:
    return sorted(node.name() for node in graph(value))


def products(value: Tensor) -> int:
    """Matrix products with weights: qkv, proj and two of the MLP in each layer."""
    return sum(node.name() in ("AddmmBackward0", "LinearBackward0") for node in graph(value))


def leaves(value: Tensor) -> list[int]:
    return [id(node.variable) for node in graph(value) if hasattr(node, "variable")]


@pytest.mark.parametrize("mode", ["deep", "stay"])
def test_stacked_prompts_equal_one_by_one_in_values_and_gradients(mode: str) -> None:
    model = small(pre_norm=True)
    x = tensor(3, 2, 3, 8, 12)
    stacks = {0: tensor(3, 2, WIDTH), 2: tensor(3, 2, 1, WIDTH, seed=1)}  # the second: one for each sample
    for p in stacks.values():
        p.requires_grad_()

    def features(prompts: dict[int, Tensor], x: Tensor) -> Tensor:
        return model.features(model.weights, x, prompts, mode)

    together = vmap(features)(stacks, x)
    gradients = torch.autograd.grad(together.square().sum(), list(stacks.values()))
    for k in range(3):
        own = {i: p[k].detach().clone().requires_grad_() for i, p in stacks.items()}
        alone = features(own, x[k])
        torch.testing.assert_close(together[k], alone)
        for mine, theirs in zip(gradients, torch.autograd.grad(alone.square().sum(), list(own.values())), strict=True):
            torch.testing.assert_close(mine[k], theirs)


def test_a_frozen_prefix_is_not_stacked() -> None:
    """Clients that share their images and differ in prompts from layer 3 on: three layers run once for all."""
    rows: list[int] = []

    class Watched(ViT):
        def block(self, weights: Params, at: str, h: Tensor, first_tokens: int | None = None) -> Tensor:
            rows.append(torch._C._functorch.is_batchedtensor(h))
            return super().block(weights, at, h, first_tokens)

    plain_model = small()
    model = Watched(plain_model.name, plain_model.image, 5, plain_model.weights, WIDTH, 4, DEPTH, 4)
    x, prompts = tensor(2, 3, 8, 12), tensor(5, 2, WIDTH)
    vmap(lambda prompt: model.features(model.weights, x, {3: prompt}))(prompts)
    assert rows == [False] * 3 + [True] * 3
