"""Writes the table of methods into README.md, as `promptfed list methods --markdown` prints it."""

from pathlib import Path

from promptfed.cli.listing import LISTS, markdown

README = Path(__file__).parents[1] / "README.md"
BEGIN, END = "<!-- methods: scripts/method_table.py -->\n", "<!-- end of methods -->\n"


def filled(text: str) -> str:
    """The README with the table as it is now."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}{markdown(LISTS['methods']())}{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    README.write_text(filled(README.read_text()))
