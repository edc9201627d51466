"""`RegularizerCallback`: terms on the loss of a LightningModule that stays as it is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import wraps
from typing import Any

from torch import Tensor

from steelyard.composition import CompositeLoss, TermLike, collect_aux, reads
from steelyard.errors import InputError
from steelyard.integrations.lightning.batch_inputs import joined, of_batch
from steelyard.integrations.lightning.lightning_import import Callback, LightningModule, Trainer
from steelyard.integrations.lightning.metric_logging import checked, log
from steelyard.integrations.torch.activations import Captured, hooked
from steelyard.spec import Schedule


class RegularizerCallback(Callback):
    """A callback that adds terms to the loss that `training_step` returns, and logs every part.

    Lightning gives callbacks no say in the loss, so the module's `training_step` is wrapped from
    the beginning of `fit` to its end. Terms read, by name: what the batch holds, what
    `training_step` returns beside its `"loss"`, captured activations, `aux`, `parameters` (all
    of the module, by name) and `loss` itself. A name that two of them have is read as `batch.x`,
    `outputs.x` or `activations.x`.

    The step and what terms remember are saved with the trainer's checkpoints.

    Args:
        terms: as for `CompositeLoss`.
        aux: the weights of auxiliary losses, by name.
        capture: paths of modules whose outputs terms read, with wildcards.
        batch: names for the items of a batch that is a tuple.
        log: arguments for `log_dict`; `sync_dist` is on unless they say otherwise.
        settings: the other arguments of `CompositeLoss`.

    Attributes:
        composite: the loss; its base is what `training_step` returns.

    Raises:
        SpecError: an argument breaks a rule.

    Example:
        >>> from steelyard.integrations import term
        >>> callback = RegularizerCallback(
        ...     [term(lambda hidden: hidden.abs().mean(), 0.1, "sparse", inputs="net.1")],
        ...     capture="net.1",
        ... )
        >>> callback.composite.specs[0].name  # now Trainer(callbacks=[callback])
        'sparse'
    """

    def __init__(
        self,
        terms: Iterable[TermLike] | Mapping[str, Iterable[TermLike]] = (),
        *,
        aux: Mapping[str, float | Schedule] | None = None,
        capture: str | Sequence[str] = (),
        batch: Sequence[str] = (),
        log: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        self.composite = CompositeLoss(reads(_as_it_is, "loss"), terms, aux=aux, **settings)
        self._capture = capture
        self._batch = tuple(batch)
        self._log = checked(log or {})
        self._undo = ExitStack()

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Wrap the module's `training_step`.

        Raises:
            InputError: the module optimizes by itself, or a path matches no module.
        """
        if not pl_module.automatic_optimization:
            raise InputError(
                f"RegularizerCallback adds to the loss that training_step returns, and "
                f"{type(pl_module).__name__} optimizes by itself (automatic_optimization=False): "
                f"compose in the step, with RegularizedModule."
            )
        activations = self._undo.enter_context(hooked(pl_module, self._capture))
        self._wrap(trainer, pl_module, activations)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:  # noqa: ARG002 - the signature is Lightning's
        """Give the module its own `training_step` back."""
        self._undo.close()

    def on_exception(
        self,
        trainer: Trainer,  # noqa: ARG002 - the signature is Lightning's
        pl_module: LightningModule,  # noqa: ARG002
        exception: BaseException,  # noqa: ARG002
    ) -> None:
        """The same, when training breaks off."""
        self._undo.close()

    def state_dict(self) -> dict[str, Any]:
        """The step, and what the terms remember."""
        return self.composite.get_extra_state()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        self.composite.set_extra_state(state_dict)

    def _wrap(self, trainer: Trainer, module: LightningModule, activations: Captured) -> None:
        step = module.training_step
        parameters = dict(module.named_parameters())

        @wraps(step)
        def regularized(*args: Any, **kwargs: Any) -> Any:
            with collect_aux() as aux:
                activations.begin()
                try:
                    returned = step(*args, **kwargs)
                finally:
                    activations.end()
            outputs = {"loss": returned} if isinstance(returned, Tensor) else returned
            if not isinstance(outputs, Mapping) or outputs.get("loss") is None:
                return returned  # a batch that is skipped, or an error that Lightning explains
            sources = {
                "batch": of_batch(args[0], self._batch),
                "outputs": outputs,
                "activations": activations.values,
            }
            inputs = {**joined(sources), "parameters": parameters, "loss": outputs["loss"]}
            total = self._weighed(trainer, {**inputs, "aux": aux} if aux else inputs)
            activations.values.clear()
            log(module, self.composite, self._log)
            return total if isinstance(returned, Tensor) else {**outputs, "loss": total}

        # torch.compile leaves a step of its own on the instance.
        own = vars(module).get("training_step")
        module.training_step = regularized  # type: ignore[method-assign]
        if own is None:
            self._undo.callback(delattr, module, "training_step")
        else:
            self._undo.callback(setattr, module, "training_step", own)

    def _weighed(self, trainer: Trainer, inputs: Mapping[str, Any]) -> Tensor:
        self.composite.step = trainer.global_step
        total: Tensor = self.composite(inputs)  # a batch may hold any names
        return total


def _as_it_is(loss: Tensor) -> Tensor:
    return loss
