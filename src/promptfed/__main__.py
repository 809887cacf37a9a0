"""The command promptfed, also as python -m promptfed."""

import sys

from .cli import lazy


def main() -> None:
    with lazy.at_once():
        from .cli import main as command
    try:
        command.main()
    except KeyboardInterrupt:
        sys.exit(lazy.INTERRUPTED)


if __name__ == "__main__":
    main()
