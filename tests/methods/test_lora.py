"""Tunings inside the layers of a frozen backbone: low-rank updates, biases and adapters."""

from typing import Any

import numpy as np
import pytest
import torch

import promptfed
from promptfed import models, params
from promptfed.errors import UserError
from promptfed.methods import create
from promptfed.models.cnn import cnn
from promptfed.models.transformer import complete
from promptfed.models.vit import vit
from promptfed.phases import Batch, Context
from promptfed.testing import check_method
from promptfed.tunings.adapter import Adapter
from promptfed.tunings.bias import Bias
from promptfed.tunings.lora import Lora
from tiny import near

NOBODY = torch.zeros((), dtype=torch.int64)
CTX = Context({}, {}, None, NOBODY, NOBODY.expand(3))
WIDTH, DEPTH = 16, 2
VIT = vit((1, 8, 8), 3, 0, width=WIDTH, depth=DEPTH, heads=2)
X = torch.randn(5, 1, 8, 8, generator=torch.Generator().manual_seed(0))
TUNINGS = (Lora(rank=2), Bias(), Adapter(bottleneck=3))


def batch(x: torch.Tensor) -> Batch:
    return Batch(x, torch.zeros(len(x), dtype=torch.int64), None, torch.zeros(2), {})


def clip() -> models.CLIP:
    made = models.build("clip-mini", (3, 32, 32), 3, 0, ("circle", "square", "star"))
    assert isinstance(made, models.CLIP)
    return made


@pytest.mark.parametrize("projections", [("q", "k", "v"), ("v", "q"), ("k",)])
def test_lora_adds_a_scaled_product_to_each_projection(projections: Any) -> None:
    """The same as a model whose weights are changed entry by entry."""
    tuning = Lora(rank=2, alpha=6, projections=projections, standardise=False)
    values = near(tuning.init(VIT, 3), 1)
    changed = {name: p.double().numpy().copy() for name, p in VIT.weights.items()}
    for layer in range(DEPTH):
        for part in projections:
            at, first = f"body.blocks.{layer}", "qkv".index(part) * WIDTH
            a, b = (values[f"lora.{m}.{at}.{part}"].double().numpy() for m in "ab")
            for i in range(WIDTH):
                for j in range(WIDTH):
                    changed[f"{at}.qkv.weight"][first + i, j] += 6 / 2 * sum(b[i, r] * a[r, j] for r in range(2))
    weights = {name: torch.from_numpy(p).float() for name, p in changed.items()} | {
        name: values[name] for name in ("head.weight", "head.bias")
    }
    expected = VIT.classify(weights, VIT.features(weights, X))
    np.testing.assert_allclose(tuning.logits(VIT, values, batch(X), CTX), expected, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(expected, VIT.classify(weights, VIT.features(VIT.weights, X)), atol=1e-2)


def test_an_adapter_adds_a_bottleneck_after_attention_and_after_the_mlp() -> None:
    """The second half of a layer, written out."""
    at = "body.blocks.1"
    tuning = Adapter(bottleneck=3)
    w = {name: p.double() for name, p in {**VIT.weights, **near(tuning.init(VIT, 3), 1)}.items()}
    g = torch.Generator().manual_seed(2)
    h, mixed = torch.randn(2, 5, WIDTH, generator=g).double(), torch.randn(2, 2, 5, 8, generator=g).double()

    def gelu(x: torch.Tensor) -> torch.Tensor:
        return x * (1 + torch.erf(x / 2**0.5)) / 2

    def layer(name: str, x: torch.Tensor) -> torch.Tensor:
        return x @ w[f"{at}.{name}.weight"].T + w[f"{at}.{name}.bias"]

    def adapted(name: str, x: torch.Tensor) -> torch.Tensor:
        return x + layer(f"{name}.out", gelu(layer(f"{name}.in", x)))

    one = h + adapted("adapter1", layer("proj", mixed.transpose(1, 2).reshape(2, 5, WIDTH)))
    centred = one - one.mean(-1, keepdim=True)
    normal = centred / (centred.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    normal = normal * w[f"{at}.norm2.weight"] + w[f"{at}.norm2.bias"]
    expected = one + adapted("adapter2", layer("mlp.out", gelu(layer("mlp.in", normal))))
    torch.testing.assert_close(complete(w, at, h, mixed, 1e-6, "gelu"), expected)
    frozen = {name: p.double() for name, p in VIT.weights.items()}
    assert not torch.allclose(complete(frozen, at, h, mixed, 1e-6, "gelu"), expected, atol=1e-2)


@pytest.mark.parametrize("tuning", TUNINGS, ids=lambda t: type(t).__name__)
def test_training_begins_at_the_frozen_model(tuning: Any) -> None:
    values = tuning.init(VIT, 3)
    expected = VIT.classify(VIT.weights, VIT.features(VIT.weights, X))
    torch.testing.assert_close(tuning.logits(VIT, values, batch(X), CTX), expected)
    assert {tuning.role(name) for name in values} == {"body", "head", "given"}


@pytest.mark.parametrize(
    ("tuning", "layer"),
    [
        (Lora(rank=2), 3 * 2 * 2 * WIDTH),
        (Lora(rank=2, projections=("q", "v")), 2 * 2 * 2 * WIDTH),
        (Bias(), (2 + 3 + 1 + 2 + 1) * WIDTH),  # two norms, qkv, proj, the MLP's hidden layer and its output
        (Adapter(bottleneck=3), 2 * (2 * 3 * WIDTH + 3 + WIDTH)),
    ],
)
def test_numbers_of_parameters(tuning: Any, layer: int) -> None:
    outside = 2 * WIDTH if isinstance(tuning, Bias) else 0  # patch embedding and last norm
    head = 3 * WIDTH + 3
    made = {name: p for name, p in tuning.init(VIT, 0).items() if tuning.role(name) != "given"}
    assert params.numel(made) == DEPTH * layer + outside + head


def test_towers_of_a_clip() -> None:
    model = clip()
    for tower in ("image", "text"):
        for tuning in (Lora(tower=tower), Bias(tower=tower), Adapter(tower=tower)):
            assert all(f"body.{tower}." in name for name in tuning.init(model, 0))
    both = Lora(rank=2).init(model, 0)
    assert (
        both.keys()
        == {**Lora(rank=2, tower="image").init(model, 0), **Lora(rank=2, tower="text").init(model, 0)}.keys()
    )


def test_a_tuned_text_tower_changes_the_text_features_alone() -> None:
    """Image features stay, and are cached."""
    model, tuning = clip(), Lora(rank=2, tower="text")
    x = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    values = near(tuning.init(model, 0), 1, 0.3)
    image = model.features(model.weights, x)
    assert tuning.frozen_name(model) == "features"
    assert torch.equal(tuning.features(model, values, batch(x), CTX), image)
    weights = tuning.weights(model, values, "text")
    expected = model.logits(model.weights, image, model.text(weights, model.sentences(model.template)))
    assert torch.equal(tuning.logits(model, values, batch(x), CTX), expected)
    assert not torch.allclose(expected, model.classify(model.weights, image), atol=1e-2)
    assert Lora(tower="image").frozen_name(model) == ""


@pytest.mark.parametrize(
    ("tuning", "model", "message"),
    [
        (Lora(), cnn((3, 16, 16), 3, 0), r'^backbone\.name = "cnn" has no transformer layers to tune: '),
        (Adapter(), cnn((3, 16, 16), 3, 0), r'^backbone\.name = "cnn" has no transformer layers to tune: '),
        (Lora(tower="text"), VIT, r'^method\.tower = "text": backbone "vit-tiny" has none \(allowed: all, image\)$'),
    ],
    ids=["lora", "adapter", "tower"],
)
def test_a_backbone_without_such_layers_is_refused(tuning: Any, model: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        tuning.check(model)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("fedavg+lora", {"rank": 2, "tower": "text"}),  # without a head: text features classify
        pytest.param("fedavg+lora", {"rank": 2}, marks=pytest.mark.slow),
        pytest.param("fedprox+bias", {}, marks=pytest.mark.slow),
        pytest.param("fedavg+adapter", {"bottleneck": 2}, marks=pytest.mark.slow),
    ],
)
def test_towers_conform(name: str, settings: dict[str, Any]) -> None:
    check_method(name, backbone="clip-mini", epochs=1, batch_size=16, **settings)


def test_a_head_of_ones_own_needs_a_backbone_with_a_head() -> None:
    method, model = create("fedper+lora"), clip()
    with pytest.raises(UserError, match='needs a "head", and backbone "clip-mini" has none'):
        method.check(model, method.tuning.init(model, 0))


@pytest.mark.parametrize("name", ["scaffold+lora", "fedper+bias", "ditto+adapter+pt"])
def test_under_other_methods(name: str, tmp_path: Any) -> None:
    result = promptfed.run(
        method={"name": name, "epochs": 1},
        dataset={"name": "shapes", "limit": 48},
        partition={"name": "iid", "clients": 2},
        backbone="vit-mini",
        rounds=1,
        engine={"workers": 1},
        out=tmp_path / "run",
    )
    assert not result.numbers["left_out"]
    assert 0 <= result.metrics["local"]["mean"] <= 1
