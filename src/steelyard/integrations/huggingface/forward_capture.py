"""Run the loss of a trainer, and collect from its forward pass the inputs of terms."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn
from transformers.loss.loss_utils import ForCausalLMLoss

from steelyard._torch_internals import has_forward_hooks
from steelyard.composition.auxiliary_losses import collect_aux
from steelyard.gradients.layout import fields_of
from steelyard.gradients.sharded import named_shards
from steelyard.integrations.huggingface.causal_lm import (
    IGNORE_INDEX,
    Forward,
    logits_of,
    next_labels,
    output_layer,
    record_forward,
)
from steelyard.integrations.huggingface.internals import loss_replaced
from steelyard.integrations.torch.activations import capture
from steelyard.penalties.from_logits.lm_head import RecordedCall, record_call, stand_in
from steelyard.penalties.from_logits.logit_terms import cross_entropy
from steelyard.penalties.from_logits.projection import Projection


class LabelledRows(NamedTuple):
    """The positions of a batch that its loss counts: those whose label is not -100.

    Attributes:
        projection: the rows of these positions, `[N, V]`.
        targets: their labels, `[N]`.
    """

    projection: Projection
    targets: Tensor


def labelled_rows(projection: Projection, inputs: Mapping[str, Any]) -> LabelledRows | None:
    """Select the rows of a projection whose label is not -100; None if the labels do not fit.

    Args:
        projection: of a whole batch, `[B, T, V]`.
        inputs: with `labels`, or `shift_labels`, `[B, T]`.
    """
    labels = next_labels(inputs, shifted=True)
    if labels is None or tuple(labels.shape) != projection.shape[:-1]:
        return None
    labels = labels.to(projection.hidden.device)
    kept = labels != IGNORE_INDEX
    return LabelledRows(projection[kept], labels[kept])


@dataclass(eq=False)
class LogitFreeLoss:
    """transformers' `ForCausalLMLoss`, computed from the input of the output layer.

    Attributes:
        head: the last call of the output layer.
        retain_graph: whether the loss is differentiated several times, for gradient norms. The
            gradient is then computed in the backward pass, which costs one projection more; else
            it is computed with the loss.
        rows: the rows that the loss was computed from; None if it was not computed.
    """

    head: RecordedCall
    retain_graph: bool = False
    rows: LabelledRows | None = None

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor,
        vocab_size: int,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = IGNORE_INDEX,
        shift_labels: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        """Compute the loss with the signature of `ForCausalLMLoss`.

        If the model has changed the logits after the output layer, or asks for another loss, the
        value is meaningless and `rows` stays None: the caller runs the model again with logits.

        Args:
            logits: the placeholder that the output layer returned.
            labels: `[B, T]`.
            vocab_size: V.
            num_items_in_batch: the divisor of the sum; None: the number of labelled rows.
            ignore_index: must be -100.
            shift_labels: labels that are already aligned with the positions, `[B, T]`.
        """
        projection = self.head.projection
        same = self.head.untouched(logits) and ignore_index == IGNORE_INDEX
        if projection is None or not same or projection.shape[-1] != vocab_size:
            return logits.sum()
        labelled = labelled_rows(projection, {"labels": labels, "shift_labels": shift_labels})
        if labelled is None:
            return logits.sum()
        self.rows = labelled
        rows, targets = labelled
        # reduction="sum" computes the gradient together with the value, once.
        total: Tensor = cross_entropy(
            rows, targets, reduction="none" if self.retain_graph else "sum"
        ).sum()
        return total / (rows.shape[0] if num_items_in_batch is None else num_items_in_batch)


@contextmanager
def without_logits(
    model: Any, layer: nn.Module, *, retain_graph: bool = False
) -> Iterator[LogitFreeLoss]:
    """Let a model compute its own loss without logits until the block ends.

    Args:
        model: one of transformers', which `supports_logit_free_loss`.
        layer: its output layer.
        retain_graph: whether the loss is differentiated several times.
    """
    with record_call(layer, stand_in) as head:
        loss = LogitFreeLoss(head, retain_graph)
        with loss_replaced(model, loss):
            yield loss


def supports_logit_free_loss(model: Any, layer: object) -> bool:
    """True if the loss is transformers' own, and the output layer a plain one without hooks."""
    return (
        getattr(model, "loss_function", None) is ForCausalLMLoss
        and type(layer) is nn.Linear
        and not has_forward_hooks(layer)
    )


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
    head: RecordedCall | None
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
                head = stack.enter_context(record_call(layer))
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
