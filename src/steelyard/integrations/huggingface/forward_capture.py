"""Run the loss of a trainer, and collect from its forward pass the inputs of terms."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from steelyard.composition import collect_aux
from steelyard.gradients import fields_of, named_shards
from steelyard.integrations.huggingface.causal_lm import (
    Forward,
    logits_of,
    output_layer,
    record_forward,
)
from steelyard.integrations.huggingface.logit_free_loss import (
    LogitFreeLoss,
    supports_logit_free_loss,
    without_logits,
)
from steelyard.integrations.torch.activations import capture
from steelyard.penalties.from_logits.lm_head import Heard, overheard


@dataclass(frozen=True, eq=False)
class CapturedForward:
    """One forward pass of a trainer.

    Attributes:
        result: what the trainer's own loss function returned.
        unwrapped: the model without its wrappers.
        extra_inputs: auxiliary losses and captured activations.
        forward: inputs and outputs of the model.
        head: the last call of the output layer, if a term reads `projection`.
        loss: the model's own loss without logits, if it was tried.
        reference: the forward pass of the reference model, if one was recorded.
        reference_unwrapped: the reference model without its wrappers.
    """

    result: Any
    unwrapped: Any
    extra_inputs: Mapping[str, Any]
    forward: Forward
    head: Heard | None
    loss: LogitFreeLoss | None
    reference: Forward | None = None
    reference_unwrapped: Any = None

    @property
    def logit_free(self) -> bool:
        """True if the pass materialized no logits."""
        return self.loss is not None and self.loss.rows is not None

    def model_inputs(self, names: set[str]) -> dict[str, Any]:
        """Inputs of terms that are the model's: fields of its output, logits and parameters.

        Args:
            names: of all inputs that terms read; logits behind a fused head and parameters are
                collected only if they are among them.
        """
        forward, unwrapped = self.forward, self.unwrapped
        # Some trainers run their whole loss as the model's forward pass, which returns a tuple.
        fields = fields_of(forward.outputs) or {}
        inputs = {name: value for name, value in fields.items() if value is not None}
        if self.logit_free:
            inputs.pop("logits", None)  # the placeholder
        elif "logits" in names:
            logits = logits_of(unwrapped, forward)
            inputs |= {} if logits is None else {"logits": logits}
        hidden_states = getattr(forward.backbone, "hidden_states", None)
        if hidden_states is not None:  # a fused head does not pass them on
            inputs.setdefault("hidden_states", hidden_states)
        if "parameters" in names:
            inputs["parameters"] = named_shards(unwrapped)
        return inputs


class ForwardCapture:
    """Runs the loss of a trainer and captures its forward pass.

    Args:
        paths: of modules whose outputs terms read.
        retain_graph: whether the loss is differentiated several times.
    """

    def __init__(self, paths: Sequence[str], *, retain_graph: bool = False) -> None:
        self._paths = paths
        self._retain_graph = retain_graph
        # Whether the model's own loss can be computed without logits; None until it is tried.
        self._logit_free: bool | None = None

    def run(
        self,
        compute_loss: Callable[[], Any],
        model: nn.Module,
        unwrapped: Any,
        *,
        projected: bool,
        logit_free: bool,
        reference: tuple[nn.Module, Any] | None = None,
    ) -> CapturedForward:
        """Compute the trainer's own loss, and capture its forward pass.

        The first call with `logit_free` tries whether the model's loss can be computed without
        logits. If the model fails then, or does not call its loss function with the placeholder,
        the pass is repeated with logits, and so are all later ones.

        Args:
            compute_loss: returns the trainer's own loss.
            model: the module that it calls.
            unwrapped: the model without its wrappers.
            projected: whether a term reads `projection`.
            logit_free: whether nothing reads the logits.
            reference: a model whose pass without a graph is captured too, as the trainer calls
                it and without its wrappers.
        """
        run_once = partial(
            self._run_once, compute_loss, model, unwrapped, projected=projected, reference=reference
        )
        if logit_free and projected and self._logit_free is not False:
            captured = None
            try:
                captured = run_once(logit_free=True)
            except Exception:
                if self._logit_free:
                    raise  # it has worked before: the placeholder is not to blame
            self._logit_free = captured is not None and captured.logit_free
            if captured is not None and (captured.logit_free or captured.loss is None):
                return captured
        return run_once(logit_free=False)

    def _run_once(
        self,
        compute_loss: Callable[[], Any],
        model: nn.Module,
        unwrapped: Any,
        *,
        projected: bool,
        logit_free: bool,
        reference: tuple[nn.Module, Any] | None,
    ) -> CapturedForward:
        layer = output_layer(unwrapped) if projected else None
        head = loss = reference_forward = None
        with ExitStack() as stack:
            forward = stack.enter_context(record_forward(model, unwrapped))
            if reference is not None:
                reference_forward = stack.enter_context(record_forward(*reference, graph=False))
            aux = stack.enter_context(collect_aux())
            activations = (
                stack.enter_context(capture(unwrapped, self._paths)) if self._paths else {}
            )
            if layer is not None and logit_free and supports_logit_free_loss(unwrapped, layer):
                loss = stack.enter_context(
                    without_logits(unwrapped, layer, retain_graph=self._retain_graph)
                )
                head = loss.head
            elif layer is not None:
                head = stack.enter_context(overheard(layer))
            result = compute_loss()
            extra_inputs = {"aux": aux, "activations": dict(activations)}
        return CapturedForward(
            result,
            unwrapped,
            extra_inputs,
            forward,
            head,
            loss,
            reference_forward,
            None if reference is None else reference[1],
        )
