"""The contribution of SGPT's parts in a finished run: test accuracy with the selected groups, with the best single
group, and without group prompts; the share of training samples trained in the group that they would select; and how
many times less the pooled feature varies over images, against its constant part, than the class token beside the same
prompts.

python scripts/sgpt_parts.py runs/NAME/sgpt-seed0...
"""

import argparse
from pathlib import Path

import torch

from promptfed.analysis.opened import Opened
from promptfed.methods.sgpt import Sgpt
from promptfed.tunings.heads import SCALE


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+")
    for folder in parser.parse_args().runs:
        found, steadier = parts(folder)
        shares = ", ".join(f"{what} {100 * share:.1f} %" for what, share in found.items())
        print(f"{folder.name} {shares}; variance against the constant part {steadier:.1f} times less than that of cls")


@torch.no_grad()
def parts(folder: Path) -> tuple[dict[str, float], float]:
    opened = Opened(folder)
    method, model, sites = opened.method, opened.model, opened.federation.sites
    assert isinstance(method, Sgpt)
    prompts = method.tuning
    right = torch.zeros(prompts.groups + 2)  # each group for all; the selected one; none
    tested, agreed, trained = 0, 0, 0
    features: dict[str, list[torch.Tensor]] = {"mean": [], "cls": []}  # by what the head sees
    for client, site in enumerate(sites):
        work, params = opened.own(client)
        for batch, _ in opened.batches(work, opened.host.samples(site.test)):
            chosen = prompts.select(model, params, batch)
            alone = [torch.full_like(chosen, g) for g in range(prompts.groups)]
            for i, groups in enumerate([*alone, chosen, None]):
                logits = prompts.head(model, params, prompts.prompted(model, params, batch, groups))
                right[i] += (logits.argmax(1) == batch.y).sum()
            raw = {name: p for name, p in params.items() if not name.startswith(f"{SCALE}.")}
            for pool, found in features.items():
                found.append(prompts.model_copy(update={"pool": pool}).prompted(model, raw, batch, chosen))
            tested += len(batch.y)
        for batch, ctx in opened.batches(work, work.samples):
            near = prompts.similarity(model, params, batch)
            agreed += int((method.choose(near, batch, ctx) == near.argmax(1)).sum())
            trained += len(batch.y)
    opened.close()
    varied = {pool: torch.cat(found).double() for pool, found in features.items()}
    share = {pool: float(x.var(0).sum() / x.mean(0).square().sum()) for pool, x in varied.items()}
    shares = {
        "selected groups": float(right[-2]) / tested,
        "best single group": float(right[:-2].max()) / tested,
        "no groups": float(right[-1]) / tested,
        "training agrees with selection": agreed / trained,
    }
    return shares, share["cls"] / share["mean"]


if __name__ == "__main__":
    main()
