"""`CustomCall`: one call of a custom loss, from the forward pass to the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor

from steelyard.clients.client_pass import ClientPass, TwoPasses, tensor_like
from steelyard.clients.one_pass import TwoPassCall
from steelyard.clients.step_progress import StepProgress
from steelyard.clients.term_settings import TermSettings
from steelyard.composition import NamedBaseLoss, Pipeline, ToParameters
from steelyard.output import CustomLossOutput

_LOSS = "elementwise_loss"  # of each token, among the outputs of a datum


@dataclass(frozen=True)
class CustomCall:
    """A call of a custom loss.

    Attributes:
        client: the wrapped client.
        pipeline: the base loss and the terms.
        settings: of the terms.
        data: the batch.
        step: the number of the step.
        shares: factors on the weights, by name.
    """

    client: Any
    pipeline: Pipeline
    settings: TermSettings
    data: Sequence[Any]
    step: int
    shares: Mapping[str, float] | None

    @property
    def has_open_pass(self) -> bool:
        """Whether the client keeps the graph of a forward pass for the backward pass."""
        return hasattr(self.client, "open_pass")

    def why_two_passes(self) -> str | None:
        """Reason for which a server cannot run the call in one pass, whatever its terms."""
        if self.settings.grad_space != "logprobs":
            return f"gradients are compared with respect to the {self.settings.grad_space}"
        if self._is_measured:
            return "measure_progress needs the log-probs before the optimizer step is submitted"
        if self.shares:
            return "shares of an accumulated mean change from call to call"
        return None

    def in_two_passes(self, optim_steps: Callable[[], int]) -> TwoPassCall:
        """The call in two passes, for a request in one that fails.

        Args:
            optim_steps: gives the number of optimizer steps so far.
        """

        def evaluate() -> tuple[ClientPass, CustomLossOutput]:
            forward, _ = self.open_pass()
            return forward, self.compute(forward)

        return TwoPassCall(
            evaluate,
            lambda found: self.submit_backward(*found),
            optim_steps,
            partial(_with_client_fields, self.data, self.pipeline.loss_fn),
        )

    def open_pass(self) -> tuple[ClientPass, ToParameters | None]:
        """The forward pass, and its `parameter_gradients` if gradients are compared there."""
        if not self.has_open_pass:
            return TwoPasses(self.client, self.data), None
        needs = self.pipeline.needs(self.step)
        compares = self.pipeline.settings.compares_gradients(self.step)
        if self.settings.grad_space == "logprobs" or not compares:
            return self.client.open_pass(self.data, needs), None
        needs = tuple(dict.fromkeys((*needs, "parameters")))
        forward = self.client.open_pass(self.data, needs, per_term=True)
        return forward, forward.parameter_gradients

    def compute(
        self, forward: ClientPass, to_parameters: ToParameters | None = None
    ) -> CustomLossOutput:
        """Evaluate the terms after a forward pass."""
        inputs = self._inputs(forward, to_parameters)
        return self.pipeline.compute(self.data, forward.logprobs, self.step, **inputs)

    async def acompute(
        self, forward: ClientPass, to_parameters: ToParameters | None
    ) -> CustomLossOutput:
        """Do the same as `compute`, without blocking the event loop."""
        inputs = self._inputs(forward, to_parameters)
        return await self.pipeline.acompute(self.data, forward.logprobs, self.step, **inputs)

    def measurement(self, forward: ClientPass, output: CustomLossOutput) -> StepProgress | None:
        """Measurement of the optimizer step that follows; None if it is not to be measured."""
        if not self._is_measured:
            return None
        specs = [term.spec for term in self.pipeline.due(self.step)]
        timeout, workers = self.settings.timeout, self.settings.workers
        return StepProgress(self.data, forward.logprobs, specs, output, timeout, workers)

    def submit_backward(
        self,
        forward: Any,  # a ClientPass; only the engine's takes a total
        output: CustomLossOutput,
    ) -> Any:
        """Submit the backward pass; its future has the output with the client's own fields."""
        output = replace(output, passes=1 if self.has_open_pass else 2)
        extra = output.extra_gradients
        # Compared with respect to the parameters, the gradient is whole: no pass is left to run.
        whole = {"total": extra.get("parameters")} if output.grad_space == "parameters" else {}
        data, loss_fn = self.data, self.pipeline.loss_fn
        return forward.backward(
            output.gradients,
            extra,
            lambda result: _with_client_fields(data, loss_fn, output, result, forward.logprobs),
            **whole,
        )

    def _inputs(self, forward: ClientPass, to_parameters: ToParameters | None) -> dict[str, Any]:
        return {"given": forward.given, "to_parameters": to_parameters, "shares": self.shares}

    @property
    def _is_measured(self) -> bool:
        every = self.settings.measure_progress
        return bool(every) and self.step % every == 0


def _with_client_fields(
    data: Sequence[Any],
    loss_fn: Any,
    output: CustomLossOutput,
    result: Any,
    logprobs: Sequence[Tensor] | None,
) -> CustomLossOutput:
    """The output with the fields of the client's own."""
    metrics, outputs = dict(result.metrics), result.loss_fn_outputs
    # The server's loss is a linear one with the same gradient; see `TwoPasses`.
    if "loss:sum" in metrics:
        metrics.setdefault("surrogate_loss:sum", metrics["loss:sum"])
    metrics["loss:sum"] = output.loss_total
    if isinstance(loss_fn, NamedBaseLoss) and logprobs is not None:
        outputs = _with_losses(outputs, loss_fn.elementwise(data, list(logprobs)))
    return replace(
        output,
        loss_fn_outputs=outputs,
        loss_fn_output_type=result.loss_fn_output_type,
        server_metrics=metrics,
    )


def _with_losses(outputs: Sequence[Any], losses: Sequence[Tensor]) -> list[Any]:
    """Outputs in which the loss of each token is the base loss's, not that of the linear loss."""
    return [
        {**each, _LOSS: tensor_like(each[_LOSS], values)} if _LOSS in each else each
        for each, values in zip(outputs, losses, strict=True)
    ]
