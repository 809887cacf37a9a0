"""Analyses of finished runs and comparisons: each makes a picture, a CSV and a caption."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import UserError, unknown
from .base import Analysis, Found, Options

ANALYSES: dict[str, Analysis] = {
    "attention": Analysis("what the last layer attends to, with and without the prompt", "run", "attention.attention"),
    "colours-tsne": Analysis("features of pure colours under each client's prompt", "run", "colours.embedded"),
    "colours-labels": Analysis("classes predicted on pure colours against a client's own", "run", "colours.predicted"),
    "drift": Analysis("how far parameters move in each round", "run", "recorded.drift"),
    "leakage": Analysis("label distributions that uploads reveal", "run", "leakage.leakage"),
    "groups": Analysis("what SGPT's groups hold, and how stable they are", "run", "groups.groups"),
    "selection": Analysis("how steadily clients select SGPT's groups over rounds", "run", "selection.selection"),
    "helps": Analysis("DP2FL's weights of others in each client's data prompt", "run", "helps.helps"),
    "clients": Analysis("each client's accuracy, at all stages", "run", "recorded.clients"),
    "partition": Analysis("who holds which classes", "run", "recorded.partition"),
    "scatter": Analysis("global against worst-client accuracy of all runs", "comparison", "compared.scatter"),
    "sweep": Analysis("accuracy over the prompt's size, by its kind", "comparison", "compared.sweep"),
}


@dataclass(frozen=True)
class Made:
    files: dict[str, list[Path]]  # by analysis: picture, tables, caption
    left_out: dict[str, str]  # by analysis: why it does not apply


def make(
    folder: str | Path, names: Sequence[str] = (), out: str | Path | None = None, options: Options | None = None
) -> Made:
    """Makes analyses of a run or of a comparison, into its folder analysis/ unless `out` is given.

    Without names all that apply; a named one that does not apply is an error.
    """
    from .opened import Comparison, Opened  # slow to import

    folder = Path(folder)
    kind = "comparison" if is_comparison(folder) else "run"
    for name in names:
        if name not in ANALYSES:
            raise unknown("analyse", name, ANALYSES)
        if ANALYSES[name].of != kind:
            raise UserError(f'{name} is an analysis of a {ANALYSES[name].of}, and "{folder}" holds a {kind}')
    wanted = names or [name for name, analysis in ANALYSES.items() if analysis.of == kind]
    made = Made({}, {})
    out = Path(out) if out else folder / "analysis"
    if out.exists() and not out.is_dir():
        raise UserError(f'--out = "{out}" is not a folder')
    of = Comparison.read(folder) if kind == "comparison" else Opened(folder)
    try:
        for name in wanted:
            try:
                found = ANALYSES[name].function(of, options or Options())
            except UserError as error:
                if names:
                    raise
                made.left_out[name] = str(error)
                continue
            made.files[name] = found.save(out, name)
    finally:
        of.close()
    return made


def is_comparison(folder: Path) -> bool:
    return not (folder / "config.toml").exists() and any(folder.glob("*/result.json"))


__all__ = ["ANALYSES", "Analysis", "Found", "Made", "Options", "make"]
