"""The conformance suite over every method and composition, and a run of each on the embedded models."""

import pytest

import promptfed
from fitting import SMALL, embedded, where
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


@pytest.mark.parametrize("name", [*METHODS, "pfedpt", "head-tune", "promptfl", *COMPOSITIONS])
def test_method(name):
    check_method(name, **where(name), **SMALL.get(name, {}))


@pytest.mark.parametrize(("name", "settings"), VARIANTS, ids=lambda v: str(v))
def test_variant(name, settings):
    check_method(name, **settings)


@pytest.mark.parametrize("name", ["pfedpt-tokens", "fedvpt", "fedper+vpt-d"])
def test_transformer(name):
    check_method(name, backbone="vit-tiny")


@pytest.mark.parametrize("name", ["fedvpt", "fedavg+vpt+pt", "fedavg+vpt+st"])
def test_transformer_with_prompts_in_its_last_layers(name):
    check_method(name, backbone="vit-tiny", layers=(6, 7), mode="stay", tokens=2)


def test_what_is_refused_in_a_run_does_not_hold(tmp_path, monkeypatch):
    code = "from promptfed import Method\nclass Mine(Method):\n    def aggregate(self, state, updates): pass\n"
    (tmp_path / "forgetful.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(AssertionError, match=r"^Mine\.aggregate\(\) must return a dict of tensors, not NoneType$"):
        check_method("forgetful:Mine")


# FedPR is about prompts: on all weights there is nothing to project.
EVERYTHING = [name for name in (*METHODS, *ALIASES) if name != "fedpr"]
ON_FROZEN = [
    *("fedpr+vpt", "fedmix+vpt", "fedem+vpt", "fedrod+vpt", "pfedme+vpt", "perfedavg+vpt", "fedrep+vpt", "fedbabu+vpt"),
    *("local+vpt", "local+head", "fedprox+promptfl", "pfedme+promptfl", "local+promptfl"),
    *("fedprox+maple", "pfedme+maple", "local+maple"),
]


@pytest.mark.parametrize("name", [*EVERYTHING, *ON_FROZEN])
def test_a_full_run_on_the_embedded_model(name, tmp_path):
    plug = name.rpartition("+")[2]
    settings = {"epochs": 1, **SMALL.get(name, {}), **({"depth": 2} if plug == "maple" else {})}
    if name.startswith("fedmtl"):
        settings["iterations"] = 16
    result = promptfed.run(
        method={"name": name, **settings},
        dataset={"name": "shapes", "limit": 96},
        partition={"name": "iid", "clients": 2},
        backbone=embedded(name),
        rounds=1,
        engine={"workers": 1},
        out=tmp_path / "run",
    )
    assert 0 <= result.metrics["local"]["mean"] <= 1
    assert result.metrics["global"] is not None
    assert not result.numbers["left_out"]
    trained = name not in ("zero-shot",)
    assert (result.numbers["passes"]["train"] > 0) is trained
