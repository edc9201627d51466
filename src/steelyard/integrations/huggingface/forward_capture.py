"""A trainer's own loss as it is computed, and what terms read of its forward pass."""

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
    observed,
    output_layer,
    projection_of,
    target_logprobs,
)
from steelyard.integrations.huggingface.logit_free_loss import (
    Counted,
    OwnLoss,
    can_stand_in,
    counted,
    standing_in,
)
from steelyard.integrations.torch.activations import capture
from steelyard.penalties.from_logits.lm_head import Heard, overheard


@dataclass(frozen=True, eq=False)
class CapturedForward:
    """One forward pass of a trainer.

    Attributes:
        result: what the trainer's own loss gave.
        inner: the model without its wrappers.
        beside: auxiliary losses and captured activations.
        seen: what the model read and gave.
        heard: what its output layer read and gave, if terms read that.
        own_loss: the model's own loss without logits, if it was tried.
    """

    result: Any
    inner: Any
    beside: Mapping[str, Any]
    seen: Forward
    heard: Heard | None
    own_loss: OwnLoss | None

    @property
    def lean(self) -> bool:
        """Whether it made no logits."""
        return self.own_loss is not None and self.own_loss.counted is not None

    def readable(
        self, batch: Mapping[str, Any], asked: set[str], *, shifted: bool
    ) -> dict[str, Any]:
        """What terms read of it, by name; what is dear only if it is asked for.

        Args:
            batch: what the trainer gave to the model.
            asked: the names that terms read.
            shifted: whether the loss compares with the label of the next position.

        Raises:
            InputError: the model has no logits that a projection could stand for.
        """
        seen, inner = self.seen, self.inner
        named = {k: v for k, v in dict(seen.outputs or {}).items() if v is not None}
        logits: Any = None
        if self.lean:
            named.pop("logits", None)  # what stood in for them
            logits = self.heard.projection if self.heard and "logprobs" in asked else None
        elif asked & {"logits", "logprobs"}:
            logits = logits_of(inner, seen)
            named |= {} if logits is None else {"logits": logits}
        logprobs = target_logprobs(seen, logits) if "logprobs" in asked else None
        named |= {} if logprobs is None else {"logprobs": logprobs}
        labels = seen.inputs.get("labels")
        if "data" in asked and "logprobs" in named and labels is not None:
            named["data"] = data_of(labels)
        if "parameters" in asked:
            named["parameters"] = dict(inner.named_parameters())
        rows = self._rows(batch, shifted=shifted)
        lined_up = {} if rows is None else rows._asdict()
        free = {k: v for k, v in lined_up.items() if v is not None and k not in batch}
        return {**free, **named}

    def _rows(self, batch: Mapping[str, Any], *, shifted: bool) -> Counted | None:
        if self.own_loss is not None and self.own_loss.counted is not None:
            return self.own_loss.counted
        found = None if self.heard is None else projection_of(self.inner, self.seen, self.heard)
        return None if found is None else counted(found, batch, shifted=shifted)


class ForwardCapture:
    """The forward passes of a trainer.

    Args:
        paths: of modules whose outputs terms read.
        often: whether the loss is differentiated several times.
    """

    def __init__(self, paths: Sequence[str], *, often: bool = False) -> None:
        self._paths = paths
        self._often = often
        # Whether the model's own loss can do without logits; None until it is tried.
        self._lean: bool | None = None

    def run(
        self, own: Callable[[], Any], model: nn.Module, inner: Any, *, projected: bool, lean: bool
    ) -> CapturedForward:
        """Compute the trainer's own loss, and watch.

        Args:
            own: gives the loss.
            model: what it calls.
            inner: the model without its wrappers.
            projected: whether terms read a projection.
            lean: whether nobody reads logits. That the model's own loss can do without them is
                found out by trying; if it cannot, they are made ever after.
        """
        if lean and projected and self._lean is not False:
            passed = None
            try:
                passed = self._once(own, model, inner, projected=projected, lean=True)
            except Exception:
                if self._lean:
                    raise
            self._lean = passed is not None and passed.lean
            if passed is not None and (passed.lean or passed.own_loss is None):
                return passed
        return self._once(own, model, inner, projected=projected, lean=False)

    def _once(
        self, own: Callable[[], Any], model: nn.Module, inner: Any, *, projected: bool, lean: bool
    ) -> CapturedForward:
        layer = output_layer(inner) if projected else None
        heard = loss = None
        with ExitStack() as stack:
            seen = stack.enter_context(observed(model, inner))
            deposits = stack.enter_context(collect_aux())
            captured = stack.enter_context(capture(inner, self._paths)) if self._paths else {}
            if layer is not None and lean and can_stand_in(inner, layer):
                loss = stack.enter_context(standing_in(inner, layer, often=self._often))
                heard = loss.heard
            elif layer is not None:
                heard = stack.enter_context(overheard(layer))
            result = own()
            beside = {"aux": deposits, "activations": dict(captured)}
        return CapturedForward(result, inner, beside, seen, heard, loss)
