"""The conformance suite over every method and composition."""

import pytest

from promptfed.methods import ALIASES, METHODS
from promptfed.testing import check_method

COMPOSITIONS = ("fedprox+pt", "moon+pt", "fedper+pt", "fedrep+pt", "fedavg+ft", "fedprox+ft", "moon+ft", "pfedpt+ft")
VARIANTS = (
    ("pfedpt", {"prompt": "fixed-patch"}),
    ("pfedpt", {"prompt": "random-patch"}),
    ("pfedpt", {"joint": True}),
    ("perfedavg", {"order": "second"}),
    ("fedavg", {"momentum": 0.9, "weight_decay": 0.01}),
)


@pytest.mark.parametrize("name", [name for name in (*METHODS, *ALIASES, *COMPOSITIONS) if "tokens" not in name])
def test_method(name):
    check_method(name)


@pytest.mark.parametrize(("name", "settings"), VARIANTS, ids=lambda v: str(v))
def test_variant(name, settings):
    check_method(name, **settings)


@pytest.mark.parametrize("name", ["pfedpt-tokens", "fedper"])
def test_transformer(name):
    check_method(name, backbone="vit-tiny")
