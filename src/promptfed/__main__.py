"""The command promptfed, also as python -m promptfed."""

import sys

from . import interrupts


def main() -> None:
    with interrupts.at_once():
        from . import cli
    try:
        cli.main()
    except KeyboardInterrupt:
        sys.exit(interrupts.CODE)


if __name__ == "__main__":
    main()
