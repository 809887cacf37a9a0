"""Pretrain clip-mini, the embedded foundation model, on drawn pictures and their captions.

    python scripts/train_clip_mini.py --work WORK --out src/promptfed/models/clip_mini

Every picture is new: each block of steps draws its own from the seed and the block's number. A stopped run resumes from
the last checkpoint in WORK. The files in OUT have the layout of `transformers`' CLIPModel, in 16-bit floats.
"""

import argparse
import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import captioned_drawings as world
import numpy as np
import torch
from clip_mini_words import END, START, tokenizer
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F

from promptfed.data.drawing import SHAPES, SIZE
from promptfed.models.clip import CLIP, clip
from promptfed.models.pretrained.load import load
from promptfed.models.text import Sentences
from promptfed.models.vit import ViT
from promptfed.params import Params

CONTEXT = 24  # tokens
BLOCK = 128  # steps whose pictures are drawn together; also the steps between checkpoints


@dataclass(frozen=True)
class Settings:
    steps: int
    batch: int
    lr: float
    warmup: int
    ramp: int  # steps until the pictures are as hard as the dataset's
    weight_decay: float
    patch: int
    width: int
    depth: int
    heads: int
    text_width: int
    text_depth: int
    text_heads: int
    embedding: int
    mlp_ratio: int
    seed: int
    start: str  # folder of an earlier clip-mini to begin with; empty: from scratch
    naming: float  # weight of the loss that names the attributes
    tracing: float  # weight of the loss that finds the first thing's pixels


def sentences(words: Tokenizer, texts: list[str]) -> Sentences:
    return Sentences.of([encoded.ids for encoded in words.encode_batch(texts)])


def normalised(pictures: np.ndarray) -> Tensor:
    return torch.from_numpy(pictures).float() / 127.5 - 1


@dataclass
class Lesson:
    """One batch: pictures, distinct sentences, which match, and the attributes."""

    pictures: Tensor  # (B, 3, 32, 32)
    texts: list[str]  # T of them
    fits: Tensor  # bool (B, T)
    attributes: Tensor  # int64 (B, 8)
    inside: Tensor  # (B, 16, 64), 1 where the first thing is, by patch


class Lessons:
    """The pictures of one block of steps, and a caption for each.

    Trained on shapes of any size anywhere from the start, a transformer learns colours and little else for a long time:
    the first blocks are easier.
    """

    def __init__(self, settings: Settings, block: int):
        seed = settings.seed * 1_000_003 + block + 1  # evaluation draws from other seeds
        first = 0.6 if settings.start else 0.15
        ease = min(1.0, first + (1 - first) * block * BLOCK / settings.ramp)
        self.scenes = world.sample(BLOCK * settings.batch, seed, ease)
        self.told = world.mentioned(self.scenes, seed)
        if ease < 1:
            self.told[:, 3] = False  # easier scenes are larger than their size says
        self.texts = self.scenes.captions(self.told)
        self.batch, self.patch = settings.batch, settings.patch

    def __getitem__(self, step: int) -> Lesson:
        part = slice(step * self.batch, (step + 1) * self.batch)
        told, attributes = self.told[part], self.scenes.attributes[part]
        # captions of half of the pictures: a text costs half as much as a picture
        texts = {text: i for i, text in enumerate(self.texts[part][: self.batch // 2])}
        kept = list(texts.values())
        same = attributes[:, None] == attributes[None, kept]  # (B, T, 8)
        fits = (same | ~told[None, kept]).all(2)  # a picture fits every caption that is true of it
        pictures = normalised(self.scenes.pictures[part])
        inside = torch.from_numpy(self.scenes.outlines(part)).float()[:, None]
        by_patch = F.unfold(inside, self.patch, stride=self.patch).transpose(1, 2)
        return Lesson(pictures, list(texts), torch.from_numpy(fits), torch.from_numpy(attributes), by_patch)


def contrast(logits: Tensor, fits: Tensor) -> Tensor:
    """CLIP's symmetric loss, with several fitting captions per picture and pictures per caption; logits (B, T)."""
    fitting = fits.any(1)  # pictures that have a caption here
    target = fits.float()
    by_picture = -((logits.log_softmax(1) * target).sum(1) / target.sum(1).clamp(min=1))[fitting]
    by_text = -(logits.log_softmax(0) * target).sum(0) / target.sum(0)
    return (by_picture.mean() + by_text.mean()) / 2


@torch.no_grad()
def image_features(model: CLIP, pictures: np.ndarray) -> Tensor:
    parts = [model.features(model.weights, normalised(pictures[i : i + 256])) for i in range(0, len(pictures), 256)]
    return torch.cat(parts)


def named(logits: Tensor, attributes: Tensor) -> Tensor:
    """Cross-entropy of all attributes at once, each read off the class token by a linear head; logits (B, sum)."""
    parts = logits.split(tuple(world.ATTRIBUTES.values()), 1)
    return sum((F.cross_entropy(part, attributes[:, i]) for i, part in enumerate(parts)), torch.zeros(()))


@torch.no_grad()
def report(model: CLIP, words: Tokenizer, count: int, seed: int) -> dict[str, float]:
    """Zero-shot accuracy in percent on new pictures: of the shape, by style, and of other attributes."""
    scenes = world.sample(count, seed)
    features = image_features(model, scenes.pictures)

    def right(names: Sequence[str], attribute: int) -> np.ndarray:
        text = model.text(model.weights, sentences(words, [f"a photo of a {name}." for name in names]))
        hit: np.ndarray = (features @ text.T).argmax(1).numpy() == scenes.attributes[:, attribute]
        return hit

    shape, style, relation = right(SHAPES, 0), scenes.attributes[:, 4], scenes.attributes[:, 5]
    alone = relation == 0
    groups = {"shape": shape[alone], "shape among others": shape[~alone]}
    groups |= {name: shape[alone & (style == i)] for i, name in enumerate(world.STYLES)}
    groups["colour"] = right([f"{name} shape" for name in world.COLOURS], 1)[alone]
    textured = alone & (scenes.attributes[:, 2] > 0)
    groups["texture"] = right([f"{name} shape" for name in world.TEXTURES], 2)[textured]
    return {name: round(100 * float(members.mean()), 1) for name, members in groups.items()}


def train(settings: Settings, work: Path, words: Tokenizer) -> tuple[CLIP, float]:
    """The trained model and the seconds it took, including interrupted runs."""
    model = clip(
        (3, SIZE, SIZE),
        settings.seed,
        name="clip-mini",
        patch=settings.patch,
        width=settings.width,
        depth=settings.depth,
        heads=settings.heads,
        text_width=settings.text_width,
        text_depth=settings.text_depth,
        text_heads=settings.text_heads,
        vocabulary=words.get_vocab_size(),
        context_length=CONTEXT,
        embedding=settings.embedding,
        mlp_ratio=settings.mlp_ratio,
    )
    if settings.start:
        model.weights |= begun(Path(settings.start), model.weights, words)
    else:
        model.weights |= spread_out(model.weights, settings)
    # of pre-training only: what the class token and the patches are asked
    model.weights["naming"] = torch.zeros(settings.width, sum(world.ATTRIBUTES.values()))
    model.weights["tracing"] = torch.zeros(settings.width, settings.patch**2)
    for p in model.weights.values():
        p.requires_grad_()
    matrices = [p for name, p in model.weights.items() if p.ndim > 1 and "position" not in name]
    rest = [p for name, p in model.weights.items() if p.ndim <= 1 or "position" in name]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": rest, "weight_decay": 0.0}],
        lr=settings.lr,
        betas=(0.9, 0.98),
    )
    checkpoint, step, spent = work / "checkpoint.safetensors", 0, 0.0
    if checkpoint.exists():
        step, spent = restore(checkpoint, settings, model.weights, optimizer)
        print(f"resuming from step {step}", flush=True)
    began = time.perf_counter() - spent
    while step < settings.steps:
        lessons = Lessons(settings, step // BLOCK)
        losses = []
        for within in range(step % BLOCK, min(BLOCK, settings.steps - step // BLOCK * BLOCK)):
            lesson = lessons[within]
            for group in optimizer.param_groups:
                group["lr"] = settings.lr * schedule(step, settings)
            token, patches = encoded(model, lesson.pictures)
            image = model.join(model.weights, token)
            text = model.text(model.weights, sentences(words, lesson.texts))
            loss = contrast(model.logits(model.weights, image, text), lesson.fits)
            loss = loss + settings.naming * named(token @ model.weights["naming"], lesson.attributes)
            loss = loss + settings.tracing * F.binary_cross_entropy_with_logits(
                patches @ model.weights["tracing"], lesson.inside
            )
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(model.weights.values(), 1.0)
            optimizer.step()
            with torch.no_grad():
                model.weights["body.scale"].clamp_(max=math.log(100))
            losses.append(loss.item())
            step += 1
        spent = time.perf_counter() - began
        save(checkpoint, settings, model.weights, optimizer, step, spent)
        if step // BLOCK % 4:
            continue
        now = report(model, words, 1024, seed=900_001)
        line = ", ".join(f"{name} {now[name]:.1f}" for name in ("shape", "shape among others", "colour", "texture"))
        print(f"step {step:5d}  {spent:5.0f} s  loss {np.mean(losses):.3f}  zero-shot {line}", flush=True)
    model.weights = {name: p.detach() for name, p in model.weights.items()}
    return model, spent


def spread_out(weights: Params, settings: Settings) -> Params:
    """Larger weights of the image tower to begin with, and positions that tell patches apart: from the usual small ones
    a tower of this size takes several times as many steps until it sees shapes."""
    at = "body.image."
    larger = {n: 3 * p for n, p in weights.items() if n.startswith(at) and p.ndim > 1 and "cls" not in n}
    side = SIZE // settings.patch
    place = torch.arange(side) * math.pi / 2
    waves = 0.1 ** (torch.arange(settings.width // 4) / (settings.width // 4))  # per patch
    row, column = (w.reshape(-1, 1) * waves for w in torch.meshgrid(place, place, indexing="ij"))
    position = weights[f"{at}position"].clone()
    position[0, 1:] = 0.5 * torch.cat([row.sin(), row.cos(), column.sin(), column.cos()], 1)
    return {**larger, f"{at}position": position}


def begun(folder: Path, weights: Params, words: Tokenizer) -> Params:
    """The weights of an earlier clip-mini; words that it does not know begin at random."""
    earlier = load(str(folder), 2, 0, names=("a", "b")).weights
    known = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab()
    tokens = weights["body.text.tokens"].clone()
    for word, i in words.get_vocab().items():
        if word in known:
            tokens[i] = earlier["body.text.tokens"][known[word]]
    return {**{name: earlier[name].clone() for name in weights}, "body.text.tokens": tokens}


def encoded(model: CLIP, pictures: Tensor) -> tuple[Tensor, Tensor]:
    """Class tokens (B, width) and patches (B, 16, width) after the last norm."""
    tower = model.image_tower
    assert isinstance(tower, ViT)
    h = tower.norm(model.weights, tower.encode(model.weights, tower.embed(model.weights, pictures), None))
    return h[:, 0], h[:, 1:]


def schedule(step: int, settings: Settings) -> float:
    """Linear warm-up, then half a cosine down to 0."""
    if step < settings.warmup:
        return (step + 1) / settings.warmup
    return (1 + math.cos(math.pi * (step - settings.warmup) / (settings.steps - settings.warmup))) / 2


def save(
    path: Path, settings: Settings, weights: Params, optimizer: torch.optim.Optimizer, step: int, spent: float
) -> None:
    tensors = {f"weight.{name}": p.detach() for name, p in weights.items()}
    for name, p in weights.items():
        tensors |= {f"{key}.{name}": optimizer.state[p][key] for key in ("exp_avg", "exp_avg_sq", "step")}
    about = {"settings": repr(settings), "step": str(step), "spent": str(spent)}
    save_file(tensors, path.with_suffix(".part"), about)
    path.with_suffix(".part").replace(path)


def restore(path: Path, settings: Settings, weights: Params, optimizer: torch.optim.Optimizer) -> tuple[int, float]:
    with safe_open(path, "pt") as file:
        about = file.metadata()
    if about["settings"] != repr(settings):
        raise SystemExit(f"{path} is from a run with other settings; delete it or choose another --work")
    tensors = load_file(path)
    for name, p in weights.items():
        p.data.copy_(tensors[f"weight.{name}"])
        optimizer.state[p] = {key: tensors[f"{key}.{name}"] for key in ("exp_avg", "exp_avg_sq", "step")}
    return int(about["step"]), float(about["spent"])


def export(model: CLIP, settings: Settings, words: Tokenizer, out: Path) -> None:
    """config.json, model.safetensors, tokenizer.json and preprocessor_config.json as `transformers` names them."""
    out.mkdir(parents=True, exist_ok=True)
    common = {"hidden_act": "quick_gelu", "layer_norm_eps": 1e-5, "attention_dropout": 0.0}
    config = {
        "architectures": ["CLIPModel"],
        "model_type": "clip",
        "projection_dim": settings.embedding,
        "logit_scale_init_value": 2.6592,
        "text_config": {
            "model_type": "clip_text_model",
            "vocab_size": words.get_vocab_size(),
            "hidden_size": settings.text_width,
            "intermediate_size": settings.mlp_ratio * settings.text_width,
            "num_hidden_layers": settings.text_depth,
            "num_attention_heads": settings.text_heads,
            "max_position_embeddings": CONTEXT,
            "projection_dim": settings.embedding,
            "bos_token_id": words.token_to_id(START),
            "eos_token_id": words.token_to_id(END),
            "pad_token_id": words.token_to_id(END),
            **common,
        },
        "vision_config": {
            "model_type": "clip_vision_model",
            "image_size": SIZE,
            "num_channels": 3,
            "patch_size": settings.patch,
            "hidden_size": settings.width,
            "intermediate_size": settings.mlp_ratio * settings.width,
            "num_hidden_layers": settings.depth,
            "num_attention_heads": settings.heads,
            "projection_dim": settings.embedding,
            **common,
        },
    }
    preprocessor = {
        "image_processor_type": "CLIPImageProcessor",
        "do_convert_rgb": True,
        "do_resize": True,
        "size": {"shortest_edge": SIZE},
        "resample": 3,
        "do_center_crop": True,
        "crop_size": {"height": SIZE, "width": SIZE},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    marks = {
        "tokenizer_class": "CLIPTokenizer",
        "model_max_length": CONTEXT,
        "bos_token": START,
        "eos_token": END,
        "unk_token": END,
        "pad_token": END,
    }
    for name, content in (
        ("config", config),
        ("preprocessor_config", preprocessor),
        ("tokenizer_config", marks),
    ):
        (out / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")
    words.save(str(out / "tokenizer.json"))
    tensors = {name: p.half().contiguous() for name, p in published(model, settings).items()}
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    (out / "model.safetensors").chmod(0o644)  # safetensors writes it readable by its owner only


def published(model: CLIP, settings: Settings) -> Params:
    """The weights under the names of `transformers`' CLIPModel."""
    w = model.weights
    named: Params = {
        "logit_scale": w["body.scale"],
        "visual_projection.weight": w["body.image.proj"],
        "text_projection.weight": w["body.text.proj"],
        "text_model.embeddings.token_embedding.weight": w["body.text.tokens"],
        "text_model.embeddings.position_embedding.weight": w["body.text.position"],
        "vision_model.embeddings.class_embedding": w["body.image.cls"].flatten(),
        "vision_model.embeddings.patch_embedding.weight": w["body.image.patch.weight"],
        "vision_model.embeddings.position_embedding.weight": w["body.image.position"][0],
    }
    layers = {"norm1": "layer_norm1", "norm2": "layer_norm2", "proj": "self_attn.out_proj"}
    layers |= {"mlp.in": "mlp.fc1", "mlp.out": "mlp.fc2"}
    for kind in ("weight", "bias"):
        named[f"vision_model.pre_layrnorm.{kind}"] = w[f"body.image.norm_pre.{kind}"]  # so spelled
        named[f"vision_model.post_layernorm.{kind}"] = w[f"body.image.norm.{kind}"]
        named[f"text_model.final_layer_norm.{kind}"] = w[f"body.text.norm.{kind}"]
        for tower, theirs, depth in (
            ("image", "vision_model", settings.depth),
            ("text", "text_model", settings.text_depth),
        ):
            for i in range(depth):
                ours, at = f"body.{tower}.blocks.{i}", f"{theirs}.encoder.layers.{i}"
                for name, other in layers.items():
                    named[f"{at}.{other}.{kind}"] = w[f"{ours}.{name}.{kind}"]
                for name, part in zip("qkv", w[f"{ours}.qkv.{kind}"].chunk(3), strict=True):
                    named[f"{at}.self_attn.{name}_proj.{kind}"] = part
    return named


def main() -> None:
    parser = argparse.ArgumentParser(description="Pretrain clip-mini.")
    parser.add_argument("--work", type=Path, required=True, help="folder for the checkpoint and the results")
    parser.add_argument("--out", type=Path, required=True, help="folder for the finished model")
    parser.add_argument("--threads", type=int, default=1)
    defaults = {
        "steps": 12288, "batch": 64, "warmup": 200, "ramp": 5000, "patch": 8, "width": 128, "depth": 6, "heads": 4,
        "text_width": 128, "text_depth": 3, "text_heads": 4, "embedding": 128, "mlp_ratio": 2, "seed": 0,
    }  # fmt: skip
    for name, default in defaults.items():
        parser.add_argument("--" + name.replace("_", "-"), type=int, default=default)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--start", default="")
    parser.add_argument("--naming", type=float, default=1.0)
    parser.add_argument("--tracing", type=float, default=4.0)
    parser.add_argument("--weight-decay", type=float, default=0.05)
    given = vars(parser.parse_args())
    work, out, threads = given.pop("work"), given.pop("out"), given.pop("threads")
    settings = Settings(**given)
    work.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(threads)
    words = tokenizer(world.vocabulary())
    model, spent = train(settings, work, words)
    model.weights = {name: p.half().float() for name, p in model.weights.items()}  # as stored in the files
    export(model, settings, words, out)
    results = {
        "minutes": round(spent / 60, 1),
        "zero-shot": report(model, words, 12_800, seed=900_002),
    }
    (work / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
