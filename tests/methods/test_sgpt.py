"""SGPT's parameters and defaults, mistakes in its settings, whole runs, and the conformance suite."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sgpt_toy import CLASSES, DEPTH, GROUP, HEAD, LENGTH, MODEL, NAME, SHARED, SMALL, WIDTH, G, W, small

import promptfed
from promptfed.errors import UserError
from promptfed.methods import create
from promptfed.methods.sgpt import Sgpt
from promptfed.methods.sgpt.features import SharedGroup
from promptfed.methods.sgpt.keys import orthogonal
from promptfed.models import ViT
from promptfed.params import numel
from promptfed.testing import check_method
from tiny import linear

# ---- what there is


def test_parameters_have_the_papers_shapes_and_roles() -> None:
    method = small()
    shapes = {name: tuple(p.shape) for name, p in method.tuning.init(MODEL, 0).items()}
    assert shapes == {
        **dict.fromkeys(SHARED, (LENGTH, WIDTH)),
        **dict.fromkeys(GROUP, (G, LENGTH, WIDTH)),
        "keys": (G, WIDTH),
        "head.weight": (CLASSES, WIDTH),
        "head.bias": (CLASSES,),
    }
    roles = {method.tuning.role(name) for name in shapes}
    assert roles == set(method.tuning.role_names()) == {"body", "group", "keys", "head"}
    assert not method.personal
    assert method.serves


def test_as_many_parameters_as_the_paper_says() -> None:
    """Table 5 has 0.1 M: 3 shared prompts, 3 x 20 group prompts and 20 keys of 768 numbers each, a head of 100 classes.
    Only what init() looks at of a ViT-B/16."""
    weights = {
        "body.cls": torch.zeros(1, 1, 768),
        "head.weight": torch.zeros(100, 768),
        "head.bias": torch.zeros(100),
    }
    model = ViT("vit-b-16", (3, 224, 224), 100, weights, 768, patch=16, depth=12, heads=12)
    method = create(NAME, {"standardise": False})
    method.tuning.check(model)
    params = method.tuning.init(model, 0)
    assert numel(params) == 3 * 768 + 3 * 20 * 768 + 20 * 768 + 100 * 769 == 140_644
    assert set(params) == {*(f"shared.{i}" for i in (0, 1, 2)), *(f"group.{i}" for i in (3, 4, 5)), "keys", *HEAD}


def test_the_papers_settings_are_the_defaults() -> None:
    method = create(NAME)
    assert isinstance(method, Sgpt)
    assert (method.lr, method.momentum, method.weight_decay) == (0.01, 0.9, 1e-5)
    assert (method.batch_size, method.epochs) == (40, 5)
    assert (method.key_momentum, method.prompt_momentum, method.rare, method.floor) == (0.5, 0.5, 50, 5e-4)
    assert Sgpt() == method


def test_initial_values() -> None:
    bound = np.sqrt(6 / (3 * 4**2 + WIDTH))
    uniform, code = (SharedGroup(**SMALL, initial=kind).init(MODEL, 3) for kind in ("uniform", "code"))
    for name in (*SHARED, *GROUP):
        assert 0.5 * bound < float(uniform[name].abs().max()) <= bound
    for name in SHARED:
        assert not code[name].any()
    for name in (*GROUP, "keys"):
        assert torch.equal(uniform[name], code[name])
    torch.manual_seed(0)
    again, other = SharedGroup(**SMALL).init(MODEL, 3), SharedGroup(**SMALL).init(MODEL, 4)
    for name in (*SHARED, *GROUP, "keys"):
        assert torch.equal(uniform[name], again[name])
        assert not torch.equal(uniform[name], other[name])


def test_group_prompts_may_start_around_cls_of_a_blank_image() -> None:
    uniform, cls = (SharedGroup(**SMALL, initial=kind).init(MODEL, 3) for kind in ("uniform", "cls"))
    h, states = MODEL.embed(W, torch.zeros(1, *MODEL.image)), {}
    for layer in range(DEPTH):
        states[f"group.{layer}"] = h[0, 0]
        h = MODEL.block(W, f"body.blocks.{layer}", h)
    for name, p in cls.items():
        torch.testing.assert_close(p, uniform[name] + states[name] if name in GROUP else uniform[name])
    assert not torch.allclose(states["group.2"], states["group.4"], atol=1e-2)


@pytest.mark.parametrize(("rows", "width"), [(4, 16), (5, 5), (1, 3), (7, 3)])
def test_keys_start_orthonormal(rows: int, width: int) -> None:
    """More rows than dimensions: every `width` of them."""
    keys = orthogonal(rows, width, torch.Generator().manual_seed(0)).double().numpy()
    assert keys.shape == (rows, width)
    for i in range(0, rows, width):
        part = keys[i : i + width]
        np.testing.assert_allclose(part @ part.T, np.eye(len(part)), atol=1e-6)
    assert len(np.unique(keys.round(4), axis=0)) == rows


# ---- mistakes


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"shared_layers": (0, 5)}, r"method\.shared_layers = \[0, 5\] must be different layers of .*: 0 to 4$"),
        ({"group_layers": (-1,)}, r"method\.group_layers = \[-1\] must be different layers of .*: 0 to 4$"),
        ({"group_layers": (3, 3)}, r"method\.group_layers = \[3, 3\] must be different layers"),
        ({"group_layers": (1, 3)}, r"method\.group_layers = \[1, 3\] must all come after .* is layer 1$"),
        ({"shared_layers": (0, 3)}, r"method\.group_layers = \[2, 4\] must all come after .* is layer 3$"),
        ({"query": 6}, r'method\.query = 6 must be "last" or a number of layers of .*: 1 to 5$'),
        ({"query": 0}, r"method\.query = 0 must be"),
    ],
)
def test_settings_that_do_not_fit_the_model(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        small(**settings).tuning.check(MODEL)
    assert "\n" not in str(caught.value)


def test_settings_that_do_fit() -> None:
    for settings in ({}, {"query": 1}, {"query": DEPTH}, {"training": "group", "group_layers": (0,)}):
        small(**settings).tuning.check(MODEL)


def test_a_backbone_without_tokens() -> None:
    with pytest.raises(UserError, match=r'backbone\.name = "linear" takes no tokens'):
        small().tuning.check(linear())


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        (NAME, {"group_layers": ()}, r'method\.group_layers = \[\] must .*; method\.training="shared" does without$'),
        (NAME, {"shared_layers": ()}, r'method\.shared_layers = \[\] must .*; method\.training="group" does without$'),
        (NAME, {"training": "shared", "shared_layers": ()}, r"method\.shared_layers = \[\] must"),
        (f"{NAME}+pt", {}, r"has a tuning of its own, and takes no other$"),
        (f"{NAME}+vpt", {}, r"has a tuning of its own, and takes no other$"),
        (NAME, {"training": "both"}, r"method\.training = 'both' should be 'bcd', "),
        (NAME, {"groups": 0}, r"method\.groups = 0 should be greater than or equal to 1$"),
        (NAME, {"key_momentum": 1}, r"method\.key_momentum = 1 should be less than 1$"),
    ],
)
def test_settings_that_contradict(name: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        create(name, settings)
    assert "\n" not in str(caught.value)


# ---- runs


def test_a_run_without_groups_has_no_clustering(tmp_path: Path) -> None:
    for training, groups in (("shared", False), ("bcd", True)):
        done = promptfed.run(
            method={"name": "sgpt", "training": training, "groups": 2, "epochs": 1},
            dataset={"name": "shapes", "limit": 48},
            partition="domain",
            backbone="vit-mini",
            rounds=1,
            engine={"workers": 1},
            out=tmp_path / training,
        )
        assert ("clustering" in done.metrics) is groups


# ---- the suite


@pytest.mark.parametrize(
    "settings", [{"training": "joint", "majority": True, "query": 2}, {"training": "shared"}], ids=str
)
def test_conformance(settings: dict[str, Any]) -> None:
    few = {"groups": 3, "rare": 4, "epochs": 1, "shared_layers": (0,), "group_layers": (4, 5)}
    check_method(NAME, backbone="vit-mini", size=32, **few, **settings)
