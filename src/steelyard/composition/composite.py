"""`CompositeLoss`: a base loss and terms over named tensors, in the caller's graph."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from operator import add
from pathlib import Path
from time import perf_counter
from typing import Any, Self, TypeAlias

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from steelyard._torch_internals import active_transforms
from steelyard.composition.aggregate import Combined, combine
from steelyard.composition.auxiliary_losses import DepositCollector
from steelyard.composition.call_events import CALL_EVENTS, CallEvents
from steelyard.composition.call_seeds import CallSeed
from steelyard.composition.distributed_inputs import (
    DistributedInputs,
    distributed_inputs,
    with_parts,
)
from steelyard.composition.evaluate import Evaluator
from steelyard.composition.input_names import (
    Named,
    Reads,
    base_of,
    gather_inputs,
    itself,
    spec_of,
    specs_of,
    term,
)
from steelyard.composition.inputs import Inputs, requiring_grad, runs_in_graph
from steelyard.composition.lazy_output import LazyOutput
from steelyard.composition.own_data import batch_of, check_joined, inputs_of
from steelyard.composition.ranks import Ranks
from steelyard.composition.run_recorder import CallRecorder
from steelyard.composition.settings import Settings
from steelyard.composition.term_set import TermSet
from steelyard.composition.terms import Term, TermResult
from steelyard.composition.traced import TracedGroup, evaluate_traced, traced_groups
from steelyard.composition.weightings import AggregatorLike
from steelyard.doctor.declaration import declared_terms
from steelyard.doctor.facts import innermost
from steelyard.errors import InputError, SpecError
from steelyard.execution.workers import Workers
from steelyard.output.custom_loss import CustomLossOutput
from steelyard.spec.checks import is_whole
from steelyard.spec.error_messages import title
from steelyard.spec.protocol import Schedule
from steelyard.spec.regularizer import ComposedLoss, RegularizerSpec, split_loss
from steelyard.telemetry.bus import listening

Share: TypeAlias = float | Tensor
TermLike: TypeAlias = RegularizerSpec | Mapping[str, Any]
BaseFn: TypeAlias = Callable[..., Any]

_GIVEN = ("logits", "projection", "hidden_states", "parameters")


class UncountedStepWarning(UserWarning):
    """A composite has terms that follow the step, and nothing counts it."""


class CompositeLoss(nn.Module):
    """A base loss and weighted terms over named tensors: total = base + sum(weight * term).

    Called with what the loss functions read, by name; mappings and dataclasses, such as the
    outputs of a model, are opened. It gives a scalar to call `backward` on; `output` has the
    numbers. Terms stay in the caller's graph, so what they close over is trained as well. An
    offloaded term (`run_in`, `timeout`, an async function, a numerical or a score gradient)
    works on copies, and has a gradient with respect to its inputs alone.

    Each call with gradients enabled is a step, from 0, which schedules, `every` and bounds follow.
    Where it is not, as in gradient accumulation, `follow` the optimizer or set `step`; also inside
    `torch.compile`, where a call does not count.

    Args:
        base: the base loss, a function of named inputs; or one for each head. Or a sum, as in
            `base + 0.1 * term`.
        terms: what `term` gives; mappings with its arguments; or specs of terms over
            `(data, logprobs)`, which read the inputs of these names. Or a list for each head.
        aux: the weights of auxiliary losses, by name; see `aux_loss` and `watch`.
        track_grad_norms: also compute each term's gradient norm and all cosines.
        wrt: a module or tensors that the norms are with respect to; None is all the inputs. For a
            module under `fully_shard` or `DistributedDataParallel` they are norms of the mean
            gradient over the processes, weighted by their shares.
        track_every: compute the norms at steps that this divides.
        timeout: seconds each offloaded term may take, unless its spec says otherwise.
        parallel: let offloaded terms overlap.
        max_concurrency: how many threads, and how many processes, at once; None is one per core.
        check_finite: treat a NaN or infinite value as a failure of its term. This reads the
            values at each call, which synchronizes with an accelerator.
        workers: the pools that run offloaded terms; None is those that the process shares.
        aggregate: how the terms' gradients become one, as in `Pipeline`; they are those with
            respect to `wrt`.
        seed: seed of the random numbers that terms draw, as in `Pipeline`; not inside of
            `torch.compile` or `torch.func.vmap`.
        run: a folder, new or empty, for a `metrics.jsonl` with a line for each step, a
            `config.json` and a `log.txt`, which `steelyard watch`, `report` and `doctor` read. The
            first process writes it. A line needs the values of its step: with
            `check_finite=False`, which reads none, only the steps that `track_every` divides have
            one.

    Attributes:
        share: factor on the sum of the regularizers, 1 unless set. For gradient accumulation
            with a base loss that is divided by the tokens of the whole batch, set it to the
            micro-batch's share of these tokens. With processes that have unequal numbers of
            tokens, multiply it by the number of processes.
        group: the processes that compute the loss of one batch together, None for all: those of
            data parallelism. Bounds and the state of terms follow their mean values.
        unmeasured: names of terms that the next calls leave out, since their batch has nothing that
            these terms measure; they are in `output.not_run`. A trainer sets it that knows which
            tokens count; a term's function may also return None.
        observer: called with the results of each call, before their gradients are released.
        records: whether calls are recorded in the run folder.
        run_config: tables that a trainer adds to what the run folder declares.

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
        base: BaseFn | Mapping[str, BaseFn] | ComposedLoss,
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
        aggregate: AggregatorLike = "sum",
        seed: int | None = None,
        run: str | Path | None = None,
    ) -> None:
        super().__init__()
        base, composed = split_loss(base, ())
        left = [term(itself, w, name, inputs=f"aux.{name}") for name, w in (aux or {}).items()]
        self._terms = TermSet(
            base_of(base),
            [*specs_of(composed), *specs_of(terms), *left],
            Settings(
                track_grad_norms,
                parallel,
                timeout,
                max_concurrency,
                check_finite,
                workers,
                aggregate,
                track_every,
                seed,
            ),
            gives=_GIVEN,
        )
        self.share: Share = 1.0
        self.group: dist.ProcessGroup | None = None
        self.unmeasured: Collection[str] = ()
        self.observer: Callable[[Sequence[TermResult]], None] | None = None
        # In a tuple, since a module as an attribute would become a part of this one.
        self._wrt_module = (wrt,) if isinstance(wrt, nn.Module) else ()
        self._wrapper: tuple[nn.Module, ...] = ()
        self._wrt = _parameters_of(wrt)
        self._collector = DepositCollector()
        self._last: LazyOutput | None = None
        self.records = True
        self.run_config: Mapping[str, Any] = {}
        self._recorder = _recorder_of(run)
        if self._recorder is not None:
            weakref.finalize(self, self._recorder.close)
        self._optimizer: weakref.ref[Optimizer] | None = None
        self._base_module = base if isinstance(base, nn.Module) else None
        self.register_buffer("_weights", torch.zeros(0), persistent=False)
        self._weights: Tensor
        self._due: Sequence[Term] = ()
        self._groups: tuple[TracedGroup, ...] = ()
        self._counts_calls, self._called = True, False
        self._uncounted = _WarnOnce()
        self._set_step(0)

    @property
    def step(self) -> int:
        """The number of the step that schedules, `every` and bounds follow.

        It is that of the last call with gradients, before the first 0. Once it has been set, or
        follows an optimizer, calls do not count any more.
        """
        return self._step

    @step.setter
    def step(self, step: int) -> None:
        if step != self._step:
            self.record_step()
        self._counts_calls = False
        self._set_step(step)

    @property
    def specs(self) -> tuple[RegularizerSpec, ...]:
        """The specs of the terms, in order."""
        return self._terms.specs

    @property
    def output(self) -> CustomLossOutput:
        """The numbers of the last call, in this process.

        They are read from their device here, and shown to the doctor, who warns of what is wrong.

        Raises:
            InputError: there was none.
        """
        last = self._last_call()
        output = last.output
        if last.step is not None:
            self._terms.examine(last.step, output)
        return output

    @property
    def results(self) -> Sequence[TermResult]:
        """The terms of the last call, as tensors on their device, without synchronizing.

        Raises:
            InputError: there was none.
        """
        return self._last_call().results

    def output_across_ranks(self, group: dist.ProcessGroup | None = None) -> CustomLossOutput:
        """The numbers of the last call, each averaged over the processes where the term ran.

        Processes count with their `share`. Every process of the group must call it. The terms' own
        metrics are this process's, and so are norms and cosines, unless they are of the mean
        gradient: see `wrt`.

        Raises:
            InputError: there is no group, or the processes have different terms.
        """
        return self._last_call().across(self.group if group is None else group)

    def forward(self, *outputs: object, **inputs: Any) -> Tensor:
        """The weighted total.

        Args:
            outputs: mappings and dataclasses whose fields are inputs.
            inputs: what the terms read, by name.

        Raises:
            InputError: something that a term reads is not there; or inside `torch.func.vmap` a
                term is offloaded or gradients are compared.
            SpecError: a schedule yields a bad weight at this step.
            TermError: the base loss failed, or a term whose `on_error` is `"raise"`.
        """
        named = gather_inputs(outputs, inputs)
        if self._collector.deposits:
            named.setdefault("aux", self._collector.deposits)
        self._collector.warn_unweighed(named.get("aux"), self._read_aux)
        if self._counts_calls and torch.is_grad_enabled():
            self._count_call()
        for due in self._due:
            if due.name not in self.unmeasured:
                _check_inputs(due, inputs_of(named, due.name))
        if self._reads_own_data:
            measured = (term.spec for term in self._due if term.name not in self.unmeasured)
            check_joined(measured, named.get("data"))
        if not torch.compiler.is_compiling():
            mapped = "Vmap" in active_transforms()
            total = self._compose_mapped(named) if mapped else self._compose(named)
        elif self._traceable and not self.unmeasured:
            total = self._compose_traced(named, self._groups)
        else:
            total = self._compose(named)
        if self._collector.deposits:
            self._collector.deposits = {}
        return total

    def compare_parameters(self, model: nn.Module) -> None:
        """Compare gradients with respect to the parameters of a module, as with `wrt=model`."""
        self._wrt_module, self._wrt = (model,), _parameters_of(model)

    def follow(self, optimizer: Optimizer) -> RemovableHandle:
        """Count a step whenever `optimizer` has made one, instead of calls.

        `remove` the handle to stop; the step then stands still.

        Args:
            optimizer: one of torch's, or what accelerate's `prepare` returns for one: that one is
                followed, which makes no step between accumulated micro-batches.
        """
        self._counts_calls = False

        def count(*_: object) -> None:
            self.step += 1

        followed = innermost_optimizer(optimizer)
        self._optimizer = weakref.ref(followed)
        if self._recorder is not None:
            self._recorder.follows = True
        return followed.register_step_post_hook(count)

    def set_wrapper(self, model: nn.Module) -> None:
        """Compare gradients over the processes if `model` is what averages those of `wrt`.

        For trainers, which put the module into a `DistributedDataParallel` that the caller does not
        see: norms are then those of the mean gradient, as with that as `wrt`.
        """
        if not self._wrt_module or self._wrapper == (model,):
            return
        averages = isinstance(model, DistributedDataParallel) and any(
            module is self._wrt_module[0] for module in model.modules()
        )
        self._wrapper = (model,) if averages else ()

    def join(self, data: Any) -> Any:
        """Return the data of the next call: the batch, and behind them those of its terms' own.

        Run the model on `joined.data`, and pass `data=joined` with all their `logprobs`; see
        `Pipeline.join`.
        """
        counted = self._counts_calls and self._called
        return self._terms.join(data, self._step + counted)

    def record_step(self) -> None:
        """Write the line of the current step to the run folder, if there are calls of it left.

        Otherwise it is written when the step changes, and where calls are counted with the call.
        """
        if self._recorder is None:
            return
        optimizer = None if self._optimizer is None else self._optimizer()
        rate = None if optimizer is None else optimizer.param_groups[0]["lr"]
        last = self._last if self._reads_values else None
        self._recorder.end_step(self._step, self._declared, last, rate)

    @property
    def _reads_values(self) -> bool:
        """Whether the line of the current step is written, which reads its values."""
        settings = self._terms.settings
        return settings.check_finite or self._step % settings.track_every == 0

    def watch(self, model: nn.Module) -> RemovableHandle:
        """Collect the values passed to `aux_loss` during each forward pass of `model`."""
        return self._collector.watch(model)

    def add(self, like: TermLike) -> None:
        """Put one more term at the end, from the next call on."""
        self._terms.add(spec_of(like))
        self._plan()

    def remove(self, name: str) -> None:
        """Take a term off, from the next call on."""
        self._terms.remove(name)
        self._plan()

    def set_weight(self, name: str, weight: float | Schedule) -> None:
        """Change a weight, from the next call on."""
        self._terms.set_weight(name, weight)
        self._plan()

    def set_enabled(self, name: str, enabled: bool) -> None:
        """Switch a term on or off, from the next call on."""
        self._terms.set_enabled(name, enabled)
        self._plan()

    def get_extra_state(self) -> dict[str, Any]:
        """State for `state_dict`: the step of the next call, and the state of the terms."""
        counted = self._counts_calls and self._called
        return {"step": self._step + counted, "terms": self._terms.state_dict()}

    def set_extra_state(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `get_extra_state` returned."""
        self._terms.load_state_dict(state["terms"])
        self._set_step(state["step"])

    def _set_step(self, step: int) -> None:
        if not is_whole(step, at_least=0):
            raise InputError(f"step must be a whole number >= 0, got {step!r}.")
        self._step, self._called = step, False
        self._plan()

    def _count_call(self) -> None:
        """Begin the step of a call: the one after that of the call before."""
        if torch.compiler.is_compiling():  # a count would be a constant of the graph
            if self._reads_step:
                self._uncounted.warn()
            return
        if self._called:
            self._step += 1
            if self._reads_step:
                self._plan()
        self._called = True

    def _plan(self) -> None:
        """Determine the due terms and their weights ahead of the call, for compiled calls."""
        before, self._due = self._due, self._terms.due(self._step)
        if self._due != before:
            self._groups = traced_groups(self._due)
        settings = self._terms.settings
        self._tracked = settings.tracks(self._step)
        self._traceable = not settings.compares_gradients(self._step) and all(
            runs_in_graph(t.spec) and not t.is_bounded and t.spec.data is None for t in self._due
        )
        self._reads_own_data = any(term.spec.data is not None for term in self._due)
        self._joined = bool(self._terms.stateful) or any(s.ranks == "one" for s in self.specs)
        self._not_run = tuple(s.name for s in self.specs if not s.due(self._step))
        tracks = settings.track_grad_norms and settings.track_every > 1
        self._reads_step = tracks or any(map(_reads_step, self.specs))
        self._read_aux = {name for spec in self.specs for name in _aux_of(spec)}
        weights = [term.spec.weight_at(self._step) for term in self._due]
        self._weights = torch.tensor(weights, dtype=torch.float32, device=self._weights.device)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # untyped in torch
        self._plan()  # a change of dtype would have rounded the weights
        return self

    def __getstate__(self) -> dict[str, Any]:
        dropped = dict[str, Any](group=None, observer=None, _wrapper=())  # a group has no pickle
        dropped |= dict[str, Any](_recorder=None, _optimizer=None)  # a copy writes no run folder
        return {**self.__dict__, **dropped}

    # Where a graph breaks (at heads, in torch 2.11), Dynamo would trace what this calls by itself.
    @torch.compiler.disable  # type: ignore[untyped-decorator]  # untyped in torch
    def _compose(self, inputs: Mapping[str, Any]) -> Tensor:
        settings, tracked = self._terms.settings, self._tracked
        events = None
        if listening(*CALL_EVENTS):
            data, count = batch_of(inputs.get("data")), len(self.specs)
            events = CallEvents(self._terms.model_id, data, count, tracked=tracked)
        self._open_recorder()
        try:
            compared = settings.compares_gradients(self._step)
            targets = self._targets(inputs) if compared else []
            tracked = tracked and bool(targets)
            space = "inputs" if self._wrt is None else "parameters"
            named, shard_readers = self._inputs(inputs, space, targets)
            ranks = Ranks.of(self.group, self.share) if self._joined else None
            trains = torch.is_grad_enabled()
            call = self._terms.count_call(self._step, trains=trains)
            seed = CallSeed(settings.seed, call, trains, self.group)
            evaluator = Evaluator(named, settings, events, ranks=ranks, seed=seed, part=self.share)
            results = evaluator.evaluate(
                self._due, self._step, tracked=tracked, unmeasured=self.unmeasured
            )
            if ranks is not None:
                self._terms.average_state(ranks)
            began = perf_counter()
            combined = self._combine(results, named, space, tracked=tracked) if targets else None
            factors = combined.factors if combined else {}
            total = _added(results, self.share, factors, shard_readers)
        except BaseException as error:
            if events is not None:
                events.exception(error)
            raise
        self._release(results)
        summary = None
        if combined is not None:
            norm = (combined.total_norm or 0.0) if tracked else None
            summary = replace(combined, totals={}, total_norm=norm)
        # Bypasses nn.Module.__setattr__, whose search for parameters takes as long as a small term.
        last = LazyOutput(
            results, self._not_run, summary, self.share, self._step if trains else None
        )
        self.__dict__["_last"] = last
        self._record(last, trains=trains)
        if events is not None and events.wants_numbers():
            events.stop(results, last.output, began)
        return total

    def _combine(
        self, results: Sequence[TermResult], inputs: Inputs, space: str, *, tracked: bool
    ) -> Combined:
        """Compare and aggregate the gradients of the terms."""
        aggregator, known = self._terms.settings.aggregator, None
        if isinstance(inputs, DistributedInputs):
            known = inputs.compare(results, reads_values=aggregator.reads_gram)
        return combine(
            results,
            aggregator,
            space,
            tracked=tracked,
            step=self._step,
            share=float(self.share) if aggregator.reads_gram else 1.0,
            known=known,
            declared=self._terms.rows,
        )

    def _open_recorder(self) -> None:
        """Open the run folder before the first step, in the first process."""
        if self._recorder is None:
            return
        if dist.is_available() and dist.is_initialized() and dist.get_rank() > 0:
            self._recorder = None
        elif self.records and torch.is_grad_enabled():
            self._recorder.open(self._step, self._declared)

    def _record(self, call: LazyOutput, *, trains: bool) -> None:
        """Add a call to the run folder; it is a step of its own where calls are counted."""
        recorder = self._recorder
        if recorder is None or not (self._reads_values and self.records):
            return
        recorder.add(call, self._step, trains=trains)
        if trains and self._counts_calls:
            self.record_step()

    @property
    def _declared(self) -> dict[str, Any]:
        """Declaration of the run folder, in the form of a config."""
        settings = self._terms.settings
        own = {
            "track_grad_norms": settings.track_grad_norms,
            "track_every": settings.track_every,
            "grad_space": "inputs" if self._wrt is None else "parameters",
        }
        return {
            "trainer": type(self).__name__,
            "loss": {"use": _name_of(self._terms.loss_fn)},
            "regularizers": declared_terms(self.specs),
            **self.run_config,
            "train": {**own, **self.run_config.get("train", {})},
        }

    def _release(self, results: Sequence[TermResult]) -> None:
        """Release the graph and the gradients of the results, which the observer sees before."""
        if self.observer is not None:
            self.observer(results)
        for result in results:
            result.value = None if result.value is None else result.value.detach()
            result.gradients, result.group = {}, None

    def _compose_traced(
        self, inputs: Mapping[str, Any], groups: Sequence[TracedGroup] = ()
    ) -> Tensor:
        """As `_compose`, traceable by torch.compile: no events, no checks, no `on_error`."""
        # A base loss in a group cannot be told apart from what `share` multiplies.
        groups = [g for g in groups if _is_whole(self.share) or not g.has_base]
        results = evaluate_traced(self._due, self._weights, groups, inputs)
        total = _added(results, self.share, {})
        for result in results:
            result.value = None if result.value is None else result.value.detach()
            result.group = None
        compiled = torch.is_grad_enabled()
        self._last = LazyOutput(results, self._not_run, share=self.share, compiled=compiled)
        return total

    def _compose_mapped(self, inputs: Mapping[str, Any]) -> Tensor:
        """As `_compose_traced`, inside `torch.func.vmap`, whose values cannot be read: no output.

        Raises:
            InputError: a term is offloaded, or gradients are compared.
        """
        if not self._traceable:
            raise InputError(
                "inside torch.func.vmap terms must run inline, without track_grad_norms and with "
                "aggregate='sum', got others: call the composite outside of vmap, or change them."
            )
        total = self._compose_traced(inputs)
        self._last = None
        return total

    def _targets(self, inputs: Mapping[str, Any]) -> list[Tensor]:
        # Of a module those that it has now: `fully_shard`, for one, replaces parameters.
        if self._wrt_module:
            return requiring_grad(list(self._wrt_module[0].parameters()))
        return requiring_grad(inputs if self._wrt is None else self._wrt)

    def _inputs(
        self, named: Mapping[str, Any], space: str, targets: Sequence[Tensor]
    ) -> tuple[Inputs, Collection[str]]:
        """The inputs, and the terms whose gradient counts whatever the share; see `with_parts`."""
        fuse_base, share = _is_whole(self.share), self.share
        if not (dist.is_available() and dist.is_initialized()):
            return Inputs(named, space, targets, fuse_base=fuse_base), ()
        (named, kept), sharded = with_parts(named, self._due, share, self.group), None
        if targets:
            module = next(iter((*self._wrapper, *self._wrt_module)), None)
            sharded = distributed_inputs(
                named, space, module, targets, share, self.group, kept, fuse_base=fuse_base
            )
        return sharded or Inputs(named, space, targets, fuse_base=fuse_base), kept

    def _last_call(self) -> LazyOutput:
        if self._last is None:
            raise InputError(
                "output is that of the last call, and there was none: call it first, outside of "
                "torch.func.vmap."
            )
        return self._last


def _added(
    results: Sequence[TermResult],
    share: Share,
    factors: Mapping[str, float],
    kept: Collection[str] = (),
) -> Tensor:
    """Sum base + share * Σ weight * term.

    Args:
        results: the base loss first; a group of fused terms counts once, by its total.
        share: factor on the sum of the regularizers.
        factors: the aggregator's factors on the gradients; values are not changed.
        kept: terms whose gradient counts though the share is 0.
    """
    parts: list[Tensor] = []  # not `list[Tensor]()`, which Dynamo does not trace
    gradients: list[Tensor] = []
    for result in results:
        if result.group is None and result.value is not None:
            value = result.value if result.term.is_base else result.weight * result.value
            value = _scaled(value, factors.get(result.term.name, 1.0))
            if result.term.name in kept:
                gradients.append(value - value.detach())
            else:
                parts.append(value)
    for result in results:
        group = result.group
        if group is not None and result.term.name == group.names[0]:
            parts.append(group.joint.total)
    if _is_whole(share):
        return reduce(add, parts)
    return sum(gradients, parts[0] + share * sum(parts[1:]))


def _scaled(value: Tensor, factor: float) -> Tensor:
    """The value unchanged, with its gradient multiplied by the factor."""
    return value if factor == 1 else factor * value + (1 - factor) * value.detach()


def innermost_optimizer(optimizer: Optimizer) -> Optimizer:
    """The optimizer inside of wrappers such as accelerate's, which take no hooks themselves."""
    inner = getattr(optimizer, "optimizer", None)
    return innermost_optimizer(inner) if isinstance(inner, Optimizer) else optimizer


def _recorder_of(run: str | Path | None) -> CallRecorder | None:
    """Writer of the run folder; None without one.

    Raises:
        SpecError: it is no path.
    """
    if run is None:
        return None
    if not isinstance(run, str | Path) or not str(run):
        raise SpecError(f"run must be the path of a folder, got {run!r}.")
    return CallRecorder(run)


def _name_of(base: Any) -> str:
    fn = innermost(base)
    return str(getattr(fn, "__name__", type(fn).__name__))


def _reads_step(spec: RegularizerSpec) -> bool:
    """Return whether a term follows the number of the step."""
    return spec.enabled and (spec.every > 1 or spec.is_bounded or callable(spec.weight))


def _is_whole(share: Share) -> bool:
    return not isinstance(share, Tensor) and share == 1


class _WarnOnce:
    """Warning of a compiled call that counts no step."""

    def __init__(self) -> None:
        self._warned = False

    # Dynamo runs it while it traces: neither does the warning break the graph, nor is it a part.
    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # untyped in torch
    def warn(self) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                "a CompositeLoss inside torch.compile does not count its calls, and has a "
                "schedule, a bound, every or track_every, which need steps: call "
                "follow(optimizer), or set step.",
                UncountedStepWarning,
                stacklevel=2,
            )


def _aux_of(spec: RegularizerSpec) -> list[str]:
    """The auxiliary losses that a term reads."""
    names = spec.fn.required if isinstance(spec.fn, Reads) else ()
    return [name.removeprefix("aux.") for name in names if name.startswith("aux.")]


def _parameters_of(wrt: nn.Module | Tensor | Iterable[Tensor] | None) -> list[Tensor] | None:
    if wrt is None:
        return None
    if isinstance(wrt, Tensor):
        wrt = [wrt]
    tensors = wrt.parameters() if isinstance(wrt, nn.Module) else wrt
    every = list(tensors) if isinstance(tensors, Iterable) else [tensors]
    for tensor in every:
        if not isinstance(tensor, Tensor):
            raise SpecError(f"wrt must be a module, a tensor or a list of tensors, got {tensor!r}.")
    targets = [tensor for tensor in every if tensor.requires_grad]
    if not targets:
        raise SpecError(
            f"wrt must hold tensors that require a gradient, and none of the {len(every)} does."
        )
    return targets


def _check_inputs(term: Term, inputs: Mapping[str, Any]) -> None:
    if isinstance(term.spec.fn, Named):
        term.spec.fn.check(term.name, inputs)
        return
    for name in ("data", "logprobs", *term.spec.needs):
        if name not in inputs:
            there = ", ".join(repr(name) for name in inputs) or "none"
            raise InputError(
                f"{title(term.name)} reads the input {name!r}, which is not there; the inputs "
                f"are: {there}. "
                f"Name others with steelyard.term(..., inputs=...)."
            )
