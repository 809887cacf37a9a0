"""What embeddings do not hide: the images, at more bytes than theirs."""

import torch
from dp2fl_toy import batch_of, images, method_of

from promptfed.attacks.embedding_inversion import invert
from promptfed.models.clip import CLIP, clip
from promptfed.phases import Holdings
from promptfed.tunings.maple import image_tower


def square() -> CLIP:
    """As many numbers in a patch as in its embedding, as in ViT-B/16 (3 x 16 x 16 = 768)."""
    return clip(
        (3, 16, 16),
        3,
        patch=4,
        width=48,
        depth=1,
        heads=4,
        text_width=16,
        text_depth=1,
        text_heads=2,
        vocabulary=8,
        context_length=8,
        embedding=8,
    )


def test_a_patch_embedding_can_be_turned_back_into_the_image() -> None:
    model, x = square(), images(2, side=16)
    hello = method_of().enroll(model, {}, Holdings(lambda: iter(()), lambda: iter([batch_of(x)]), torch.ones(4), {}))
    found = invert(image_tower(model), model.weights, hello["x"])
    assert float((found - x.double()).abs().max()) < 1e-3


def test_embeddings_are_larger_than_images() -> None:
    """At 224 pixels and ViT-B/16: 605 KB of float32 against 150 KB of raw bytes."""
    patches, width = (224 // 16) ** 2, 768
    assert (1 + patches) * width * 4 == 605_184
    assert 3 * 224 * 224 == 150_528
    model = square()
    hello = method_of().enroll(
        model, {}, Holdings(lambda: iter(()), lambda: iter([batch_of(images(2, side=16))]), torch.ones(4), {})
    )
    assert hello["x"].shape == (2, 1 + 16, 48)
    assert hello["x"].numel() * hello["x"].element_size() == 2 * (1 + 16) * 48 * 4
