"""Forward and backward passes of one adapter, packing by packing; runs on the worker thread.

A batch is split into packings that fit the token budget. For a named loss each packing goes forward
and backward before the next one, so that one graph exists at a time:

    for each packing:  logprobs = forward(packing)
                       loss, d loss / d logprobs       (elementwise, for each sequence)
                       sum += backward(d loss / d logprobs)
    adapter.accumulate(sum)

A custom loss may couple all tokens of the batch, so its gradient is known only after every packing
went forward. If all packings fit the budget together, their graphs are kept for the backward pass;
else the pass runs without graphs, and the backward pass runs each packing forward again.

Each term's own gradient of the weights takes a backward pass through the same graphs
(`parameter_gradients`). Their weighted sum is the gradient of the loss, so that a step at which
they are computed needs no further pass. They are kept for all terms at once: the gradient of a
packing is a part of them, and inner products need whole ones; those of LoRA matrices are small.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tinker import types
from torch import Tensor

from steelyard.composition import NamedLoss
from steelyard.engine.adapter import Adapter
from steelyard.engine.datum_tensors import DatumTensors
from steelyard.engine.forward import COMPUTED_INPUTS, ForwardResult, OutputGradients, forward
from steelyard.engine.memory import TokenBudget, or_none
from steelyard.engine.model import Model
from steelyard.engine.packing import Packing, pack
from steelyard.engine.term_gradients import backward_each
from steelyard.errors import InputError
from steelyard.penalties.from_logits import Projection
from steelyard.penalties.from_logits.lm_head import affine

Settings = Mapping[str, float]
LossOfLogprobs = Callable[[list[Tensor]], tuple[Tensor, Mapping[str, float]]]


@dataclass
class OpenPass:
    """A forward pass that waits for its backward pass.

    Attributes:
        examples: the data.
        outputs: of the model for each of them, by name, without a graph.
        results: the packings with their graphs; None if they are not kept, and the backward pass
            must run the model forward again.
        version: of the weights that it was made with.
        temperature: of the policy.
    """

    examples: Sequence[DatumTensors]
    outputs: Sequence[dict[str, Any]]
    results: list[ForwardResult] | None
    version: int
    temperature: float = 1.0


class Trainer:
    """Runs an adapter in its model: losses, forward passes and backward passes.

    Args:
        model: the base model.
        adapter: the weights that are trained.
        token_budget: limits the tokens of one autograd graph.
    """

    def __init__(self, model: Model, adapter: Adapter, token_budget: TokenBudget) -> None:
        self.model = model
        self.adapter = adapter
        self._token_budget = token_budget

    def forward(
        self,
        examples: Sequence[DatumTensors],
        loss: NamedLoss,
        settings: Settings,
        temperature: float = 1.0,
    ) -> types.ForwardBackwardOutput:
        """Compute the loss and the log-probs at a temperature, without gradients."""
        outputs = self._token_budget.run(
            self.adapter, lambda tokens: self._without_graph(examples, tokens, (), temperature)
        )
        logprobs = [each["logprobs"] for each in outputs]
        losses, _ = _loss_and_gradients(logprobs, examples, loss, settings)
        return _sdk_output(logprobs, losses)

    def forward_backward(
        self,
        examples: Sequence[DatumTensors],
        loss: NamedLoss,
        settings: Settings,
        temperature: float = 1.0,
    ) -> types.ForwardBackwardOutput:
        """Compute the loss of log-probs at a temperature, and accumulate its gradient."""

        def work(tokens: int) -> types.ForwardBackwardOutput:
            total = _GradientSum(self.adapter)
            outputs = _empty_outputs(examples)
            losses: list[Tensor] = [torch.empty(0)] * len(examples)
            for packing in self._packings(examples, tokens):
                result = self._with_graph(examples, packing, (), temperature)
                result.split(examples, outputs)
                indices = [sequence.index for sequence in packing.sequences]
                logprobs = [outputs[i]["logprobs"] for i in indices]
                packed_losses, packed_gradients = _loss_and_gradients(
                    logprobs, [examples[i] for i in indices], loss, settings
                )
                gradients: list[Tensor] = [torch.empty(0)] * len(examples)
                for i, value, gradient in zip(
                    indices, packed_losses, packed_gradients, strict=True
                ):
                    losses[i], gradients[i] = value, gradient
                total.add(result.backward(OutputGradients(gradients), self._weights()))
            # Only here, after the last packing: if memory runs out before, the call is repeated,
            # and no packing may count twice.
            self.adapter.accumulate(total.gradients)
            return _sdk_output([each["logprobs"] for each in outputs], losses)

        return self._token_budget.run(self.adapter, work)

    def open_pass(
        self,
        examples: Sequence[DatumTensors],
        needs: Sequence[str],
        *,
        temperature: float = 1.0,
        keep_graph: bool = True,
        per_term: bool = False,
    ) -> OpenPass:
        """Run the model forward, and keep its graph for `backward` if the token budget allows it.

        Args:
            examples: the data.
            needs: outputs beside the log-probs; those of `COMPUTED_INPUTS` are computed.
            temperature: of the policy: divides the logits.
            keep_graph: False if no backward pass is expected; one would run forward again.
            per_term: prepare for `parameter_gradients` of several terms.

        Raises:
            InputError: `needs` has a projection, and the model's logits are not the output of its
                output layer.
        """
        computed = [need for need in needs if need in COMPUTED_INPUTS]
        if "projection" in computed and not self.model.supports_projection:
            raise InputError(
                f"needs=('projection',) takes a model whose logits are what its output layer "
                f"gives, and {self.model.source.name!r} has none or changes them after it: use "
                f"needs=('logits',)."
            )
        if per_term:
            computed += self._head_input

        def work(tokens: int) -> OpenPass:
            packings = self._packings(examples, tokens)
            outputs = _empty_outputs(examples)
            results = None
            size = sum(packing.rows * packing.length for packing in packings)
            if keep_graph and size <= tokens:
                results = [
                    self._with_graph(examples, packing, computed, temperature)
                    for packing in packings
                ]
                for result in results:
                    result.split(examples, outputs)
            else:
                outputs = self._without_graph(examples, tokens, computed, temperature)
            if "projection" in computed:
                self._add_projections(outputs, temperature)
            return OpenPass(examples, outputs, results, self.adapter.version, temperature)

        return self._token_budget.run(self.adapter, work, computed)

    def backward(
        self,
        opened: OpenPass,
        gradients: OutputGradients,
        total: Sequence[Tensor | None] | None = None,
    ) -> types.ForwardBackwardOutput:
        """Accumulate the gradients of the weights, given those of the outputs of an open pass.

        Args:
            opened: the forward pass.
            gradients: of its outputs.
            total: the gradients of the weights, if `parameter_gradients` has given them already;
                None runs the backward pass.
        """
        if total is None:
            (total,) = self.parameter_gradients(opened, [gradients])
        self.adapter.accumulate(total)
        logprobs = [each["logprobs"] for each in opened.outputs]
        # The surrogate loss sum(logprobs * gradient), linear in the log-probs, has that gradient.
        surrogate = [
            row * gradient.to(row)
            for row, gradient in zip(logprobs, gradients.logprobs, strict=True)
        ]
        return _sdk_output(logprobs, surrogate)

    def parameter_gradients(
        self, opened: OpenPass, terms: Sequence[OutputGradients]
    ) -> list[list[Tensor | None]]:
        """Gradients of the weights for each of several gradients of the outputs, one pass each.

        The model runs forward again if the weights have changed since, if the graphs were not kept
        or were used already, or if memory runs out in their backward pass. A remote client runs it
        twice in any case: once for the log-probs, once for their gradients.
        """
        results, opened.results = opened.results, None
        sums = None
        if results is not None and opened.version == self.adapter.version:
            sums = self._backward_kept(results, terms)
        if sums is None:
            results = None  # frees graphs that were not used
            computed = self._differentiated(terms)
            sums, opened.outputs = self._token_budget.run(
                self.adapter,
                lambda tokens: self._backward_recomputed(opened, terms, tokens, computed),
                computed,
            )
        for total, gradients in zip(sums, terms, strict=True):
            total.add([gradients.parameters.get(key) for key in self.adapter.parameters])
            total.add(self._through_output_weight(gradients))
        return [total.gradients for total in sums]

    def _add_projections(self, outputs: Sequence[dict[str, Any]], temperature: float) -> None:
        """Turn the inputs of the output layer into projections, all with one weight tensor.

        Their logits are those of the policy: z / t = (h / t) W^T + b / t.
        """
        with torch.enable_grad():
            weight, bias = affine(self.model.output_layer)
        # A leaf of its own: terms differentiate up to here, `_through_output_weight` goes on to A
        # and B of the layer's LoRA.
        weight = weight.detach().requires_grad_(weight.requires_grad)
        bias = None if bias is None else bias.to(weight.dtype) / temperature
        for each in outputs:
            hidden = each.pop("head_input").to(weight.dtype) / temperature
            each["projection"] = Projection(hidden.requires_grad_(), weight, bias)

    def _through_output_weight(self, gradients: OutputGradients) -> Sequence[Tensor | None]:
        """Gradients of the weights through the output layer's `W + scale * B A`, for projections.

        All data share that weight, and its gradient is already summed over them.
        """
        gradient = gradients.projection[0].weight if gradients.projection else None
        if gradient is None:
            return [None] * len(self.adapter.parameters)
        self.model.activate(self.adapter)
        with torch.enable_grad():
            weight, _ = affine(self.model.output_layer)
        return torch.autograd.grad(weight, self._weights(), gradient.to(weight), allow_unused=True)

    def _backward_kept(
        self, results: list[ForwardResult], terms: Sequence[OutputGradients]
    ) -> list[_GradientSum] | None:
        """Sums of the gradients through kept graphs; None if memory runs out."""
        sums = [_GradientSum(self.adapter) for _ in terms]
        self.model.activate(self.adapter)

        def work() -> list[_GradientSum]:
            while results:
                # Popped, so that each graph is freed as soon as it is used.
                self._add_backward(results.pop(), terms, sums)
            return sums

        return or_none(work)

    def _differentiated(self, terms: Sequence[OutputGradients]) -> list[str]:
        """Outputs beside the log-probs that a backward pass of the terms starts from."""
        computed = [
            need
            for need in COMPUTED_INPUTS
            if any(getattr(gradients, need) is not None for gradients in terms)
        ]
        return [*computed, *self._head_input] if len(terms) > 1 else computed

    def _backward_recomputed(
        self,
        opened: OpenPass,
        terms: Sequence[OutputGradients],
        tokens: int,
        computed: Sequence[str],
    ) -> tuple[list[_GradientSum], Sequence[dict[str, Any]]]:
        """Sums of the gradients through new graphs, and the outputs of that forward pass."""
        examples = opened.examples
        sums, outputs = [_GradientSum(self.adapter) for _ in terms], _empty_outputs(examples)
        for packing in self._packings(examples, tokens):
            result = self._with_graph(examples, packing, computed, opened.temperature)
            result.split(examples, outputs)
            self._add_backward(result, terms, sums)
        return sums, outputs

    def _add_backward(
        self,
        result: ForwardResult,
        terms: Sequence[OutputGradients],
        sums: Sequence[_GradientSum],
    ) -> None:
        """Add the gradients of a packing for each term; the last backward pass frees its graph."""
        if len(terms) == 1:
            sums[0].add(result.backward(terms[0], self._weights()))
            return
        head = list(self.model.output_layer.parameters()) if result.head_input is not None else []
        found = backward_each(result, terms, self._weights(), head)
        for total, gradients in zip(sums, found, strict=True):
            total.add(gradients)

    @property
    def _head_input(self) -> list[str]:
        """The output that `backward_each` starts from, if the model has it."""
        return ["head_input"] if self.model.supports_projection else []

    def _packings(self, examples: Sequence[DatumTensors], tokens: int) -> list[Packing]:
        lengths = [len(example.tokens) for example in examples]
        return pack(lengths, tokens, shared=self.model.supports_packing)

    def _with_graph(
        self,
        examples: Sequence[DatumTensors],
        packing: Packing,
        needs: Sequence[str],
        temperature: float,
    ) -> ForwardResult:
        with torch.enable_grad():
            return forward(self.model, self.adapter, examples, packing, needs, temperature)

    def _without_graph(
        self,
        examples: Sequence[DatumTensors],
        tokens: int,
        needs: Sequence[str],
        temperature: float,
    ) -> list[dict[str, Any]]:
        outputs = _empty_outputs(examples)
        with torch.no_grad():
            for packing in self._packings(examples, tokens):
                result = forward(self.model, self.adapter, examples, packing, needs, temperature)
                result.split(examples, outputs)
        return outputs

    def _weights(self) -> list[Tensor]:
        return list(self.adapter.parameters.values())


def with_metrics(
    output: types.ForwardBackwardOutput, total: float, metrics: Mapping[str, float]
) -> types.ForwardBackwardOutput:
    """Put the value and the metrics of a custom loss into the output of its backward pass.

    `loss:sum` is the value; the linear surrogate's becomes `surrogate_loss:sum`, as in the SDK.
    """
    surrogate = output.metrics.pop("loss:sum")
    output.metrics.update(metrics)
    output.metrics.update({"loss:sum": total, "surrogate_loss:sum": surrogate})
    return output


class _GradientSum:
    """Sum of the gradients of several packings, which reaches the adapter only as a whole."""

    def __init__(self, adapter: Adapter) -> None:
        self.gradients: list[Tensor | None] = [None] * len(adapter.parameters)

    def add(self, gradients: Sequence[Tensor | None]) -> None:
        for i, gradient in enumerate(gradients):
            if gradient is not None:
                so_far = self.gradients[i]
                self.gradients[i] = gradient if so_far is None else so_far + gradient


def _empty_outputs(examples: Sequence[DatumTensors]) -> list[dict[str, Any]]:
    return [{} for _ in examples]


def _loss_and_gradients(
    logprobs: Sequence[Tensor],
    examples: Sequence[DatumTensors],
    loss: NamedLoss,
    settings: Settings,
) -> tuple[list[Tensor], list[Tensor]]:
    """Loss of each token of each example, and d loss / d logprobs, in the same shapes."""
    losses, gradients = [], []
    for row, example in zip(logprobs, examples, strict=True):
        with torch.enable_grad():
            leaf = row.detach().requires_grad_()
            fields = {name: value.to(leaf) for name, value in example.inputs.items()}
            values = loss.elementwise(leaf, fields, settings)
            (gradient,) = torch.autograd.grad(values.sum(), leaf)
        losses.append(values.detach())
        gradients.append(gradient)
    return losses, gradients


def _sdk_output(
    logprobs: Sequence[Tensor], losses: Sequence[Tensor]
) -> types.ForwardBackwardOutput:
    # In float64: a batch may have very many tokens.
    total = sum(values.double().sum().item() for values in losses)
    return types.ForwardBackwardOutput(
        loss_fn_output_type="TorchLossReturn",
        loss_fn_outputs=[
            {"logprobs": _tensor_data(row), "elementwise_loss": _tensor_data(values)}
            for row, values in zip(logprobs, losses, strict=True)
        ],
        metrics={"loss:sum": total},
    )


def _tensor_data(tensor: Tensor) -> types.TensorData:
    return types.TensorData.from_torch(tensor.cpu())
