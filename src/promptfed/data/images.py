"""From any PIL image to uint8 pixels of one shape."""

import numpy as np
from PIL import Image, ImageOps

Pixels = np.ndarray  # uint8 (C, H, W)


def pixels(image: Image.Image, channels: int, size: int | None) -> Pixels:
    """Decode, convert to grey or colour, and resize; what is not square is cropped to its centre."""
    image = eight_bits(ImageOps.exif_transpose(image))
    image = image.convert("L" if channels == 1 else "RGB")
    if size is not None and image.size != (size, size):
        image = ImageOps.fit(image, (size, size), Image.Resampling.BILINEAR)
    array = np.asarray(image, dtype=np.uint8)  # (H, W) or (H, W, 3)
    return array[None] if channels == 1 else np.ascontiguousarray(array.transpose(2, 0, 1))


def eight_bits(image: Image.Image) -> Image.Image:
    """Deep grey images scaled to 0..255 (PIL's own conversion clips them), transparent ones laid on white."""
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
