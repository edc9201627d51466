"""`ForwardPass`: one forward pass of a custom loss, and the way back through it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from tinker import types
from tinker.lib.public_interfaces.api_future import AwaitableConcurrentFuture
from torch import Tensor

from steelyard.engine.forward import MADE, OutputGradients
from steelyard.engine.trainer import Opened, Trainer
from steelyard.engine.worker_thread import WorkerThread

T = TypeVar("T")


class ForwardPass:
    """What a forward pass gave, and the way back.

    Attributes:
        logprobs: of the target tokens of each datum, `[T]` or `[T, K]`, without a graph.
        given: what else was asked for: `"logits"`, `[T, V]` for each datum; `"projection"`, a
            `Projection` of that shape for each datum, with one weight; `"hidden_states"`,
            `{layer: [T, H]}` for each datum, 0 for the embeddings; `"parameters"`, the LoRA
            weights by key.
    """

    def __init__(
        self, host: WorkerThread, trainer: Trainer, opened: Opened, needs: Sequence[str]
    ) -> None:
        self._host, self._trainer, self._opened = host, trainer, opened
        self.logprobs: list[Tensor] = [found["logprobs"] for found in opened.found]
        self.given: dict[str, Any] = {
            need: [found[need] for found in opened.found] for need in needs if need in MADE
        }
        if "parameters" in needs:
            parameters = trainer.adapter.parameters
            self.given["parameters"] = {key: p.detach() for key, p in parameters.items()}

    def backward(
        self,
        gradients: Sequence[Tensor],
        beyond: Mapping[str, Any] | None = None,
        then: Callable[[types.ForwardBackwardOutput], T] = lambda output: output,  # type: ignore[assignment,return-value]  # T is the output then
    ) -> AwaitableConcurrentFuture[T]:
        """Gather the gradient of the weights that these gradients make, when its turn comes.

        Args:
            gradients: d loss / d logprobs.
            beyond: d loss / d what was given, by need, structured alike; None for no pull.
            then: what to make of the output.
        """
        pulls = OutputGradients(gradients, **(beyond or {}))
        return self._host.submit(lambda: then(self._trainer.close(self._opened, pulls)))
