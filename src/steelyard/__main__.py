"""`python -m steelyard`, and the `steelyard` command."""

from __future__ import annotations

import sys

from steelyard.errors import MissingExtraError


def main() -> None:
    """Run the command line."""
    try:
        from steelyard.cli import main as run  # noqa: PLC0415 - an extra
    except MissingExtraError as error:
        sys.exit(str(error))
    run()


if __name__ == "__main__":
    main()
