"""Interpreter of uploaded losses.

A loss is a graph of operations as data. Each operation is looked up in the allowlist and applied;
no code from a client is executed. `validate` has rejected graphs with other operations when they
were uploaded. `budget` limits the memory and the time that they take.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from tinker import types
from torch import Tensor

from steelyard.engine.datum_tensors import read_field
from steelyard.engine.server.uploaded_loss.budget import (
    BudgetMode,
    LossBudget,
    Measured,
    Sizes,
    Stopwatch,
)
from steelyard.engine.server.uploaded_loss.operations import Program
from steelyard.errors import InputError

_MAX_MEASURED = 1024  # shapes that are remembered for each loss
# Under vmap torch 2.13 computes the median of an expanded tensor, and the roll of a single number,
# over the whole batch; it does not check the quantiles, nor the dimensions of the others.
ALONE = frozenset({"dot", "index_select", "median", "quantile", "roll", "tril", "triu"})


@dataclass
class TracedLoss:
    """An uploaded loss; its value is that of the SDK's `LossHandle`, in one backward pass.

    The graph computes (loss, metrics) of one datum. The loss of a batch is the sum over its data;
    a metric is summed, and divided by the number of data if its key ends with `:mean`.

    Attributes:
        name: the name of the function.
        inputs: `logprobs`, then the fields that the loss reads, with their ranks.
        nodes: the operations in order; the last one is the output.
    """

    name: str
    inputs: Sequence[types.CustomLossInput]
    nodes: Sequence[types.CustomLossNode]
    # Identifies it in the process that runs it.
    key: str = field(default_factory=lambda: uuid.uuid4().hex, compare=False, repr=False)
    # Whether data of equal shapes can run together, as far as is known.
    batches: bool = field(default=True, init=False, compare=False, repr=False)
    # By the shapes of the data: what a run on `meta` has shown.
    _measured: dict[tuple[Any, ...], Measured] = field(
        default_factory=dict, compare=False, repr=False
    )
    # By operation and shapes: sizes of the results, for graphs that cannot be measured as a whole.
    sizes: dict[Any, Sizes] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        self.batches = not any(node.target.rpartition(".")[2] in ALONE for node in self.nodes)

    def bind(self, data: Sequence[types.Datum], budget: LossBudget | None = None) -> BoundLoss:
        """Loss of a batch as a function of its log-probs, one tensor `[T]` or `[T, K]` per datum.

        Raises:
            InputError: a datum lacks a field, or a field has another rank.
        """
        return BoundLoss(self, self.read_fields(data), budget or LossBudget())

    def read_fields(self, data: Sequence[types.Datum]) -> list[list[Tensor]]:
        """Target tokens of each datum, and the fields that the loss reads.

        Raises:
            InputError: a datum lacks a field, or a field has another rank.
        """
        return [self._read_fields(index, datum) for index, datum in enumerate(data)]

    def measure(self, inputs: Sequence[Tensor], stopwatch: Stopwatch, max_bytes: int) -> Measured:
        """Check the loss of one datum against the budget on `meta`, where nothing is allocated.

        Args:
            inputs: the log-probs and the fields; their shapes matter.
            stopwatch: the time that is left.
            max_bytes: the memory that the loss may take.

        Returns:
            The work and the memory of all operations, if every one was checked. Those behind a
            mask cannot be, as their sizes depend on values; they are checked one by one when the
            loss runs.

        Raises:
            InputError: the loss exceeds the budget.
        """
        key = (max_bytes, *((tensor.shape, tensor.dtype) for tensor in inputs))
        if key not in self._measured:
            if len(self._measured) >= _MAX_MEASURED:
                self._measured.clear()
            self._measured[key] = self._measure(inputs, stopwatch, max_bytes)
        return self._measured[key]

    def _measure(self, inputs: Sequence[Tensor], stopwatch: Stopwatch, max_bytes: int) -> Measured:
        logprobs, *others = [torch.empty_like(tensor, device="meta") for tensor in inputs]
        mode = BudgetMode(stopwatch, max_bytes)
        try:
            with torch.device("meta"), mode, torch.enable_grad():
                logprobs.requires_grad_()
                loss, _ = self.evaluate([logprobs, *others], "meta")
                torch.autograd.grad(loss, logprobs, allow_unused=True)
        except InputError as error:
            # An operation that fails on meta may work where it is run; one that is refused does
            # not, nor one that has used up the stack.
            if mode.exceeded or isinstance(error.__cause__, RecursionError | None):
                raise
            return Measured(complete=False)
        except Exception:  # noqa: BLE001 - of the backward pass
            return Measured(complete=False)
        return mode.measured

    def evaluate(
        self,
        inputs: Sequence[Tensor],
        device: str = "cpu",
        check: Callable[[], None] | None = None,
    ) -> tuple[Tensor, Any]:
        """Loss of one datum, and its metrics as the graph computes them.

        Args:
            inputs: the log-probs and the fields.
            device: on which tensors are made.
            check: called before each operation; None: nothing is.

        Raises:
            InputError: an operation fails, or the output is not a number.
        """
        return self._result(self._program.run(inputs, device, check))

    @cached_property
    def _program(self) -> Program:
        return Program(self.name, self.nodes)

    def _read_fields(self, index: int, datum: types.Datum) -> list[Tensor]:
        """Target tokens of a datum, and the fields that the loss reads."""
        logprobs, *others = self.inputs
        tensors = []
        # The log-probs have the shape of target_tokens, which is checked in their place.
        for name, rank in [("target_tokens", logprobs.rank), *((i.name, i.rank) for i in others)]:
            tensor = read_field(index, datum, name, self.name)
            if rank == 0 and tensor.numel() == 1:
                tensor = tensor.reshape(())
            if tensor.dim() != rank:
                raise InputError(
                    f"data[{index}].loss_fn_inputs[{name!r}] must have the rank {rank}, as the "
                    f"loss {self.name!r} declares it, got {tensor.dim()}.",
                    datum=index,
                )
            tensors.append(tensor)
        return tensors

    def _result(self, output: Any) -> tuple[Tensor, Any]:
        loss, metrics = output
        if not isinstance(loss, Tensor) or loss.dim() or not loss.is_floating_point():
            shape = list(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise InputError(f"the loss {self.name!r} must be one number, got {shape}.")
        return loss, metrics


class BoundLoss:
    """An uploaded loss over the data of one batch; called with their log-probs.

    It computes the gradient of each datum by itself, or of small data of equal shapes together, so
    that few graphs are alive at a time, and the backward pass is within the budget too.

    Args:
        loss: the loss.
        fields: for each datum, the target tokens and the fields that the loss reads.
        budget: the memory and the time that it may take.
    """

    def __init__(
        self, loss: TracedLoss, fields: Sequence[Sequence[Tensor]], budget: LossBudget
    ) -> None:
        self._loss, self._budget = loss, budget
        self._shapes = [targets.shape for targets, *_ in fields]
        self._fields = [others for _, *others in fields]
        self._stopwatch = Stopwatch(loss.name, budget.seconds)

    def check(self) -> None:
        """Check that the loss is within its budget, without running it.

        Raises:
            InputError: it is not.
        """
        with self._stopwatch:
            for shape, tensors in zip(self._shapes, self._fields, strict=True):
                self._measure([torch.empty(shape, device="meta"), *tensors])

    def __call__(self, logprobs: list[Tensor]) -> tuple[Tensor, dict[str, float]]:
        """Sum of the losses of all data, with its gradient, and the metrics.

        Raises:
            InputError: an operation fails, the loss exceeds its budget, or it is not finite.
        """
        return with_gradients(self.run(logprobs), logprobs)

    def run(self, logprobs: Sequence[Tensor]) -> LossResult:
        """Compute the loss, its gradients and the metrics.

        Raises:
            InputError: an operation fails, the loss exceeds its budget, or it is not finite.
        """
        results: list[BatchResult] = []
        gradients: list[Tensor | None] = [None] * len(logprobs)
        inputs = [[row, *own] for row, own in zip(logprobs, self._fields, strict=True)]
        with self._stopwatch:
            for group in group_by_shape(inputs, lambda index: self._largest_group(inputs[index])):
                for indices, result in self._run(group, inputs):
                    results.append(result)
                    for index, gradient in zip(indices, result.gradients or (), strict=False):
                        gradients[index] = gradient
        total = torch.stack([result.value for result in results]).sum()
        if all(gradient is None for gradient in gradients) or not bool(torch.isfinite(total)):
            raise InputError(
                f"the loss {self._loss.name!r} must be finite and come from the log-probs, "
                f"got {total.item()}."
            )
        known = [
            torch.zeros_like(row) if gradient is None else gradient
            for row, gradient in zip(logprobs, gradients, strict=True)
        ]
        metrics = _sums([result.metrics for result in results])
        count = len(logprobs)
        means = {k: v / count if k.endswith(":mean") else v for k, v in metrics.items()}
        return LossResult(total, known, means)

    def _run(
        self, group: list[int], inputs: Sequence[Sequence[Tensor]]
    ) -> Iterator[tuple[list[int], BatchResult]]:
        """Run data of equal shapes, together or, if they cannot be, one by one.

        Yields the indices of data that ran together, and their result.
        """
        together = self._run_together([inputs[index] for index in group])
        if together is not None:
            yield group, together
            return
        for index in group:
            with self._watched(self._measure(inputs[index])):
                result = run_alone(self._evaluate, inputs[index])
            yield [index], result

    def _run_together(self, inputs: Sequence[Sequence[Tensor]]) -> BatchResult | None:
        if len(inputs) == 1 or not self._loss.batches:
            return None
        try:
            # Together they are small: none of their operations needs a look at the time.
            return run_together(self._loss.evaluate, inputs)
        except Exception:  # noqa: BLE001 - of vmap, or of a datum: run alone, it names the operation
            self._stopwatch.check()
            self._loss.batches = False
            return None

    def _evaluate(self, inputs: Sequence[Tensor]) -> tuple[Tensor, Any]:
        return self._loss.evaluate(inputs, check=self._stopwatch.check)

    def _largest_group(self, inputs: Sequence[Tensor]) -> int:
        """Number of data like this one that may run together, within the budget."""
        return self._measure(inputs).times_within(self._budget.max_bytes)

    def _watched(self, measured: Measured) -> AbstractContextManager[object]:
        """Check each operation inside against the budget, unless they are small altogether."""
        if measured.is_small:
            return nullcontext()
        return BudgetMode(
            self._stopwatch,
            self._budget.max_bytes,
            measured=measured.complete,
            sizes=self._loss.sizes,
        )

    def _measure(self, inputs: Sequence[Tensor]) -> Measured:
        return self._loss.measure(inputs, self._stopwatch, self._budget.max_bytes)


@dataclass(frozen=True)
class LossResult:
    """Loss of a batch.

    Attributes:
        value: the sum over its data, without a graph.
        gradients: with respect to the log-probs of each datum.
        metrics: over all data.
    """

    value: Tensor
    gradients: Sequence[Tensor]
    metrics: dict[str, float]


def with_gradients(
    result: LossResult, logprobs: Sequence[Tensor]
) -> tuple[Tensor, dict[str, float]]:
    """Value of a result that is differentiable with respect to the log-probs, and the metrics."""
    value = _KnownGradients.apply(result.value, result.gradients, *logprobs)  # type: ignore[no-untyped-call]
    return value, result.metrics


class _KnownGradients(torch.autograd.Function):
    """A value whose gradients with respect to the log-probs are already known."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, gradients: Sequence[Tensor], *_: Tensor) -> Tensor:
        ctx.gradients = gradients
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *(slopes[0] * gradient for gradient in ctx.gradients)


def _sums(metrics: Sequence[dict[str, float]]) -> dict[str, float]:
    keys = dict.fromkeys(key for own in metrics for key in own)
    return {key: sum(own.get(key, 0.0) for own in metrics) for key in keys}


# (inputs of one datum) -> (loss, metrics)
Evaluate = Callable[[Sequence[Tensor]], tuple[Tensor, dict[str, Any]]]


@dataclass(frozen=True)
class BatchResult:
    """Results of some data.

    Attributes:
        value: sum of their losses.
        gradients: of the sum, one for each datum; None if it does not depend on the log-probs.
        metrics: sums over the data.
    """

    value: Tensor
    gradients: Sequence[Tensor] | None
    metrics: dict[str, float]


def group_by_shape(
    inputs: Sequence[Sequence[Tensor]], largest: Callable[[int], int]
) -> list[list[int]]:
    """Indices of the data, in groups of equal shapes and types.

    Args:
        inputs: of each datum.
        largest: gives the largest size of the group of a datum, by its index.
    """
    groups: dict[Any, list[list[int]]] = {}
    for index, tensors in enumerate(inputs):
        own = groups.setdefault(tuple((tensor.shape, tensor.dtype) for tensor in tensors), [[]])
        if len(own[-1]) >= largest(index):
            own.append([])
        own[-1].append(index)
    return [group for of_shape in groups.values() for group in of_shape]


def run_together(evaluate: Evaluate, inputs: Sequence[Sequence[Tensor]]) -> BatchResult:
    """Run a loss for data of equal shapes.

    Args:
        evaluate: the loss of one datum.
        inputs: of each datum, the log-probs first.

    Raises:
        Exception: an operation cannot be batched, for example since the shape of its result
            depends on values; or it fails.
    """
    keys: list[str] = []

    def of_one(*tensors: Tensor) -> tuple[Tensor, ...]:
        value, metrics = evaluate(tensors)
        keys[:] = metrics
        return value, *_stacked([_to_scalar(key, metric) for key, metric in metrics.items()])

    logprobs, *others = [torch.stack(list(column)) for column in zip(*inputs, strict=True)]
    leaf = logprobs.detach().requires_grad_()
    values, *metrics = torch.func.vmap(of_one)(leaf, *others)
    total = values.sum()
    gradients = None
    if total.requires_grad:
        (gradient,) = torch.autograd.grad(total, leaf, allow_unused=True)
        gradients = None if gradient is None else list(gradient.unbind())
    sums = metrics[0].sum(0).tolist() if metrics else []
    return BatchResult(total.detach(), gradients, dict(zip(keys, sums, strict=True)))


def run_alone(evaluate: Evaluate, inputs: Sequence[Tensor]) -> BatchResult:
    """Run a loss for one datum.

    Raises:
        InputError: an operation fails, or a metric is not a number.
    """
    leaf = inputs[0].detach().requires_grad_()
    value, metrics = evaluate([leaf, *inputs[1:]])
    gradients = None
    if value.requires_grad:
        (gradient,) = torch.autograd.grad(value, leaf, allow_unused=True)
        gradients = None if gradient is None else [gradient]
    numbers = {key: _to_float(key, metric) for key, metric in metrics.items()}
    return BatchResult(value.detach(), gradients, numbers)


def _to_scalar(key: str, metric: Any) -> Tensor:
    if isinstance(metric, Tensor) and metric.numel() == 1:
        return metric
    return torch.tensor(_to_float(key, metric), dtype=torch.float64)


def _stacked(metrics: Sequence[Tensor]) -> list[Tensor]:
    """One vector of all metrics, if there are any: one by one they take longer than the loss."""
    if not metrics:
        return []
    with torch.no_grad():
        if len({metric.dtype for metric in metrics}) > 1:
            metrics = [metric.double() for metric in metrics]
        return [torch.stack([metric.reshape(()) for metric in metrics]).double()]


def _to_float(key: str, metric: Any) -> float:
    if isinstance(metric, Tensor) and metric.numel() == 1:
        return float(metric.detach())
    if isinstance(metric, int | float):
        return float(metric)
    raise InputError(f"the metric {key!r} must be one number, got {type(metric).__name__}.")
