"""Attach transforms to an optimizer with its hooks: when they run, and how their state is saved."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, Self
from weakref import WeakKeyDictionary

import torch
from torch.optim import Optimizer

from steelyard.composition.composite import innermost_optimizer
from steelyard.errors import InputError, SpecError, StateError
from steelyard.integrations.optim.transform import Transform, select, slots_of, with_gradients
from steelyard.spec.checks import is_whole

_STATE_KEY = "steelyard"  # in the optimizer's state_dict
_ATTACHED: WeakKeyDictionary[Optimizer, Attachment] = WeakKeyDictionary()


def attach(optimizer: Optimizer, transforms: Iterable[Transform]) -> Attachment:
    """Apply `transforms` to the gradients of `optimizer` before each step, in the order listed.

    With a closure, as LBFGS needs one, they are applied to the gradients of each evaluation;
    decoupled decay shrinks the weights once a step. Parameters without a gradient are left out.

    Args:
        optimizer: Any `torch.optim.Optimizer`, or what accelerate's `prepare` returns for one: that
            one gets the transforms. Its `state_dict` has the number of steps from then on, under
            the key "steelyard", and its `load_state_dict` restores it.
        transforms: `l2_decay`, `clip_by_global_norm`, … or a `Transform` of your own.

    Returns:
        The attachment, which `remove` takes off again; also a context manager.

    Raises:
        InputError: It is no optimizer, or has transforms already. While stepping: no parameter
            has a gradient, or a sparse gradient would become dense.
        SpecError: One is not a transform, or cannot work on this optimizer.

    Example:
        >>> import torch
        >>> from steelyard.integrations.optim import attach, clip_by_global_norm, l1_decay
        >>> model = torch.nn.Linear(3, 2)
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.0)
        >>> attached = attach(
        ...     optimizer,
        ...     [clip_by_global_norm(1.0), l1_decay(1e-3, where=lambda p: p.ndim > 1)],
        ... )
        >>> model(torch.ones(1, 3)).sum().backward()
        >>> optimizer.step()
        >>> optimizer.state_dict()["steelyard"]
        {'step': 1, 'transforms': ['clip_by_global_norm', 'l1_decay']}
        >>> attached.remove()
    """
    optimizer = innermost_optimizer(optimizer)
    if not isinstance(optimizer, Optimizer) or not _takes_hooks(optimizer):
        raise InputError(
            f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__qualname__}: "
            "attach to the optimizer that a wrapper holds."
        )
    if isinstance(transforms, Transform):
        raise SpecError(
            f"transforms must be listed in their order, got {transforms.name} alone: put it into "
            "a list."
        )
    listed = tuple(transforms)
    for transform in listed:
        if not isinstance(transform, Transform):
            raise SpecError(
                f"a transform must be made by l2_decay, clip_by_global_norm, … or be a Transform, "
                f"got {transform!r}."
            )
        transform.check(optimizer)
    if optimizer in _ATTACHED:
        raise InputError(
            "an optimizer must have its transforms attached at once, in their order, got one "
            f"that has {', '.join(_ATTACHED[optimizer].names) or 'an empty list'} already: "
            "remove() those first."
        )
    attachment = Attachment(optimizer, listed)
    _ATTACHED[optimizer] = attachment
    return attachment


def _takes_hooks(optimizer: Optimizer) -> bool:
    """False for a wrapper that subclasses Optimizer without calling its constructor."""
    try:
        optimizer.register_step_pre_hook(lambda *_: None).remove()
    except AttributeError:
        return False
    return True


class Attachment:
    """The transforms of one optimizer, until `remove` or the end of a `with` block.

    It holds no reference to the optimizer. A copy of the optimizer, or one that was unpickled,
    has no transforms: attach them again.
    """

    def __init__(self, optimizer: Optimizer, transforms: tuple[Transform, ...]) -> None:
        self._transforms = transforms
        self._step = 0
        self._applied = False  # in the current step
        self._step_to_load = 0
        self._hooks = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
            optimizer.register_state_dict_post_hook(self._add_state),
            # Loading is checked before the optimizer changes anything, and takes effect after
            # it has accepted the rest of the state.
            optimizer.register_load_state_dict_pre_hook(self._check_state),
            optimizer.register_load_state_dict_post_hook(self._load_state),
        ]

    @property
    def step(self) -> int:
        """Number of steps the optimizer has made with these transforms; schedules follow it."""
        return self._step

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the transforms, in order."""
        return tuple(transform.name for transform in self._transforms)

    def remove(self) -> None:
        """Take the transforms off the optimizer; a second call does nothing."""
        for hook in self._hooks:
            hook.remove()
        for optimizer, attachment in list(_ATTACHED.items()):
            if attachment is self:
                del _ATTACHED[optimizer]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.remove()

    def __repr__(self) -> str:
        return f"Attachment({', '.join(self.names)}; step {self._step})"

    # `Any`: arguments and result of a step are the optimizer's own.
    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        self._applied = False
        if _will_be_skipped(optimizer):
            return None
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self._apply(optimizer)
            return None
        # The closure computes the gradients during the step, so the transforms run after it.
        wrapped = self._wrap_closure(optimizer, closure)
        if "closure" in kwargs:
            return args, {**kwargs, "closure": wrapped}
        return (args[0], wrapped, *args[2:]), kwargs

    def _wrap_closure(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        def wrapped() -> Any:
            loss = closure()
            self._apply(optimizer)
            return loss

        return wrapped

    @torch.no_grad()
    def _apply(self, optimizer: Optimizer) -> None:
        slots = with_gradients(slots_of(optimizer))
        for transform in self._transforms:
            selected = select(slots, transform.where)
            if selected:
                transform.apply(selected, self._step, first=not self._applied)
        self._applied = True

    def _after_step(self, *_: Any) -> None:
        self._step += self._applied

    def _add_state(self, _: Optimizer, state: dict[str, Any]) -> None:
        state[_STATE_KEY] = {"step": self._step, "transforms": list(self.names)}

    def _check_state(self, _: Optimizer, state: dict[str, Any]) -> None:
        cure = "attach after loading, to begin at step 0"
        if _STATE_KEY not in state:
            raise StateError(
                "a state_dict for an optimizer with transforms must hold their state under "
                f"{_STATE_KEY!r}, got {', '.join(map(repr, state))}: it was saved without them; "
                f"{cure}."
            )
        saved = state[_STATE_KEY]
        if saved["transforms"] != list(self.names):
            raise StateError(
                f"the transforms of a state_dict must be those attached, {list(self.names)}, got "
                f"{saved['transforms']}: attach the same in the same order, or {cure}."
            )
        if not is_whole(saved["step"], at_least=0):
            raise StateError(f"step must be a whole number >= 0, got {saved['step']!r}.")
        self._step_to_load = int(saved["step"])

    def _load_state(self, _: Optimizer) -> None:
        self._step = self._step_to_load


def _will_be_skipped(optimizer: Optimizer) -> bool:
    """True if a fused optimizer will skip this step, because `GradScaler` found infinities.

    `GradScaler` gives a fused optimizer its scale and its findings as attributes. For any other it
    unscales the gradients before it calls `step`, or does not call it.

    Raises:
        InputError: the fused optimizer is to unscale the gradients itself, after the transforms.
    """
    if getattr(optimizer, "grad_scale", None) is not None:
        raise InputError(
            "transforms must see gradients that are not scaled, got a fused optimizer that a "
            "GradScaler leaves to unscale them: call scaler.unscale_(optimizer) before "
            "scaler.step(optimizer)."
        )
    overflowed = getattr(optimizer, "found_inf", None)
    return overflowed is not None and bool(overflowed.item())
