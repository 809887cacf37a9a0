"""The most that a stranger can have parsed: messages as large as the limits allow, each as costly as can be.

Prints what becomes of each, and by how many megabytes the peak of this process has risen.
"""

import json
import resource
import time

import flower_wire as fuzz

from promptfed.flower.wire import LIMITS

EVALUATE = 1 + 3 * fuzz.ASKS.index("evaluate")
REQUEST, BLOB = 0, 2


def scored(counts: str) -> str:
    """An answer with these counts of hits in it, which add up if they are ones."""
    none = '"fp": [], "fn": []'
    hits = f'"n": {counts.count("1")}, "tp": [{counts}]'
    scores = f'{{"val": {{{none}, {hits}}}, "test": {{{none}, "n": 0, "tp": []}}}}'
    return f'{{"version": 3, "sizes": [], "result": {{"client": 0, "passes": 0, "scores": {scores}}}}}'


def keyed(count: int) -> str:
    return ", ".join(f'"{i:x}": 1' for i in range(count))


def header(tensors: str) -> str:
    return f'{{"__metadata__": {{"promptfed": "{{}}"}}, {tensors}}}'


def tensor(name: int, begin: int, end: int) -> str:
    return f'"{name}": {{"dtype": "U8", "shape": [1], "data_offsets": [{begin}, {end}]}}'


CASES = {
    "numbers": (EVALUATE, scored(",".join("1" * 1_000_000))),
    "too many numbers": (EVALUATE, scored(",".join("1" * (LIMITS.head // 2 - 200)))),
    "wrong numbers": (EVALUATE, scored("-1," * 999_999 + "0")),
    "keys": (REQUEST, f"{{{keyed(LIMITS.parts - 1)}}}"),
    "digests": (REQUEST, f'{{"note": {{"clients": [{{"client": 0, "once": {{{keyed(LIMITS.parts - 9)}}}}}]}}}}'),
    "empty lists": (REQUEST, f'{{"note": [{", ".join(["[]"] * (LIMITS.parts - 9))}]}}'),
    "too many lists": (REQUEST, f"[{','.join(['[]'] * 1_000_000)}]"),
    "deep": (REQUEST, "[" * LIMITS.parts),
    "digits": (REQUEST, f'{{"version": {"9" * 4_000_000}}}'),
    "halves of pairs": (REQUEST, '"' + "\\ud800" * 600_000 + '"'),
    "tensors": (BLOB, header(", ".join(tensor(i, i, i + 1) for i in range(LIMITS.tensors)))),
    "no tensors": (BLOB, header(keyed(LIMITS.tensors))),
    "large tensors": (BLOB, header(", ".join(tensor(i, 0, 1 << 53) for i in range(LIMITS.tensors)))),
}


def peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    base, found = peak(), {}
    for name, (kind, text) in CASES.items():
        fuzz.seen.clear()
        begun = time.process_time()
        data = bytes(LIMITS.tensors) if kind == BLOB else b""
        fuzz.one(bytes([kind, 0]) + text.encode() + (fuzz.MARK + data if data else b""))
        found[name] = [*fuzz.seen, round(time.process_time() - begun, 2), round(peak() - base)]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
