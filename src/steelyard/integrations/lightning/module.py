"""`RegularizedModule`: a composite loss inside the steps of a LightningModule."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from functools import wraps
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from steelyard.composition import CompositeLoss, Deposits, collect_aux
from steelyard.errors import InputError
from steelyard.integrations.lightning.lightning_import import LightningModule, Trainer
from steelyard.integrations.lightning.metric_logging import checked, log

if TYPE_CHECKING:
    _Mixed = LightningModule
else:
    _Mixed = object  # so that it goes with lightning.pytorch and with pytorch_lightning

_STEPS = ("training_step", "validation_step", "test_step", "predict_step")


class RegularizedModule(_Mixed):
    """A mixin: `compose` in a step gives the composite loss and logs every part of it.

    Put it before `LightningModule`, and set `composite` in `__init__`. In training, schedules
    and `every` follow the trainer's optimizer steps; validation and test use the weights of the
    last training step, and what terms remember stays as it was.
    What modules leave with `aux_loss` during a step is collected. The composite is a submodule,
    so the step and what terms remember are in every checkpoint.

    Attributes:
        composite: the loss.
        log_settings: arguments for `log_dict`, such as `on_epoch` or `prog_bar`. `sync_dist` is
            on unless they say otherwise.

    Raises:
        SpecError: `log_settings` has something that `log_dict` does not know.

    Example:
        >>> from lightning.pytorch import LightningModule
        >>> from torch import nn
        >>> from steelyard.integrations import term
        >>> class Model(RegularizedModule, LightningModule):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.net = nn.Linear(2, 1)
        ...         self.composite = CompositeLoss(
        ...             lambda prediction, y: (prediction - y).square().mean(),
        ...             [term(lambda prediction: prediction.abs().mean(), 0.1, "small")],
        ...         )
        ...
        ...     def training_step(self, batch, _):
        ...         x, y = batch
        ...         return self.compose(prediction=self.net(x), y=y)
        >>> model = Model()  # without a trainer it only computes
        >>> total = model.training_step((torch.ones(3, 2), torch.zeros(3, 1)), 0)
        >>> list(model.composite.output.regularizers)
        ['small']
    """

    composite: CompositeLoss
    log_settings: ClassVar[Mapping[str, Any]] = {}
    _aux: Deposits | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        checked(cls.log_settings)
        # Hooks such as on_train_batch_start would do, if nobody forgot to call super().
        for name in _STEPS:
            step = getattr(cls, name, None)
            if step is not None and not getattr(step, "collects_aux", False):
                setattr(cls, name, _collecting(step))

    def compose(self, *outputs: object, batch_size: int | None = None, **inputs: Any) -> Tensor:
        """The weighted total of `composite`; its parts are logged.

        Args:
            outputs: mappings and dataclasses whose fields are inputs.
            batch_size: what an epoch's means weigh this batch by; None leaves it to Lightning.
            inputs: what the terms read, by name.

        Raises:
            InputError: there is no `composite`, or something that a term reads is not there.
            SpecError: a schedule yields a bad weight at this step.
            TermError: the base loss failed, or a term whose `on_error` is `"raise"`.
        """
        composite = self._composite()
        if self._aux:
            inputs.setdefault("aux", dict(self._aux))
            self._aux.clear()  # a step may compose twice
        trainer = self._attached()
        if trainer is None or trainer.predicting:
            total: Tensor = composite(*outputs, **inputs)
            return total
        if trainer.training:
            composite.step = trainer.global_step
            total = composite(*outputs, **inputs)
        else:
            with _unchanged(composite):
                total = composite(*outputs, **inputs)
        settings = checked(self.log_settings)
        if batch_size is not None:
            settings["batch_size"] = batch_size
        log(self, composite, settings)
        return total

    def _composite(self) -> CompositeLoss:
        composite = getattr(self, "composite", None)
        if not isinstance(composite, CompositeLoss):
            raise InputError(
                f"composite must be a CompositeLoss, got {composite!r}: set self.composite in "
                f"{type(self).__name__}.__init__."
            )
        return composite

    def _attached(self) -> Trainer | None:
        try:
            return self.trainer if self.fabric is None else None
        except RuntimeError:
            return None


def _collecting(step: Callable[..., Any]) -> Callable[..., Any]:
    """The step, with auxiliary losses collected while it runs."""

    @wraps(step)
    def collected(self: RegularizedModule, *args: Any, **kwargs: Any) -> Any:
        if self._aux is not None:  # called by the step of a subclass
            return step(self, *args, **kwargs)
        with collect_aux() as deposits:
            self._aux = deposits
            try:
                return step(self, *args, **kwargs)
            finally:
                self._aux = None

    collected.collects_aux = True  # type: ignore[attr-defined]
    return collected


@contextmanager
def _unchanged(composite: CompositeLoss) -> Iterator[None]:
    """What the terms remember, and the step, are afterwards what they were before."""
    # `validate` and `test` run in inference mode; a tensor made there cannot be trained with.
    with torch.inference_mode(mode=False):
        before = deepcopy(composite.get_extra_state())
    try:
        yield
    finally:
        with torch.inference_mode(mode=False):
            composite.set_extra_state(before)
