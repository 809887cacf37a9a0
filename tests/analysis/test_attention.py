"""Where a model looks: Grad-CAM and attention against NumPy, and both on runs."""

from contextlib import closing

import numpy as np
import pytest
import torch
from analysed import differences, made, read
from torch.nn import functional as F

from promptfed import UserError, models
from promptfed.analysis import Options
from promptfed.analysis.attention import attention_map, different, grad_cam, look, prompted, share
from promptfed.analysis.opened import Opened
from promptfed.methods import create
from promptfed.models.base import Model
from promptfed.phases import Batch
from promptfed.tuning import Full


class Toy(Model):
    """A convolution, the mean over places, a linear head."""

    def features(self, weights, x, tokens=None):
        return F.conv2d(x, weights["body.conv"]).mean((2, 3))


def toy() -> Toy:
    g = torch.Generator().manual_seed(0)
    shapes = {"body.conv": (3, 2, 2, 2), "head.weight": (4, 3), "head.bias": (4,)}
    return Toy("toy", (2, 5, 6), 4, {name: torch.randn(shape, generator=g) for name, shape in shapes.items()})


def test_grad_cam_of_a_model_that_is_differentiated_by_hand():
    model, x, y = toy(), torch.randn(2, 2, 5, 6), torch.tensor([1, 3])
    seen = look(Full(), model, dict(model.weights), Batch(x, y, None, torch.zeros(2), {}), None)
    w, kernel = model.weights["head.weight"].numpy(), model.weights["body.conv"].numpy()
    for n in range(2):
        layer = np.zeros((3, 4, 5))
        for i in range(4):
            for j in range(5):
                layer[:, i, j] = (kernel * x[n, :, i : i + 2, j : j + 2].numpy()).sum((1, 2, 3))
        # The score is sum_k w_ck mean(A_k) + b_c: its slope in A_k is w_ck / 20 everywhere.
        expected = np.maximum((w[int(y[n])][:, None, None] / 20 * layer).sum(0), 0)
        np.testing.assert_allclose(seen.maps[n], expected, atol=1e-6)
    assert not seen.prompt.any()


def test_grad_cam_weighs_channels_by_their_mean_slope():
    layer = torch.tensor([[[[1.0, -2.0]], [[3.0, 4.0]]]], requires_grad=True)
    score = (layer * torch.tensor([[[[1.0, 3.0]], [[-1.0, 0.0]]]])).sum()
    np.testing.assert_allclose(grad_cam(score, layer), [[[2 - 1.5, 0]]])


def test_attention_is_that_of_the_tokens_that_are_read():
    tower = models.vit((3, 8, 12), 2, 0, patch=4, depth=1, width=8, heads=2)
    g = np.random.default_rng(0)
    q, k = g.normal(size=(1, 2, 1, 4)), g.normal(size=(1, 2, 1 + 3 + 6, 4))
    maps, prompt = attention_map(torch.from_numpy(q), torch.from_numpy(k), tower)
    scores = np.exp(np.einsum("bhqd,bhkd->bhqk", q, k) / 2)
    weights = (scores / scores.sum(-1, keepdims=True)).mean((1, 2))[0]
    np.testing.assert_allclose(maps[0], weights[4:].reshape(2, 3))
    np.testing.assert_allclose(prompt, [weights[1:4].sum()])


def test_the_share_of_a_map_on_a_part_of_the_image():
    area = np.zeros((2, 4), bool)
    area[:, :2] = True
    maps = np.array([[[3.0, 3.0, 1.0, 1.0]] * 2, [[0.0] * 4] * 2])
    np.testing.assert_allclose(share(maps, area), [6 / 8, np.nan])
    # Enlarged from one row of two cells, bilinear: 4, 3.25, 1.75, 1 in each row.
    np.testing.assert_allclose(share(np.array([[[4.0, 1.0]]]), area), [7.25 / 10])


def test_where_a_prompt_lies_on_the_image():
    model = models.build("cnn", (3, 16, 16), 2, 0)
    frame = np.ones((16, 16), bool)
    frame[2:-2, 2:-2] = False
    assert np.array_equal(prompted(model, create("pfedpt", {"prompt_size": 2}).tuning), frame)
    patch = np.zeros((16, 16), bool)
    patch[:3, :3] = True
    assert np.array_equal(prompted(model, create("pfedpt", {"prompt": "fixed-patch", "prompt_size": 3}).tuning), patch)
    assert prompted(model, create("pfedpt", {"prompt": "random-patch"}).tuning) is None
    assert prompted(model, create("fedavg").tuning) is None


def test_attention_on_the_prompt_of_all_clients(finished, tmp_path):
    made(finished("pfedpt"), "attention", tmp_path, Options(everyone=True, images=4))
    shares = read(tmp_path / "attention-clients.csv")
    assert [row["client"] for row in shares] == ["0", "1", "2", "3"]
    means = [np.mean([float(row[f"on_prompt_{name}"]) for row in shares]) for name in ("with", "without")]
    assert all(0 < mean < 1 for mean in means)
    assert differences(tmp_path / "attention.json") == pytest.approx([means[0] - means[1]], abs=0.006)


def test_images_of_one_class(finished, tmp_path):
    """pFedPT's Fig. 12."""
    folder = finished("pfedpt")
    with closing(Opened(folder)) as opened:
        data, test = opened.federation.dataset, opened.federation.sites[1].test
        count = np.bincount(data.labels[test], minlength=len(data.classes))
    most, none = (data.classes[i] for i in (count.argmax(), count.argmin()))
    made(folder, "attention", tmp_path, Options((1,), label=most))
    rows = read(tmp_path / "attention.csv")
    assert {row["label"] for row in rows} == {most}
    assert len({row["image"] for row in rows}) == min(6, count.max())
    with pytest.raises(UserError, match='--class = "cat" is unknown'):
        made(folder, "attention", tmp_path, Options((1,), label="cat"))
    assert count.min() == 0
    with pytest.raises(UserError, match=f'--class = "{none}": client 1 has no test image of this class'):
        made(folder, "attention", tmp_path, Options((1,), label=none))
    made(folder, "attention", tmp_path, Options(label=none))  # of the first client that has one
    assert {(row["label"], row["client"] != "1") for row in read(tmp_path / "attention.csv")} == {(none, True)}


def test_images_of_different_classes_come_first():
    labels = np.array([0, 0, 0, 1, 1, 2])
    assert different(labels, np.arange(6), 4).tolist() == [0, 3, 5, 1]


@pytest.mark.parametrize(("name", "cells"), [("pfedpt", 2 * 2), ("vpt", 4 * 4), ("dp2fl", 4 * 4)])
def test_attention_of_a_run(finished, tmp_path, name, cells):
    folder = finished(name)
    rows = made(folder, "attention", tmp_path, Options((1,), 3))
    opened = Opened(folder)
    if name != "pfedpt":
        by_image = [[row for row in rows if row["image"] == image] for image in {row["image"] for row in rows}]
        for part in by_image:  # attention is a distribution over cls, prompts and patches
            assert 0 < sum(float(row["with"]) for row in part) + float(part[0]["attention_to_prompt"]) < 1
            assert float(part[0]["attention_to_prompt"]) > 0
    assert len(rows) == min(3, len(opened.federation.sites[1].test)) * cells
    assert {int(row["image"]) for row in rows} <= set(opened.federation.sites[1].test.tolist())
    work, params = opened.own(1)
    index = np.unique([int(row["image"]) for row in rows])
    best = opened.probabilities(work, params, opened.host.samples(index)).argmax(1)
    classes = opened.federation.dataset.classes
    expected = {str(i): classes[b] for i, b in zip(index, best, strict=True)}
    assert {row["image"]: row["predicted_with"] for row in rows} == expected
    opened.close()


@pytest.mark.parametrize("name", ["fedavg", "promptfl"])
def test_attention_of_a_run_without_prompts_on_images(finished, tmp_path, name):
    """FedAvg's half of pFedPT's Fig. 4: one map per image."""
    folder = finished(name)
    rows = made(folder, "attention", tmp_path, Options((1,), 3))
    opened = Opened(folder)
    work, params = opened.own(1)
    index = np.unique([int(row["image"]) for row in rows])
    best = opened.probabilities(work, params, opened.host.samples(index)).argmax(1)
    classes = opened.federation.dataset.classes
    assert {row["image"]: row["predicted"] for row in rows} == {
        str(i): classes[b] for i, b in zip(index, best, strict=True)
    }
    assert {float(row["attention_to_prompt"]) for row in rows} == {0}
    assert max(float(row["attention"]) for row in rows) > 0
    assert not {"with", "without"} & set(rows[0])
    opened.close()


def test_models_without_attention_or_convolutions():
    class Flat(Model):
        def features(self, weights, x, tokens=None):
            return x.flatten(1)[:, :3] * weights["body.scale"]

    model = Flat("flat", (1, 2, 2), 2, {**toy().weights, "body.scale": torch.ones(())})
    batch = Batch(torch.ones(1, 1, 2, 2), torch.tensor([0]), None, torch.zeros(2), {})
    with pytest.raises(UserError, match="neither attention nor convolutions"):
        look(Full(), model, dict(model.weights), batch, None)
