"""Training on views: seeded, alike however clients are batched, stacked and distributed; evaluation sees images."""

import json

import numpy as np
import pytest
import torch

import promptfed
from promptfed import FedAvg, methods, models
from promptfed.clients.wire import unpack
from promptfed.data.augment import Augment, FixedViews
from promptfed.methods.moon import Moon
from promptfed.testing import Case, begun, check_resumed, check_stacked, equal, tiny_federation
from promptfed.training import train
from promptfed.tunings.heads import HeadOnly

CROP, FLIP, FIXED = Augment("crop+flip"), Augment("flip"), Augment("crop+flip", 3)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PROMPTFED_CACHE", str(tmp_path / "cache"))


def case_of(folder, name="fedavg", backbone="cnn", augment=CROP, **settings):
    size = 32 if backbone == "vit-mini" else 16
    method = name if isinstance(name, promptfed.Method) else methods.create(name, {"epochs": 1, **settings})
    model = models.build(backbone, (3, size, size), 4, 5)
    return Case(method, model, tiny_federation(folder / "tiny", size=size), augment=augment)


class Seen(FedAvg):
    """Keeps the images of its batches."""

    def loss(self, model, params, batch, ctx):
        SEEN.append(batch.x)
        return super().loss(model, params, batch, ctx)


SEEN: list[torch.Tensor] = []


def seen(folder, augment, client=0, round=1, seed=11, **settings):
    """The images that a client trains on, epoch by epoch, each as bytes and sorted: in no order."""
    SEEN.clear()
    case = case_of(folder, Seen(**settings), augment=augment)
    case.seed = seed
    with case.clients() as (_, host):
        train(case.method, case.model, [host.work(client, begun(case), round)], case.method.phases(round), seed, round)
    epochs = torch.cat(SEEN).split(len(case.federation.sites[client].train))
    return [sorted(x.numpy().tobytes() for x in epoch) for epoch in epochs]


def stored(folder, client=0):
    """A client's training images as they are stored, normalised."""
    federation = tiny_federation(folder / "tiny")
    x = torch.from_numpy(federation.dataset.images[federation.sites[client].train])
    return (x.float() - 127.5) / 127.5


@pytest.mark.parametrize("augment", [CROP, FLIP, FIXED])
def test_a_view_depends_on_seed_round_client_and_epoch_and_on_no_batch(tmp_path, augment):
    first = seen(tmp_path, augment, epochs=2, batch_size=4)
    assert first == seen(tmp_path, augment, epochs=2, batch_size=7)
    assert first[0] != first[1]
    assert first != seen(tmp_path, augment, epochs=2, batch_size=4, seed=12)
    assert first != seen(tmp_path, augment, epochs=2, batch_size=4, round=2)


def test_clients_with_the_same_images_see_other_views(tmp_path):
    case = case_of(tmp_path, Seen(epochs=1, batch_size=16))
    drawn = []
    with case.clients() as (_, host):
        for client in (0, 1):
            work = host.work(client, begun(case), 1)
            work.samples = host.work(0, begun(case), 1).samples
            SEEN.clear()
            train(case.method, case.model, [work], case.method.phases(1), case.seed, 1)
            drawn.append({x.numpy().tobytes() for x in torch.cat(SEEN)})
    assert not drawn[0] & drawn[1]


def test_without_augmentation_images_are_as_stored(tmp_path):
    expected = sorted(x.numpy().tobytes() for x in stored(tmp_path))
    assert seen(tmp_path, None, epochs=2) == [expected] * 2


def test_a_flip_shows_images_and_mirrored_images(tmp_path):
    x = stored(tmp_path)
    straight, mirrored = ({image.numpy().tobytes() for image in y.contiguous()} for y in (x, x.flip(3)))
    found = {image for epoch in seen(tmp_path, FLIP, epochs=16) for image in epoch}
    assert found == straight | mirrored


def test_fixed_views_are_all_that_is_seen(tmp_path):
    data = tiny_federation(tmp_path / "tiny").dataset
    fixed = FixedViews(FIXED, data, "bilinear", CPU)
    index = tiny_federation(tmp_path / "tiny").sites[0].train
    numbers = (index[:, None] * 3 + np.arange(3)).ravel()
    known = {x.numpy().tobytes() for x in (fixed(numbers) - 127.5) / 127.5}
    epochs = seen(tmp_path, FIXED, epochs=6)
    assert {image for epoch in epochs for image in epoch} <= known
    assert len({image for epoch in epochs for image in epoch}) > 2 * len(index)
    assert all(len(set(epoch)) == len(index) for epoch in epochs)  # one view of each image


@pytest.mark.parametrize(
    ("name", "backbone", "augment", "settings"),
    [
        ("moon", "cnn", CROP, {}),
        ("head-tune", "cnn", CROP, {"lr": 0.1}),
        ("head-tune", "cnn", FIXED, {"lr": 0.1}),
        ("sgpt", "vit-mini", FIXED, {"groups": 3}),
    ],
)
def test_stacking_and_resuming_change_nothing(tmp_path, name, backbone, augment, settings):
    case = case_of(tmp_path, name, backbone, augment, batch_size=4, **settings)
    check_stacked(case)
    check_resumed(case)


def test_evaluation_is_never_augmented(tmp_path):
    plain, varied = (case_of(tmp_path, "head-tune", augment=augment) for augment in (None, CROP))
    state = begun(plain)
    found = []
    for case in (plain, varied):
        with case.clients() as (clients, _):
            found.append(clients.evaluate(dict.fromkeys(range(5), state), as_of=1, pooled=True, after_local=False))
    assert repr(found[0]) == repr(found[1])


# ---- outputs of frozen layers


def outcome(case, **where):
    return case.run(rounds=1, score_all=False, **where).state


def test_frozen_values_are_those_of_the_view(tmp_path):
    """A head on features that are computed for every batch, and on features of cached views: as with all layers at
    work."""

    class Unfrozen(HeadOnly):
        def frozen_name(self, model):
            return ""

    for augment in (CROP, FIXED):
        case = case_of(tmp_path, "head-tune", augment=augment, lr=1.0)
        whole = case_of(tmp_path, case.method.model_copy(update={"tuning": Unfrozen()}), augment=augment)
        a, b = outcome(case), outcome(whole)
        assert all(torch.allclose(p, b[name], atol=1e-5) for name, p in a.items())
        plain = outcome(case_of(tmp_path, "head-tune", augment=None, lr=1.0))
        assert max(float((p - plain[name]).abs().max()) for name, p in a.items()) > 1e-3


class Counted(HeadOnly):
    def frozen(self, model, x):
        PASSES.append(len(x))
        return super().frozen(model, x)


PASSES: list[int] = []


def test_fixed_views_are_computed_once_and_new_ones_every_time(tmp_path):
    counts = {}
    for augment in (FIXED, CROP):
        case = case_of(tmp_path, FedAvg(tuning=Counted(), epochs=4, batch_size=8), augment=augment)
        counts[augment.views] = []
        down = dict.fromkeys(range(5), begun(case))
        with case.clients() as (clients, _):
            for round in (1, 2):
                PASSES.clear()
                clients.train(down, round, score=False)
                counts[augment.views].append(sum(PASSES))
    n = len(case.federation.dataset)
    assert counts[3] == [3 * n + 1, 0]  # one more to learn the shape
    assert counts[0] == [4 * 37, 4 * 37]  # 4 epochs of all training samples


def test_without_room_fixed_views_are_computed_every_time(tmp_path):
    case = case_of(tmp_path, "head-tune", augment=FIXED, lr=0.1)
    cached = outcome(case)
    with pytest.warns(UserWarning, match=r"engine\.frozen_gb = 0 is too small for the features of \d+ views"):
        anew = outcome(case, frozen_bytes=0.0)
    assert all(torch.allclose(p, anew[name], atol=1e-5) for name, p in cached.items())


def test_constants_of_samples_are_those_of_their_views(tmp_path):
    """MOON's reference features: in the first step of a round they are the features themselves."""

    class Watched(Moon):
        def loss(self, model, params, batch, ctx):
            FEATURES.append((self.tuning.features(model, params, batch, ctx).detach(), batch.extra["received"]))
            return super().loss(model, params, batch, ctx)

    FEATURES = []
    case = case_of(tmp_path, Watched(epochs=1))
    with case.clients() as (_, host):
        work = host.work(0, begun(case), 1)
        train(case.method, case.model, [work], case.method.phases(1), case.seed, 1)
    now, received = FEATURES[0]
    assert torch.allclose(now, received, atol=1e-6)
    assert received.abs().max() > 0


# ---- engines


def finished(folder):
    lines = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    return unpack((folder / "checkpoint.safetensors").read_bytes())[0], [line["aggregated"] for line in lines]


def test_worker_processes_give_the_same_bits_and_the_result_says_what_was_cached(tmp_path):
    settings = {
        "method": {"name": "head-tune", "epochs": 2},
        "dataset": {"name": "digits", "limit": 90, "size": 16, "augment": "crop+flip", "views": 2},
        "partition": {"name": "iid", "clients": 3},
        "rounds": 2,
    }
    one = promptfed.run(**settings, out=tmp_path / "one", engine={"workers": 1})
    promptfed.run(**settings, out=tmp_path / "two", engine={"workers": 2})
    (state, scores), (other, others) = finished(tmp_path / "one"), finished(tmp_path / "two")
    assert equal(state, other)
    assert scores == others
    said = one.numbers["frozen"]["views"]
    assert said == 'dataset.augment = "crop+flip": every epoch draws one of 2 fixed views of each training image; ' + (
        "the features of each are cached"
    )
