"""The command promptfed, also as python -m promptfed."""

import sys

from .cli import interrupts


def main() -> None:
    with interrupts.at_once():
        from .cli import main as command
    try:
        command.main()
    except KeyboardInterrupt:
        sys.exit(interrupts.CODE)


if __name__ == "__main__":
    main()
