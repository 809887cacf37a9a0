"""promptfed report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


def report(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR...", help="folders of runs or comparisons")],
    out: Annotated[Path, typer.Option("--out", help="the page to write")] = Path("report.html"),
) -> None:
    """Put runs and comparisons on one HTML page that is read without a network."""
    from ..report.page import write  # altair is slow to import, and not every command draws

    path = write(folders, out)
    Console().print(f"report: {path} ({path.stat().st_size / 1e6:.1f} MB)", soft_wrap=True)
