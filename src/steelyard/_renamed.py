"""Deprecated aliases: old names that still import, with a warning."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Mapping
from operator import attrgetter
from typing import Any


def leave_aliases(module: str, table: Mapping[str, str]) -> None:
    """Make old names of a module importable; each warns once and gives its replacement.

    A replacement is imported when its old name is first used, so it may belong to a higher layer.

    Args:
        module: the module that used to define the names.
        table: for each old name, its replacement as `"package.module:attribute"`.

    Example:
        >>> leave_aliases(__name__, {"Fraction": "fractions:Fraction"})
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     half = sys.modules[__name__].Fraction(1, 2)
        >>> print(caught[0].message)
        steelyard._renamed.Fraction is deprecated: use fractions.Fraction.
    """

    def resolve(name: str) -> Any:
        if name not in table:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        origin, _, path = table[name].partition(":")
        warnings.warn(
            f"{module}.{name} is deprecated: use {origin}.{path}.", DeprecationWarning, stacklevel=2
        )
        found = attrgetter(path)(importlib.import_module(origin))
        # Stored in the module, so that the next access does not call this function or warn again.
        setattr(sys.modules[module], name, found)
        return found

    # Assigned dynamically: with a `__getattr__` in its source, a module would have every name for
    # type checkers, and they would no longer find misspelt ones.
    vars(sys.modules[module])["__getattr__"] = resolve
