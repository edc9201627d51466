"""Plain PyTorch: `CompositeLoss` in a training loop that is already there."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Self, TypeAlias

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from steelyard.composition import Pipeline
from steelyard.composition.term import Term
from steelyard.errors import InputError, SpecError
from steelyard.execution import Workers
from steelyard.integrations.activations import capture
from steelyard.integrations.apart import runs_apart
from steelyard.integrations.auxiliary import (
    Deposits,
    aux_loss,
    begin_collecting,
    collect_aux,
    end_collecting,
)
from steelyard.integrations.inputs import Inputs, gather
from steelyard.integrations.named import (
    Named,
    Reads,
    base_of,
    itself,
    reads,
    spec_of,
    specs_of,
    term,
)
from steelyard.integrations.reading import Reading
from steelyard.integrations.weighed import Weighed
from steelyard.integrations.weighing import Share, weigh, weigh_traced
from steelyard.output import CustomLossOutput
from steelyard.spec import RegularizerSpec, Schedule, title
from steelyard.spec.numbers import is_whole

__all__ = ["CompositeLoss", "aux_loss", "capture", "collect_aux", "reads", "term"]

TermLike: TypeAlias = RegularizerSpec | Mapping[str, Any]
BaseFn: TypeAlias = Callable[..., Any]

_GIVEN = ("logits", "projection", "hidden_states", "parameters")


class CompositeLoss(nn.Module):
    """A base loss and weighted terms over named tensors: total = base + sum(weight * term).

    Called with what the loss functions read, by name; mappings and dataclasses, such as the
    outputs of a model, are opened. It gives a scalar to call `backward` on; `output` has the
    numbers. Terms stay in the caller's graph, so what they close over is trained as well. A
    term that runs apart (`run_in`, `timeout`, an async function, a numerical or a score
    gradient) works on copies, and its gradient goes to what it reads alone.

    Args:
        base: the base loss, a function of named inputs; or one for each head.
        terms: what `term` gives; mappings with its arguments; or specs of terms over
            `(data, logprobs)`, which read the inputs of these names. Or a list for each head.
        aux: the weights of auxiliary losses, by name; see `aux_loss` and `watch`.
        track_grad_norms: also compute each term's gradient norm and all cosines.
        wrt: a module or tensors that the norms are with respect to; None is all the inputs.
        track_every: compute the norms at steps that this divides.
        timeout: seconds each term that runs apart may take, unless its spec says otherwise.
        parallel: let terms that run apart overlap.
        max_concurrency: how many threads, and how many processes, at once; None is one per core.
        check_finite: treat a NaN or infinite value as a failure of its term. That reads the
            values at each call, so an accelerator is waited for; False leaves it to `output`.
        workers: what terms run on that run apart; None is what all of the process share.

    Attributes:
        share: what part of the regularizers' sum a call adds, 1 unless set. With gradients
            accumulated over micro-batches whose base loss is divided by the tokens of the whole
            batch, it is the micro-batch's share of them.

    Raises:
        SpecError: an argument breaks a rule.

    Example:
        >>> from torch.nn import functional
        >>> loss = CompositeLoss(
        ...     lambda logits, labels: functional.cross_entropy(logits, labels),
        ...     [term(lambda hidden: hidden.square().mean(), weight=0.5, name="activity")],
        ... )
        >>> hidden = torch.ones(2, 4, requires_grad=True)
        >>> total = loss(logits=hidden[:, :3] * 0, labels=torch.tensor([0, 2]), hidden=hidden)
        >>> total.backward()
        >>> round(total.item(), 4), loss.output.regularizers["activity"].contribution
        (1.5986, 0.5)
    """

    def __init__(
        self,
        base: BaseFn | Mapping[str, BaseFn],
        terms: Iterable[TermLike] | Mapping[str, Iterable[TermLike]] = (),
        *,
        aux: Mapping[str, float | Schedule] | None = None,
        track_grad_norms: bool = False,
        wrt: nn.Module | Tensor | Iterable[Tensor] | None = None,
        track_every: int = 1,
        timeout: float = 30.0,
        parallel: bool = True,
        max_concurrency: int | None = None,
        check_finite: bool = True,
        workers: Workers | None = None,
    ) -> None:
        super().__init__()
        if not is_whole(track_every, at_least=1):
            raise SpecError(f"track_every must be a whole number >= 1, got {track_every!r}.")
        left = [term(itself, w, name, inputs=f"aux.{name}") for name, w in (aux or {}).items()]
        self._pipeline = Pipeline(
            base_of(base),
            [*specs_of(terms), *left],
            track_grad_norms,
            parallel,
            timeout,
            max_concurrency,
            check_finite,
            workers,
            gives=_GIVEN,
        )
        self.share: Share = 1.0
        self._wrt = _targets(wrt)
        self._track_every = track_every
        self._unweighed: set[str] = set()
        self._deposits: Deposits = {}
        self._weighed: Weighed | None = None
        self._base_module = base if isinstance(base, nn.Module) else None
        self.register_buffer("_weights", torch.zeros(0), persistent=False)
        self._weights: Tensor
        self.step = 0

    @property
    def step(self) -> int:
        """The number of the step that schedules and `every` follow; set it, or `follow`."""
        return self._step

    @step.setter
    def step(self, step: int) -> None:
        if not is_whole(step, at_least=0):
            raise InputError(f"step must be a whole number >= 0, got {step!r}.")
        self._step = step
        self._plan()

    @property
    def specs(self) -> tuple[RegularizerSpec, ...]:
        """The specs of the terms, in order."""
        return self._pipeline.specs

    @property
    def output(self) -> CustomLossOutput:
        """The numbers of the last call, in this process.

        Raises:
            InputError: there was none.
        """
        return self._last().output

    @property
    def readings(self) -> Sequence[Reading]:
        """The terms of the last call, as tensors on their device: reading them waits for nothing.

        Raises:
            InputError: there was none.
        """
        return self._last().readings

    def output_across_ranks(self, group: dist.ProcessGroup | None = None) -> CustomLossOutput:
        """The numbers of the last call, each averaged over the processes where the term ran.

        Every process of the group must call it. Norms, cosines and the terms' own metrics are
        this process's.

        Raises:
            InputError: there is no group, or the processes have different terms.
        """
        return self._last().across(group)

    def forward(self, *outputs: object, **inputs: Any) -> Tensor:
        """The weighted total.

        Args:
            outputs: mappings and dataclasses whose fields are inputs.
            inputs: what the terms read, by name.

        Raises:
            InputError: something that a term reads is not there.
            SpecError: a schedule yields a bad weight at this step.
            TermError: the base loss failed, or a term whose `on_error` is `"raise"`.
        """
        found = gather(outputs, inputs)
        if self._deposits:
            found.setdefault("aux", self._deposits)
        self._warn_unweighed(found.get("aux"))
        for each in self._due:
            _check_inputs(each, found)
        if self._traceable and torch.compiler.is_compiling():
            total, self._weighed = weigh_traced(
                self._due, self._weights, found, self.share, self._not_run
            )
        else:
            total, self._weighed = weigh(
                self._pipeline,
                found,
                self._step,
                share=self.share,
                wrt=self._wrt,
                tracked=self._tracked,
            )
        self._deposits = {}
        return total

    def follow(self, optimizer: Optimizer) -> RemovableHandle:
        """Count a step whenever `optimizer` has made one; `remove` the handle to stop."""

        def count(*_: object) -> None:
            self.step += 1

        return optimizer.register_step_post_hook(count)

    def watch(self, model: nn.Module) -> RemovableHandle:
        """Collect what modules leave with `aux_loss` whenever `model` is called."""
        before = model.register_forward_pre_hook(self._begin_collecting)
        after = model.register_forward_hook(self._end_collecting, always_call=True)
        return _Both(before, after)

    def add(self, like: TermLike) -> None:
        """Put one more term at the end, from the next call on."""
        self._pipeline.add(spec_of(like))
        self._plan()

    def remove(self, name: str) -> None:
        """Take a term off, from the next call on."""
        self._pipeline.remove(name)
        self._plan()

    def set_weight(self, name: str, weight: float | Schedule) -> None:
        """Change a weight, from the next call on."""
        self._pipeline.set_weight(name, weight)
        self._plan()

    def set_enabled(self, name: str, enabled: bool) -> None:
        """Switch a term on or off, from the next call on."""
        self._pipeline.set_enabled(name, enabled)
        self._plan()

    def get_extra_state(self) -> dict[str, Any]:
        """What goes into `state_dict`: the step, and what the terms remember."""
        return {"step": self._step, "terms": self._pipeline.state_dict()}

    def set_extra_state(self, state: Mapping[str, Any]) -> None:
        """Take back what `get_extra_state` gave."""
        self._pipeline.load_state_dict(state["terms"])
        self.step = state["step"]

    # Methods rather than closures: what copies the model with the composite copies the bond.
    def _begin_collecting(self, *_: object) -> None:
        self._deposits = begin_collecting()

    def _end_collecting(self, *_: object) -> None:
        end_collecting(self._deposits)

    def _plan(self) -> None:
        """Settle what runs at this step, for a compiled call, which cannot ask."""
        self._due = self._pipeline.due(self._step)
        track = self._pipeline.settings.track_grad_norms
        self._tracked = track and self._step % self._track_every == 0
        self._traceable = not self._tracked and not any(runs_apart(t.spec) for t in self._due)
        self._not_run = tuple(s.name for s in self.specs if not s.due(self._step))
        self._read_aux = {name for spec in self.specs for name in _aux_of(spec)}
        weights = [each.spec.weight_at(self._step) for each in self._due]
        self._weights = torch.tensor(weights, dtype=torch.float32, device=self._weights.device)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch leaves it so
        self._plan()  # a change of dtype would have rounded the weights
        return self

    def __getstate__(self) -> dict[str, Any]:
        # What the last forward pass left is of the graph of that pass.
        return {**self.__dict__, "_deposits": {}}

    def _last(self) -> Weighed:
        if self._weighed is None:
            raise InputError("output is that of the last call, and there was none: call it first.")
        return self._weighed

    def _warn_unweighed(self, deposits: object) -> None:
        if not isinstance(deposits, Mapping):  # an output of the model that happens to be "aux"
            return
        for name in deposits.keys() - self._read_aux - self._unweighed:
            self._unweighed.add(name)
            warnings.warn(
                f"the model leaves the auxiliary loss {name!r}, which has no weight and is not "
                f"part of the loss: give it one with aux={{{name!r}: ...}}.",
                stacklevel=5,
            )


class _Both(RemovableHandle):
    """Two handles as one."""

    def __init__(self, first: RemovableHandle, second: RemovableHandle) -> None:
        self._handles = (first, second)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


def _aux_of(spec: RegularizerSpec) -> list[str]:
    """The auxiliary losses that a term reads."""
    names = spec.fn.required if isinstance(spec.fn, Reads) else ()
    return [name.removeprefix("aux.") for name in names if name.startswith("aux.")]


def _targets(wrt: nn.Module | Tensor | Iterable[Tensor] | None) -> list[Tensor] | None:
    if wrt is None:
        return None
    if isinstance(wrt, Tensor):
        wrt = [wrt]
    every = list(wrt.parameters() if isinstance(wrt, nn.Module) else wrt)
    targets = [each for each in every if isinstance(each, Tensor) and each.requires_grad]
    if not targets:
        raise SpecError(
            f"wrt must hold tensors that require a gradient, and none of the {len(every)} does."
        )
    return targets


def _check_inputs(each: Term, inputs: Inputs) -> None:
    who = title(each.spec.name)  # a cached property, such as each.name, stops a compiler
    if isinstance(each.spec.fn, Named):
        each.spec.fn.check(who, inputs)
        return
    for name in ("data", "logprobs", *each.spec.needs):
        if name not in inputs:
            there = ", ".join(repr(name) for name in inputs) or "none"
            raise InputError(
                f"{who} reads the input {name!r}, which is not there; the inputs are: {there}. "
                f"Name others with steelyard.integrations.torch.term(..., inputs=...)."
            )
