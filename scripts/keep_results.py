"""Copies what is worth keeping of a comparison: its table, and each run's result and rounds, without checkpoints.

python scripts/keep_results.py runs/NAME experiments/PAPER/NAME --replace /my/data=cifar10
"""

import argparse
import json
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("comparison", type=Path)
    parser.add_argument("kept", type=Path)
    parser.add_argument("--replace", action="append", default=[], metavar="OLD=NEW", help="in all that is copied")
    given = parser.parse_args()
    pairs = [pair.split("=", 1) for pair in given.replace]

    def cleaned(text: str) -> str:
        for old, new in pairs:
            text = text.replace(old, new)
        return text

    given.kept.mkdir(parents=True, exist_ok=True)
    for name in ("table.md", "table.json"):
        (given.kept / name).write_text(cleaned((given.comparison / name).read_text()))
    for file in sorted(given.comparison.glob("*/result.json")):
        folder = given.kept / file.parent.name
        folder.mkdir(exist_ok=True)
        (folder / "result.json").write_text(cleaned(json.dumps(json.loads(file.read_text())) + "\n"))
        # Of a round who took part, its loss, bytes, passes and summaries; the clients' own scores are in the result.
        lines = [json.loads(line) for line in (file.parent / "rounds.jsonl").read_text().splitlines()]
        for line in lines:
            for stage in line.values():
                if isinstance(stage, dict):
                    stage.pop("clients", None) if "summary" in stage else None
        (folder / "rounds.jsonl").write_text(cleaned("".join(json.dumps(line) + "\n" for line in lines)))


if __name__ == "__main__":
    main()
