"""Every registered method ends with the parameters and metrics that are on record.

    python tests/test_golden.py            # records golden.json anew
    python tests/test_golden.py fedavg ... # records these cases, and leaves the others

A change of structure must not change a result. Where this machine rounds as the one that recorded a case did, results
are compared to the last bit; elsewhere, as numbers.
"""

import hashlib
import json
import os
import sys
import tempfile
from pathlib import Path

import lmdb
import numpy as np
import pytest
import torch
from safetensors.torch import load

import fitting
import promptfed
from promptfed.methods import ALIASES, METHODS

RECORD = Path(__file__).parent / "golden.json"
FIXTURES = Path(__file__).parent / "fixtures"  # a small CLIP and 128 drawings, which stay as they are
PART = {"clip-mini": "whole", "vit-mini": "image"}
SMALL = {**fitting.SMALL, "pfedpg": {"tokens": 2}, "fedmtl": {"iterations": 16}, "fedprox+maple": {"depth": 2}}
# FedPR projects prompts: on all weights there is nothing to project. References are compared with what they stand for.
NAMES = (
    *(name for name in METHODS if name not in ("fedpr", "class-mean", "centralised")),
    *ALIASES,
    "fedpr+vpt",
    "fedprox+maple",
    "moon+pt",
    "fedprox+ft",
)
# Heads on features as they are, and the learning rates of the recorded runs.
SLOW = {"lr": 0.005, "momentum": 0.0}
AS_RECORDED = {
    **{name: {**SLOW, "standardise": False} for name in ("head-tune", "fedvpt", "fedvpt-d", "fedpr+vpt")},
    **dict.fromkeys(("promptfl", "fedprox+maple"), SLOW),
    **{name: {"standardise": False} for name in ("fedit", "ffa-lora", "fedsa-lora", "flexlora")},
    "sgpt": {"lr": 0.01, "momentum": 0.9, "standardise": False},
}
CASES = {name: (name, {**SMALL.get(name, {}), **AS_RECORDED.get(name, {})}) for name in NAMES}
CASES["pfedpg plain"] = ("pfedpg", {**SMALL["pfedpg"], "attention_init": "plain"})
CASES |= {f"dp2fl {mode}": ("dp2fl", {**SMALL["dp2fl"], "privacy": mode}) for mode in ("embeddings", "sealed")}


def rounding() -> str:
    """A digest of what this machine makes of sums whose last bits depend on its order of operations."""
    g = torch.Generator().manual_seed(1)
    x, w = torch.randn(33, 65, generator=g), torch.randn(65, 129, generator=g)
    image, kernel = torch.randn(2, 3, 17, 17, generator=g), torch.randn(8, 3, 5, 5, generator=g)
    parts = [(x @ w).softmax(1), torch.nn.functional.conv2d(image, kernel).exp().sum(0), torch.nn.functional.gelu(x)]
    q = torch.randn(1, 2, 19, 8, generator=g)
    parts.append(torch.nn.functional.scaled_dot_product_attention(q, q, q))
    return hashlib.sha256(b"".join(p.numpy().tobytes() for p in parts)).hexdigest()[:16]


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """The server's state and what the clients remember, but for keys, which are random."""
    found = {f"server {name}": p for name, p in load((folder / "checkpoint.safetensors").read_bytes()).items()}
    env = lmdb.open(str(folder / "clients"), readonly=True, lock=False)
    with env.begin() as txn:
        for key, value in txn.cursor():
            found |= {f"{key.hex()} {name}": p for name, p in load(value).items()}
    env.close()
    return {name: p for name, p in found.items() if p.dtype != torch.uint8}


def drawings() -> promptfed.Dataset:
    with np.load(FIXTURES / "shapes.npz") as kept:
        arrays = {key: kept[key] for key in kept}
    names = {key: tuple(arrays.pop(key).tolist()) for key in ("classes", "domains")}
    half = (0.5, 0.5, 0.5)
    return promptfed.Dataset.from_arrays("drawings", mean=half, std=half, **names, **arrays)


def execute(name: str, settings: dict, folder: Path) -> promptfed.Result:
    return promptfed.run(
        method={"name": name, "epochs": 1, **settings},
        dataset=drawings(),
        partition={"name": "dirichlet", "alpha": 0.5, "clients": 3},
        backbone={"name": str(FIXTURES / "clip_mini"), "part": PART[fitting.embedded(name)]},
        rounds=2,
        seed=3,
        engine={"workers": 1, "device": "cpu"},
        out=folder,
    )


def outcome(result: promptfed.Result) -> dict:
    held = tensors(result.folder)
    digests = sorted(f"{p.dtype}{tuple(p.shape)}".encode() + p.numpy().tobytes() for p in held.values())
    numbers = {stage: kinds["last"] for stage, kinds in result.numbers["metrics"].items()}
    text = json.dumps([numbers, result.numbers["communication"]], sort_keys=True)
    floats = [p.double() for p in held.values() if p.is_floating_point()]
    return {
        "arithmetic": f"torch {torch.__version__}, {rounding()}",
        "parameters": hashlib.sha256(b"".join(digests)).hexdigest(),
        "metrics": hashlib.sha256(text.encode()).hexdigest(),
        "norm": float(f"{float(sum(p.square().sum() for p in floats)) ** 0.5:.6g}"),
        "local": numbers["aggregated"]["local"]["weighted"],
        "loss": numbers["aggregated"]["loss"],
    }


@pytest.mark.parametrize("case", CASES)
def test_a_method_ends_as_recorded(case, tmp_path):
    result = execute(*CASES[case], tmp_path / "run")
    fitting.check_result(result)
    wanted, found = json.loads(RECORD.read_text())[case], outcome(result)
    if found["arithmetic"] == wanted["arithmetic"]:
        assert found == wanted
    else:
        assert found["norm"] == pytest.approx(wanted["norm"], rel=1e-3)
        assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-2)
        assert found["local"] == pytest.approx(wanted["local"], abs=0.1)


def record(cases: list[str]) -> None:
    """Of all cases if none are named."""
    torch.set_num_threads(1)
    methods = json.loads(RECORD.read_text()) if cases else {}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["PROMPTFED_CACHE"] = folder + "/cache"
        for i, case in enumerate(cases or CASES):
            name, settings = CASES[case]
            methods[case] = outcome(execute(name, settings, Path(folder) / str(i)))
            print(case, methods[case]["local"], file=sys.stderr)
    RECORD.write_text(json.dumps({case: methods[case] for case in CASES}, indent=1) + "\n")


if __name__ == "__main__":
    record(sys.argv[1:])
