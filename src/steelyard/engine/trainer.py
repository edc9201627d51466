"""Forward and backward passes of one adapter, packing by packing; runs on the worker thread.

A batch is split into packings that fit the token budget. For a named loss each packing goes forward
and backward before the next one, so that one graph exists at a time:

    for each packing:  logprobs = forward(packing)
                       loss, d loss / d logprobs       (elementwise, or for each sequence)
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
from typing import Any, TypeVar

import torch
from tinker import types
from tinker.lib.public_interfaces.api_future import AwaitableConcurrentFuture
from torch import Tensor

from steelyard.composition.named_losses import NamedLoss
from steelyard.engine.adapter import Adapter
from steelyard.engine.datum_tensors import DatumTensors
from steelyard.engine.forward import (
    COMPUTED_INPUTS,
    ForwardResult,
    OutputGradients,
    backward_each,
    forward,
)
from steelyard.engine.memory import GraphLimits, TokenBudget, or_none
from steelyard.engine.model import Model
from steelyard.engine.packing import Packing, pack, pack_in_one_row
from steelyard.engine.worker_thread import WorkerThread
from steelyard.errors import InputError
from steelyard.penalties.from_logits.lm_head import affine
from steelyard.penalties.from_logits.projection import Projection
from steelyard.spec.regularizer import REFERENCE_INPUTS

Settings = Mapping[str, float]
# Most log-probs of a call that terms compute with on the CPU: 8 MB.
_MOST_ON_CPU = 2**20
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
            self.adapter,
            lambda limits: self._without_graph(
                examples, limits.recomputed, (), temperature, adapter=self.adapter
            ),
        )
        logprobs = [row["logprobs"] for row in outputs]
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

        def work(limits: GraphLimits) -> types.ForwardBackwardOutput:
            total = _GradientSum(self.adapter)
            outputs = _empty_outputs(examples)
            losses: list[Tensor] = [torch.empty(0)] * len(examples)
            for packing in self._packings(examples, limits.whole):
                recompute = limits.recomputes(packing.size)
                result = self._with_graph(examples, packing, (), temperature, recompute)
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
            return _sdk_output([row["logprobs"] for row in outputs], losses)

        return self._token_budget.run(self.adapter, work)

    def open_pass(
        self,
        examples: Sequence[DatumTensors],
        needs: Sequence[str],
        *,
        temperature: float = 1.0,
        keep_graph: bool = True,
        per_term: bool = False,
        reference_of: Sequence[int] | None = None,
    ) -> OpenPass:
        """Run the model forward, and keep its graph for `backward` if the token budget allows it.

        Args:
            examples: the data.
            needs: outputs beside the log-probs; those of `COMPUTED_INPUTS`, and those of the base
                model, `REFERENCE_INPUTS`, are computed.
            temperature: of the policy: divides the logits.
            keep_graph: False if no backward pass is expected; one would run forward again.
            per_term: prepare for `parameter_gradients` of several terms.
            reference_of: indices of the data for which those of the base model are; None: all.

        Raises:
            InputError: `needs` has a projection, and the model's logits are not the output of its
                output layer.
        """
        computed = [need for need in needs if need in COMPUTED_INPUTS]
        references = [need for need in needs if need in REFERENCE_INPUTS]
        projects = not {"projection", "reference_projection"}.isdisjoint(needs)
        if projects and not self.model.supports_projection:
            raise InputError(
                f"needs=('projection',) takes a model whose logits are what its output layer "
                f"gives, and {self.model.source.name!r} has none or changes them after it: use "
                f"needs=('logits',)."
            )
        if per_term:
            computed += self._head_input

        def work(limits: GraphLimits) -> OpenPass:
            tokens = limits.recomputed
            packings = self._packings(examples, tokens)
            outputs = _empty_outputs(examples)
            results = None
            size = sum(packing.size for packing in packings)
            if keep_graph and size <= tokens:
                recompute = limits.recomputes(size)
                results = [
                    self._with_graph(examples, packing, computed, temperature, recompute)
                    for packing in packings
                ]
                for result in results:
                    result.split(examples, outputs)
            else:
                outputs = self._without_graph(
                    examples, tokens, computed, temperature, adapter=self.adapter
                )
            if "projection" in computed:
                self._add_projections(outputs, temperature)
            if references:
                indices = range(len(examples)) if reference_of is None else reference_of
                self._add_references(examples, outputs, indices, references, tokens, temperature)
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
        logprobs = [row["logprobs"] for row in opened.outputs]
        # The surrogate loss sum(logprobs * gradient), linear in the log-probs, has that gradient.
        flat = _flat(logprobs)
        surrogate = _split_like(flat * _flat(gradients.logprobs).to(flat), logprobs)
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
                lambda limits: self._backward_recomputed(opened, terms, limits, computed),
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
        for row in outputs:
            hidden = row.pop("head_input").to(weight.dtype) / temperature
            row["projection"] = Projection(hidden.requires_grad_(), weight, bias)

    def _add_references(
        self,
        examples: Sequence[DatumTensors],
        outputs: Sequence[dict[str, Any]],
        indices: Sequence[int],
        references: Sequence[str],
        tokens: int,
        temperature: float,
    ) -> None:
        """Add what the base model computes for some of the data, without the adapter."""
        chosen = [examples[index] for index in indices]
        needs = [need.removeprefix("reference_") for need in references]
        of_base = self._without_graph(chosen, tokens, needs, temperature, adapter=None)
        if "projection" in needs:
            with self.model.without_adapter():
                weight, bias = affine(self.model.output_layer)
            weight, bias = weight.detach(), None if bias is None else bias.detach() / temperature
            for base in of_base:
                hidden = base.pop("head_input").to(weight.dtype) / temperature
                base["projection"] = Projection(hidden, weight, bias)
        for index, base in zip(indices, of_base, strict=True):
            outputs[index] |= {f"reference_{need}": base[need] for need in needs}

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
        limits: GraphLimits,
        computed: Sequence[str],
    ) -> tuple[list[_GradientSum], Sequence[dict[str, Any]]]:
        """Sums of the gradients through new graphs, and the outputs of that forward pass."""
        examples = opened.examples
        sums, outputs = [_GradientSum(self.adapter) for _ in terms], _empty_outputs(examples)
        for packing in self._packings(examples, limits.whole):
            recompute = limits.recomputes(packing.size)
            result = self._with_graph(examples, packing, computed, opened.temperature, recompute)
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
        by_term = backward_each(result, terms, self._weights(), head)
        for total, gradients in zip(sums, by_term, strict=True):
            total.add(gradients)

    @property
    def _head_input(self) -> list[str]:
        """The output that `backward_each` starts from, if the model has it."""
        # Without logits, the log-probs know their gradient by that input themselves.
        reads = self.model.supports_projection and not self.model.computes_without_logits
        return ["head_input"] if reads else []

    def _packings(self, examples: Sequence[DatumTensors], tokens: int) -> list[Packing]:
        lengths = [len(example.tokens) for example in examples]
        if self.model.packs_in_one_row:
            return pack_in_one_row(lengths, tokens)
        return pack(lengths, tokens, shared=self.model.supports_packing)

    def _with_graph(
        self,
        examples: Sequence[DatumTensors],
        packing: Packing,
        needs: Sequence[str],
        temperature: float,
        recompute: bool,
    ) -> ForwardResult:
        with torch.enable_grad():
            return forward(
                self.model,
                self.adapter,
                examples,
                packing,
                needs,
                temperature,
                recompute=recompute,
            )

    def _without_graph(
        self,
        examples: Sequence[DatumTensors],
        tokens: int,
        needs: Sequence[str],
        temperature: float,
        *,
        adapter: Adapter | None,
    ) -> list[dict[str, Any]]:
        outputs = _empty_outputs(examples)
        with torch.no_grad():
            for packing in self._packings(examples, tokens):
                result = forward(self.model, adapter, examples, packing, needs, temperature)
                result.split(examples, outputs)
        return outputs

    def _weights(self) -> list[Tensor]:
        return self.adapter.leaves


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
        for i, gradient in enumerate(_in_full_precision(gradients)):
            if gradient is not None:
                so_far = self.gradients[i]
                self.gradients[i] = gradient if so_far is None else so_far + gradient


def _in_full_precision(gradients: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
    """Gradients with those of 16 bits, of copies of the weights, in float32: as sums are."""
    half = [g for g in gradients if g is not None and g.dtype == torch.bfloat16]
    if not half:
        return gradients
    # Together: on a GPU each operation costs more than its arithmetic.
    split: Any = torch.split  # it has no types
    parts = split(torch.cat([g.flatten() for g in half]).float(), [g.numel() for g in half])
    wide = iter([part.view(g.shape) for part, g in zip(parts, half, strict=True)])
    return [next(wide) if g is not None and g.dtype == torch.bfloat16 else g for g in gradients]


def _empty_outputs(examples: Sequence[DatumTensors]) -> list[dict[str, Any]]:
    return [{} for _ in examples]


def _loss_and_gradients(
    logprobs: Sequence[Tensor],
    examples: Sequence[DatumTensors],
    loss: NamedLoss,
    settings: Settings,
) -> tuple[list[Tensor], list[Tensor]]:
    """Loss of each token of each example, and d loss / d logprobs, in the same shapes."""
    if loss.per_sequence and len(examples) > 1:
        parts = [
            _loss_and_gradients([row], [example], loss, settings)
            for row, example in zip(logprobs, examples, strict=True)
        ]
        return [values for (values,), _ in parts], [gradient for _, (gradient,) in parts]
    # The tokens of all examples at once: the loss is elementwise.
    with torch.enable_grad():
        leaf = _flat(logprobs).requires_grad_()
        fields = {
            name: _flat([example.inputs[name] for example in examples]).to(leaf)
            for name in examples[0].inputs
        }
        values = loss.elementwise(leaf, fields, settings)
        (gradient,) = torch.autograd.grad(values.sum(), leaf)
    return _split_like(values.detach(), logprobs), _split_like(gradient, logprobs)


def _flat(rows: Sequence[Tensor]) -> Tensor:
    return torch.cat([row.detach().flatten() for row in rows])


def _split_like(flat: Tensor, rows: Sequence[Tensor]) -> list[Tensor]:
    """Parts of a flat tensor, in the shapes of the rows that it was made of."""
    split: Any = torch.split  # it has no types
    parts = split(flat, [row.numel() for row in rows])
    return [part.view(row.shape) for part, row in zip(parts, rows, strict=True)]


def _sdk_output(
    logprobs: Sequence[Tensor], losses: Sequence[Tensor]
) -> types.ForwardBackwardOutput:
    # One copy of all: on a GPU each of them waits for the computation.
    logprobs, losses = _on_cpu(logprobs), _on_cpu(losses)
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


def _on_cpu(rows: Sequence[Tensor]) -> list[Tensor]:
    return _split_like(_flat(rows).cpu(), rows) if rows[0].is_cuda else list(rows)


def _tensor_data(tensor: Tensor) -> types.TensorData:
    return types.TensorData.from_torch(tensor)


T = TypeVar("T")


class ForwardPass:
    """Outputs of a forward pass, and the backward pass through it.

    Attributes:
        logprobs: of the target tokens of each datum, `[T]` or `[T, K]`, without a graph; on the CPU
            unless extra inputs were requested, which are on the model's device.
        given: the extra inputs that were requested, without a graph: `"logits"`, `[T, V]` for each
            datum; `"projection"`, a `Projection` of that shape for each datum, with one shared
            weight; `"reference_logits"` and `"reference_projection"`, the same of the base model;
            `"hidden_states"`, `{layer: [T, H]}` for each datum, 0 for the embeddings;
            `"parameters"`, the LoRA weights by key.
    """

    def __init__(
        self, worker: WorkerThread, trainer: Trainer, opened: OpenPass, needs: Sequence[str]
    ) -> None:
        self._worker, self._trainer, self._opened = worker, trainer, opened
        logprobs = [outputs["logprobs"] for outputs in opened.outputs]
        # Terms compute with few numbers at a time, which on a GPU cost more than on the CPU.
        few = not needs and sum(row.numel() for row in logprobs) <= _MOST_ON_CPU
        self.logprobs: list[Tensor] = _on_cpu(logprobs) if few else logprobs
        self.given: dict[str, Any] = {
            need: [outputs.get(need) for outputs in opened.outputs]
            for need in needs
            if need in (*COMPUTED_INPUTS, *REFERENCE_INPUTS)
        }
        if "parameters" in needs:
            parameters = trainer.adapter.parameters
            self.given["parameters"] = {key: p.detach() for key, p in parameters.items()}

    def backward(
        self,
        gradients: Sequence[Tensor],
        extra_gradients: Mapping[str, Any] | None = None,
        then: Callable[[types.ForwardBackwardOutput], T] = lambda output: output,  # type: ignore[assignment,return-value]  # T is the output then
        *,
        total: Mapping[str, Tensor | None] | None = None,
    ) -> AwaitableConcurrentFuture[T]:
        """Queue the backward pass, which accumulates the gradients of the LoRA weights.

        Args:
            gradients: d loss / d logprobs, for each datum.
            extra_gradients: d loss / d `given`, by name and in the same structure; None in place
                of a tensor stands for zeros.
            then: applied to the output before the future has it.
            total: d loss / d LoRA weights by key, if it is known from `parameter_gradients`; then
                it is accumulated, and no backward pass runs.
        """
        output_gradients = OutputGradients(gradients, **(extra_gradients or {}))
        weights = None if total is None else list(total.values())
        return self._worker.submit(
            lambda: then(self._trainer.backward(self._opened, output_gradients, weights))
        )

    def parameter_gradients(
        self, terms: Sequence[tuple[Sequence[Tensor], Mapping[str, Any]]]
    ) -> list[list[Tensor | None]]:
        """Compute d term / d LoRA weights of each term, in the order of the keys; add up nothing.

        Each takes a backward pass. If the token budget did not allow to keep the graph, the model
        runs forward once more for all of them.

        Args:
            terms: for each, d term / d logprobs and d term / d `given`, as for `backward`.
        """
        by_term = [OutputGradients(gradients, **extra) for gradients, extra in terms]
        return self._worker.submit(
            lambda: self._trainer.parameter_gradients(self._opened, by_term)
        ).result()
