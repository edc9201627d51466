"""Budget of an uploaded loss: memory and time, checked before each operation of torch runs.

`BudgetMode` sees every operation that torch dispatches, those inside a function of the allowlist
(`matmul` copies what it broadcasts, `diff` repeats itself) and those of the backward pass too. On
the device `meta`, whose tensors have shapes but no storage, it measures a loss without running it.
"""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from steelyard._torch_internals import TorchDispatchMode
from steelyard.errors import InputError

MAX_ELEMENTS = 2**24
# A graph has at most thousands of nodes; `torch.diff(x, n=2**20)` is one node and 2**20 operations.
# Checking one takes 30 microseconds, so that a refusal takes less than a second.
_MAX_OPERATIONS = 2**14
# That all operations read: `torch.stack(pieces)` is one operation and reads thousands.
_MAX_OPERANDS = 2**16
# A tensor takes about a kilobyte beside its elements, so that many small ones fill the memory too.
MAX_PIECES = 2**14
# Of float32, on one slow core. With this estimate a product that would exceed the time budget is
# refused before it starts, for nothing can stop it later.
_MULTIPLICATIONS_PER_SECOND = 2**33
# Products of float64 take twice as long; those of other types have no fast kernel on a CPU.
_SLOWDOWN = {torch.float32: 1, torch.float64: 2}
_SLOWDOWN_OTHERS = 16

_ATEN = torch.ops.aten
_PRODUCTS = {_ATEN.mm, _ATEN.bmm, _ATEN.addmm, _ATEN.baddbmm, _ATEN.mv, _ATEN.addmv}
# Singular values, of `norm(p="nuc")`, take about as long as so many products of the matrix.
_SVD, _PRODUCTS_OF_SVD = "aten::_linalg_svd", 20

Sizes = list[tuple[Sequence[int], int]]  # shape and bytes of each tensor

# Elements and multiplications of a datum that need no check of the time before each operation:
# sorting them all, the slowest operation there is, takes less than a second.
_SMALL_WORK = 2**22
_MAX_SIZES = 4096  # operations whose sizes are remembered
# Sizes that depend on values.
_BY_VALUES = {_ATEN.masked_select.default, _ATEN.nonzero.default, _ATEN.index.Tensor}


@dataclass(frozen=True)
class Measured:
    """Sizes and operations found by a run of a loss on `meta`.

    Attributes:
        complete: whether every operation could be checked.
        work: the elements that its operations read and write, and multiplications of products.
        peak_bytes: the largest memory of the tensors that are alive at once.
    """

    complete: bool
    work: int = 0
    peak_bytes: int = 0

    @property
    def is_small(self) -> bool:
        """True if all operations together take so little that none needs a check of its own."""
        return self.complete and self.work <= _SMALL_WORK

    def times_within(self, max_bytes: int) -> int:
        """Number of such runs that together are still small, and within the memory; at least 1."""
        if not self.is_small:
            return 1
        by_work = _SMALL_WORK // max(self.work, 1)
        return max(1, min(by_work, max_bytes // max(self.peak_bytes, 1)))


@dataclass(frozen=True)
class LossBudget:
    """Largest memory and time of one call of an uploaded loss.

    Attributes:
        max_bytes: of all tensors that are alive at once, of one datum.
        seconds: for all data of the call, forward and backward.
    """

    max_bytes: int = 2**30
    seconds: float = 10.0


class Stopwatch:
    """CPU time of this thread that a call of a loss has left.

    By the clock, a machine that is busy with other work would refuse losses of any size.

    Args:
        name: the name of the loss, for messages.
        seconds: the time that it may take.
    """

    def __init__(self, name: str, seconds: float) -> None:
        self.name, self.seconds = name, seconds
        self._left = seconds
        self._started: float | None = None

    def __enter__(self) -> None:
        self._started = time.thread_time()

    def __exit__(self, *_: object) -> None:
        if self._started is not None:
            self._left -= time.thread_time() - self._started
        self._started = None

    def check(self, ahead: float = 0.0) -> None:
        """Raise if no time is left, or less than the `ahead` seconds of the next operation.

        Raises:
            InputError: the time is used up.
        """
        running = 0.0 if self._started is None else time.thread_time() - self._started
        if self._left - running < ahead:
            raise out_of_time(self.name, self.seconds)


class BudgetMode(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's has no types
    """Checks every operation inside its `with` block against the budget, before it runs.

    Args:
        stopwatch: the time that is left.
        max_bytes: of all tensors that are alive at once.
        measured: whether the same operations were checked on `meta` before, so that only the time
            is left to check.
        sizes: sizes of results by operation and shapes; those that are found are added.

    Attributes:
        exceeded: whether an operation was refused.
    """

    def __init__(
        self,
        stopwatch: Stopwatch,
        max_bytes: int,
        *,
        measured: bool = False,
        sizes: dict[Any, Sizes] | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as above
        self._stopwatch = stopwatch
        self._max_bytes = max_bytes
        self._measured = measured
        self._operations = self._operands = self._pieces = 0
        self._estimated_seconds = 0.0
        self._live_bytes = 0
        self._storages: dict[int, int] = {}
        self._sizes = {} if sizes is None else sizes
        self._work = self._peak_bytes = 0
        self.exceeded = False

    @property
    def measured(self) -> Measured:
        """Sizes and operations found so far."""
        return Measured(complete=True, work=self._work, peak_bytes=self._peak_bytes)

    def __torch_dispatch__(
        self,
        func: Any,  # torch's OpOverload has no types
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operation, if it is within the budget."""
        try:
            return self._run(func, args, dict(kwargs or {}))
        except InputError:
            self.exceeded = True
            raise

    def _run(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        operands = find_tensors([args, kwargs])
        on_meta = _is_on_meta(operands, kwargs)
        self._check_time(func, args, on_meta=on_meta)
        if self._measured:
            return func(*args, **kwargs)
        self._check_operands(len(operands))
        self._check_pieces(_pieces(func, *args, **kwargs))
        if not on_meta:
            self._check_size(self._predict(func, args, kwargs))
        result = func(*args, **kwargs)
        tensors = find_tensors(result)
        for tensor in tensors:
            self._count(tensor)
        self._work += sum(tensor.numel() for tensor in [*tensors, *operands])
        self._check_size([(tensor.shape, 0) for tensor in tensors])
        return result

    def _check_time(self, func: Any, args: Sequence[Any], *, on_meta: bool) -> None:
        self._operations += 1
        if self._operations > _MAX_OPERATIONS:
            raise InputError(
                f"the loss {self._stopwatch.name!r} must take at most {_MAX_OPERATIONS} operations "
                f"for a datum, backward too, got more."
            )
        seconds = _seconds_of_product(func, args)
        self._work += int(seconds * _MULTIPLICATIONS_PER_SECOND)
        # On meta no time passes: the estimates add up.
        self._estimated_seconds = seconds + (self._estimated_seconds if on_meta else 0.0)
        self._stopwatch.check(self._estimated_seconds)

    def _predict(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Sizes:
        """Sizes of the results of an operation; found once for each shape of its arguments."""
        if func in _BY_VALUES:
            return predict_sizes(func, args, kwargs)
        key = _shapes_key([func, args, kwargs])
        if key not in self._sizes:
            if len(self._sizes) >= _MAX_SIZES:
                self._sizes.clear()
            self._sizes[key] = predict_sizes(func, args, kwargs)
        return self._sizes[key]

    def _check_operands(self, count: int) -> None:
        self._operands += count
        if self._operands > _MAX_OPERANDS:
            raise InputError(
                f"the operations of the loss {self._stopwatch.name!r} must read at most "
                f"{_MAX_OPERANDS} tensors for a datum, backward too, got more."
            )

    def _check_pieces(self, pieces: int) -> None:
        self._pieces += pieces
        if self._pieces > MAX_PIECES:
            raise InputError(
                f"the loss {self._stopwatch.name!r} may cut the tensors of a datum into at most "
                f"{MAX_PIECES} pieces, got {self._pieces}."
            )

    def _check_size(self, sizes: Sizes) -> None:
        for shape, _ in sizes:
            if math.prod(shape) > MAX_ELEMENTS:
                raise InputError(
                    f"a tensor in a custom loss must have at most {MAX_ELEMENTS} elements, "
                    f"got the shape {list(shape)}."
                )
        if self._live_bytes + sum(added for _, added in sizes) > self._max_bytes:
            raise out_of_memory(self._stopwatch.name, self._max_bytes)

    def _count(self, tensor: Tensor) -> None:
        """Count the storage of a tensor until it is freed; a view shares that of its base."""
        storage = tensor.untyped_storage()
        key = id(storage)  # torch keeps this object for as long as anything uses the storage
        if key not in self._storages:
            self._storages[key] = storage.nbytes()
            self._live_bytes += storage.nbytes()
            self._peak_bytes = max(self._peak_bytes, self._live_bytes)
            weakref.finalize(storage, self._free, key).atexit = False

    def _free(self, key: int) -> None:
        self._live_bytes -= self._storages.pop(key, 0)


def out_of_time(name: str, seconds: float) -> InputError:
    """Build the error for a loss that takes too long."""
    return InputError(
        f"the loss {name!r} must take at most {seconds:g} seconds for a batch, got one that takes "
        f"longer: send fewer or shorter data, or start the server with a larger loss_seconds "
        f"(--loss-seconds)."
    )


def out_of_memory(name: str, max_bytes: int) -> InputError:
    """Build the error for a loss that takes too much memory."""
    return InputError(
        f"the loss {name!r} must take at most {max_bytes} bytes of memory for a datum, backward "
        f"too, got one that takes more: send shorter data, or start the server with a larger "
        f"max_loss_bytes (--max-loss-bytes)."
    )


def predict_sizes(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sizes:
    """Shape of each result of an operation before it runs, and the bytes that it adds.

    A result that shares the storage of an argument adds none.

    Raises:
        InputError: the operation cannot be run on `meta`.
    """
    if func is _ATEN.masked_select.default:
        source, mask = args
        shape: Sequence[int] = torch.broadcast_shapes(source.shape, mask.shape)  # type: ignore[no-untyped-call]  # as above
        repeats = math.prod(shape) // max(mask.numel(), 1)
        chosen = _count_true(mask) * repeats
        return [((chosen,), chosen * source.element_size())]
    if func is _ATEN.nonzero.default:
        shape = (_count_true(args[0]), args[0].dim())
        return [(shape, math.prod(shape) * 8)]
    meta_args, options = to_meta(list(args)), to_meta(dict(kwargs))
    if func is _ATEN.index.Tensor:
        meta_args[1] = _indices_of_masks(args[1])
    if not find_tensors([args, kwargs]):  # it makes a tensor from numbers
        options["device"] = torch.device("meta")
    try:
        results = find_tensors(func(*meta_args, **options))
    except NotImplementedError as error:
        if str(func) == "aten._local_scalar_dense.default":  # a number, as bool(tensor) is
            return []
        raise InputError(
            f"a custom loss may use operations whose results have a size that is known before "
            f"they run, got {func}."
        ) from error
    except RecursionError as error:
        raise InputError(
            f"a custom loss may use operations of a bounded depth, got {func}, whose own calls "
            f"are nested too deep."
        ) from error
    except (IndexError, RuntimeError, TypeError, ValueError):
        return []  # the call itself raises it, with the real values
    shared = {id(tensor.untyped_storage()) for tensor in find_tensors([meta_args, options])}
    return [
        (result.shape, 0 if id(result.untyped_storage()) in shared else result.nbytes)
        for result in results
    ]


def _shapes_key(value: Any) -> Any:
    """Key of arguments: of tensors by shape, of others by value."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype
    if isinstance(value, dict):
        value = [*value.items()]
    if isinstance(value, list | tuple):
        return tuple(_shapes_key(item) for item in value)
    return (type(value), value)


def find_tensors(value: Any) -> list[Tensor]:
    """Tensors in a value and the containers in it."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        return [tensor for item in value.values() for tensor in find_tensors(item)]
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in find_tensors(item)]
    return []


def to_meta(value: Any) -> Any:
    """Copy of a value whose tensors and devices are on `meta`."""
    if isinstance(value, Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    if isinstance(value, torch.device):
        return torch.device("meta")
    if isinstance(value, dict):
        return {key: to_meta(item) for key, item in value.items()}
    if isinstance(value, list):
        return [to_meta(item) for item in value]
    if isinstance(value, tuple) and not isinstance(value, torch.Size):
        return tuple(to_meta(item) for item in value)
    return value


def _is_on_meta(operands: Sequence[Tensor], kwargs: Mapping[str, Any]) -> bool:
    device = kwargs.get("device")
    if device is not None:
        return torch.device(device).type == "meta"
    return any(tensor.is_meta for tensor in operands)


def _seconds_of_product(func: Any, args: Sequence[Any]) -> float:
    """Estimated time of a product of matrices, or of singular values; 0 for everything else."""
    if func.name() == _SVD:
        left: Tensor = args[0]
        columns = min(left.shape[-2:]) * _PRODUCTS_OF_SVD
    elif func.overloadpacket in _PRODUCTS:
        left, right = [arg for arg in args if isinstance(arg, Tensor)][-2:]
        columns = right.shape[-1] if right.dim() > 1 else 1
    else:
        return 0.0
    slowdown = _SLOWDOWN.get(left.dtype, _SLOWDOWN_OTHERS)
    return left.numel() * columns * slowdown / _MULTIPLICATIONS_PER_SECOND


def _pieces(func: Any, source: Any = None, size: Any = 0, dim: int = 0, *_: Any, **__: Any) -> int:
    """Number of pieces that an operation cuts a tensor into; 0 for operations that cut none.

    Of the forms of `split`, `chunk` and `unbind` torch dispatches these three.
    """
    if func is _ATEN.unbind.int and source.dim():
        return int(source.shape[size])  # its second argument is the dimension
    if func is _ATEN.split.Tensor and source.dim() and size > 0:
        return int(-(-source.shape[dim] // size))
    if func is _ATEN.split_with_sizes.default:
        return len(size)
    return 0


def _indices_of_masks(indices: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Indices of `x[...]` on `meta`, each mask replaced by the places that it selects."""
    on_meta: list[Tensor | None] = []
    for index in indices:
        if index is not None and index.dtype is torch.bool:
            chosen = _count_true(index)
            positions = torch.empty(chosen, dtype=torch.int64, device="meta")
            on_meta.extend([positions] * index.dim())
        else:
            on_meta.append(to_meta(index))
    return on_meta


def _count_true(mask: Tensor) -> int:
    return int(mask.count_nonzero())
