"""Writes the table of methods into docs/methods/index.md, as `promptfed list methods --markdown` prints it."""

from pathlib import Path

from promptfed.cli.listing import LISTS, markdown

PAGE = Path(__file__).parents[1] / "docs" / "methods" / "index.md"
BEGIN, END = "<!-- methods: scripts/method_table.py -->\n", "<!-- end of methods -->\n"


def filled(text: str) -> str:
    """The page with the table as it is now."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}{markdown(LISTS['methods']())}{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text()))
