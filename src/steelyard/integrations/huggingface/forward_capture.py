"""Run the loss of a trainer, and collect from its forward pass the inputs of terms."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from torch import nn

from steelyard.composition import collect_aux
from steelyard.integrations.huggingface.causal_lm import (
    Forward,
    data_of,
    logits_of,
    output_layer,
    projection_of,
    record_forward,
    target_logprobs,
)
from steelyard.integrations.huggingface.logit_free_loss import (
    LabelledRows,
    LogitFreeLoss,
    labelled_rows,
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
    """

    result: Any
    unwrapped: Any
    extra_inputs: Mapping[str, Any]
    forward: Forward
    head: Heard | None
    loss: LogitFreeLoss | None

    @property
    def logit_free(self) -> bool:
        """True if the pass materialized no logits."""
        return self.loss is not None and self.loss.rows is not None

    def term_inputs(
        self, batch: Mapping[str, Any], names: set[str], *, shifted: bool
    ) -> dict[str, Any]:
        """Inputs of terms, by name.

        Logits, log-probs, data and parameters are computed only if `names` has them.

        Args:
            batch: the keyword arguments that the trainer passed to the model.
            names: the names of all inputs that terms read.
            shifted: whether the loss compares a position with the label of the next one.

        Raises:
            InputError: a term reads `projection`, and the model changes its logits after the
                output layer, or that layer is of an unknown kind.
        """
        forward, unwrapped = self.forward, self.unwrapped
        inputs = {k: v for k, v in dict(forward.outputs or {}).items() if v is not None}
        logits: Any = None
        if self.logit_free:
            inputs.pop("logits", None)  # the placeholder
            logits = self.head.projection if self.head and "logprobs" in names else None
        elif names & {"logits", "logprobs"}:
            logits = logits_of(unwrapped, forward)
            inputs |= {} if logits is None else {"logits": logits}
        logprobs = target_logprobs(forward, logits) if "logprobs" in names else None
        inputs |= {} if logprobs is None else {"logprobs": logprobs}
        labels = forward.inputs.get("labels")
        if "data" in names and "logprobs" in inputs and labels is not None:
            inputs["data"] = data_of(labels)
        if "parameters" in names:
            inputs["parameters"] = dict(unwrapped.named_parameters())
        rows = self._labelled_rows(batch, shifted=shifted)
        row_fields = {} if rows is None else rows._asdict()
        # A field of the batch that happens to be called `targets` or `mask` stays the batch's.
        free = {k: v for k, v in row_fields.items() if v is not None and k not in batch}
        return {**free, **inputs}

    def _labelled_rows(self, batch: Mapping[str, Any], *, shifted: bool) -> LabelledRows | None:
        if self.loss is not None and self.loss.rows is not None:
            return self.loss.rows
        if self.head is None:
            return None
        projection = projection_of(self.unwrapped, self.forward, self.head)
        return None if projection is None else labelled_rows(projection, batch, shifted=shifted)


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
        """
        if logit_free and projected and self._logit_free is not False:
            captured = None
            try:
                captured = self._run_once(
                    compute_loss, model, unwrapped, projected=projected, logit_free=True
                )
            except Exception:
                if self._logit_free:
                    raise  # it has worked before: the placeholder is not to blame
            self._logit_free = captured is not None and captured.logit_free
            if captured is not None and (captured.logit_free or captured.loss is None):
                return captured
        return self._run_once(compute_loss, model, unwrapped, projected=projected, logit_free=False)

    def _run_once(
        self,
        compute_loss: Callable[[], Any],
        model: nn.Module,
        unwrapped: Any,
        *,
        projected: bool,
        logit_free: bool,
    ) -> CapturedForward:
        layer = output_layer(unwrapped) if projected else None
        head = loss = None
        with ExitStack() as stack:
            forward = stack.enter_context(record_forward(model, unwrapped))
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
        return CapturedForward(result, unwrapped, extra_inputs, forward, head, loss)
