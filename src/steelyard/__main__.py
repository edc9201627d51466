"""Entry point of the `steelyard` command and of `python -m steelyard`."""

from __future__ import annotations

import sys

from steelyard.errors import MissingExtraError


def main() -> None:
    """Run the command line; exit with the pip command if the extra `cli` is not installed."""
    try:
        from steelyard.cli.app import main as run  # noqa: PLC0415 - an extra
    except MissingExtraError as error:
        sys.exit(str(error))
    run()


if __name__ == "__main__":
    main()
