"""Sums over sharded parameters, of which each process holds a part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from steelyard.gradients import is_sharded, sharded_dimensions, sum_over


def divides_units(parameter: Any) -> bool:
    """Whether processes share output units, the elements of the first axis; a vector is one."""
    return is_sharded(parameter) and bool(unit_dimensions(parameter))


def unit_dimensions(parameter: Any) -> tuple[int, ...]:
    """Dimensions of the mesh of a `DTensor` along which an output unit is shared."""
    return tuple(
        i
        for i in sharded_dimensions(parameter)
        if parameter.ndim == 1 or parameter.placements[i].dim != 0
    )


def add_up(
    sums: Sequence[Tensor], parameters: Sequence[Any], dimensions: Sequence[tuple[int, ...]]
) -> list[Tensor]:
    """Add up sums over the parts of sharded parameters, with one reduction for those of one mesh.

    Args:
        sums: One tensor for each parameter, summed over this process's part of it.
        parameters: The parameters, each a `DTensor`.
        dimensions: For each parameter, the dimensions of its mesh to add up along.
    """
    found = list(sums)
    groups: dict[tuple[Any, tuple[int, ...]], list[int]] = {}
    for i, (parameter, along) in enumerate(zip(parameters, dimensions, strict=True)):
        groups.setdefault((parameter.device_mesh, along), []).append(i)
    for where, mine in groups.items():
        flat = [found[i].reshape(-1).double() for i in mine]
        summed = sum_over(*where, torch.cat(flat))
        totals = torch.split(summed, [each.numel() for each in flat])
        for i, total in zip(mine, totals, strict=True):
            found[i] = total.reshape(found[i].shape).to(found[i])
    return found
