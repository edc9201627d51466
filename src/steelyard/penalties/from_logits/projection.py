"""`Projection`: hidden states and an output layer in place of logits, and its validation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from steelyard.errors import InputError
from steelyard.penalties._arrays import Array, dtype_name, is_floating, is_sharded, is_torch
from steelyard.penalties.from_logits._logit_inputs import Rows, ShardedRows, accept_rows


@dataclass(frozen=True, eq=False)
class Projection:
    """Hidden states and an output layer, whose logits are `hidden @ weight.T + bias`.

    The functions of this package take it in place of logits and of a reference (torch). They
    compute one chunk of rows at a time, so that at most one chunk's logits exist.

    Attributes:
        hidden: Any leading shape, features last.
        weight: `[classes, features]`, as in `torch.nn.Linear`, of the same dtype.
        bias: `[classes]`, or None.
        chunk: Rows at a time; `None` is as many as fit into 1 GB of bfloat16 logits on a GPU.

    Example:
        >>> import torch
        >>> from steelyard.penalties.from_logits import entropy
        >>> weight = torch.zeros(4, 3)
        >>> projection = Projection(torch.randn(2, 5, 3, requires_grad=True), weight)
        >>> projection.shape, projection[:, 1:].shape
        ((2, 5, 4), (2, 4, 4))
        >>> print(f"{entropy(projection):.4f} {entropy(projection.logits()):.4f}")
        1.3863 1.3863
    """

    hidden: Array
    weight: Array
    bias: Array | None = None
    chunk: int | None = field(default=None, kw_only=True)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the logits."""
        return (*self.hidden.shape[:-1], self.weight.shape[0])

    def logits(self) -> Array:
        """Compute all logits."""
        logits = self.hidden @ self.weight.T
        return logits if self.bias is None else logits + self.bias

    def gathered(self) -> Projection:
        """Projection with the whole output layer, if each process has a part of it, as under FSDP.

        Rows are this process's own, so that the gradient of the layer is averaged over the
        processes, as FSDP does it. A collective operation: every process must call it.
        """
        if not is_sharded(self.weight):
            return self
        bias = None if self.bias is None else _gathered(self.bias)
        return replace(self, weight=_gathered(self.weight), bias=bias)

    def __getitem__(self, at: Any) -> Projection:  # whatever the hidden states take
        """Projection of some of the rows: an index, a slice or a mask of the leading axes."""
        return replace(self, hidden=self.hidden[at])

    def __iter__(self) -> Iterator[Projection]:
        """Projections of each entry of the first axis."""
        return (replace(self, hidden=hidden) for hidden in self.hidden)


def _gathered(part: Array) -> Array:
    from torch.distributed.tensor import Partial, Replicate  # noqa: PLC0415  # loaded: it is one

    mesh = part.device_mesh
    whole = part.redistribute(placements=[Replicate()] * mesh.ndim)
    return whole.to_local(grad_placements=[Partial("avg")] * mesh.ndim)


def materialize(logits: Array | Projection | None) -> Array | None:
    """Logits as an array: of a projection, all of them, as constants."""
    if not isinstance(logits, Projection):
        return logits
    logits = logits.gathered()
    bias = None if logits.bias is None else logits.bias.detach()
    return Projection(logits.hidden.detach(), logits.weight.detach(), bias).logits()


# Logits of a chunk: 1 GB in bfloat16 on a GPU, where larger products are faster, 16 MB on a CPU.
_ON_GPU, _ELSEWHERE = 2**29, 2**22
# Rows for each feature from which the gradient by the weight is small compared to the logits.
_ROWS_PER_FEATURE = 4


class Projected(NamedTuple):
    """Checked inputs with their leading axes flattened.

    Attributes:
        rows: The hidden states in place of logits, `[rows, features]`, with targets and mask.
        weight: `[classes, features]`.
        bias: `[classes]`, or None.
        reference: `[rows, classes]`, or `[rows, features]` if it is a projection; or None.
        reference_weight: `[classes, features]` of a reference that is a projection.
        reference_bias: `[classes]` of a reference that is a projection, or None.
        chunk: Rows in a chunk.
    """

    rows: Rows
    weight: Array
    bias: Array | None
    reference: Array | None
    reference_weight: Array | None
    reference_bias: Array | None
    chunk: int

    @property
    def classes(self) -> int:
        """Number of classes."""
        count: int = self.weight.shape[0]
        return count

    @property
    def arrays(self) -> tuple[Array | None, ...]:
        """Arrays in the order of the operators' arguments."""
        return (self.rows.logits, *self[1:6], self.rows.targets)

    def defers_gradient(self, wanted: Sequence[bool]) -> bool:
        """Return whether the backward pass computes the gradients, from recomputed logits.

        float16 underflows in the gradient of a mean over many rows without a loss scale, which is
        known only in the backward pass. And with few rows, for example of one datum, the gradient
        by the weight, stored until then, would be about as large as the logits.

        Args:
            wanted: Whether the gradients by hidden states, weight and bias are required.
        """
        few = self.rows.logits.shape[0] < _ROWS_PER_FEATURE * self.weight.shape[1]
        return (few and wanted[1]) or (dtype_name(self.weight) == "float16" and any(wanted))


def accept(
    logits: Array | Projection,
    reference: Array | Projection | None = None,
    targets: Array | None = None,
    mask: Array | None = None,
) -> Rows | Projected | ShardedRows:
    """Check the inputs of a function over logits or over a projection.

    Raises:
        InputError: As `accept_rows`, `accept_projection` and `accept_shards`.
    """
    if isinstance(logits, Projection) and is_sharded(logits.hidden):
        logits = logits.logits()  # in tensor parallelism, each process's classes
    if isinstance(logits, Projection):
        return accept_projection(logits, reference, targets, mask)
    if is_sharded(logits):
        from steelyard.penalties.from_logits import _vocabulary_shards  # noqa: PLC0415  # needs torch

        return _vocabulary_shards.accept_shards(logits, materialize(reference), targets, mask)
    return accept_rows(logits, materialize(reference), targets, mask)


def accept_projection(
    logits: Projection,
    reference: Array | Projection | None = None,
    targets: Array | None = None,
    mask: Array | None = None,
) -> Projected:
    """Check the inputs of a function over a projection.

    Raises:
        InputError: The arrays are not torch tensors of one floating dtype, or their shapes do not
            match; for targets and mask as `accept_rows`.
    """
    logits = logits.gathered()
    _check(logits)
    chunk = logits.chunk
    if chunk is not None and (isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 1):
        raise InputError(f"chunk must be None or an integer >= 1, got {chunk!r}.")
    hidden, classes = logits.hidden, logits.weight.shape[0]
    rows = accept_rows(hidden, targets=targets, mask=mask)
    states: Array | None = reference
    weight = bias = None
    if isinstance(reference, Projection):
        reference = reference.gathered()
        _check(reference, "reference's ")
        features = reference.weight.shape[1]
        _check_shape("reference's hidden", reference.hidden, (*rows.shape, features))
        _check_shape("reference's weight", reference.weight, (classes, features))
        states, weight = reference.hidden, reference.weight.detach()
        bias = None if reference.bias is None else reference.bias.detach()
    elif reference is not None:
        if not is_torch(reference):
            raise InputError(
                f"reference must be a torch tensor or a Projection, as hidden is one, got "
                f"{type(reference).__qualname__}."
            )
        if not is_floating(reference):
            raise InputError(
                f"reference must hold floating-point numbers, got {dtype_name(reference)}; cast it "
                "first."
            )
        _check_shape("reference", reference, (*rows.shape, classes))
    return Projected(
        rows,
        logits.weight,
        logits.bias,
        None if states is None else states.detach().reshape(-1, states.shape[-1]),
        weight,
        bias,
        chunk or max((_ON_GPU if hidden.is_cuda else _ELSEWHERE) // classes, 1),
    )


def _check(logits: Projection, whose: str = "") -> None:
    hidden, weight, bias = logits.hidden, logits.weight, logits.bias
    given = {"hidden": hidden, "weight": weight} | ({} if bias is None else {"bias": bias})
    for name, x in given.items():
        if not is_torch(x) or not is_floating(x):
            kind = dtype_name(x) if is_torch(x) else type(x).__qualname__
            raise InputError(
                f"{whose}{name} must be a torch tensor of a floating dtype, got {kind}; convert "
                f"it, or give logits."
            )
        if x.dtype != hidden.dtype:
            raise InputError(
                f"{whose}{name} must have the dtype of hidden, {dtype_name(hidden)}, got "
                f"{dtype_name(x)}; cast one of them."
            )
    shape = tuple(weight.shape)
    if weight.ndim != 2 or 0 in shape or hidden.ndim == 0 or hidden.shape[-1] != shape[-1]:  # noqa: PLR2004
        raise InputError(
            f"{whose}weight must have the shape [classes, features] and hidden [..., features], "
            f"got {shape} and {tuple(hidden.shape)}."
        )
    if bias is not None:
        _check_shape(f"{whose}bias", bias, shape[:1])


def _check_shape(name: str, x: Array, shape: tuple[int, ...]) -> None:
    if tuple(x.shape) != shape:
        raise InputError(f"{name} must have the shape {shape}, got {tuple(x.shape)}.")
