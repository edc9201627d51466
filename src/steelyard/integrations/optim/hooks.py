"""Transforms on an optimizer: when they run, and how their state is kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, Self
from weakref import WeakKeyDictionary

import torch
from torch.optim import Optimizer

from steelyard.errors import InputError, SpecError, StateError
from steelyard.integrations.optim.param_lists import chosen, ready, slots_of
from steelyard.integrations.optim.transform import Transform
from steelyard.spec import is_whole

_KEY = "steelyard"
_ATTACHED: WeakKeyDictionary[Optimizer, Attachment] = WeakKeyDictionary()


def attach(optimizer: Optimizer, transforms: Iterable[Transform]) -> Attachment:
    """Have `optimizer` apply `transforms` to its gradients before each step, in the order listed.

    With a closure, as LBFGS needs one, they are applied to the gradients of each evaluation;
    decoupled decay shrinks the weights once a step. Parameters without a gradient are left out.

    Args:
        optimizer: Any `torch.optim.Optimizer`. Its `state_dict` has the number of steps from
            then on, under the key "steelyard", and its `load_state_dict` restores it.
        transforms: `l2_decay`, `clip_by_global_norm`, … or a `Transform` of your own.

    Returns:
        The attachment, to `remove` it; also a context manager.

    Raises:
        InputError: It is no optimizer, or has transforms already. While stepping: there is no
            gradient at all, or a sparse one where the result would be dense.
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
    # Wrappers such as accelerate's are optimizers by name only, and have no place for hooks.
    if not isinstance(optimizer, Optimizer) or not hasattr(optimizer, "_optimizer_step_pre_hooks"):
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


class Attachment:
    """Transforms on one optimizer, until `remove` or the end of a `with` block.

    It holds no reference to the optimizer. A copy of the optimizer, or one that was pickled,
    has no transforms: attach them again.
    """

    def __init__(self, optimizer: Optimizer, transforms: tuple[Transform, ...]) -> None:
        self._transforms = transforms
        self._step = 0
        self._applied = False
        self._loading = 0
        self._hooks = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
            optimizer.register_state_dict_post_hook(self._saved),
            optimizer.register_load_state_dict_pre_hook(self._check_loaded),
            optimizer.register_load_state_dict_post_hook(self._loaded),
        ]

    @property
    def step(self) -> int:
        """The steps the optimizer has made with these transforms; schedules follow it."""
        return self._step

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the transforms, in order."""
        return tuple(transform.name for transform in self._transforms)

    def remove(self) -> None:
        """Take the transforms off the optimizer; again does nothing."""
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

    # `Any`: what a step takes and gives back is the optimizer's business.
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
        with_transforms = self._evaluating(optimizer, closure)
        if "closure" in kwargs:
            return args, {**kwargs, "closure": with_transforms}
        return (args[0], with_transforms, *args[2:]), kwargs

    def _evaluating(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        def evaluate() -> Any:
            loss = closure()
            self._apply(optimizer)
            return loss

        return evaluate

    @torch.no_grad()
    def _apply(self, optimizer: Optimizer) -> None:
        slots = ready(slots_of(optimizer))
        for transform in self._transforms:
            concerned = chosen(slots, transform.where)
            if concerned:
                transform.apply(concerned, self._step, first=not self._applied)
        self._applied = True

    def _after_step(self, *_: Any) -> None:
        self._step += self._applied

    def _saved(self, _: Optimizer, state: dict[str, Any]) -> None:
        state[_KEY] = {"step": self._step, "transforms": list(self.names)}

    def _check_loaded(self, _: Optimizer, state: dict[str, Any]) -> None:
        """Refuse before anything of the optimizer has changed."""
        late = "attach after loading, to begin at step 0"
        if _KEY not in state:
            raise StateError(
                "a state_dict for an optimizer with transforms must hold their state under "
                f"{_KEY!r}, got {', '.join(map(repr, state))}: it was saved without them; {late}."
            )
        saved = state[_KEY]
        if saved["transforms"] != list(self.names):
            raise StateError(
                f"the transforms of a state_dict must be those attached, {list(self.names)}, got "
                f"{saved['transforms']}: attach the same in the same order, or {late}."
            )
        if not is_whole(saved["step"], at_least=0):
            raise StateError(f"step must be a whole number >= 0, got {saved['step']!r}.")
        self._loading = int(saved["step"])

    def _loaded(self, _: Optimizer) -> None:
        self._step = self._loading


def _will_be_skipped(optimizer: Optimizer) -> bool:
    """Whether a fused optimizer will skip this step, as its `GradScaler` has found infinities.

    Other optimizers get gradients that the scaler has unscaled, or no call at all.
    """
    if getattr(optimizer, "grad_scale", None) is not None:
        raise InputError(
            "transforms must see gradients that are not scaled, got a fused optimizer that a "
            "GradScaler leaves to unscale them: call scaler.unscale_(optimizer) before "
            "scaler.step(optimizer)."
        )
    found = getattr(optimizer, "found_inf", None)
    return found is not None and bool(found.item())
