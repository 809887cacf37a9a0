"""DP2FL: coupled prompts, weighting rules by hand, and what each privacy mode lets others see."""

import math
import struct
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nacl.public import PrivateKey, SealedBox
from torch import Tensor
from torch.nn import functional as F

from promptfed import models
from promptfed.engines.local import LocalClients
from promptfed.errors import UserError
from promptfed.host import Message, read_message
from promptfed.method import Batch, Context, Holdings, Phase, State, Update
from promptfed.methods import create
from promptfed.methods.dp2fl import Coupled, Dp2fl
from promptfed.methods.dp2fl_weights import EPS, combine, distance, global_weights, local_weights
from promptfed.methods.fedprox import FedProx
from promptfed.models.clip import CLIP, clip
from promptfed.models.vit import vit
from promptfed.params import Params, numel
from promptfed.server import Plan, run
from promptfed.testing import NAMES, Case, Memory, check_method, tiny_federation
from promptfed.tuning import PixelPrompt, TokenPrompt
from promptfed.wire import unpack

SIZES = (5, 4, 3, 1, 4)
BLIND = 4  # has no validation data
HOLDERS = (0, 1, 2, 3)
CTX = Context({}, {}, Phase({}, 1), torch.tensor(1), torch.ones(4))
MODES = ("open", "embeddings", "sealed")


def mini() -> CLIP:
    made = models.build("clip-mini", (3, 32, 32), 4, 5, NAMES)
    assert isinstance(made, CLIP)
    return made


MODEL = mini()


def method_of(**given: Any) -> Dp2fl:
    return Dp2fl(tuning=Coupled(depth=2), **{"epochs": 1, **given})


def batch_of(x: Tensor, y: Tensor | None = None) -> Batch:
    labels = torch.zeros(len(x), dtype=torch.int64) if y is None else y
    return Batch(x, labels, None, torch.tensor([0.5, 0.5]), {})


def images(n: int = 3, seed: int = 0, side: int = 32) -> Tensor:
    return torch.randn(n, 3, side, side, generator=torch.Generator().manual_seed(seed))


# ---- coupled prompts


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
    return Coupled(depth=depth, context_init="").init(model, 0)


@pytest.mark.parametrize(("depth", "maps"), [(9, 3_545_856), (1, 393_984)])
def test_parameter_counts_at_the_widths_of_vit_b_16(depth: int, maps: int) -> None:
    tuning, init = Coupled(depth=depth), b16(depth)
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


def test_context_starts_from_a_photo_and_the_other_words_stay() -> None:
    """With prompts at depth 1 that have not been trained, the text is "a photo of a {}." and nothing else."""
    tuning = Coupled(depth=1)
    init = tuning.init(MODEL, 0)
    assert torch.equal(init["context"], MODEL.words("a photo"))
    template = MODEL.text(MODEL.weights, MODEL.sentences("a photo of a {}."))
    torch.testing.assert_close(tuning.text(MODEL, init), template, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("context", "words"), [(2, ""), (3, "a photo"), (2, "   "), (2, "a zebra crosses")])
def test_words_that_do_not_fit_leave_random_vectors_alone_with_the_name(context: int, words: str) -> None:
    tuning = Coupled(depth=1, context=context, context_init=words)
    init = tuning.init(MODEL, 0)
    assert init["context"].shape == (context, MODEL.text_width)
    assert tuning.sentences(MODEL) is MODEL.sentences("{}.", context)
    other = Coupled(depth=1, context=context, context_init=words).init(MODEL, 1)
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
    tuning = Coupled(depth=depth)
    g = torch.Generator().manual_seed(2)
    params = {n: p + 0.05 * torch.randn(p.shape, generator=g) for n, p in tuning.init(MODEL, 0).items()}
    expected = plain_logits(params, images(), depth)
    found = tuning.logits(MODEL, params, batch_of(images()), CTX)
    torch.testing.assert_close(found.double(), expected, atol=2e-4, rtol=0)
    last = f"map.{depth - 1}.bias"
    moved = {**params, last: params[last] + torch.randn(128, generator=g)}  # a constant would be lost in the norm
    assert float((plain_logits(moved, images(), depth) - expected).abs().max()) > 0.01


def test_embedded_inputs_stand_for_images() -> None:
    tuning = Coupled(depth=2)
    params, x = tuning.init(MODEL, 0), images()
    embedded = batch_of(x)._replace(x=torch.empty(3, 0), frozen={"hidden": tuning.embed(MODEL, x)})
    assert torch.equal(tuning.features(MODEL, params, embedded, CTX), tuning.features(MODEL, params, batch_of(x), CTX))
    assert tuning.frozen_name(MODEL) == ""


def test_a_token_prompt_around_it_enters_the_first_layer() -> None:
    inner = Coupled(depth=1)
    tuning = TokenPrompt(prompt_tokens=3, inner=inner)
    params = tuning.init(MODEL, 0)
    found = tuning.features(MODEL, params, batch_of(images()), CTX)
    assert not torch.allclose(found, inner.features(MODEL, params, batch_of(images()), CTX), atol=1e-4)


def test_too_deep_prompts_name_the_setting_and_the_range() -> None:
    with pytest.raises(UserError, match=r'method\.depth = 9 must be 1 to 3, .* "clip-mini"'):
        Coupled().check(MODEL)
    Coupled(depth=3).check(MODEL)


def test_other_backbones_are_refused() -> None:
    with pytest.raises(UserError, match=r'backbone\.name = "vit-tiny": .* need a CLIP'):
        Coupled().check(vit((3, 8, 8), 4, 0, width=16, depth=1, heads=2))


def test_other_methods_run_on_it(tmp_path: Path) -> None:
    method = FedProx(tuning=Coupled(depth=2), epochs=1, mu=0.1)
    case = Case(method, MODEL, tiny_federation(tmp_path, SIZES, 32))
    memory = case.run(rounds=1)
    assert memory.state is not None
    assert memory.state.keys() == case.init.keys()
    assert not any(torch.equal(memory.state[name], p) for name, p in case.init.items())
    assert memory.lines[0]["left_out"] == []


def test_dp2fl_takes_no_plug_in() -> None:
    with pytest.raises(UserError, match="takes no plug-in"):
        create("promptfed.methods.dp2fl:Dp2fl+pt")
    with pytest.raises(ValueError, match="takes no plug-in"):
        Dp2fl(tuning=PixelPrompt(inner=Coupled()))


def test_published_settings_are_the_defaults() -> None:
    method = Dp2fl()
    assert (method.lr, method.batch_size, method.epochs, method.optimizer) == (0.035, 4, 5, "sgd")
    assert (method.alpha, method.beta, method.tuning.context, method.tuning.depth) == (1.2, 0.2, 2, 9)


# ---- global weights (Eq. 8)


def test_global_weights_by_hand() -> None:
    """S = 8: (8 - 1) / 16, (8 - 2) / 16, (8 - 5) / 16."""
    assert global_weights([1.0, 2.0, 5.0]) == pytest.approx([7 / 16, 6 / 16, 3 / 16])
    assert global_weights([3.0, 5.0]) == pytest.approx([5 / 8, 3 / 8])


def test_global_weights_at_the_limits() -> None:
    assert global_weights([4.2]) == [1.0]
    assert global_weights([0.0]) == [1.0]
    assert global_weights([0.0, 0.0, 0.0, 0.0]) == [0.25] * 4
    assert global_weights([0.0, 3.0]) == [1.0, 0.0]  # all the loss is one client's


@given(st.lists(st.floats(0, 1e6), min_size=2, max_size=12))
def test_global_weights_sum_to_one_and_fall_with_the_loss(totals: list[float]) -> None:
    found = global_weights(totals)
    assert math.fsum(found) == pytest.approx(1)
    assert min(found) >= 0
    ranked = [w for _, w in sorted(zip(totals, found, strict=True), key=lambda pair: pair[0])]
    assert all(a >= b - 1e-12 for a, b in pairwise(ranked))


# ---- local weights (Eq. 9-17)

UNIT = 1 - EPS  # a distance at which the raw weight is L - loss


def local(losses: list[float], before: float = 1.0, distances: list[float] | None = None, **given: Any) -> list[float]:
    return local_weights(before, losses, distances or [UNIT] * len(losses), **{"alpha": 1.2, "beta": 0.2, **given})


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ([0.5, 0.8], [5 / 7, 2 / 7]),  # positive clients only
        ([0.5, 0.8, 1.05, 1.1, 1.3], [0.5, 0.2, 0.2, 0.1, 0]),  # m = .2, M = -.05: f = .5 .2 | .2 .1 | 0
        ([1.05, 1.1, 1.15, 2.0], [0.2 * 5 / 12, 0.2 * 4 / 12, 0.2 * 3 / 12, 0]),  # S' = -.3
        ([1.1, 2.0], [0.2, 0]),  # one retained negative
        ([1.3, 2.0, math.inf, math.nan], [0, 0, 0, 0]),  # all discarded
        ([0.5, 1.0, 1.1], [0.5, 0.5, 0]),  # M = 0: m for a loss of exactly L, the others nothing
        ([1.0, 1.0, 1.4], [0.1, 0.1, 0]),  # S' = 0
        ([1.0, 1.1], [0.2, 0]),  # nobody positive, S' = -.1: (S' - 0) / S' and 0
        ([0.4], [1]),  # K = 1
        ([1.1], [0.2]),
        ([1.9], [0]),
        ([0.5, math.inf, math.nan], [1, 0, 0]),
        ([], []),
    ],
)
def test_local_weights_by_hand(losses: list[float], expected: list[float]) -> None:
    assert local(losses) == pytest.approx(expected, abs=1e-12)


def test_local_weights_divide_by_the_distance() -> None:
    """Raw (1 - .5) / (4 + eps), (1 - .8) / (1 + eps); at no distance at all the divisor is eps."""
    found = local([0.5, 0.8], distances=[4.0, 1.0])
    raw = np.array([0.5 / (4 + 1e-5), 0.2 / (1 + 1e-5)])
    assert found == pytest.approx(raw / raw.sum())
    near = local([0.5, 0.8], distances=[0.0, 1.0])
    assert near[0] == pytest.approx(5e4 / (5e4 + 0.2 / (1 + 1e-5)))


def test_thresholds_belong_to_the_worse_side() -> None:
    """L = 2, alpha = 1.5: 2 is no improvement, 3 is discarded."""
    assert local([1.0, 2.0, 3.0], before=2.0, alpha=1.5) == pytest.approx([0.5, 0.5, 0])
    assert local([3.0], before=2.0, alpha=1.5) == [0]


@pytest.mark.parametrize("before", [0.0, math.inf, math.nan])
def test_without_a_loss_to_improve_on_the_prompt_stays(before: float) -> None:
    assert local([0.0, 0.5, 1.0], before=before) == [0, 0, 0]


def test_proportional_negatives() -> None:
    """f = .5 and gamma .05."""
    assert local([0.5, 1.05], rule="proportional", gamma=0.5) == pytest.approx([0.5 / 0.525, 0.025 / 0.525])
    assert local([0.5, 1.05], rule="proportional", gamma=0.0) == [1, 0]
    assert local([1.05, 1.1], rule="proportional", gamma=9.0) == local([1.05, 1.1])  # nobody positive: no gamma


LOSSES = st.lists(st.integers(0, 3000).map(lambda n: n / 1000), min_size=1, max_size=12)


@given(LOSSES, st.integers(1, 3000), st.randoms(use_true_random=False))
@settings(deadline=None)
def test_retained_negatives_weigh_less_than_the_weakest_positive(losses: list[float], thousandths: int, r: Any) -> None:
    before = thousandths / 1000
    distances = [r.uniform(0, 3) for _ in losses]
    found = local(losses, before, distances)
    positive = [w for w, loss in zip(found, losses, strict=True) if loss < before]
    retained = [w for w, loss in zip(found, losses, strict=True) if before <= loss < 1.2 * before]
    discarded = [w for w, loss in zip(found, losses, strict=True) if loss >= 1.2 * before]
    assert all(w == 0 for w in discarded)
    assert sum(found) == pytest.approx(1 if positive else 0.2 if retained else 0)
    if positive:
        assert min(positive) > 0
        assert all(w <= min(positive) * (1 + 1e-12) for w in retained)
        if before not in losses:  # M = 0 leaves nothing for the others
            assert all(w > 0 for w in retained)
    # At equal distances they fall as the loss grows.
    even = sorted(zip(losses, local(losses, before), strict=True))
    fallen = [w for loss, w in even if before <= loss < 1.2 * before]
    assert all(a >= b - 1e-12 for a, b in pairwise(fallen))


@given(LOSSES, st.randoms(use_true_random=False))
def test_local_weights_do_not_depend_on_the_order_to_the_last_bit(losses: list[float], r: Any) -> None:
    order = list(range(len(losses)))
    distances = [r.uniform(0, 3) for _ in losses]
    r.shuffle(order)
    found = local(losses, 1.5, distances)
    again = local([losses[i] for i in order], 1.5, [distances[i] for i in order])
    assert [found[i] for i in order] == again


def test_distance_and_combination() -> None:
    own = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([[3.0]])}
    other = {"a": torch.tensor([1.0, 5.0]), "b": torch.tensor([[7.0]])}
    far = {"a": torch.tensor([0.0, 0.0]), "b": torch.tensor([[0.0]])}
    assert distance(other, own) == 5
    found = combine(own, [other, far], [0.5, 0.25])  # own + .5 (0, 3, 4) - .25 (1, 2, 3)
    assert found["a"].tolist() == [0.75, 3.0]
    assert found["b"].tolist() == [[4.25]]
    assert found["a"].dtype == torch.float32
    assert all(torch.equal(p, own[name]) for name, p in combine(own, [other], [0.0]).items())


# ---- the server


def toy_state(method: Dp2fl, holders: tuple[int, ...] = (0, 1)) -> State:
    """Three clients, of which the last has no validation data."""
    state = method.begin(MODEL, method.tuning.init(MODEL, 0), 0)
    for client in range(3):
        hello = {"x": torch.full((1, 17, 128), float(client)), "y": torch.tensor([client])}
        if method.privacy == "sealed":
            hello["key"] = torch.full((32,), 200 - client, dtype=torch.uint8)
        state = method.admit(state, client, hello if client in holders else {}, 0)
    return state


def toy_updates(method: Dp2fl, state: State, clients: tuple[int, ...] = (0, 1, 2)) -> list[Update]:
    losses = {0: (0.4, 1.1), 1: (0.9, 0.6), 2: (5.0, 1.05)}  # of client i's model on the sets of 0 and 1
    before = {0: 1.0, 1: 1.0}
    updates = []
    for client in clients:
        g = torch.Generator().manual_seed(client)
        sent = method.down(state, client)
        up = {n: sent[n] + 0.1 * torch.randn(sent[n].shape, generator=g) for n in method.tuning.init(MODEL, 0)}
        stats = {f"loss.{j}": torch.tensor(v, dtype=torch.float64) for j, v in enumerate(losses[client])}
        stats["total"] = torch.tensor(sum(losses[client]), dtype=torch.float64)
        if client in before:
            stats["before"] = torch.tensor(before[client], dtype=torch.float64)
        updates.append(Update(client, sent, up, 10**client, stats))
    return updates


def test_aggregation_against_numpy() -> None:
    method = method_of()
    state = toy_state(method)
    updates = toy_updates(method, state)
    found = method.aggregate(state, updates)
    totals = np.array([1.5, 1.5, 6.05])
    weights = (totals.sum() - totals) / (totals.sum() * 2)
    for name in updates[0].up:  # numbers of samples play no part
        expected = sum(w * u.up[name].double().numpy() for w, u in zip(weights, updates, strict=True))
        np.testing.assert_allclose(found[name], expected, atol=1e-6)
    # Client 0: .4 and .9 are improvements, 5 is discarded. Client 1: .6 is one, 1.05 and 1.1 are retained.
    for client, losses in ((0, [0.4, 0.9, 5.0]), (1, [1.1, 0.6, 1.05])):
        old = {n: p.double().numpy() for n, p in state.items() if n.startswith("map.")}
        apart = [math.sqrt(sum(np.square(u.up[n].double().numpy() - p).sum() for n, p in old.items())) for u in updates]
        raw = [(1 - loss) / (d + 1e-5) for loss, d in zip(losses, apart, strict=True)]
        if client == 0:
            f = [raw[0], raw[1], 0]
        else:
            nearest = max(raw[0], raw[2])
            f = [raw[1] * nearest / raw[0], raw[1], raw[1] * nearest / raw[2]]
        for name, p in old.items():
            expected = p + sum(w / sum(f) * (u.up[name].double().numpy() - p) for w, u in zip(f, updates, strict=True))
            np.testing.assert_allclose(found[f"own.{client}.{name}"], expected, atol=1e-6)
    assert not any(name.startswith("own.2.") for name in found)


def test_who_takes_no_part_keeps_its_data_prompt() -> None:
    method = method_of()
    state = method.aggregate(toy_state(method), toy_updates(method, toy_state(method)))
    after = method.aggregate(state, toy_updates(method, state, (1,)))
    for name in ("map.0.weight", "map.1.bias"):
        assert torch.equal(after[f"own.0.{name}"], state[f"own.0.{name}"])
        assert not torch.equal(after[f"own.1.{name}"], state[f"own.1.{name}"])
    assert torch.equal(after["context"], toy_updates(method, state, (1,))[0].up["context"])  # K = 1


def test_clients_receive_the_global_task_prompt_and_their_own_data_prompt() -> None:
    method = method_of()
    state = method.aggregate(toy_state(method), toy_updates(method, toy_state(method)))
    for client in (0, 1):
        down = method.down(state, client)
        assert torch.equal(down["map.1.weight"], state[f"own.{client}.map.1.weight"])
        assert torch.equal(down["context"], state["context"])
        assert torch.equal(down["deep.1"], state["deep.1"])
    assert torch.equal(
        method.down(state, 2)["map.1.weight"], state["map.1.weight"]
    )  # no validation data: the global one
    common = method.common(state)
    assert all(torch.equal(common[name], state[name]) for name in method.tuning.init(MODEL, 0))
    assert method.personal
    assert method.serves


def test_without_any_validation_data_clients_weigh_the_same(tmp_path: Path) -> None:
    federation = tiny_federation(tmp_path, SIZES, 32)
    none = replace(federation, sites=tuple(replace(site, val=site.val[:0]) for site in federation.sites))
    method = method_of(privacy="sealed")
    said: list[Message] = []
    memory = Case(method, MODEL, none).run(rounds=1, tap=said.append)
    ups = [read_message(blob)[0] for note, blobs in said if note.get("clients") for blob in blobs if blob]
    assert memory.state is not None
    assert len(ups) == len(SIZES)
    torch.testing.assert_close(memory.state["context"], torch.stack([up["context"] for up in ups]).mean(0))


# ---- newcomers


@pytest.mark.parametrize("privacy", ["embeddings", "sealed"])
@pytest.mark.parametrize(("mode", "task", "data"), [("global", 1, 1), ("initglo", 1, 0), ("init", 0, 0)])
def test_what_newcomers_start_from(mode: Any, task: int, data: int, privacy: Any) -> None:
    """Served only, admitted, and trained once; client 7 was not there at the start."""
    method = method_of(newcomer=mode, privacy=privacy)
    init = method.tuning.init(MODEL, 0)
    began = toy_state(method)
    state = method.aggregate(began, toy_updates(method, began))
    key = {"key": torch.full((32,), 9, dtype=torch.uint8)} if privacy == "sealed" else {}
    admitted = method.admit(state, 7, {"x": torch.zeros(1, 17, 128), "y": torch.tensor([0]), **key}, 2)
    for served in (state, admitted):
        down = method.down(served, 7)
        for name, is_global in (("context", task), ("deep.1", task), ("map.0.weight", data), ("map.1.bias", data)):
            assert torch.equal(down[name], (state if is_global else init)[name]), name
    for old in range(3):
        assert torch.equal(method.down(admitted, old)["context"], state["context"])
    sets = [name for name in method.down(admitted, 0) if name.startswith("once.") and name.endswith(".x")]
    assert len(sets) == 3
    took_part = Update(7, down, {n: down[n] + 1 for n in init}, 1, {"total": torch.tensor(1.0, dtype=torch.float64)})
    after = method.aggregate(admitted, [took_part])
    assert torch.equal(method.down(after, 7)["context"], after["context"])
    assert any(name.startswith("init.") for name in after) is (mode != "global")


@pytest.mark.parametrize("mode", ["global", "initglo", "init"])
def test_newcomers_join_alike_in_every_mode(mode: Any, tmp_path: Path) -> None:
    found = []
    for privacy in ("embeddings", "sealed"):
        case = Case(method_of(newcomer=mode, privacy=privacy), MODEL, tiny_federation(tmp_path / privacy, SIZES, 32))
        memory = Memory()
        with case.clients() as (clients, _):
            plan = Plan(2, 1.0, case.seed, newcomers=(2,), join_round=2)
            run(case.method, case.model, case.init, clients, plan, memory)
        found.append(memory)
    one, other = (memory.lines for memory in found)
    assert [line["clients"] for line in one] == [[0, 1, 3, 4], [0, 1, 2, 3, 4]]
    for stage in ("aggregated", "newcomers_aggregated", "common", "newcomers_common"):
        assert [line[stage] for line in one] == [line[stage] for line in other]
    assert one[0]["newcomers_aggregated"]["clients"][0]["client"] == 2


# ---- modes: what they share, and what others see


@dataclass
class Recorded:
    """A run of two rounds, and every byte that went either way."""

    method: Dp2fl
    memory: Memory
    init: Params
    asked: list[Message] = field(default_factory=list)
    said: list[Message] = field(default_factory=list)
    private: dict[int, Params] = field(default_factory=dict)

    @property
    def state(self) -> State:
        assert self.memory.state is not None
        return self.memory.state

    def answers(self) -> dict[tuple[int, int], Params]:
        """(round, client) -> stats sent after training."""
        found = {}
        for (note, _), (reply, blobs) in zip(self.asked, self.said, strict=True):
            if note["ask"] == "train":
                for one, blob in zip(reply["clients"], blobs, strict=True):
                    found[note["round"], one["client"]] = read_message(blob)[1]
        return found


def record(case: Case, rounds: int = 2, fraction: float = 1.0) -> Recorded:
    assert isinstance(case.method, Dp2fl)
    made = Recorded(case.method, Memory(), case.init)
    with case.clients() as (_, host):

        def answer(note: dict[str, Any], blobs: list[bytes]) -> Message:
            reply = host(note, blobs)
            made.asked.append((note, blobs))
            made.said.append(reply)
            return reply

        clients = LocalClients(dict(enumerate(SIZES)), [answer])
        run(case.method, case.model, case.init, clients, Plan(rounds, fraction, case.seed), made.memory)
        made.private = {client: host.remembers(client, 99)[0] for client in range(len(SIZES))}
    return made


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Recorded]:
    folder = tmp_path_factory.mktemp("federation")
    return {
        mode: record(Case(method_of(privacy=mode, lr=0.1), MODEL, tiny_federation(folder / mode, SIZES, 32)))
        for mode in MODES
    }


def test_modes_give_the_same_bits(runs: dict[str, Recorded]) -> None:
    first = runs["embeddings"]
    for mode in ("open", "sealed"):
        for name in first.init:
            assert torch.equal(runs[mode].state[name], first.state[name]), (mode, name)
        for stage in ("aggregated", "after_local", "common"):
            assert [line[stage] for line in runs[mode].memory.lines] == [line[stage] for line in first.memory.lines]
    for client in HOLDERS:
        for name in (name for name in first.init if name.startswith("map.")):
            own = first.state[f"own.{client}.{name}"]
            assert torch.equal(runs["open"].state[f"own.{client}.{name}"], own)
            assert torch.equal(runs["sealed"].private[client][f"own.{name}"], own)
            assert not torch.equal(own, first.state[name])
    assert not any(name.startswith("own.") for name in runs["sealed"].state)


def test_modes_agree_under_partial_participation(tmp_path: Path) -> None:
    one, other = (
        record(Case(method_of(privacy=mode), MODEL, tiny_federation(tmp_path / mode, SIZES, 32)), 3, 0.4)
        for mode in ("embeddings", "sealed")
    )
    assert len({tuple(line["clients"]) for line in one.memory.lines}) > 1
    assert all(torch.equal(one.state[name], other.state[name]) for name in one.init)
    assert [line["aggregated"] for line in one.memory.lines] == [line["aggregated"] for line in other.memory.lines]


def test_a_client_without_validation_data_has_no_data_prompt_of_its_own(runs: dict[str, Recorded]) -> None:
    for mode, made in runs.items():
        assert not any(name.startswith((f"val.{BLIND}.", f"own.{BLIND}.")) for name in made.state), mode
        down = made.method.down(made.state, BLIND)
        assert torch.equal(down["map.0.weight"], made.state["map.0.weight"])
        assert set(made.private[BLIND]) == ({"secret"} if mode == "sealed" else set())
        assert not made.memory.lines[-1]["left_out"]


def test_reported_losses_are_those_of_the_trained_and_of_the_received_model(
    runs: dict[str, Recorded], tmp_path: Path
) -> None:
    """Round 1 begins with the initial model; losses again from the images, with the tuning's own logits."""
    made = runs["embeddings"]
    federation = tiny_federation(tmp_path, SIZES, 32)
    case = Case(made.method, MODEL, federation)
    with case.clients() as (_, host):
        held = {j: host.samples(federation.sites[j].val) for j in HOLDERS}
    ups = {}
    for (note, _), (reply, blobs) in zip(made.asked, made.said, strict=True):
        if note["ask"] == "train" and note["round"] == 1:
            ups |= {one["client"]: read_message(blob)[0] for one, blob in zip(reply["clients"], blobs, strict=True)}

    def loss(params: Params, j: int) -> float:
        batch = batch_of(held[j].images(slice(None)), held[j].y)
        return float(F.cross_entropy(made.method.tuning.logits(MODEL, params, batch, CTX), batch.y))

    for client in range(len(SIZES)):
        stats = made.answers()[1, client]
        expected = {f"loss.{j}": loss(ups[client], j) for j in HOLDERS}
        for name, value in expected.items():
            assert float(stats[name]) == pytest.approx(value, rel=1e-5)
        assert float(stats["total"]) == pytest.approx(sum(expected.values()), rel=1e-5)
        if client == BLIND:
            assert "before" not in stats
        else:
            assert float(stats["before"]) == pytest.approx(loss(made.init, client), rel=1e-5)


def sent_to_clients(made: Recorded, ask: str) -> list[tuple[dict[str, Any], list[Params]]]:
    return [(note, [unpack(blob)[0] for blob in blobs]) for note, blobs in made.asked if note["ask"] == ask]


def test_sealed_messages_to_clients_name_no_owner(runs: dict[str, Recorded]) -> None:
    made = runs["sealed"]
    keys = {made.state[f"val.{j}.key"].numpy().tobytes().hex() for j in HOLDERS}
    trained = sent_to_clients(made, "train")
    assert trained
    for note, blobs in trained:
        assert set(note) == {"ask", "round", "score", "clients", "blob", "once", "new"}
        for once in note["once"]:  # names of what travels once: keys, in the order of keys
            assert list(once) == [f"set.{key}.{part}" for key in sorted(keys) for part in "xy"]
        for params in blobs:
            names = {name for name in params if not name.startswith("set.")}
            assert names in (set(), set(made.init))
            assert {name.split(".")[1] for name in params if name.startswith("set.")} <= keys
    settled = sent_to_clients(made, "settle")
    assert len(settled) == 2 * len(HOLDERS)
    maps = {name for name in made.init if name.startswith("map.")}
    expected = {f"{i}.{name}" for i in range(len(SIZES)) for name in (*maps, "sealed")}
    for _, (params,) in settled:
        assert set(params) == expected
    evaluated = [set(params) for _, blobs in sent_to_clients(made, "evaluate") for params in blobs]
    assert all(names in (set(made.init), {*made.init, "common"}) for names in evaluated)


def test_sealed_messages_do_not_change_when_clients_change_numbers() -> None:
    """Neither names nor order nor values depend on who is which client."""
    method = method_of(privacy="sealed")
    renumbered = {0: 2, 1: 0, 2: 1}
    hellos = {
        j: {
            "x": torch.full((1, 17, 128), float(j)),
            "y": torch.tensor([j]),
            "key": torch.full((32,), [7, 250, 90][j], dtype=torch.uint8),
        }
        for j in range(3)
    }
    init = method.tuning.init(MODEL, 0)
    ups = {j: {n: p + j + 1 for n, p in init.items()} for j in range(3)}
    stats = {
        i: {f"sealed.{bytes([k] * 32).hex()}": torch.full((56,), 10 * i + at) for at, k in enumerate((7, 250, 90))}
        for i in range(3)
    }
    payloads = []
    for number in ({0: 0, 1: 1, 2: 2}, renumbered):
        state = method.begin(MODEL, init, 0)
        for j in sorted(number, key=lambda j: number[j]):
            state = method.admit(state, number[j], hellos[j], 0)
        updates = sorted((Update(number[j], {}, ups[j], 1, stats[j]) for j in range(3)), key=lambda u: u.client)
        second = method.exchange(state, updates)
        payloads.append([(method.down(state, number[j]), second[number[j]]) for j in range(3)])
    for one, other in zip(*payloads, strict=True):
        for a, b in zip(one, other, strict=True):
            assert list(a) == list(b)
            assert all(torch.equal(a[name], b[name]) for name in a)
    # The order is that of keys and digests, not that of clients: sets 0, 2, 1 by their keys.
    sets = [float(p[0, 0, 0]) for name, p in payloads[0][0][0].items() if name.startswith("once.") and name[-1] == "x"]
    assert sets == [0, 2, 1]


def individual(runs: dict[str, Recorded]) -> dict[tuple[int, int, int], float]:
    """(round, evaluator, owner) -> loss, as told in the open; the sealed run has the same ones to the last bit."""
    return {
        (round, client, j): float(stats[f"loss.{j}"])
        for (round, client), stats in runs["embeddings"].answers().items()
        for j in HOLDERS
    }


def test_single_losses_leave_evaluators_only_sealed(runs: dict[str, Recorded]) -> None:
    losses = individual(runs)
    assert len(losses) == 2 * len(SIZES) * len(HOLDERS)
    open_bytes = [blob for _, blobs in runs["embeddings"].said for blob in blobs]
    assert all(any(struct.pack("<d", loss) in blob for blob in open_bytes) for loss in losses.values())  # it would show
    made = runs["sealed"]
    trained = [
        blob
        for (note, _), (_, blobs) in zip(made.asked, made.said, strict=True)
        if note["ask"] == "train"
        for blob in blobs
    ]
    settled = [blob for note, blobs in made.asked if note["ask"] == "settle" for blob in blobs]
    assert trained
    assert settled
    for loss in losses.values():
        for blob in trained + settled:
            assert struct.pack("<d", loss) not in blob
            assert struct.pack("<f", loss) not in blob
    for stats in made.answers().values():
        assert "total" in stats
        assert all(name == "total" or name.startswith("sealed.") for name in stats)
        assert all(p.dtype == torch.uint8 and p.shape == (56,) for n, p in stats.items() if n != "total")


def test_scores_tell_no_validation_loss(runs: dict[str, Recorded]) -> None:
    """Notes of a scored run have hits and misses on validation data, and no loss."""
    scores = [
        one["after_local"]["val"]
        for (note, _), (reply, _) in zip(runs["sealed"].asked, runs["sealed"].said, strict=True)
        if note["ask"] == "train"
        for one in reply["clients"]
    ]
    assert scores
    assert all(set(score) == {"n", "tp", "fp", "fn"} for score in scores)


def test_only_the_owner_opens_a_sealed_loss(runs: dict[str, Recorded]) -> None:
    made = runs["sealed"]
    secrets = {j: PrivateKey(made.private[j]["secret"].numpy().tobytes()) for j in range(len(SIZES))}
    for (round, client, j), loss in individual(runs).items():
        sealed = made.answers()[round, client][f"sealed.{secrets[j].public_key.encode().hex()}"].numpy().tobytes()
        assert struct.unpack("<d", SealedBox(secrets[j]).decrypt(sealed)) == (loss,)
        with pytest.raises(Exception, match="decrypt"):
            SealedBox(secrets[(j + 1) % len(SIZES)]).decrypt(sealed)


def test_private_keys_never_travel(runs: dict[str, Recorded]) -> None:
    made = runs["sealed"]
    messages = [blob for _, blobs in made.asked + made.said for blob in blobs]
    notes = repr([note for note, _ in made.asked + made.said])
    for client in range(len(SIZES)):
        secret = made.private[client]["secret"].numpy().tobytes()
        assert len(secret) == 32
        assert not any(secret in blob for blob in messages)
        assert secret.hex() not in notes
    assert any(made.state["val.0.key"].numpy().tobytes() in blob for blob in messages)  # the public one does
    assert len({made.private[c]["secret"].numpy().tobytes() for c in range(len(SIZES))}) == len(SIZES)


def test_the_server_keeps_no_ciphertext_and_clients_no_traces_of_a_round(runs: dict[str, Recorded]) -> None:
    made = runs["sealed"]
    assert {n.split(".")[-1] for n, p in made.state.items() if p.dtype == torch.uint8} == {"key"}
    for client in HOLDERS:
        assert {name.split(".")[0] for name in made.private[client]} == {"secret", "own"}


def test_sets_travel_once(runs: dict[str, Recorded]) -> None:
    for made in runs.values():
        first, second = (line["bytes"]["down"] for line in made.memory.lines)
        size = sum(p.numel() * p.element_size() for n, p in made.state.items() if n.startswith("val."))
        assert first - second >= (len(SIZES) - 1) * size


def test_a_box_that_does_not_open_is_discarded() -> None:
    method = method_of(privacy="sealed")
    secret = method.secrets()
    key = PrivateKey(secret["secret"].numpy().tobytes()).public_key
    maps = {n: p for n, p in method.tuning.init(MODEL, 0).items() if n.startswith("map.")}

    def settled(second: bytes) -> Params:
        boxes = [SealedBox(key).encrypt(struct.pack("<d", 0.5)), second]
        received = {f"{i}.sealed": torch.frombuffer(bytearray(box), dtype=torch.uint8) for i, box in enumerate(boxes)}
        received |= {f"{i}.{n}": p + i + 1 for i in range(2) for n, p in maps.items()}
        loss = torch.frombuffer(bytearray(struct.pack("<d", 1.0)), dtype=torch.uint8)
        before = {f"before.{n}": p for n, p in maps.items()}
        return method.settle(received, {**secret, **before, "before.loss": loss})

    for broken in (bytes(56), b"short", SealedBox(key).encrypt(b"no number")):
        own = settled(broken)
        assert own.keys() == {"secret", *(f"own.{n}" for n in maps)}
        torch.testing.assert_close(own["own.map.0.weight"], maps["map.0.weight"] + 1)
    both = settled(SealedBox(key).encrypt(struct.pack("<d", 0.5)))
    assert not torch.allclose(both["own.map.0.weight"], maps["map.0.weight"] + 1)


def test_a_client_that_has_lost_its_key_goes_on_from_the_global_prompt() -> None:
    method = method_of(privacy="sealed")
    params = method.tuning.init(MODEL, 0)
    down = method.down(toy_state(method), 0)
    once = {name.removeprefix("once."): p for name, p in down.items() if name.startswith("once.")}
    ctx = replace(CTX, down=down, once=once)
    assert method.keep(MODEL, params, ctx) == {}
    assert method.settle({"0.sealed": torch.zeros(56, dtype=torch.uint8)}, {}) == {}


def test_the_common_model_is_not_the_clients_own() -> None:
    method = method_of(privacy="sealed")
    init = method.tuning.init(MODEL, 0)
    private = {f"own.{n}": p + 1 for n, p in init.items() if n.startswith("map.")}
    state = method.begin(MODEL, init, 0)
    own = method.start(init, method.down(state, 0), private, {})
    common = method.start(init, method.common(state), private, {})
    assert torch.equal(own["map.0.weight"], init["map.0.weight"] + 1)
    assert torch.equal(own["context"], init["context"])
    assert all(torch.equal(common[name], p) for name, p in init.items())


# ---- what embeddings do not hide


def square() -> CLIP:
    """As many numbers in a patch as in its embedding, as in ViT-B/16 (3 x 16 x 16 = 768)."""
    return clip(
        (3, 16, 16),
        3,
        patch=4,
        width=48,
        depth=1,
        heads=4,
        text_width=16,
        text_depth=1,
        text_heads=2,
        vocabulary=8,
        context_length=8,
        embedding=8,
    )


def test_a_patch_embedding_can_be_turned_back_into_the_image() -> None:
    """Everybody has the frozen weights: subtract positions, solve a linear system for each patch."""
    model, x = square(), images(2, side=16)
    hello = method_of().enroll(model, {}, Holdings(lambda: iter(()), lambda: iter([batch_of(x)]), torch.ones(4), {}))
    w = {name: p.double() for name, p in model.weights.items()}
    patches = (hello["x"].double() - w["body.image.position"])[:, 1:]  # (2, 16, 48), without cls
    pixels = torch.linalg.lstsq(w["body.image.patch.weight"].flatten(1), patches.flatten(0, 1).T).solution  # (48, 32)
    columns = pixels.T.reshape(2, 16, 48).transpose(1, 2)
    found = F.fold(columns, (16, 16), 4, stride=4)
    assert float((found - x.double()).abs().max()) < 1e-3


def test_embeddings_are_larger_than_images() -> None:
    """At 224 pixels and ViT-B/16: 605 KB of float32 against 150 KB of raw bytes."""
    patches, width = (224 // 16) ** 2, 768
    assert (1 + patches) * width * 4 == 605_184
    assert 3 * 224 * 224 == 150_528
    model = square()
    hello = method_of().enroll(
        model, {}, Holdings(lambda: iter(()), lambda: iter([batch_of(images(2, side=16))]), torch.ones(4), {})
    )
    assert hello["x"].shape == (2, 1 + 16, 48)
    assert hello["x"].numel() * hello["x"].element_size() == 2 * (1 + 16) * 48 * 4


# ---- the conformance suite


@pytest.mark.parametrize("given", [{"privacy": "embeddings"}, {"privacy": "sealed", "newcomer": "initglo"}], ids=str)
def test_conformance(given: dict[str, Any]) -> None:
    check_method("promptfed.methods.dp2fl:Dp2fl", backbone="clip-mini", size=32, depth=2, epochs=1, **given)
