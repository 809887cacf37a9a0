"""CLIP's text tower against the plain computation over all positions and classes; both towers with prompts."""

import math
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from reference import layer, norm, parts, shaken
from torch import Tensor
from torch.func import vmap

from promptfed.errors import UserError
from promptfed.models import text
from promptfed.models.clip import CLIP, clip, image_vit
from promptfed.models.text import Sentences, TextTower
from promptfed.params import Params

WIDTH, LENGTH, LAYERS, START, END = 16, 20, 4, 98, 99
NAMES = ([5, 6, 7], [8], [5, 9], [10, 11, 12, 13])  # words of four classes; two begin alike


def small(dtype: torch.dtype = torch.float64) -> CLIP:
    model = clip(
        (3, 8, 8),
        0,
        patch=4,
        width=24,
        depth=3,
        heads=4,
        text_width=WIDTH,
        text_depth=LAYERS,
        text_heads=2,
        vocabulary=100,
        context_length=LENGTH,
        embedding=12,
    )
    model.weights = shaken(model.weights, dtype=dtype)
    return model


def tensor(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@dataclass
class Case:
    """Where the context stands among the words of each class, "." being a word behind its name."""

    position: str
    context: int

    def rows(self) -> list[list[int | str]]:
        slots = [f"slot {i}" for i in range(self.context)]
        half = len(slots) // 2
        shapes = {
            "end": lambda name: [*slots, *name, 20],
            "middle": lambda name: [*slots[:half], *name, *slots[half:], 20],
            "front": lambda name: [*name, *slots, 20],
        }
        return [[START, *shapes[self.position](name), END] for name in NAMES]

    def sentences(self) -> Sentences:
        rows = self.rows()
        slots = [[row.index(f"slot {i}") for i in range(self.context)] for row in rows]
        return Sentences.of([[0 if isinstance(t, str) else t for t in row] for row in rows], slots)


def plain(model: CLIP, case: Case, context: Tensor, deep: dict[int, Tensor]) -> Tensor:
    """Each class on its own, at full length, padded with end tokens."""
    w, features = model.weights, []
    for c, row in enumerate(case.rows()):
        row = row + [END] * (LENGTH - len(row))
        own = context if context.ndim == 2 else context[c]
        vectors = [own[int(t.split()[1])] if isinstance(t, str) else w["body.text.tokens"][t] for t in row]
        h = (torch.stack(vectors) + w["body.text.position"])[None]
        for i in range(LAYERS):
            if i in deep:
                new = deep[i] if deep[i].ndim == 2 else deep[i][c]
                rows = [new[int(t.split()[1])] if isinstance(t, str) else h[0, n] for n, t in enumerate(row)]
                h = torch.stack(rows)[None]
            h = layer(h, parts(w, f"body.text.blocks.{i}"), 2, 1e-5, quick=True, causal=True)
        end = norm(h[0, row.index(END)], w["body.text.norm.weight"], w["body.text.norm.bias"], 1e-5)
        feature = w["body.text.proj"] @ end
        features.append(feature / feature.square().sum().sqrt())
    return torch.stack(features)


CASES = [Case(position, 5) for position in ("end", "middle", "front")]
FORMS = {"unified": (5, WIDTH), "class-specific": (4, 5, WIDTH)}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.position)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("deep", ["shallow", "deep", "deep of another form"])
def test_text_features_equal_the_plain_computation(case: Case, form: str, deep: str) -> None:
    model, context = small(), tensor(*FORMS[form])
    other = FORMS["class-specific" if form == "unified" else "unified"]
    shape = other if deep == "deep of another form" else FORMS[form]
    prompts = {} if deep == "shallow" else {i: tensor(*shape, seed=i) for i in (1, 2)}
    everything = [context, *prompts.values()]
    for p in everything:
        p.requires_grad_()
    found = model.text(model.weights, case.sentences(), context, prompts)
    expected = plain(model, case, context, prompts)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    sign = tensor(*found.shape, seed=9)
    gradients = torch.autograd.grad((found * sign).sum(), everything)
    for mine, theirs in zip(gradients, torch.autograd.grad((expected * sign).sum(), everything), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-11)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.position)
def test_it_is_exact_to_1e6_in_single_precision(case: Case) -> None:
    model, context = small(torch.float32), tensor(5, WIDTH)
    found = model.text(model.weights, case.sentences(), context.float())
    model.weights = {name: p.double() for name, p in model.weights.items()}
    assert (found - plain(model, case, context, {})).abs().max() < 1e-6


def test_without_context() -> None:
    model, case = small(), Case("end", 0)
    torch.testing.assert_close(model.text(model.weights, case.sentences()), plain(model, case, tensor(0, WIDTH), {}))
    alone = Sentences.of([[START, 5, END]])
    both = Sentences.of([[START, 5, END], [START, 5, 6, END]])
    torch.testing.assert_close(model.text(model.weights, alone)[0], model.text(model.weights, both)[0])


@pytest.mark.parametrize(
    ("rows", "slots", "shared", "plain_"),
    [
        ([[98, 0, 0, 5, 99], [98, 0, 0, 6, 7, 99]], [[1, 2], [1, 2]], 3, 1),
        ([[98, 0, 0, 4, 5, 99], [98, 0, 0, 4, 6, 99]], [[1, 2], [1, 2]], 4, 1),  # a word in common behind the context
        ([[98, 5, 0, 99], [98, 6, 0, 99]], [[2], [2]], 1, 1),
        ([[98, 5, 0, 99], [98, 5, 6, 0, 99]], [[2], [3]], 2, 2),
        ([[98, 5, 99]], [[]], 2, 2),  # one class: all but its end token
        ([[98, 5, 99], [98, 5, 6, 99]], [[], []], 2, 2),
        ([[98, 0, 0, 99], [98, 0, 0, 99]], [[1, 2], [2, 1]], 1, 1),  # the same places, but not the same vectors
    ],
)
def test_what_all_classes_have_in_common(
    rows: list[list[int]], slots: list[list[int]], shared: int, plain_: int
) -> None:
    made = Sentences.of(rows, slots)
    assert (made.shared, made.plain) == (shared, plain_)
    assert made.ids.shape == (len(rows), max(map(len, rows)))
    assert made.end.tolist() == [len(row) - 1 for row in rows]


def test_sentences_that_begin_differently_are_refused() -> None:
    with pytest.raises(ValueError, match="same start token"):
        Sentences.of([[98, 5, 99], [97, 5, 99]])


def test_slots_and_vectors_must_be_as_many() -> None:
    model = small()
    with pytest.raises(ValueError, match="0 context vectors for 5 slots"):
        model.text(model.weights, CASES[0].sentences())
    with pytest.raises(ValueError, match="4 context vectors for 5 slots"):
        model.text(model.weights, CASES[0].sentences(), tensor(4, WIDTH))


@pytest.mark.parametrize(("position", "prefix"), [("end", 1 + 5), ("middle", 1 + 2), ("front", 1)])
def test_the_prefix_is_computed_once_and_only_as_many_tokens_as_needed(
    position: str, prefix: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, ...]] = []

    def watched(weights: Params, at: str, h: Tensor, *rest: object) -> object:
        seen.append(tuple(h.shape))
        return project(weights, at, h, *rest)

    project = text.project
    monkeypatch.setattr(text, "project", watched)
    model = small()
    model.text(model.weights, Case(position, 5).sentences(), tensor(5, WIDTH))
    longest = 1 + 5 + 4 + 1 + 1
    assert seen == [(1, prefix, WIDTH), (4, longest - prefix, WIDTH)] * LAYERS


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.position)
@pytest.mark.parametrize("form", FORMS)
def test_stacked_contexts_equal_one_by_one(case: Case, form: str) -> None:
    model, sentences = small(), case.sentences()
    contexts, deep = tensor(3, *FORMS[form]).requires_grad_(), tensor(3, 5, WIDTH, seed=1).requires_grad_()

    def features(context: Tensor, deep: Tensor) -> Tensor:
        return model.text(model.weights, sentences, context, {1: deep})

    together = vmap(features)(contexts, deep)
    sign = tensor(*together.shape, seed=2)
    gradients = torch.autograd.grad((together * sign).sum(), [contexts, deep])
    for k in range(3):
        own = [p[k].detach().clone().requires_grad_() for p in (contexts, deep)]
        alone = features(*own)
        torch.testing.assert_close(together[k], alone)
        for mine, theirs in zip(gradients, torch.autograd.grad((alone * sign[k]).sum(), own), strict=True):
            torch.testing.assert_close(mine[k], theirs)


def image_features(model: CLIP, x: Tensor, prompts: dict[int, Tensor]) -> Tensor:
    """The image tower over lists of tokens, with deep prompts behind cls, before the first norm at layer 0."""
    w, at = model.weights, "body.image"
    patches = [
        x[:, :, top : top + 4, left : left + 4].flatten(1) @ w[f"{at}.patch.weight"].flatten(1).T
        for top in (0, 4)
        for left in (0, 4)
    ]
    h = torch.stack([w[f"{at}.cls"][0, 0].expand(len(x), -1), *patches], 1) + w[f"{at}.position"]
    for i in range(3):
        if i in prompts:
            h = torch.cat([h[:, :1], prompts[i].repeat(len(x), 1, 1), h[:, -4:]], 1)
        if i == 0:
            h = norm(h, w[f"{at}.norm_pre.weight"], w[f"{at}.norm_pre.bias"], 1e-5)
        h = layer(h, parts(w, f"{at}.blocks.{i}"), 4, 1e-5, quick=True)
    f = norm(h[:, 0], w[f"{at}.norm.weight"], w[f"{at}.norm.bias"], 1e-5) @ w[f"{at}.proj"].T
    return f / f.square().sum(-1, keepdim=True).sqrt()


def test_coupled_prompts_of_both_towers() -> None:
    """MaPLe: linear maps of the text prompts are the vision prompts; the maps learn through both."""
    model, case, x = small(), Case("end", 2), tensor(3, 3, 8, 8)
    context, deep = tensor(2, WIDTH), tensor(2, WIDTH, seed=1)
    maps = [tensor(24, WIDTH, seed=2 + i).requires_grad_() for i in range(2)]
    vision = {0: context @ maps[0].T, 1: deep @ maps[1].T}
    w = model.weights
    image = model.features(w, x, vision)
    words = model.text(w, case.sentences(), context, {1: deep})
    torch.testing.assert_close(image, image_features(model, x, vision))
    torch.testing.assert_close(words, plain(model, case, context, {1: deep}))
    logits = model.logits(w, image, words)
    for b in range(3):
        for c in range(4):
            cosine = (image[b] * words[c]).sum() / image[b].norm() / words[c].norm()
            torch.testing.assert_close(logits[b, c], math.exp(w["body.scale"]) * cosine)
    assert all(g.abs().sum() > 0 for g in torch.autograd.grad(logits.std(), maps))


def test_tokens_are_the_same_as_prompts_at_the_first_layer() -> None:
    model, x, tokens = small(), tensor(2, 3, 8, 8), tensor(3, 24)
    torch.testing.assert_close(model.features(model.weights, x, tokens), image_features(model, x, {0: tokens}))
    torch.testing.assert_close(model.features(model.weights, x), image_features(model, x, {}))


def test_the_image_tower_alone() -> None:
    model, x = small(), tensor(2, 3, 8, 8)
    alone = image_vit(model, 7, 1, "vit")
    assert set(alone.weights) >= {"body.cls", "body.norm_pre.weight", "body.blocks.2.qkv.bias", "head.weight"}
    assert all(name.startswith(("body.", "head.")) for name in alone.weights)
    assert not any(name.startswith(("body.image", "body.text", "body.proj")) for name in alone.weights)
    features = alone.features(alone.weights, x)
    torch.testing.assert_close(model.join(model.weights, features), image_features(model, x, {}))
    assert alone.classify({n: p.double() for n, p in alone.weights.items()}, features).shape == (2, 7)
    assert (alone.name, alone.classes, alone.width) == ("vit", 7, 24)


def named(model: CLIP) -> CLIP:
    sentences = Case("end", 0).sentences()
    model.tokenizer = SimpleNamespace(sentences=lambda *_: sentences)
    model.names = ("a", "b", "c", "d")
    return model


def test_classify_computes_the_frozen_text_features_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, calls = named(small()), tensor(2, 3, 8, 8), []
    compute = TextTower.features
    monkeypatch.setattr(TextTower, "features", lambda *given: calls.append(1) or compute(*given))
    image = model.features(model.weights, x)
    expected = model.logits(model.weights, image, plain(model, Case("end", 0), tensor(0, WIDTH), {}))
    for _ in range(3):
        torch.testing.assert_close(model.classify({**model.weights, "prompt": x}, image), expected)
    assert len(calls) == 1
    # Another text tower has other features, and leaves the kept ones alone.
    other = model.weights | {"body.text.proj": model.weights["body.text.proj"] * tensor(12, 1)}
    assert not torch.allclose(model.classify(other, image), expected)
    torch.testing.assert_close(model.classify(model.weights, image), expected)
    assert len(calls) == 2


def test_classifying_without_class_names_is_refused() -> None:
    model = small()
    with pytest.raises(UserError, match=r'backbone\.name = "clip" needs class names, which the dataset lacks'):
        model.classify(model.weights, tensor(1, 12))


def test_frozen_towers_have_no_gradient() -> None:
    model, context = small(), tensor(5, WIDTH).requires_grad_()
    loss = model.text(model.weights, CASES[0].sentences(), context).sum()
    assert not model.features(model.weights, tensor(2, 3, 8, 8)).requires_grad
    loss.backward()
    assert context.grad is not None
    assert all(p.grad is None and not p.requires_grad for p in model.weights.values())


def test_image_sides_must_be_multiples_of_the_patch() -> None:
    with pytest.raises(UserError, match="multiples of 4, got 8x10"):
        clip(
            (3, 8, 10),
            0,
            patch=4,
            width=8,
            depth=1,
            heads=2,
            text_width=8,
            text_depth=1,
            text_heads=2,
            vocabulary=9,
            context_length=5,
            embedding=4,
        )
