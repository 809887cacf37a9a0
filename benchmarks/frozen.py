"""Speed-up from caching the outputs of frozen layers, compared with a training step written by hand.

Each ratio is the median over interleaved pairs on the same weights and data: CPU seconds of a plain step on one thread
divided by promptfed's. Every pair checks that loss and gradient of the prompts agree to 1e-5 of their largest entry.
The plain step below uses PyTorch's fused operations and needs no gradients of weights, but it computes all 77 tokens
of every sentence and the image tower in every step, and caches nothing between steps.

    text    16 context vectors before 100 class names in CLIP ViT-B/16 (PromptFL, CoOp); promptfed takes image features
            from its cache. The text tower alone (forward, loss, backward) is timed in the same pairs.
    prefix  SGPT's second block in ViT-B/16: the prompt of each sample's group enters at layers 4, 5 and 6 and stays;
            the shared prompts of layers 0 to 3 are frozen. promptfed takes the input of layer 4 from its cache, which
            alone can give 20 / 16 layers = 1.25; its last layer computes only the needed tokens, which gives the rest.
    peak    VPT-shallow in ViT-B/16, 10 tokens: FLOP/s of the matrix products in a forward pass and in a backward pass
            without gradients of weights, as a share of the rate of large matrix products between the steps.

Each part runs in its own process. Memory is the peak during a step, weights included, in the first pair: later pairs
reuse what the allocator kept. CPU seconds include the kernel's time to allocate memory, which tensors of more than
32 MB cost each time they are created. About six minutes of CPU time in total.

    python benchmarks/frozen.py [--parts text prefix peak] [--pairs 7] [--text-pairs 5]
"""

import argparse
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from promptfed.models.clip import clip
from promptfed.models.text import Sentences
from promptfed.models.vit import vit
from promptfed.params import Params

IMAGE, SIZE = (3, 224, 224), {"width": 768, "depth": 12, "heads": 12, "patch": 16, "mlp_ratio": 4}
CLASSES, CONTEXT, POSITIONS, VOCABULARY = 100, 16, 77, 49408
START, END, STOP = VOCABULARY - 2, VOCABULARY - 1, 269  # CLIP's ids of start token, end token and full stop
GROUPS, SHARED, GROUPED = 20, range(4), range(4, 7)  # SGPT: groups, layers of the shared and of the group prompts
TOKENS = 10  # VPT
TEXT_BATCH, BATCH = 32, 4


def plain_layer(w: Params, at: str, h: Tensor, heads: int, eps: float, gelu: Callable, causal: bool = False) -> Tensor:
    n, t, width = h.shape
    x = F.layer_norm(h, (width,), w[f"{at}.norm1.weight"], w[f"{at}.norm1.bias"], eps)
    q, k, v = F.linear(x, w[f"{at}.qkv.weight"], w[f"{at}.qkv.bias"]).chunk(3, dim=-1)
    q, k, v = (part.reshape(n, t, heads, width // heads).transpose(1, 2) for part in (q, k, v))
    x = F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2).reshape(n, t, width)
    h = h + F.linear(x, w[f"{at}.proj.weight"], w[f"{at}.proj.bias"])
    x = F.layer_norm(h, (width,), w[f"{at}.norm2.weight"], w[f"{at}.norm2.bias"], eps)
    x = gelu(F.linear(x, w[f"{at}.mlp.in.weight"], w[f"{at}.mlp.in.bias"]))
    return h + F.linear(x, w[f"{at}.mlp.out.weight"], w[f"{at}.mlp.out.bias"])


def quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def plain_patches(w: Params, at: str, x: Tensor) -> Tensor:
    h = F.conv2d(x, w[f"{at}.patch.weight"], w.get(f"{at}.patch.bias"), stride=16).flatten(2).transpose(1, 2)
    return torch.cat([w[f"{at}.cls"].expand(len(x), 1, -1), h], dim=1) + w[f"{at}.position"]


def plain_clip_image(w: Params, x: Tensor) -> Tensor:
    at = "body.image"
    h = plain_patches(w, at, x)
    h = F.layer_norm(h, (768,), w[f"{at}.norm_pre.weight"], w[f"{at}.norm_pre.bias"], 1e-5)
    for i in range(12):
        h = plain_layer(w, f"{at}.blocks.{i}", h, 12, 1e-5, quick_gelu)
    h = F.layer_norm(h[:, 0], (768,), w[f"{at}.norm.weight"], w[f"{at}.norm.bias"], 1e-5)
    return F.normalize(h @ w[f"{at}.proj"].T, dim=-1)


def plain_clip_text(w: Params, ids: Tensor, context: Tensor) -> Tensor:
    """ids (classes, 77); the end token is the largest id of a row."""
    at = "body.text"
    h = F.embedding(ids, w[f"{at}.tokens"])
    h = torch.cat([h[:, :1], context.expand(len(h), -1, -1), h[:, 1 + len(context) :]], dim=1) + w[f"{at}.position"]
    for i in range(12):
        h = plain_layer(w, f"{at}.blocks.{i}", h, 8, 1e-5, quick_gelu, causal=True)
    h = F.layer_norm(h, (512,), w[f"{at}.norm.weight"], w[f"{at}.norm.bias"], 1e-5)
    return F.normalize(h[torch.arange(len(h)), ids.argmax(dim=-1)] @ w[f"{at}.proj"].T, dim=-1)


def plain_vit(w: Params, x: Tensor, prompts: dict[int, Tensor], pooled: int) -> Tensor:
    """Prompts (B, T, width) enter at their layers and stay. -> logits from the mean of the first tokens."""
    h = plain_patches(w, "body", x)
    for i in range(12):
        if i in prompts:
            h = torch.cat([h[:, :1], prompts[i], h[:, 1:]], dim=1)
        h = plain_layer(w, f"body.blocks.{i}", h, 12, 1e-6, F.gelu)
    h = F.layer_norm(h, (768,), w["body.norm.weight"], w["body.norm.bias"], 1e-6)
    return F.linear(h[:, :pooled].mean(dim=1), w["head.weight"], w["head.bias"])


class Cost(NamedTuple):
    seconds: float  # CPU time
    system: float  # the kernel's part of it
    peak: float  # GB


def measured(work: Callable[[], Any]) -> tuple[Any, Cost]:
    reset = Path("/proc/self/clear_refs")
    if reset.exists():
        reset.write_text("5")  # Linux: resets the peak; elsewhere it is that of the process so far
    before = resource.getrusage(resource.RUSAGE_SELF)
    result = work()
    after = resource.getrusage(resource.RUSAGE_SELF)
    user, system = after.ru_utime - before.ru_utime, after.ru_stime - before.ru_stime
    status = Path("/proc/self/status").read_text() if reset.exists() else f"VmHWM: {after.ru_maxrss}"
    return result, Cost(user + system, system, int(status.split("VmHWM:")[1].split()[0]) / 2**20)


def gradient(logits: Tensor, y: Tensor, prompts: Tensor) -> tuple[Tensor, Tensor]:
    """-> loss, its gradient with respect to the prompts."""
    loss = F.cross_entropy(logits, y)
    return loss.detach(), torch.autograd.grad(loss, prompts)[0]


def difference(ours: tuple[Tensor, Tensor], plain: tuple[Tensor, Tensor]) -> float:
    """Of loss and gradient, each relative to its largest entry."""
    both = [float((a - b).abs().max() / b.abs().max()) for a, b in zip(ours, plain, strict=True)]
    if not all(d < 1e-5 for d in both):
        raise AssertionError(f"loss and gradient differ by {both}")
    return max(both)


def interleaved(pairs: int, *works: Callable[[], Any]) -> list[list[Cost]]:
    """-> the costs of each work, one per pair. The first and the last work return loss and gradient."""
    rounds = [[measured(work) for work in works] for _ in range(pairs)]
    worst = max(difference(row[0][0], row[-1][0]) for row in rounds)
    print(f"  largest relative difference of loss and gradient {worst:.1e}")
    return [[row[i][1] for row in rounds] for i in range(len(works))]


def spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def print_ratio(what: str, plain: Sequence[Cost], ours: Sequence[Cost], target: float) -> None:
    ratios = [a.seconds / b.seconds for a, b in zip(plain, ours, strict=True)]
    user = [(a.seconds - a.system) / (b.seconds - b.system) for a, b in zip(plain, ours, strict=True)]
    print(f"  {what}: median {spread(ratios)} of {len(ratios)} pairs; target {target}")
    print(f"    without kernel time {spread(user)}")


def print_costs(what: str, costs: Sequence[Cost]) -> None:
    system, peak = statistics.median(c.system for c in costs), costs[0].peak
    print(f"  {what}: {spread([c.seconds for c in costs])} s, {system:.2f} of it kernel time; peak {peak:.2f} GB")


def text(pairs: int) -> None:
    print(f"text: CLIP ViT-B/16, {CONTEXT} context vectors, {CLASSES} classes, batch {TEXT_BATCH}")
    model = clip(
        IMAGE, 0, **SIZE, text_width=512, text_depth=12, text_heads=8,
        vocabulary=VOCABULARY, context_length=POSITIONS, embedding=512,
    )  # fmt: skip
    w = model.weights
    for name in w:  # newly initialised layers make all sentences alike: gradients would be differences of near equals
        if name.startswith("body.text.blocks") and w[name].ndim == 2:
            w[name] *= 2
    g = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 5, (CLASSES,), generator=g).tolist()
    names = [torch.randint(1000, START, (n,), generator=g).tolist() for n in lengths]
    rows = [[START, *[0] * CONTEXT, *name, STOP, END] for name in names]
    sentences = Sentences.of(rows, [range(1, 1 + CONTEXT)] * CLASSES)
    ids = torch.tensor([row + [0] * (POSITIONS - len(row)) for row in rows])
    x, y = torch.randn(TEXT_BATCH, *IMAGE, generator=g), torch.randint(CLASSES, (TEXT_BATCH,), generator=g)
    context = torch.randn(CONTEXT, 512, generator=g).mul_(0.02).requires_grad_()
    cached = model.features(w, x)

    features = torch.empty_like(cached)

    def ours() -> tuple[Tensor, Tensor]:
        return gradient(model.logits(w, cached, model.text(w, sentences, context)), y, context)

    def plain_image() -> None:
        features.copy_(plain_clip_image(w, x))

    def plain_text() -> tuple[Tensor, Tensor]:
        return gradient(w["body.scale"].exp() * features @ plain_clip_text(w, ids, context).T, y, context)

    ours()
    mine, images, texts = interleaved(pairs, ours, plain_image, plain_text)
    steps = [
        Cost(a.seconds + b.seconds, a.system + b.system, max(a.peak, b.peak))
        for a, b in zip(images, texts, strict=True)
    ]
    print_ratio("step, image features cached", steps, mine, 10)
    print_ratio("text tower alone", texts, mine, 8)
    print_costs("plain image tower", images)
    print_costs("plain text tower", texts)
    print_costs("promptfed", mine)


def prefix(pairs: int) -> None:
    print(f"prefix: ViT-B/16, group prompts at layers 4, 5, 6, input of layer 4 cached, batch {BATCH}")
    model = vit(IMAGE, CLASSES, 0, **SIZE)
    w, g = model.weights, torch.Generator().manual_seed(0)
    x, y = torch.randn(BATCH, *IMAGE, generator=g), torch.randint(CLASSES, (BATCH,), generator=g)
    group = torch.randint(GROUPS, (BATCH,), generator=g)
    prompts = torch.randn(len(GROUPED), GROUPS, 768, generator=g).mul_(0.1).requires_grad_()
    shared = {i: 0.1 * torch.randn(1, 768, generator=g).expand(BATCH, 1, 768) for i in SHARED}
    pooled = 1 + len(GROUPED)  # cls and the group prompts after it
    cached = model.encode(w, model.embed(w, x), shared, "stay", stop=GROUPED[0])

    def grouped() -> dict[int, Tensor]:
        return {i: chosen[:, None] for i, chosen in zip(GROUPED, prompts[:, group], strict=True)}

    def ours() -> tuple[Tensor, Tensor]:
        h = model.encode(w, cached, grouped(), "stay", start=GROUPED[0], first_tokens=pooled)
        return gradient(model.classify(w, model.norm(w, h).mean(dim=1)), y, prompts)

    def plain() -> tuple[Tensor, Tensor]:
        return gradient(plain_vit(w, x, shared | grouped(), pooled), y, prompts)

    ours()
    mine, theirs = interleaved(pairs, ours, plain)
    print_ratio("step, prefix cached", theirs, mine, 1.3)
    print_costs("plain", theirs)
    print_costs("promptfed", mine)


def peak(pairs: int) -> None:
    print(f"peak: ViT-B/16, {TOKENS} tokens at the input, batch {BATCH}")
    model = vit(IMAGE, CLASSES, 0, **SIZE)
    w, g = model.weights, torch.Generator().manual_seed(0)
    x, y = torch.randn(BATCH, *IMAGE, generator=g), torch.randint(CLASSES, (BATCH,), generator=g)
    tokens = torch.randn(TOKENS, 768, generator=g).mul_(0.1).requires_grad_()
    squares = {n: torch.randn(n, n, generator=g) for n in (512, 1024, 2048)}
    # Two FLOP per multiplication. A layer of T tokens has 12 products of (T, 768) and (768, 768), forward and backward,
    # and in its attention two of (T, 768) and (768, T) forward, four backward. The last layer computes queries, keys
    # and values of all tokens and the rest of cls only. The patches are embedded once.
    t = 1 + TOKENS + 14 * 14
    layer, last = 2 * 12 * t * 768**2 + 6 * t**2 * 768, 2 * (3 * t + 9) * 768**2 + 6 * t * 768
    work = BATCH * 2 * (11 * layer + last + 14 * 14 * 768**2)

    def ours() -> tuple[Tensor, Tensor]:
        return gradient(model.classify(w, model.features(w, x, tokens)), y, tokens)

    def plain() -> tuple[Tensor, Tensor]:
        return gradient(plain_vit(w, x, {0: tokens.expand(BATCH, -1, -1)}, 1), y, tokens)

    def product_rate(n: int) -> float:
        started, times = time.process_time(), 2**34 // n**3
        for _ in range(times):
            squares[n] @ squares[n]
        return times * 2 * n**3 / (time.process_time() - started)

    mine, best, shares = [], [], []
    for _ in range(pairs):
        best.append(max(product_rate(n) for n in squares))
        _, cost = measured(ours)
        mine.append(cost)
        shares.append(100 * work / cost.seconds / best[-1])
    print(f"  share of the peak: median {spread(shares)} % of {pairs} pairs; an early prototype reached 75")
    print(f"  step: {spread([work / c.seconds / 1e9 for c in mine])} GFLOP/s of {work / 1e9:.0f} GFLOP")
    print(f"  products of large matrices: {spread([rate / 1e9 for rate in best])} GFLOP/s")
    print_costs("promptfed", mine)
    print(f"  largest relative difference of loss and gradient {difference(ours(), plain()):.1e}")


def alone(part: str, pairs: int) -> None:
    torch.set_num_threads(1)
    PARTS[part](pairs)


PARTS = {"text": text, "prefix": prefix, "peak": peak}


def main() -> None:
    import noise  # not needed by the parts, whose memory is measured

    parser = argparse.ArgumentParser()
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--text-pairs", type=int, default=5)
    args = parser.parse_args()
    for part in args.parts:
        pairs = args.text_pairs if part == "text" else args.pairs
        noise.in_own_process(alone, part, pairs)


if __name__ == "__main__":
    main()
