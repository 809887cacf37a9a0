"""The text tower runs once for prompts that do not change, and again for all others."""

from collections.abc import Iterator

import pytest
import torch
from torch.func import grad, vmap

from promptfed import models
from promptfed.methods import create
from promptfed.models.clip import CLIP
from promptfed.models.text import TextTower
from promptfed.scoring import evaluate
from promptfed.training import CHUNK, Samples, Work, context, train

Passes = list[int]


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Passes]:
    """The number of classes in each pass of a text tower."""
    seen: Passes = []
    features = TextTower.features

    def counted(self, weights, sentences, *prompts):
        seen.append(len(sentences.ids))
        return features(self, weights, sentences, *prompts)

    monkeypatch.setattr(TextTower, "features", counted)
    return seen


@pytest.fixture
def model() -> CLIP:
    made = models.build("clip-mini", (3, 32, 32), 3, 0, ("circle", "square", "star"))
    assert isinstance(made, CLIP)
    return made


def many(n: int, width: int) -> Samples:
    g = torch.Generator().manual_seed(0)
    features = torch.nn.functional.normalize(torch.randn(n, width, generator=g), dim=-1)
    scale = torch.ones(3, 1, 1)
    return Samples(torch.empty(n, 0), torch.randint(3, (n,), generator=g), scale, scale, {"features": features})


@pytest.mark.parametrize(("name", "expected"), [("promptfl", 1), ("promptfolio", 2), ("fedpgp", 1), ("zero-shot", 1)])
def test_an_evaluation_of_many_batches_needs_one_pass_per_context(
    name: str, expected: int, model: CLIP, passes: Passes
) -> None:
    method = create(name)
    data = many(3 * CHUNK, model.embedding)
    params = method.tuning.init(model, 0)
    for _ in range(2):  # on validation data and on test data
        evaluate(method, model, Work(0, data, params, {}, {}), {n: p.clone() for n, p in params.items()}, data)
    assert len(passes) == expected


def test_dp2fl_computes_its_losses_on_all_validation_sets_with_one_pass(model: CLIP, passes: Passes) -> None:
    method, data = create("dp2fl", {"privacy": "open"}), many(1, model.embedding)
    params = method.tuning.init(model, 0)
    images = torch.rand(CHUNK + 1, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    sets = {name: {"x": images, "y": torch.arange(len(images)) % 3} for name in "012"}
    with torch.no_grad():
        losses = method.losses(model, params, sets, context(Work(0, data, params, {}, {}), model))
    assert len(losses) == 3
    assert len(passes) == 1


def test_atpfl_refers_to_prompts_with_one_pass_for_all_clients_and_steps(model: CLIP, passes: Passes) -> None:
    """Two clients in their first round: what they refer to is what they received. A step has a pass of its own."""
    method = create("atpfl", {"epochs": 2, "batch_size": 4, "prompt_size": 2})
    g = torch.Generator().manual_seed(1)
    x, scale = torch.randint(0, 255, (8, 3, 32, 32), dtype=torch.uint8, generator=g), torch.full((3, 1, 1), 127.0)
    data = Samples(x, torch.arange(8) % 3, scale, scale)
    init = method.tuning.init(model, 0)
    for client in range(2):
        train(method, model, [Work(client, data, init, init, init)], method.schedule(1), 0, 1)
    steps = 2 * 2 * 2
    assert len(passes) == steps + 1


def test_a_context_that_has_changed_in_place_is_computed_again(model: CLIP, passes: Passes) -> None:
    sentences, context = model.sentences(context=2), torch.zeros(2, model.text_width)
    first = model.text(model.weights, sentences, context)
    context += 1
    second = model.text(model.weights, sentences, context)
    assert len(passes) == 2
    assert not torch.equal(first, second)
    torch.testing.assert_close(
        second, torch.nn.functional.normalize(model.text_tower.features(model.weights, sentences, context), dim=-1)
    )


def test_other_sentences_or_weights_are_computed_again(model: CLIP, passes: Passes) -> None:
    context = torch.ones(2, model.text_width)
    one = model.text(model.weights, model.sentences(context=2), context)
    other = model.text(model.weights, model.sentences("a {}.", context=2), context)
    trained = {**model.weights, "body.text.proj": 2 * model.weights["body.text.proj"].roll(1, 0)}
    third = model.text(trained, model.sentences(context=2), context)
    assert len(passes) == 3
    assert not torch.equal(one, other)
    assert not torch.equal(one, third)


def test_gradients_and_vmap_pass_through(model: CLIP, passes: Passes) -> None:
    sentences = model.sentences(context=2)
    context = torch.ones(2, model.text_width)

    def summed(vectors: torch.Tensor) -> torch.Tensor:
        return model.text(model.weights, sentences, vectors).square().mul(torch.arange(model.embedding)).sum()

    known = summed(context)  # from now on in the cache
    moving = context.clone().requires_grad_()
    (by_autograd,) = torch.autograd.grad(summed(moving), moving)
    by_transform = grad(summed)(context)
    torch.testing.assert_close(by_autograd, by_transform, rtol=1e-3, atol=1e-3)
    assert by_autograd.abs().sum() > 0
    other = context.clone()
    other[0, 0] = 9
    both = vmap(summed)(torch.stack([context, other]))
    torch.testing.assert_close(both[0], known)
    assert not torch.isclose(both[1], known)
    assert len(passes) == 4
    assert torch.equal(summed(context), known)
    assert len(passes) == 4
