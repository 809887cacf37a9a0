"""The conformance suite over every method and composition, and runs of compositions on the embedded models."""

import pytest

import promptfed
from fitting import SMALL, check_result, embedded, where
from promptfed.methods import METHODS
from promptfed.testing import check_method

FEW = {
    "fedem": {"components": 4, "batch_size": 8},
    "fedmix": {"mean_size": 4},
    "pfedme": {"inner_steps": 2, "personal_steps": 2},
    **SMALL,
}
COMPOSITIONS = ("fedprox+pt", "moon+pt", "fedper+pt", "fedrep+pt", "fedavg+ft", "fedprox+ft", "moon+ft", "pfedpt+ft")
VARIANTS = (
    ("pfedpt", {"prompt": "fixed-patch"}),
    ("pfedpt", {"prompt": "random-patch"}),
    ("pfedpt", {"joint": True}),
    ("perfedavg", {"order": "second"}),
    ("fedavg+bias", {"epochs": 1, "standardise": False}),  # as features of fresh weights are, training is steady
    ("fedavg", {"momentum": 0.9, "weight_decay": 0.01}),
)


# FedPR's own tests check it on a convolutional network and on prompts.
NAMES = [
    *(name for name in METHODS if name != "fedpr"),
    *("pfedpt", "head-tune", "promptfl", "cocoop", "fedclip", "plot", "fedtpg"),
    "fedit",
    *COMPOSITIONS,
]


@pytest.mark.parametrize("name", NAMES)
def test_method(name):
    """With one epoch, for time: it has several steps. Variants below have two."""
    check_method(name, **where(name), **{"epochs": 1, **FEW.get(name, {})})


@pytest.mark.parametrize(("name", "settings"), VARIANTS, ids=lambda v: str(v))
def test_variant(name, settings):
    check_method(name, **settings)


@pytest.mark.parametrize("name", ["pfedpt-tokens", "fedvpt", "fedper+vpt-d"])
def test_transformer(name):
    check_method(name, backbone="vit-tiny", epochs=1)


@pytest.mark.parametrize(
    "name", ["fedvpt", *(pytest.param(f"fedavg+vpt+{p}", marks=pytest.mark.slow) for p in ("pt", "st"))]
)
def test_transformer_with_prompts_in_its_last_layers(name):
    check_method(name, backbone="vit-tiny", layers=(6, 7), mode="stay", tokens=2, epochs=1)


def test_a_method_that_a_run_would_refuse_does_not_conform(tmp_path, monkeypatch):
    code = "from promptfed import Method\nclass Mine(Method):\n    def aggregate(self, state, updates): pass\n"
    (tmp_path / "forgetful.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(AssertionError, match=r"^Mine\.aggregate\(\) must return a dict of tensors, not NoneType$"):
        check_method("forgetful:Mine")


@pytest.mark.parametrize(("name", "settings"), [("promptfl", {"context": 2}), ("fedvpt", {"tokens": 2})])
def test_check_method_chooses_a_backbone_that_fits(name, settings):
    check_method(name, **settings, epochs=1)


ON_FROZEN = [
    *(
        "scaffold+vpt",
        "feddyn+vpt",
        "fedadam+vpt",
        "ditto+vpt",
        "apfl+head",
        "fedala+vpt",
        "fedamp+vpt",
        "fedproto+vpt",
    ),
    *("fedmix+vpt", "fedem+vpt", "fedrod+vpt", "pfedme+vpt", "perfedavg+vpt", "fedrep+vpt", "fedbabu+vpt", "local+vpt"),
    *("local+head", "fedprox+promptfl", "pfedme+promptfl", "local+promptfl", "pfedme+maple", "local+maple"),
]


@pytest.mark.parametrize("name", ON_FROZEN)
def test_a_run_on_frozen_weights(name, tmp_path):
    """Registered methods are run in test_golden.py."""
    result = promptfed.run(
        method={"name": name, "epochs": 1, **({"depth": 2} if name.endswith("+maple") else {})},
        dataset={"name": "shapes", "limit": 96},
        partition={"name": "iid", "clients": 2},
        backbone=embedded(name),
        rounds=1,
        engine={"workers": 1},
        out=tmp_path / "run",
    )
    check_result(result)
