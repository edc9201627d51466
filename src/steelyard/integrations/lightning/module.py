"""`RegularizedModule`: compute a composite loss inside the steps of a LightningModule."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from functools import wraps
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from steelyard.composition.auxiliary_losses import Deposits, collect_aux
from steelyard.composition.composite import CompositeLoss
from steelyard.composition.input_names import gather_inputs
from steelyard.errors import InputError
from steelyard.integrations.lightning.steps import (
    LightningModule,
    Trainer,
    check_log_settings,
    follow_trainer,
    log_components,
    unlabelled_terms,
)

if TYPE_CHECKING:
    _Mixed = LightningModule
else:
    _Mixed = object  # so that it goes with lightning.pytorch and with pytorch_lightning

_STEPS = ("training_step", "validation_step", "test_step", "predict_step")


class RegularizedModule(_Mixed):
    """Mixin whose `compose` computes the composite loss in a step and logs every component.

    Put it before `LightningModule`, and set `composite` in `__init__`. In training, schedules
    and `every` follow the trainer's optimizer steps; validation, test and prediction use the
    weights of the last training step, and do not change the state of the terms. Auxiliary losses
    that modules report with `aux_loss` during a step are collected. The composite is a submodule,
    so the step and the state of the terms are in every checkpoint.

    Attributes:
        composite: the loss.
        log_settings: arguments for `log_dict`, such as `on_epoch` or `prog_bar`. `sync_dist` is
            on unless they say otherwise.

    Raises:
        SpecError: `log_settings` has an argument that `log_dict` does not.

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
        check_log_settings(cls.log_settings)
        # The steps are wrapped, rather than hooks such as on_train_batch_start overridden: a
        # subclass with such a hook may not call super().
        for name in _STEPS:
            step = getattr(cls, name, None)
            if step is not None and not getattr(step, "collects_aux", False):
                setattr(cls, name, _collecting(step))

    def compose(self, *outputs: object, batch_size: int | None = None, **inputs: Any) -> Tensor:
        """Compute the weighted total of `composite`, and log its components.

        Args:
            outputs: mappings and dataclasses whose fields are inputs.
            batch_size: the weight of this batch in an epoch's means; None: Lightning's guess.
            inputs: the inputs of the terms, by name.

        Raises:
            InputError: there is no `composite`, or an input of a term is missing.
            SpecError: a schedule yields a bad weight at this step.
            TermError: the base loss failed, or a term whose `on_error` is `"raise"`.
        """
        composite = self._composite()
        if self._aux:
            inputs.setdefault("aux", dict(self._aux))
            self._aux.clear()  # a step may compose twice
        trainer = self._attached_trainer()
        if trainer is not None and trainer.training:
            follow_trainer(composite, trainer, self)
        named = gather_inputs(outputs, inputs)
        composite.unmeasured = unlabelled_terms(composite.specs, named, self)
        evaluates = trainer is not None and not trainer.training
        # A sanity check, a test and a prediction are no evaluation of the run.
        composite.records = trainer is None or trainer.training or _validates(trainer)
        with _state_restored(composite) if evaluates else nullcontext():
            total: Tensor = composite(named)
        if trainer is None or trainer.predicting:  # which has no logs
            return total
        settings = check_log_settings(self.log_settings)
        if batch_size is not None:
            settings["batch_size"] = batch_size
        log_components(self, composite, settings)
        return total

    def _set_step(self) -> None:
        """Set the step of the composite to that of the trainer, while it trains."""
        trainer, composite = self._attached_trainer(), getattr(self, "composite", None)
        if trainer is not None and trainer.training and isinstance(composite, CompositeLoss):
            composite.step = trainer.global_step

    def _composite(self) -> CompositeLoss:
        composite = getattr(self, "composite", None)
        if not isinstance(composite, CompositeLoss):
            raise InputError(
                f"composite must be a CompositeLoss, got {composite!r}: set self.composite in "
                f"{type(self).__name__}.__init__."
            )
        return composite

    def _attached_trainer(self) -> Trainer | None:
        try:
            return self.trainer if self.fabric is None else None
        except RuntimeError:  # raised by Lightning's property where there is no trainer
            return None


def _validates(trainer: Trainer) -> bool:
    return trainer.validating or (trainer.state.fn == "fit" and not trainer.sanity_checking)


def _collecting(step: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a step so that auxiliary losses are collected while it runs."""

    @wraps(step)
    def collecting_step(self: RegularizedModule, *args: Any, **kwargs: Any) -> Any:
        if self._aux is not None:  # called by the step of a subclass, which collects
            return step(self, *args, **kwargs)
        with collect_aux() as deposits:
            self._aux = deposits
            self._set_step()  # before the step asks `composite.join` for data
            try:
                return step(self, *args, **kwargs)
            finally:
                self._aux = None

    collecting_step.collects_aux = True  # type: ignore[attr-defined]
    return collecting_step


@contextmanager
def _state_restored(composite: CompositeLoss) -> Iterator[None]:
    """Restore the state of the terms, and the step, at the end of the block."""
    # `validate` and `test` run in inference mode, and autograd refuses tensors made there.
    with torch.inference_mode(mode=False):
        before = deepcopy(composite.get_extra_state())
    try:
        yield
    finally:
        with torch.inference_mode(mode=False):
            composite.set_extra_state(before)
