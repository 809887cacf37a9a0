"""Docstrings are plain sentences with `names` in backticks, without other markup."""

import re
from typing import Any

from sphinx.application import Sphinx


def escape(line: str) -> str:
    """Escape stars, bars and underscores outside backticks. A line that is a call is an example."""
    if line.startswith((">>> ", "...")):
        return line
    if re.fullmatch(r"\w+\(.*\)", line.strip()):
        return f"``{line.strip()}``"
    parts = re.split(r"(`[^`]*`)", line.strip())
    return "".join(part if part.startswith("`") else re.sub(r"([\\*|_])", r"\\\1", part) for part in parts)


def process(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    lines[:] = [escape(line) for line in lines]


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("autodoc-process-docstring", process)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
