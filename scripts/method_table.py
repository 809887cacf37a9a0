"""Writes tables of all methods, made of `promptfed list methods`: in full into docs/methods/index.md, names alone into
README.md."""

from itertools import groupby
from pathlib import Path

from promptfed.cli.listing import LISTS, Rows, markdown

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- methods: scripts/method_table.py -->\n", "<!-- end of methods -->\n"


def names(rows: Rows) -> str:
    """A line for each family: what is tuned, and by which methods."""
    lines = ["| what is tuned | methods |", "|---|---|"]
    for family, members in groupby(rows, lambda row: str(row["family"])):
        each = ", ".join(f"`{row['name']}`" for row in members)
        lines.append(f"| {family} | {each} |")
    return "".join(f"{line}\n" for line in lines)


PAGES = {ROOT / "docs" / "methods" / "index.md": markdown, ROOT / "README.md": names}


def filled(page: Path) -> str:
    """The page with the table as it is now."""
    before, rest = page.read_text().split(BEGIN)
    return f"{before}{BEGIN}{PAGES[page](LISTS['methods']())}{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(filled(page))
