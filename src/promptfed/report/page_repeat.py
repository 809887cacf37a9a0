"""Everything needed to repeat what the page shows."""

from __future__ import annotations

import shlex
import tomllib
from html import escape
from pathlib import Path

from .. import config as C
from .page_data import Entry, Found, Group
from .page_html import h2, listed


def repeat(found: Found, out: Path) -> str:
    words = ["promptfed", "report", *map(str, found.folders), "--out", str(out)]
    text = (
        f"{h2('Repeat', 'To repeat it')}<p>A run is its configuration: save the one below as a file and start it. The "
        "same versions and the same dataset (fingerprint) give the same numbers.</p>"
        f"<p>This page:</p><pre>{escape(shlex.join(words))}</pre>"
    )
    return text + "".join(_recipe(group) for group in found.groups)


def _recipe(group: Group) -> str:
    settings = group.first.run.settings
    seeds = [entry.seed for entry in group.entries]
    commands = []
    for entry in group.entries:
        extra = "" if entry is group.first else f" seed={entry.seed}"
        name = entry.run.folder.name
        commands.append(
            f"promptfed run {shlex.quote(group.first.run.folder.name)}.toml{extra} --out {shlex.quote(name)}"
        )
    numbers = group.first.numbers
    data = numbers.get("dataset") or group.first.about.get("dataset") or {}
    facts = {
        "folder": ", ".join(str(entry.run.folder) for entry in group.entries),
        "seed": listed(seeds),
        "rounds": f"{group.first.done} of {group.first.planned}",
        "dataset": f"{data.get('name', '–')}, {data.get('images', data.get('n', '–'))} images",
        "dataset fingerprint": str(data.get("fingerprint") or "not on record: the run has no partition.json"),
        "partition (sha256)": str(group.first.about.get("hash") or "not on record"),
        "versions": _versions(group),
    }
    rows = "".join(f'<tr><th scope="row">{k}</th><td class="text wrap">{escape(v)}</td></tr>' for k, v in facts.items())
    config = _toml(group.first) if settings else "config.toml is not in the folder"
    return (
        f"<details><summary>{escape(group.label)}</summary><pre>{escape(chr(10).join(commands))}</pre>"
        f'<div class="scroll"><table><tbody>{rows}</tbody></table></div>'
        f"<details><summary>{escape(group.first.run.folder.name)}.toml: the complete configuration</summary>"
        f"<pre>{escape(config)}</pre></details></details>"
    )


def _toml(entry: Entry) -> str:
    file = entry.run.folder / "config.toml"
    try:
        text = file.read_text()
        tomllib.loads(text)
    except (OSError, ValueError):
        return C.dump(entry.run.settings)
    return text


def _versions(group: Group) -> str:
    told = [entry.numbers.get("versions") for entry in group.entries]
    known = [one for one in told if one]
    if not known:
        return "not on record: they are written when a run is finished"
    text = ", ".join(f"{name} {version}" for name, version in known[0].items())
    return text if all(one == known[0] for one in told) else f"{text}; other seeds differ or are not on record"
