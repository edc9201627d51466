"""Validation of the inputs of functions over logits, and their flattened form."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from steelyard.errors import InputError
from steelyard.penalties._arrays import (
    Array,
    Namespace,
    dtype_name,
    is_floating,
    is_torch,
    namespace,
    widened_dtype,
)
from steelyard.penalties._reduction import accept_mask

_INTEGERS = ("int8", "int16", "int32", "int64", "uint8")
_NARROW_INTEGERS = ("int8", "int16", "uint8")


class Rows(NamedTuple):
    """Checked inputs with their leading axes flattened.

    Attributes:
        xp: Namespace of the arrays.
        logits: `[rows, classes]`.
        reference: The same shape, or None.
        targets: `[rows]`, or None.
        mask: `[rows]`, or None.
        shape: Shape of the leading axes.
        dtype: Dtype of the results: float32, or float64 for float64 logits.
    """

    xp: Namespace
    logits: Array
    reference: Array | None
    targets: Array | None
    mask: Array | None
    shape: tuple[int, ...]
    dtype: Any  # each backend's own class

    @property
    def rows(self) -> Rows:
        """Itself, as `Projected.rows`."""
        return self

    @property
    def classes(self) -> int:
        count: int = self.logits.shape[-1]
        return count

    def scale(self, reduction: str) -> tuple[Array | None, float]:
        """Factors of the rows: an array if there is a mask, and one factor for all rows."""
        if self.mask is None:
            count = max(self.logits.shape[0], 1)
            return None, 1.0 / count if reduction == "mean" else 1.0
        xp = self.xp
        weights = xp.astype(self.mask, self.dtype)
        if reduction == "mean":
            kept = xp.sum(xp.astype(self.mask, xp.int32))
            weights = weights / xp.astype(xp.where(kept == 0, 1, kept), self.dtype)
        return weights, 1.0


class ShardedRows(NamedTuple):
    """Checked inputs whose classes are spread over processes.

    Attributes:
        rows: This process's columns of logits and reference, with targets and mask.
        group: The processes that have all classes together.
        offset: Number of the first class that this process has.
        classes: Number of all classes.
    """

    rows: Rows
    group: Any  # torch's ProcessGroup
    offset: int
    classes: int


def accept_rows(
    logits: Array,
    reference: Array | None = None,
    targets: Array | None = None,
    mask: Array | None = None,
) -> Rows:
    """Check the inputs of a function over logits.

    Raises:
        InputError: They are not arrays of one kind; logits or reference are not floating or have
            no classes; their shapes differ; targets are not integers with the leading shape; the
            mask is not boolean or does not broadcast to it.
    """
    given = {"logits": logits, "reference": reference, "targets": targets}
    arrays = {name: x for name, x in given.items() if x is not None}
    xp = namespace(**arrays)
    for name in ("logits", "reference"):
        if name in arrays and not is_floating(arrays[name]):
            raise InputError(
                f"{name} must hold floating-point numbers, got {dtype_name(arrays[name])}; "
                "cast it first."
            )
    shape = tuple(logits.shape)
    if not shape or shape[-1] == 0:
        raise InputError(
            f"logits must have classes on their last axis, at least one, got shape {shape}."
        )
    if reference is not None and tuple(reference.shape) != shape:
        raise InputError(
            f"logits and reference must have the same shape, got {shape} and "
            f"{tuple(reference.shape)}; broadcast them first."
        )
    if targets is not None:
        _check_shape(targets, shape[:-1])
    mask = accept_mask(xp, mask, logits, len(shape) - 1)
    return Rows(
        xp,
        _matrix(xp, logits),
        None if reference is None else _matrix(xp, reference),
        None if targets is None else _vector(xp, targets),
        None if mask is None else xp.reshape(mask, (-1,)),
        shape[:-1],
        widened_dtype(xp, logits),
    )


def check_targets(targets: Array | None, counts: Array | None, classes: int) -> None:
    """Check that targets are classes, where this does not synchronize with a device.

    On a GPU and in JAX it is not called; there the loss of such a row is NaN.

    Args:
        targets: `[rows]`, or None.
        counts: `[rows]`, a mask or a scale; rows where it is 0 are not checked. None is 1.
        classes: Number of classes.

    Raises:
        InputError: A target is out of range.
    """
    if targets is None:
        return
    bad = (targets < 0) | (targets >= classes)
    if counts is not None:
        bad = bad & (counts != 0)
    if bad.any():
        raise InputError(
            f"targets must be in [0, {classes - 1}] where the mask is true, got "
            f"{int(targets[bad][0])}; mask the rows that have no target."
        )


def _matrix(xp: Namespace, x: Array) -> Array:
    """Reshape to `[rows, classes]`, with the classes of a row contiguous."""
    if is_torch(x) and x.stride(-1) != 1:
        x = x.contiguous()
    if x.ndim == 2:  # noqa: PLR2004
        return x
    return xp.reshape(x, (math.prod(x.shape[:-1]), x.shape[-1]))


def _vector(xp: Namespace, targets: Array) -> Array:
    """Reshape to `[rows]`; the number of classes, which targets are compared with, has to fit."""
    if dtype_name(targets) in _NARROW_INTEGERS:
        targets = xp.astype(targets, xp.int32)
    return xp.reshape(targets, (-1,))


def _check_shape(targets: Array, shape: tuple[int, ...]) -> None:
    if dtype_name(targets) not in _INTEGERS:
        raise InputError(f"targets must hold integers, got {dtype_name(targets)}; cast them first.")
    if tuple(targets.shape) != shape:
        raise InputError(
            f"targets must have the shape of logits without its last axis, {shape}, got "
            f"{tuple(targets.shape)}."
        )
