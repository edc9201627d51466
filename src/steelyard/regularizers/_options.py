"""Checks of the options of regularizers: each returns the value or raises `SpecError`."""

from __future__ import annotations

from typing import Any

from steelyard.spec.checks import OptionChecks

CHECKS = OptionChecks("regularizer")
require, one_of, flag = CHECKS.require, CHECKS.one_of, CHECKS.flag
number, at_least, positive = CHECKS.number, CHECKS.at_least, CHECKS.positive
fraction, whole, function = CHECKS.fraction, CHECKS.whole, CHECKS.function


def resolve_source(regularizer: Any, option: str, *, optional: bool = False) -> None:
    """Check an option that names a field of each datum, or is a function `(datum, index)`.

    A `"package.module:attr"` from a config file is replaced by the function it names.
    """
    value = getattr(regularizer, option)
    if (optional and value is None) or (isinstance(value, str) and value and ":" not in value):
        return
    rule = "the name of a field, a function (datum, index), or 'package.module:attr'"
    holds = callable(value) or (isinstance(value, str) and ":" in value)
    require(holds, option, rule, value, regularizer.name)
    object.__setattr__(regularizer, option, function(option, value, regularizer.name))
