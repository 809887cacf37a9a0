"""FedBN: which parameters stay with the client, and models without any."""

import pytest

from promptfed import models
from promptfed.errors import UserError
from promptfed.methods import create
from promptfed.models.vit import vit

MODEL = vit((1, 8, 8), 3, 0, width=8, depth=1, heads=2)


def test_layer_norms_stay() -> None:
    method = create("fedbn")
    init = method.tuning.init(MODEL, 0)
    norms = {
        f"body.{layer}.{part}" for layer in ("blocks.0.norm1", "blocks.0.norm2", "norm") for part in ("weight", "bias")
    }
    assert method.kept(init).keys() == norms
    assert method.shared(init).keys() == MODEL.weights.keys() - norms
    assert method.personal


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("body.image.stem.0.scale", "norm"),  # of CLIP's ResNet: batch norms, as affine maps
        ("body.image.stem.0.shift", "norm"),
        ("body.image.stem.0.conv", "body"),
        ("body.blocks.3.scale1", "body"),  # DINOv2's LayerScale normalises nothing
        ("body.norm_pre.bias", "norm"),
        ("body.scale", "body"),  # a CLIP's temperature
        ("head.weight", "head"),
    ],
)
def test_what_is_a_norm(name: str, role: str) -> None:
    assert create("fedbn").tuning.role(name) == role


def test_a_backbone_without_norms_is_refused() -> None:
    method, cnn = create("fedbn"), models.build("cnn", (3, 16, 16), 4, 0)
    with pytest.raises(UserError, match=r'^method\.name: FedBn needs a "norm", and backbone "cnn" has none$'):
        method.check(cnn, method.tuning.init(cnn, 0))
