"""Maple prompts: sizes, initial values, and the two towers written out."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from dp2fl_toy import CTX, MODEL, SIZES, batch_of, images
from torch import Tensor
from torch.nn import functional as F

from promptfed.errors import UserError
from promptfed.methods.fedprox import FedProx
from promptfed.models.clip import clip
from promptfed.models.vit import vit
from promptfed.params import Params, numel
from promptfed.testing import NAMES, Case, tiny_federation
from promptfed.tunings.maple import Maple
from promptfed.tunings.tokens import TokenPrompt


def b16(depth: int) -> Params:
    """Of the widths of CLIP ViT-B/16; its layers and its vocabulary play no part in the count."""
    model = clip(
        (3, 32, 32),
        0,
        patch=16,
        width=768,
        depth=0,
        heads=12,
        text_width=512,
        text_depth=0,
        text_heads=8,
        vocabulary=4,
        context_length=8,
        embedding=4,
    )
    return Maple(depth=depth, context_init="").init(model, 0)


@pytest.mark.parametrize(("depth", "maps"), [(9, 3_545_856), (1, 393_984)])
def test_parameter_counts_at_the_widths_of_vit_b_16(depth: int, maps: int) -> None:
    tuning, init = Maple(depth=depth), b16(depth)
    roles = {role: {n: p for n, p in init.items() if tuning.role(n) == role} for role in ("body", "data")}
    assert numel(roles["data"]) == maps
    assert numel(roles["body"]) == depth * 2 * 512
    assert set(tuning.role_names()) == {"body", "data"}


def test_initial_values() -> None:
    init = b16(9)
    for name, p in init.items():
        if name.startswith("map."):  # as nn.Linear starts: uniform within 1 / sqrt(fan in)
            assert 0.9 / math.sqrt(512) < float(p.abs().max()) <= 1 / math.sqrt(512)
        else:
            assert float(p.std()) == pytest.approx(0.02, rel=0.1)
    assert not torch.equal(init["deep.1"], init["deep.2"])
    torch.manual_seed(3)
    assert all(torch.equal(p, init[name]) for name, p in b16(9).items())


def test_image_prompts_may_start_around_cls_of_a_blank_image() -> None:
    """In NumPy for layer 0, where cls has its position and nothing else; deeper, by the layers one after the other."""
    random, blank = Maple(depth=2), Maple(depth=2, map_init="blank")
    init, init_random = blank.init(MODEL, 0), random.init(MODEL, 0)
    tower, weights = MODEL.image_tower, MODEL.weights
    assert {name for name, p in init.items() if not torch.equal(p, init_random[name])} == {"map.0.bias", "map.1.bias"}
    cls = (weights["body.image.cls"] + weights["body.image.position"][:, 0]).flatten().numpy()
    prompts = init["context"].numpy() @ init["map.0.weight"].numpy().T + init["map.0.bias"].numpy()
    np.testing.assert_allclose(prompts.mean(0), cls, atol=1e-5)
    assert np.abs(prompts[0] - prompts[1]).max() > 1e-3  # they are still different
    h = tower.embed(weights, torch.zeros(1, *MODEL.image))
    h = F.layer_norm(
        h, h.shape[-1:], weights["body.image.norm_pre.weight"], weights["body.image.norm_pre.bias"], tower.eps
    )
    h = tower.block(weights, "body.image.blocks.0", h)
    deep = init["deep.1"] @ init["map.1.weight"].T + init["map.1.bias"]
    torch.testing.assert_close(deep.mean(0), h[0, 0], atol=1e-5, rtol=0)


def test_context_starts_from_a_photo_and_the_other_words_stay() -> None:
    """With prompts at depth 1 that have not been trained, the text is "a photo of a {}." and nothing else."""
    tuning = Maple(depth=1)
    init = tuning.init(MODEL, 0)
    assert torch.equal(init["context"], MODEL.words("a photo"))
    template = MODEL.text(MODEL.weights, MODEL.sentences("a photo of a {}."))
    torch.testing.assert_close(tuning.text(MODEL, init), template, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("context", "words"), [(2, ""), (3, "a photo"), (2, "   "), (2, "a zebra crosses")])
def test_words_that_do_not_fit_leave_random_vectors_alone_with_the_name(context: int, words: str) -> None:
    tuning = Maple(depth=1, context=context, context_init=words)
    init = tuning.init(MODEL, 0)
    assert init["context"].shape == (context, MODEL.text_width)
    assert tuning.sentences(MODEL) is MODEL.sentences("{}.", context)
    other = Maple(depth=1, context=context, context_init=words).init(MODEL, 1)
    assert not torch.equal(init["context"], other["context"])


def plain_layer(w: Params, at: str, h: Tensor, heads: int, causal: bool) -> Tensor:
    """A pre-norm layer in float64. h (B, T, width)."""

    def linear(name: str, x: Tensor) -> Tensor:
        return x @ w[f"{at}.{name}.weight"].T + w[f"{at}.{name}.bias"]

    def norm(name: str, x: Tensor) -> Tensor:
        return plain_norm(w, f"{at}.{name}", x)

    b, t, width = h.shape
    q, k, v = (x.reshape(b, t, heads, -1).transpose(1, 2) for x in linear("qkv", norm("norm1", h)).split(width, dim=-1))
    scores = q @ k.transpose(-1, -2) / math.sqrt(width // heads)
    if causal:
        scores = scores + torch.full((t, t), -math.inf, dtype=h.dtype).triu(1)
    h = h + linear("proj", (scores.softmax(-1) @ v).transpose(1, 2).reshape(b, t, width))
    m = linear("mlp.in", norm("norm2", h))
    return h + linear("mlp.out", m * torch.sigmoid(1.702 * m))


def plain_norm(w: Params, at: str, x: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * w[f"{at}.weight"] + w[f"{at}.bias"]


def plain_logits(p: Params, x: Tensor, depth: int) -> Tensor:
    """MaPLe on clip-mini, written out: prompts replace those of the layer before, in both towers."""
    assert MODEL.tokenizer is not None
    w = {name: v.double() for name, v in MODEL.weights.items()}
    p = {name: v.double() for name, v in p.items()}
    text_prompts = [p["context"], *(p[f"deep.{i}"] for i in range(1, depth))]
    # text: start, 2 vectors, "of a {}.", end
    texts = []
    for name in NAMES:
        ids = [MODEL.tokenizer.start, 0, 0, *MODEL.tokenizer.words(f"of a {name}."), MODEL.tokenizer.end]
        h = w["body.text.tokens"][ids]
        h = torch.cat([h[:1], text_prompts[0], h[3:]]) + w["body.text.position"][: len(ids)]
        for i in range(3):
            if 0 < i < depth:
                h = torch.cat([h[:1], text_prompts[i], h[3:]])
            h = plain_layer(w, f"body.text.blocks.{i}", h[None], 4, causal=True)[0]
        texts.append(w["body.text.proj"] @ plain_norm(w, "body.text.norm", h[-1]))
    # image: cls, the mapped vectors, patches
    patches = F.unfold(x.double(), 8, stride=8).transpose(1, 2) @ w["body.image.patch.weight"].flatten(1).T
    cls = w["body.image.cls"].expand(len(x), 1, -1)
    h = torch.cat([cls, patches], dim=1) + w["body.image.position"]
    for i in range(6):
        if i < depth:
            prompt = text_prompts[i] @ p[f"map.{i}.weight"].T + p[f"map.{i}.bias"]
            h = torch.cat([h[:, :1], prompt.expand(len(x), -1, -1), h[:, -16:]], dim=1)
        if i == 0:
            h = plain_norm(w, "body.image.norm_pre", h)
        h = plain_layer(w, f"body.image.blocks.{i}", h, 4, causal=False)
    found = plain_norm(w, "body.image.norm", h[:, 0]) @ w["body.image.proj"].T
    return w["body.scale"].exp() * F.normalize(found, dim=1) @ F.normalize(torch.stack(texts), dim=1).T


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_coupling_written_out(depth: int) -> None:
    tuning = Maple(depth=depth)
    g = torch.Generator().manual_seed(2)
    params = {n: p + 0.05 * torch.randn(p.shape, generator=g) for n, p in tuning.init(MODEL, 0).items()}
    expected = plain_logits(params, images(), depth)
    found = tuning.logits(MODEL, params, batch_of(images()), CTX)
    torch.testing.assert_close(found.double(), expected, atol=2e-4, rtol=0)
    last = f"map.{depth - 1}.bias"
    moved = {**params, last: params[last] + torch.randn(128, generator=g)}  # a constant would be lost in the norm
    assert float((plain_logits(moved, images(), depth) - expected).abs().max()) > 0.01


def test_embedded_inputs_stand_for_images() -> None:
    tuning = Maple(depth=2)
    params, x = tuning.init(MODEL, 0), images()
    embedded = batch_of(x)._replace(x=torch.empty(3, 0), frozen={"hidden": tuning.embed(MODEL, x)})
    assert torch.equal(tuning.features(MODEL, params, embedded, CTX), tuning.features(MODEL, params, batch_of(x), CTX))
    assert tuning.frozen_name(MODEL) == ""


def test_a_token_prompt_around_it_enters_the_first_layer() -> None:
    inner = Maple(depth=1)
    tuning = TokenPrompt(prompt_tokens=3, inner=inner)
    params = tuning.init(MODEL, 0)
    found = tuning.features(MODEL, params, batch_of(images()), CTX)
    assert not torch.allclose(found, inner.features(MODEL, params, batch_of(images()), CTX), atol=1e-4)


def test_too_deep_prompts_name_the_setting_and_the_range() -> None:
    with pytest.raises(UserError, match=r'method\.depth = 9 must be 1 to 3, .* "clip-mini"'):
        Maple().check(MODEL)
    Maple(depth=3).check(MODEL)


def test_other_backbones_are_refused() -> None:
    with pytest.raises(UserError, match=r'backbone\.name = "vit-tiny": .* need a CLIP'):
        Maple().check(vit((3, 8, 8), 4, 0, width=16, depth=1, heads=2))


def test_other_methods_run_on_it(tmp_path: Path) -> None:
    method = FedProx(tuning=Maple(depth=2), epochs=1, mu=0.1)
    case = Case(method, MODEL, tiny_federation(tmp_path, SIZES, 32))
    memory = case.run(rounds=1)
    assert memory.state is not None
    assert memory.state.keys() == case.init.keys()
    assert not any(torch.equal(memory.state[name], p) for name, p in case.init.items())
    assert memory.lines[0]["left_out"] == []
