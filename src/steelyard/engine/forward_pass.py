"""`ForwardPass`: a forward pass whose gradients the caller supplies later, for custom losses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from tinker import types
from tinker.lib.public_interfaces.api_future import AwaitableConcurrentFuture
from torch import Tensor

from steelyard.engine.forward import COMPUTED_INPUTS, OutputGradients
from steelyard.engine.trainer import OpenPass, Trainer
from steelyard.engine.worker_thread import WorkerThread

T = TypeVar("T")


class ForwardPass:
    """Outputs of a forward pass, and the backward pass through it.

    Attributes:
        logprobs: of the target tokens of each datum, `[T]` or `[T, K]`, without a graph.
        given: the extra inputs that were requested, without a graph: `"logits"`, `[T, V]` for each
            datum; `"projection"`, a `Projection` of that shape for each datum, with one shared
            weight; `"hidden_states"`, `{layer: [T, H]}` for each datum, 0 for the embeddings;
            `"parameters"`, the LoRA weights by key.
    """

    def __init__(
        self, worker: WorkerThread, trainer: Trainer, opened: OpenPass, needs: Sequence[str]
    ) -> None:
        self._worker, self._trainer, self._opened = worker, trainer, opened
        self.logprobs: list[Tensor] = [outputs["logprobs"] for outputs in opened.outputs]
        self.given: dict[str, Any] = {
            need: [outputs[need] for outputs in opened.outputs]
            for need in needs
            if need in COMPUTED_INPUTS
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
        found = [OutputGradients(gradients, **extra) for gradients, extra in terms]
        return self._worker.submit(
            lambda: self._trainer.parameter_gradients(self._opened, found)
        ).result()
