"""The contribution of SGPT's parts in a finished run: test accuracy with the selected groups, with the best single
group, and without group prompts; and the share of training samples trained in the group that they would select.

python scripts/sgpt_parts.py runs/NAME/sgpt-seed0...
"""

import argparse
from pathlib import Path

import torch

from promptfed.analysis.opened import Opened
from promptfed.methods.sgpt import Sgpt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+")
    for folder in parser.parse_args().runs:
        print(folder.name, ", ".join(f"{what} {100 * share:.1f} %" for what, share in parts(folder).items()))


@torch.no_grad()
def parts(folder: Path) -> dict[str, float]:
    opened = Opened(folder)
    method, model, sites = opened.method, opened.model, opened.federation.sites
    assert isinstance(method, Sgpt)
    prompts = method.tuning
    right = torch.zeros(prompts.groups + 2)  # each group for all; the selected one; none
    tested, agreed, trained = 0, 0, 0
    for client, site in enumerate(sites):
        work, params = opened.own(client)
        for batch, _ in opened.batches(work, opened.host.samples(site.test)):
            chosen = prompts.select(model, params, batch)
            alone = [torch.full_like(chosen, g) for g in range(prompts.groups)]
            for i, groups in enumerate([*alone, chosen, None]):
                logits = prompts.head(model, params, prompts.prompted(model, params, batch, groups))
                right[i] += (logits.argmax(1) == batch.y).sum()
            tested += len(batch.y)
        for batch, ctx in opened.batches(work, work.samples):
            near = prompts.similarity(model, params, batch)
            agreed += int((method.choose(near, batch, ctx) == near.argmax(1)).sum())
            trained += len(batch.y)
    opened.close()
    return {
        "selected groups": float(right[-2]) / tested,
        "best single group": float(right[:-2].max()) / tested,
        "no groups": float(right[-1]) / tested,
        "training agrees with selection": agreed / trained,
    }


if __name__ == "__main__":
    main()
