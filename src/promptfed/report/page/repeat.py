"""Everything needed to repeat what the page shows."""

from __future__ import annotations

import shlex
import tomllib
from html import escape
from pathlib import Path

from ...runs import config as C
from ..gather import Group, ReportData, SeedRun
from .html import h2, listed

_MANY = 16  # methods whose complete configurations would make a page too large


def repeat(found: ReportData, out: Path) -> str:
    words = ["promptfed", "report", *map(str, found.folders), "--out", str(out)]
    apart = [entry.run.consortium for entry in found.entries]
    how = "" if all(apart) else (
        "A run is its configuration: save the one below as a file and start it. The same versions and the same dataset "
        "(fingerprint) give the same numbers. "
    )  # fmt: skip
    if any(apart):
        how += (
            "A consortium's run needs the sites with their own images besides: a configuration alone does not give the "
            "same numbers, nor do sites that answer at other times."
        )
    text = f"{h2('Repeat', 'To repeat it')}<p>{how.strip()}</p><p>This page:</p><pre>{escape(shlex.join(words))}</pre>"
    first, *others = found.groups
    if len(others) < _MANY:
        return text + "".join(map(_recipe, found.groups))
    text += (
        f'<p class="soft">The first, <b>{escape(first.label)}</b>, is listed in full. Of the others only what differs: '
        "sections of their configuration stand in place of the first's.</p>"
    )
    return text + _recipe(first) + "".join(_recipe(group, first) for group in others)


def _recipe(group: Group, like: Group | None = None) -> str:
    """`like`: the group whose facts and sections need not be told again."""
    commands = []
    for entry in group.entries:
        if entry.run.consortium:  # a name that is known would go on with its run
            agreed, again = entry.run.folder.parent.parent, f"{entry.run.folder.name}-again"
            commands.append(shlex.join(["promptfed", "flower", "submit", str(agreed), "--name", again]))
            continue
        extra = "" if entry is group.first else f" seed={entry.seed}"
        name = entry.run.folder.name
        commands.append(
            f"promptfed run {shlex.quote(group.first.run.folder.name)}.toml{extra} --out {shlex.quote(name)}"
        )
    told = _facts(group)
    known = _facts(like) if like else {}
    facts = {k: v for k, v in told.items() if known.get(k) != v}
    rows = "".join(f'<tr><th scope="row">{k}</th><td class="text wrap">{escape(v)}</td></tr>' for k, v in facts.items())
    config, name = _toml(group.first), group.first.run.folder.name
    if like and group.first.run.settings and like.first.run.settings:
        ours, theirs = group.first.run.settings, like.first.run.settings
        config = C.dump({key: value for key, value in ours.items() if theirs.get(key) != value}) or "the same"
        what = f"{name}.toml: what it has in place of {like.first.run.folder.name}.toml's"
    else:
        what = f"{name}.toml: the complete configuration"
    return (
        f"<details><summary>{escape(group.label)}</summary><pre>{escape(chr(10).join(commands))}</pre>"
        f'<div class="scroll"><table><tbody>{rows}</tbody></table></div>'
        f"<details><summary>{escape(what)}</summary>"
        f"<pre>{escape(config)}</pre></details></details>"
    )


def _facts(group: Group) -> dict[str, str]:
    numbers = group.first.numbers
    data = numbers.get("dataset") or group.first.about.get("dataset") or {}
    apart = bool(group.first.run.consortium)
    images = sum(one.train + one.val + one.test for one in group.first.run.shares) if apart else 0
    missing = "none: each site has its own images" if apart else "not on record: the run has no partition.json"
    return {
        "folder": ", ".join(str(entry.run.folder) for entry in group.entries),
        "seed": listed([entry.seed for entry in group.entries]),
        "rounds": f"{group.first.done} of {group.first.planned}",
        "dataset": f"{data.get('name', '–')}, {images or data.get('images') or data.get('n', '–')} images",
        "dataset fingerprint": str(data.get("fingerprint") or missing),
        "partition (sha256)": str(group.first.about.get("hash") or ("none" if apart else "not on record")),
        "versions": _versions(group),
    }


def _toml(entry: SeedRun) -> str:
    if not entry.run.settings:
        return "config.toml is not in the folder"
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
