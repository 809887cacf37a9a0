"""From any PIL image to uint8 pixels of one shape."""

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from PIL import Image, ImageOps

Interpolation = Literal["bilinear", "bicubic"]


@dataclass(frozen=True)
class Resize:
    """How images get one size. An image that has this size already stays as it is.

    fit: the largest centre crop of the target's aspect ratio is resized. shortest: the shorter side is scaled to
    `scaled` pixels; squash: both sides are, whatever their ratio; then the centre is cropped.
    """

    size: tuple[int, int]  # height, width
    mode: Literal["fit", "shortest", "squash"] = "fit"
    scaled: int = 0
    interpolation: Interpolation = "bilinear"
    crop: Literal["floor", "round"] = "floor"  # an odd margin's half: rounded down, or to the nearest even pixel

    def at(self, side: int) -> "Resize":
        """The same for square images of another size: the scaled side changes with it."""
        return replace(self, size=(side, side), scaled=round(self.scaled * side / self.size[0]))

    def __call__(self, image: Image.Image) -> Image.Image:
        height, width = self.size
        if image.size == (width, height):
            return image
        resample = Image.Resampling[self.interpolation.upper()]
        if self.mode == "fit":
            return ImageOps.fit(image, (width, height), resample)
        sides = (1, 1) if self.mode == "squash" else image.size
        shorter = min(sides)
        scaled = image.resize((self.scaled * sides[0] // shorter, self.scaled * sides[1] // shorter), resample)
        margins = scaled.size[0] - width, scaled.size[1] - height
        left, top = (margin // 2 if self.crop == "floor" else round(margin / 2) for margin in margins)
        return scaled.crop((left, top, left + width, top + height))


def pixels(image: Image.Image, channels: int, resize: Resize | None) -> np.ndarray:
    """Decode, convert to grey or colour, and resize: uint8 (C, H, W)."""
    image = eight_bits(ImageOps.exif_transpose(image))
    image = image.convert("L" if channels == 1 else "RGB")
    array = np.asarray(resize(image) if resize else image, dtype=np.uint8)  # (H, W) or (H, W, 3)
    return array[None] if channels == 1 else np.ascontiguousarray(array.transpose(2, 0, 1))


def eight_bits(image: Image.Image) -> Image.Image:
    """Deep grey images scaled to 0..255 (PIL's own conversion clips them), transparent ones composited on white."""
    if image.mode.startswith("I"):  # 16 bits in a 16- or 32-bit mode
        return Image.fromarray((np.asarray(image).astype(np.int64).clip(0, 65535) // 257).astype(np.uint8))
    if image.mode == "F":
        values = np.nan_to_num(np.asarray(image))
        scale = 255.0 if values.max() <= 1 else 1.0
        return Image.fromarray((values * scale).clip(0, 255).round().astype(np.uint8))
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        layer = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer)
    return image
