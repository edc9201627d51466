"""Options that choose where on a Ray cluster a term runs: Ray takes them, the term does not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from steelyard.errors import SpecError
from steelyard.spec.numbers import is_finite

PLACEMENT = ("num_cpus", "num_gpus", "resources", "runtime_env")
# Ray has arguments of their own for these.
_NOT_RESOURCES = {"CPU": "num_cpus", "GPU": "num_gpus"}


def split_placement(
    run_in: str, options: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split options into those of the term's calls and, with `run_in="ray"`, those of its tasks.

    Example:
        >>> split_placement("ray", {"scale": 2.0, "num_gpus": 1})
        ({'scale': 2.0}, {'num_gpus': 1})
        >>> split_placement("process", {"scale": 2.0, "num_gpus": 1})
        ({'scale': 2.0, 'num_gpus': 1}, {})
    """
    of_ray = PLACEMENT if run_in == "ray" else ()
    own = {key: value for key, value in options.items() if key not in of_ray}
    return own, {key: value for key, value in options.items() if key in of_ray}


def check_placement(placement: Mapping[str, Any], where: str) -> None:
    """Check the options of a term's tasks on Ray.

    Raises:
        SpecError: one of them breaks its rule.
    """
    for key in ("num_cpus", "num_gpus"):
        if key in placement:
            _check_amount(key, placement[key], where)
    resources = placement.get("resources", {})
    if not isinstance(resources, Mapping) or not all(isinstance(key, str) for key in resources):
        raise SpecError(
            f"resources must be a mapping of names to amounts, got {resources!r} ({where})."
        )
    for key, amount in resources.items():
        if key in _NOT_RESOURCES:
            raise SpecError(
                f"resources must not name {key!r}, which has an option of its own: "
                f"use {_NOT_RESOURCES[key]}={amount!r} ({where})."
            )
        _check_amount(f"resources[{key!r}]", amount, where)
    environment = placement.get("runtime_env", {})
    if not isinstance(environment, Mapping):  # not shown in the message: it may hold secrets
        raise SpecError(
            f"runtime_env must be a mapping, got an object of type "
            f"{type(environment).__name__} ({where})."
        )


def _check_amount(key: str, amount: Any, where: str) -> None:
    if not is_finite(amount) or amount < 0 or (amount > 1 and amount != int(amount)):
        raise SpecError(
            f"{key} must be a number >= 0, and a whole one above 1, got {amount!r} ({where})."
        )
