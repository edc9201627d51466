"""Optional dependencies: looked for when a regularizer is built, loaded when it runs."""

from __future__ import annotations

import importlib.util

from steelyard.errors import MissingExtraError

EXTRAS = {"gudhi": "topology", "httpx": "http", "scipy": "fairness", "z3": "logic"}


def require(module: str, regularizer: str) -> None:
    """Nothing, if `module` can be imported.

    Raises:
        MissingExtraError: it is not installed; the message holds the command that installs it.
    """
    try:
        found = importlib.util.find_spec(module) is not None
    except ValueError:  # it stands in sys.modules as None
        found = False
    if not found:
        raise MissingExtraError(
            f"regularizer {regularizer!r} needs {module}, which is not installed: "
            f'pip install "steelyard[{EXTRAS[module]}]".'
        )
