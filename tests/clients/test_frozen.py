"""What is frozen is computed once, and gives what computing it every time gives."""

import shutil

import numpy as np
import pytest
import torch

import fitting
from promptfed import Batch, Context, methods, models
from promptfed.clients.frozen import FrozenValues
from promptfed.data import cache
from promptfed.data.images import Resize
from promptfed.models.pretrained.preprocess import Preprocess
from promptfed.testing import Case, equal, tiny_federation
from promptfed.tunings.heads import HeadOnly
from promptfed.tunings.tokens import Tokens

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PROMPTFED_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def data(tmp_path):
    return tiny_federation(tmp_path).dataset


@pytest.fixture
def model():
    return models.build("vit-tiny", (3, 16, 16), 4, 0)


class Counted(HeadOnly):
    def frozen(self, model, x):
        SEEN.append(len(x))
        return super().frozen(model, x)


SEEN: list[int] = []


def normalised(data, index):
    return (torch.from_numpy(data.images[index]).float() / 255 - 0.5) / 0.5


def test_each_sample_is_computed_once_for_all_readers(data, model):
    SEEN.clear()
    first = FrozenValues(Counted(), model, data, CPU, 1e9)
    index = np.array([5, 2, 9])
    values = first(index)["features"]
    expected = model.features(model.weights, normalised(data, index))
    torch.testing.assert_close(values, expected, rtol=1e-5, atol=1e-6)
    first(index[::-1].copy())
    again = FrozenValues(Counted(), model, data, CPU, 1e9)  # another run or process
    assert torch.equal(again(index)["features"], values)
    assert torch.equal(again(np.array([9, 2]))["features"], values[[2, 1]])
    assert sum(SEEN) == len(data) + 2  # one chunk, and one sample each to learn the shape


def test_other_weights_or_normalisation_are_another_entry(data, model):
    index = np.arange(3)
    old = FrozenValues(HeadOnly(), model, data, CPU, 1e9)(index)["features"]
    other = models.build("vit-tiny", (3, 16, 16), 4, seed=1)
    new = FrozenValues(HeadOnly(), other, data, CPU, 1e9)(index)["features"]
    assert not torch.allclose(old, new)
    torch.testing.assert_close(new, other.features(other.weights, normalised(data, index)), rtol=1e-5, atol=1e-6)
    model.preprocess = Preprocess(Resize((16, 16)), (0.4,) * 3, (0.3,) * 3)
    rescaled = FrozenValues(HeadOnly(), model, data, CPU, 1e9)(index)["features"]
    assert not torch.allclose(old, rescaled)


def test_another_head_is_the_same_entry(data, model):
    FrozenValues(HeadOnly(), model, data, CPU, 1e9)
    model.weights["head.weight"] = model.weights["head.weight"] + 1
    FrozenValues(HeadOnly(), model, data, CPU, 1e9)
    assert len(list((cache.root() / "frozen").glob("[!.]*"))) == 1


def test_beyond_the_budget_nothing_is_kept_and_it_says_so(data, model):
    with pytest.warns(UserWarning, match=r"engine\.frozen_gb"):
        values = FrozenValues(HeadOnly(), model, data, CPU, budget=100)
    index = np.array([1, 0])
    expected = model.features(model.weights, normalised(data, index))
    torch.testing.assert_close(values(index)["features"], expected, rtol=1e-5, atol=1e-6)
    assert not (cache.root() / "frozen").exists()


def test_the_entry_that_was_not_used_for_longest_makes_room(data, model):
    need = len(data) * model.width * 4
    budget = 2.5 * need + 2000
    for seed in range(3):
        FrozenValues(HeadOnly(), models.build("vit-tiny", (3, 16, 16), 4, seed), data, CPU, budget)
    assert len(list((cache.root() / "frozen").glob("[!.]*"))) == 2


def test_no_samples_have_values_of_the_right_shape(data, model):
    assert FrozenValues(HeadOnly(), model, data, CPU, 1e9)(np.arange(0))["features"].shape == (0, model.width)


@pytest.mark.parametrize("mode", ["deep", "stay"])
def test_a_frozen_prefix_gives_the_same_features(data, model, mode):
    tuning = Tokens(tokens=2, layers=(3, 5), mode=mode)
    params = tuning.init(model, 0)
    index = np.arange(4)
    x, y = normalised(data, index), torch.from_numpy(data.labels[index])
    frozen = FrozenValues(tuning, model, data, CPU, 1e9)(index)
    ctx = Context({}, {}, None, torch.tensor(4), torch.zeros(4))
    cut = tuning.features(model, params, Batch(x[:, :0], y, None, torch.zeros(2), {}, frozen), ctx)
    prompts = {i: params[f"tokens.{i}"] for i in (3, 5)}
    whole = model.features(model.weights, x, prompts, mode)
    torch.testing.assert_close(cut, whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["head-tune", "fedvpt"])
def test_a_run_does_not_notice(tmp_path, model, name):
    """Trained on cached values and on values computed every time: the same parameters."""
    settings = {"layers": (4,)} if name == "fedvpt" else {}
    method = methods.create(name, {"epochs": 1, "batch_size": 4, **settings})
    case = Case(method, model, tiny_federation(tmp_path / "d"))
    cached = case.run()
    for entry in (cache.root() / "frozen").iterdir():
        shutil.rmtree(entry, ignore_errors=True)
    with pytest.warns(UserWarning, match="computed again"):
        anew = case.run(frozen_bytes=0.0)
    assert equal(cached.state, anew.state)


@pytest.mark.parametrize(
    ("name", "backbone", "says"),
    [
        ("fedvpt", "cnn", "takes no tokens"),
        ("promptfl", "vit-tiny", "has no text tower"),
    ],
)
def test_a_tuning_refuses_a_model_without_its_slot(name, backbone, says):
    method, model = methods.create(name), models.build(backbone, (3, 16, 16), 4, 0)
    with pytest.raises(ValueError, match=says):
        method.tuning.check(model)


def test_layers_must_exist(model):
    with pytest.raises(ValueError, match=r"method\.layers = \[3, 8\] must be layers"):
        methods.create("fedvpt", {"layers": (3, 8)}).tuning.check(model)


def test_a_value_does_not_depend_on_who_asked_first(data):
    """Kernels round by the size of a batch: the CNN's differ already between 3 and 61 images."""
    model = models.build("cnn", (3, 16, 16), 4, 0)
    some = FrozenValues(HeadOnly(), model, data, CPU, 1e9)(np.array([3, 1, 50]))["features"]
    shutil.rmtree(cache.root() / "frozen")
    everyone = FrozenValues(HeadOnly(), model, data, CPU, 1e9)(np.arange(len(data)))["features"]
    assert torch.equal(some, everyone[[3, 1, 50]])
    with pytest.warns(UserWarning, match="computed again"):
        anew = FrozenValues(HeadOnly(), model, data, CPU, 0)(np.array([3, 1, 50]))["features"]
    assert torch.equal(some, anew)


def test_tokens_within_a_private_prompt_go_through_all_layers(data, model):
    tuning = methods.create("fedavg+vpt+st", {"layers": (3, 5), "tokens": 2, "prompt_tokens": 1}).tuning
    params = tuning.init(model, 0)
    x = normalised(data, np.arange(4))
    ctx = Context({}, {}, None, torch.tensor(4), torch.zeros(4))
    batch = Batch(x, torch.zeros(4, dtype=torch.long), None, torch.zeros(2), {}, {})
    prompts = {0: params["prompt.tokens"], 3: params["tokens.3"], 5: params["tokens.5"]}
    expected = model.features(model.weights, x, prompts, "deep")
    torch.testing.assert_close(tuning.features(model, params, batch, ctx), expected)


@pytest.mark.parametrize(
    ("name", "values", "why"),
    [
        ("head-tune", "features", ""),
        ("fedvpt", "", "tokens enter the first layer"),
        ("fedavg", "", "all weights are trained"),
        ("fedavg+head+pt", "", "a prompt changes what enters the model"),
    ],
)
def test_it_says_why_nothing_is_cached(model, name, values, why):
    tuning = methods.create(name).tuning
    assert tuning.frozen_name(model) == values
    assert values or methods.why_not_cached(tuning) == why


def test_moon_refuses_frozen_features(model):
    method = methods.create("moon+head")
    with pytest.raises(ValueError, match="Moon contrasts features"):
        method.check(model, method.tuning.init(model, 0))


def test_the_query_of_sgpt_and_the_features_of_a_head_are_one_entry(data, model):
    """They are the same numbers, computed once."""
    index = np.arange(len(data))
    query = FrozenValues(methods.create("sgpt", fitting.SMALL["sgpt"]).tuning, model, data, CPU, 1e9)(index)["query"]
    SEEN.clear()
    values = FrozenValues(Counted(), model, data, CPU, 1e9)
    assert torch.equal(values(index)["features"], query)
    assert SEEN == [1]  # to know its shape
