"""The conformance suite over every method and composition."""

import pytest

from promptfed.methods import METHODS
from promptfed.testing import check_method

COMPOSITIONS = ("fedprox+pt", "moon+pt", "fedper+pt", "fedrep+pt", "fedavg+ft", "fedprox+ft", "moon+ft", "pfedpt+ft")
VARIANTS = (
    ("pfedpt", {"prompt": "fixed-patch"}),
    ("pfedpt", {"prompt": "random-patch"}),
    ("pfedpt", {"joint": True}),
    ("perfedavg", {"order": "second"}),
    ("fedavg", {"momentum": 0.9, "weight_decay": 0.01}),
)


@pytest.mark.parametrize("name", [*METHODS, "pfedpt", "head-tune", *COMPOSITIONS])
def test_method(name):
    check_method(name)


@pytest.mark.parametrize(("name", "settings"), VARIANTS, ids=lambda v: str(v))
def test_variant(name, settings):
    check_method(name, **settings)


@pytest.mark.parametrize("name", ["pfedpt-tokens", "fedvpt", "fedper+vpt-d"])
def test_transformer(name):
    check_method(name, backbone="vit-tiny")


@pytest.mark.parametrize("name", ["fedvpt", "fedavg+vpt+pt", "fedavg+vpt+st"])
def test_transformer_with_prompts_in_its_last_layers(name):
    check_method(name, backbone="vit-tiny", layers=(6, 7), mode="stay", tokens=2)


def test_frozen_clip():
    check_method("promptfl", backbone="clip-mini", size=32, context=3)
