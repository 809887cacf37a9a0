"""Model folders as they are published, with random weights: names and shapes of each layout, written out."""

import itertools
import json
import math
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

Shapes = dict[str, tuple[int, ...]]

START, END = "<|startoftext|>", "<|endoftext|>"
LENGTH = 14  # positions of small text towers
VIT = {"hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 40}  # a small tower
TEXTS = ("a photo of a dog", "sports car", "school bus", "sunflowers", "red panda's 2")


def random(shapes: Shapes, seed: int = 0) -> dict[str, Tensor]:
    """Activations stay of order one through any number of layers, and no weight is like another."""
    g = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in shapes.items():
        value = torch.randn(shape, generator=g)
        if name.endswith("running_var"):
            value = 0.5 + value.abs()
        elif len(shape) > 1:
            value = value / math.sqrt(math.prod(shape[1:]))
        elif name.endswith("weight"):
            value = 1 + 0.2 * value
        else:
            value = 0.2 * value
        weights[name] = value
    return weights


def settle(module: torch.nn.Module) -> None:
    """Weights of order one, so that every part of the model matters."""
    g = torch.Generator().manual_seed(0)
    for p in module.parameters():
        p.data = p.data + torch.randn(p.shape, generator=g) * (0.2 if p.ndim < 2 else p[0].numel() ** -0.5)


def timm_vit(width: int, depth: int, hidden: int, side: int, patch: int, classes: int) -> Shapes:
    shapes: Shapes = {
        "cls_token": (1, 1, width),
        "pos_embed": (1, 1 + (side // patch) ** 2, width),
        "patch_embed.proj.weight": (width, 3, patch, patch),
        "patch_embed.proj.bias": (width,),
    }
    for i in range(depth):
        at = f"blocks.{i}"
        shapes |= {
            f"{at}.norm1.weight": (width,),
            f"{at}.norm1.bias": (width,),
            f"{at}.attn.qkv.weight": (3 * width, width),
            f"{at}.attn.qkv.bias": (3 * width,),
            f"{at}.attn.proj.weight": (width, width),
            f"{at}.attn.proj.bias": (width,),
            f"{at}.norm2.weight": (width,),
            f"{at}.norm2.bias": (width,),
            f"{at}.mlp.fc1.weight": (hidden, width),
            f"{at}.mlp.fc1.bias": (hidden,),
            f"{at}.mlp.fc2.weight": (width, hidden),
            f"{at}.mlp.fc2.bias": (width,),
        }
    shapes |= {"norm.weight": (width,), "norm.bias": (width,)}
    return shapes | {"head.weight": (classes, width), "head.bias": (classes,)}


def open_clip_layers(at: str, width: int, depth: int) -> Shapes:
    shapes: Shapes = {}
    for i in range(depth):
        block = f"{at}.resblocks.{i}"
        shapes |= {
            f"{block}.ln_1.weight": (width,),
            f"{block}.ln_1.bias": (width,),
            f"{block}.attn.in_proj_weight": (3 * width, width),
            f"{block}.attn.in_proj_bias": (3 * width,),
            f"{block}.attn.out_proj.weight": (width, width),
            f"{block}.attn.out_proj.bias": (width,),
            f"{block}.ln_2.weight": (width,),
            f"{block}.ln_2.bias": (width,),
            f"{block}.mlp.c_fc.weight": (4 * width, width),
            f"{block}.mlp.c_fc.bias": (4 * width,),
            f"{block}.mlp.c_proj.weight": (width, 4 * width),
            f"{block}.mlp.c_proj.bias": (width,),
        }
    return shapes


def open_clip_text(width: int, depth: int, vocabulary: int, length: int, joint: int) -> Shapes:
    return {
        "positional_embedding": (length, width),
        "text_projection": (width, joint),
        "logit_scale": (),
        "token_embedding.weight": (vocabulary, width),
        **open_clip_layers("transformer", width, depth),
        "ln_final.weight": (width,),
        "ln_final.bias": (width,),
    }


def open_clip_vit(width: int, depth: int, side: int, patch: int, joint: int) -> Shapes:
    return {
        "visual.class_embedding": (width,),
        "visual.positional_embedding": (1 + (side // patch) ** 2, width),
        "visual.proj": (width, joint),
        "visual.conv1.weight": (width, 3, patch, patch),
        "visual.ln_pre.weight": (width,),
        "visual.ln_pre.bias": (width,),
        **open_clip_layers("visual.transformer", width, depth),
        "visual.ln_post.weight": (width,),
        "visual.ln_post.bias": (width,),
    }


def open_clip_resnet(width: int, blocks: tuple[int, ...], side: int, joint: int) -> Shapes:
    shapes: Shapes = {}

    def convolution(name: str, bn: str, outputs: int, inputs: int, kernel: int) -> None:
        shapes[f"visual.{name}.weight"] = (outputs, inputs, kernel, kernel)
        for part in ("weight", "bias", "running_mean", "running_var"):
            shapes[f"visual.{bn}.{part}"] = (outputs,)
        shapes[f"visual.{bn}.num_batches_tracked"] = ()

    convolution("conv1", "bn1", width // 2, 3, 3)
    convolution("conv2", "bn2", width // 2, width // 2, 3)
    convolution("conv3", "bn3", width, width // 2, 3)
    inputs = width
    for stage, count in enumerate(blocks, start=1):
        planes = width * 2 ** (stage - 1)
        for block in range(count):
            at = f"layer{stage}.{block}"
            convolution(f"{at}.conv1", f"{at}.bn1", planes, inputs, 1)
            convolution(f"{at}.conv2", f"{at}.bn2", planes, planes, 3)
            convolution(f"{at}.conv3", f"{at}.bn3", 4 * planes, planes, 1)
            if block == 0:
                convolution(f"{at}.downsample.0", f"{at}.downsample.1", 4 * planes, inputs, 1)
            inputs = 4 * planes
    shapes["visual.attnpool.positional_embedding"] = (1 + (side // 32) ** 2, inputs)
    for part, outputs in (("k_proj", inputs), ("q_proj", inputs), ("v_proj", inputs), ("c_proj", joint)):
        shapes[f"visual.attnpool.{part}.weight"] = (outputs, inputs)
        shapes[f"visual.attnpool.{part}.bias"] = (outputs,)
    return shapes


def write(folder: Path, weights: dict[str, Tensor], file: str = "model.safetensors", **configs: object) -> Path:
    """Weights, and JSON files by their stems."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: p.contiguous() for name, p in weights.items()}, folder / file)
    for stem, content in configs.items():
        (folder / f"{stem}.json").write_text(json.dumps(content))
    return folder


def vocabulary() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """A byte-pair encoding in CLIP's form: all bytes, all bytes at the end of a word, merges, start and end token."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    extra = [256 + i for i in range(256 - len(printable))]
    signs = [chr(i) for i in (*printable, *extra)]
    merges: list[tuple[str, str]] = []
    for word in " ".join(TEXTS).replace("'s", "").split():
        pieces = [*word[:-1], f"{word[-1]}</w>"]
        while len(pieces) > 1:
            pair = next((p for p in merges if p in itertools.pairwise(pieces)), (pieces[0], pieces[1]))
            if pair not in merges:
                merges.append(pair)
            at = list(itertools.pairwise(pieces)).index(pair)
            pieces[at : at + 2] = ["".join(pair)]
    tokens = [*signs, *(f"{sign}</w>" for sign in signs), *dict.fromkeys(map("".join, merges)), START, END]
    return {token: i for i, token in enumerate(tokens)}, merges


def write_tokenizer(folder: Path) -> int:
    """vocab.json and merges.txt -> the number of tokens."""
    vocab, merges = vocabulary()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.json").write_text(json.dumps(vocab), encoding="utf-8")
    lines = ["#version: 0.2", *(" ".join(pair) for pair in merges)]
    (folder / "merges.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return len(vocab)
