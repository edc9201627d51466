"""What a training client's calls do to its adapter. Runs on the engine's thread, call by call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tinker import types
from torch import Tensor

from steelyard.engine.adapter import Adapter
from steelyard.engine.datum_tensors import DatumTensors
from steelyard.engine.forward import MADE, ForwardResult, OutputGradients, forward
from steelyard.engine.memory import TokenBudget
from steelyard.engine.model import Model
from steelyard.engine.named_losses import Loss
from steelyard.engine.packing import Packing, pack
from steelyard.errors import InputError
from steelyard.penalties.from_logits import Projection
from steelyard.penalties.from_logits.lm_head import affine

Settings = Mapping[str, float]
LossOfLogprobs = Callable[[list[Tensor]], tuple[Tensor, Mapping[str, float]]]


@dataclass
class Opened:
    """A forward pass whose way back is still to come.

    Attributes:
        examples: what the model read.
        found: what it gave for each of them, without the graph.
        runs: the graphs; None if they are not kept, and the way back goes forward again.
        version: of the weights it was made with.
    """

    examples: Sequence[DatumTensors]
    found: Sequence[dict[str, Any]]
    runs: list[ForwardResult] | None
    version: int


class Trainer:
    """An adapter in its model: forward passes, the way back, and steps."""

    def __init__(self, model: Model, adapter: Adapter, room: TokenBudget) -> None:
        self.model = model
        self.adapter = adapter
        self._room = room

    def forward(
        self, examples: Sequence[DatumTensors], loss: Loss, settings: Settings
    ) -> types.ForwardBackwardOutput:
        """The loss and the log-probs; no gradient."""
        found = self._room.within(self.adapter, lambda tokens: self._look(examples, tokens))
        each, _ = _losses([f["logprobs"] for f in found], examples, loss, settings)
        return _output([f["logprobs"] for f in found], each)

    def forward_backward(
        self, examples: Sequence[DatumTensors], loss: Loss, settings: Settings
    ) -> types.ForwardBackwardOutput:
        """The loss, and its gradient gathered; packing by packing."""

        def work(tokens: int) -> types.ForwardBackwardOutput:
            total = _Sum(self.adapter)
            found = _nothing(examples)
            each: list[Tensor] = [torch.empty(0)] * len(examples)
            for packing in self._packed(examples, tokens):
                run = self._run(examples, packing)
                run.split(examples, found)
                inside = [slot.index for slot in packing.slots]
                logprobs = [found[i]["logprobs"] for i in inside]
                losses, slopes = _losses(logprobs, [examples[i] for i in inside], loss, settings)
                pulls: list[Tensor] = [torch.empty(0)] * len(examples)
                for i, value, slope in zip(inside, losses, slopes, strict=True):
                    each[i], pulls[i] = value, slope
                total.add(run.pull(OutputGradients(pulls), self._weights()))
            self.adapter.gather(total.gradients)
            return _output([f["logprobs"] for f in found], each)

        return self._room.within(self.adapter, work)

    def custom(
        self, examples: Sequence[DatumTensors], loss: LossOfLogprobs
    ) -> types.ForwardBackwardOutput:
        """A loss of one's own, `logprobs -> (loss, metrics)`, and its gradient gathered.

        The loss has the log-probs in float32 on the CPU, as the SDK's custom losses do.
        """
        opened = self.open(examples, ())
        leaves = [
            found["logprobs"].detach().cpu().float().requires_grad_() for found in opened.found
        ]
        with torch.enable_grad():
            value, metrics = loss(leaves)
            slopes = torch.autograd.grad(value, leaves, allow_unused=True)
        pulls = [
            torch.zeros_like(leaf) if slope is None else slope
            for leaf, slope in zip(leaves, slopes, strict=True)
        ]
        return with_metrics(self.close(opened, OutputGradients(pulls)), value.item(), metrics)

    def open(self, examples: Sequence[DatumTensors], needs: Sequence[str]) -> Opened:
        """A forward pass; its graph is kept for the way back, if there is room for it.

        Raises:
            InputError: the model's logits are not what its output layer gives, and that is needed.
        """
        made = [need for need in needs if need in MADE]
        if "projection" in made and not self.model.projects:
            raise InputError(
                f"needs=('projection',) takes a model whose logits are what its output layer "
                f"gives, and {self.model.source.name!r} has none or changes them after it: use "
                f"needs=('logits',)."
            )

        def work(tokens: int) -> Opened:
            packings = self._packed(examples, tokens)
            found = _nothing(examples)
            runs = None
            if sum(packing.rows * packing.length for packing in packings) <= tokens:
                runs = [self._run(examples, packing, made) for packing in packings]
                for run in runs:
                    run.split(examples, found)
            else:
                found = self._look(examples, tokens, made)
            if "projection" in made:
                self._project(found)
            return Opened(examples, found, runs, self.adapter.version)

        return self._room.within(self.adapter, work)

    def close(self, opened: Opened, pulls: OutputGradients) -> types.ForwardBackwardOutput:
        """The way back: gather the gradient that `pulls` make.

        If the weights have changed since, or the graphs were not kept or leave no room for the
        way back, it goes forward again, as the two passes of a remote client would.
        """
        runs, opened.runs = opened.runs, None
        total, found = None, opened.found
        if runs is not None and opened.version == self.adapter.version:
            total = self._back(runs, pulls)
        if total is None:
            runs = None
            total, found = self._room.within(
                self.adapter, lambda tokens: self._again(opened.examples, pulls, tokens)
            )
        total.add([pulls.parameters.get(key) for key in self.adapter.parameters])
        total.add(self._through_output_layer(pulls))
        self.adapter.gather(total.gradients)
        logprobs = [f["logprobs"] for f in found]
        each = [lp * pull.to(lp) for lp, pull in zip(logprobs, pulls.logprobs, strict=True)]
        return _output(logprobs, each)

    def _project(self, found: Sequence[dict[str, Any]]) -> None:
        """Put projections in the place of what the output layer read, all with one weight."""
        with torch.enable_grad():
            weight, bias = affine(self.model.output_layer)
        weight = weight.detach().requires_grad_(weight.requires_grad)
        for each in found:
            hidden = each.pop("read").to(weight.dtype).requires_grad_()
            bias = None if bias is None else bias.to(weight.dtype)
            each["projection"] = Projection(hidden, weight, bias)

    def _through_output_layer(self, pulls: OutputGradients) -> Sequence[Tensor | None]:
        """The gradients by way of the output layer's weight, which all data share."""
        pull = pulls.projection[0].weight if pulls.projection else None
        if pull is None:
            return [None] * len(self.adapter.parameters)
        self.model.activate(self.adapter)
        with torch.enable_grad():
            weight, _ = affine(self.model.output_layer)
        return torch.autograd.grad(weight, self._weights(), pull.to(weight), allow_unused=True)

    def _back(self, runs: list[ForwardResult], pulls: OutputGradients) -> _Sum | None:
        """The gradients through kept graphs; None if there is no room for them."""
        total = _Sum(self.adapter)
        self.model.activate(self.adapter)
        try:
            while runs:
                total.add(runs.pop().pull(pulls, self._weights()))
        except torch.OutOfMemoryError:
            return None
        return total

    def _again(
        self, examples: Sequence[DatumTensors], pulls: OutputGradients, tokens: int
    ) -> tuple[_Sum, Sequence[dict[str, Any]]]:
        """The gradients through graphs made anew, and what the model gave this time."""
        made = [need for need in MADE if getattr(pulls, need) is not None]
        total, found = _Sum(self.adapter), _nothing(examples)
        for packing in self._packed(examples, tokens):
            run = self._run(examples, packing, made)
            run.split(examples, found)
            total.add(run.pull(pulls, self._weights()))
        return total, found

    def _packed(self, examples: Sequence[DatumTensors], tokens: int) -> list[Packing]:
        lengths = [len(example.tokens) for example in examples]
        return pack(lengths, tokens, shared=self.model.packs)

    def _run(
        self, examples: Sequence[DatumTensors], packing: Packing, needs: Sequence[str] = ()
    ) -> ForwardResult:
        with torch.enable_grad():
            return forward(self.model, self.adapter, examples, packing, needs)

    def _look(
        self, examples: Sequence[DatumTensors], tokens: int, needs: Sequence[str] = ()
    ) -> list[dict[str, Any]]:
        found = _nothing(examples)
        with torch.no_grad():
            for packing in self._packed(examples, tokens):
                forward(self.model, self.adapter, examples, packing, needs).split(examples, found)
        return found

    def _weights(self) -> list[Tensor]:
        return list(self.adapter.parameters.values())


def with_metrics(
    output: types.ForwardBackwardOutput, total: float, metrics: Mapping[str, float]
) -> types.ForwardBackwardOutput:
    """The output of a custom loss: its own value and metrics beside the surrogate's."""
    surrogate = output.metrics.pop("loss:sum")
    output.metrics.update(metrics)
    output.metrics.update({"loss:sum": total, "surrogate_loss:sum": surrogate})
    return output


class _Sum:
    """The gradients of several runs, added up before any of them counts."""

    def __init__(self, adapter: Adapter) -> None:
        self.gradients: list[Tensor | None] = [None] * len(adapter.parameters)

    def add(self, more: Sequence[Tensor | None]) -> None:
        for i, gradient in enumerate(more):
            if gradient is not None:
                so_far = self.gradients[i]
                self.gradients[i] = gradient if so_far is None else so_far + gradient


def _nothing(examples: Sequence[DatumTensors]) -> list[dict[str, Any]]:
    return [{} for _ in examples]


def _losses(
    logprobs: Sequence[Tensor], examples: Sequence[DatumTensors], loss: Loss, settings: Settings
) -> tuple[list[Tensor], list[Tensor]]:
    """The loss of each token of each example, and its slope."""
    each, slopes = [], []
    for row, example in zip(logprobs, examples, strict=True):
        with torch.enable_grad():
            leaf = row.detach().requires_grad_()
            fields = {name: value.to(leaf) for name, value in example.inputs.items()}
            values = loss.elementwise(leaf, fields, settings)
            (slope,) = torch.autograd.grad(values.sum(), leaf)
        each.append(values.detach())
        slopes.append(slope)
    return each, slopes


def _output(logprobs: Sequence[Tensor], each: Sequence[Tensor]) -> types.ForwardBackwardOutput:
    total = sum(values.double().sum().item() for values in each)
    return types.ForwardBackwardOutput(
        loss_fn_output_type="TorchLossReturn",
        loss_fn_outputs=[
            {"logprobs": _data(row), "elementwise_loss": _data(values)}
            for row, values in zip(logprobs, each, strict=True)
        ],
        metrics={"loss:sum": total},
    )


def _data(tensor: Tensor) -> types.TensorData:
    return types.TensorData.from_torch(tensor.cpu())
