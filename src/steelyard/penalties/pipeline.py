"""`PenaltyPipeline`: a weighted sum of named penalties, with the value of each as metrics."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from steelyard import telemetry
from steelyard.errors import InputError
from steelyard.penalties._arrays import Array, constant
from steelyard.penalties._checks import flag
from steelyard.penalties._pipeline_terms import (
    Penalty,
    PenaltyTerm,
    TermLike,
    build_term,
    refuse_traced,
    term_from,
    total_of,
    values_and_norms,
)
from steelyard.spec.protocol import Schedule, listed

T = TypeVar("T")


class PenaltyPipeline:
    """Weighted sum of penalties: `total = Σ weightᵢ · penaltyᵢ(inputs)`.

    A pipeline is immutable: each update returns a new one. A penalty is named by a built-in name
    (`l1`, `l2`, `elastic_net`, `kl`, `js`, `entropy`, `orthogonality`, `consistency`,
    `output_magnitude`), a name registered with `steelyard.register`, or `"package.module:attr"`;
    any callable that returns a scalar works too.

    Args:
        penalties: Each a name, a callable, or a pair of either with its options: `weight`
            (1.0; a finite number, or a schedule `step -> weight`), `inputs` (names of the arrays
            it reads, in order), `differentiable` (True; `gradient="none"` also turns it off),
            `enabled` (True), `name` (to use one penalty twice), and the penalty's own options.
            Or a term of another pipeline.

    Raises:
        InputError: A name is unknown or used twice; a weight is neither a finite number nor a
            schedule; the penalty does not accept the options or the number of inputs.

    Example:
        >>> import numpy as np
        >>> pipeline = PenaltyPipeline([("l1", {"weight": 0.5}), "l2"])
        >>> total, metrics = pipeline.compute(np.array([1.0, -2.0]))
        >>> print(total)
        6.5
        >>> metrics
        {'l1': 3.0, 'l1_weighted': 1.5, 'l2': 5.0, 'l2_weighted': 5.0, 'total': 6.5}

    References:
        Kendall, Gal & Cipolla (2018), "Multi-task learning using uncertainty to weigh losses",
        section 3, on weighted sums of losses.
    """

    __slots__ = ("_terms",)

    def __init__(self, penalties: Iterable[TermLike] = ()) -> None:
        self._terms: tuple[PenaltyTerm, ...] = ()
        taken = {"total", "total_grad_norm"}
        for like in penalties:
            added = term_from(like)
            keys = {added.name, f"{added.name}_weighted", f"{added.name}_grad_norm"}
            if clash := sorted(taken & keys):
                raise InputError(
                    "penalty names, and the metrics named after them, must be unique, got "
                    f"{added.name!r}, whose metric {clash[0]!r} is taken; there are: "
                    f"{listed(self.names)}. Set the option 'name' to have a penalty twice."
                )
            taken |= keys
            self._terms = (*self._terms, added)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all penalties, in order."""
        return tuple(term.name for term in self._terms)

    @property
    def terms(self) -> tuple[PenaltyTerm, ...]:
        """Enabled penalties, in order: each has a `name`, a `weight` and `inputs`.

        A term's `evaluate` returns its value and `weight_at` its weight at a step. Both work inside
        JAX and torch transformations and emit no telemetry, for code that combines the penalties
        with a loss of its own.

        Example:
            >>> import numpy as np
            >>> [l1, l2] = PenaltyPipeline(["l1", ("l2", {"weight": 0.5})]).terms
            >>> print(l1.weight * l1.evaluate(np.ones(3)), l2.weight * l2.evaluate(np.ones(3)))
            3.0 1.5
        """
        return tuple(term for term in self._terms if term.enabled)

    def weights(self, step: Any = 0) -> dict[str, Any]:
        """Weights of the enabled penalties at a step, by name.

        Args:
            step: Step at which schedules are evaluated; if it is traced, so are their weights.

        Raises:
            InputError: A schedule does not give a finite number at this step.

        Example:
            >>> from steelyard import schedules
            >>> warm = ("l2", {"weight": schedules.warmup(0.5, 10)})
            >>> PenaltyPipeline(["l1", warm]).weights(step=5)
            {'l1': 1.0, 'l2': 0.25}
        """
        return {term.name: term.weight_at(step) for term in self.terms}

    @staticmethod
    def metrics(
        values: Mapping[str, T], weights: Mapping[str, Any], norms: Mapping[str, T], total: T
    ) -> dict[str, T]:
        """Metrics under the keys that `compute` uses.

        Args:
            values: Raw value of each penalty, by name.
            weights: Weight of each penalty that gets a `name_weighted` metric.
            norms: Gradient norms, by name, and that of the `"total"`; empty if not tracked.
            total: The total.

        Example:
            >>> PenaltyPipeline.metrics({"l1": 3.0}, {"l1": 0.5}, {"l1": 2.0, "total": 1.0}, 1.5)
            {'l1': 3.0, 'l1_weighted': 1.5, 'l1_grad_norm': 2.0, 'total': 1.5, \
'total_grad_norm': 1.0}
        """
        metrics: dict[str, T] = {}
        for name, value in {**values, "total": total}.items():
            metrics[name] = value
            if name in weights:
                metrics[f"{name}_weighted"] = weights[name] * value
            if name in norms:
                metrics[f"{name}_grad_norm"] = norms[name]
        return metrics

    def compute(
        self,
        inputs: Array | Mapping[str, Array],
        step: Any = 0,
        *,
        track_grad_norms: bool = False,
    ) -> tuple[Array, dict[str, float]]:
        """Compute the total and the metrics.

        Args:
            inputs: One array for every penalty, or a dict of arrays for penalties with `inputs`.
            step: Step at which weights that are schedules are evaluated.
            track_grad_norms: Add the norm of each penalty's gradient with respect to all its
                inputs together. Each penalty is evaluated once and differentiated once; the
                total's norm is that of the weighted sum of the gradients.

        Returns:
            The total, which is differentiable, and the metrics as floats: `name` (raw),
            `name_weighted` and `total`; with `track_grad_norms` also `name_grad_norm` (unweighted)
            and `total_grad_norm`. Without an enabled penalty: 0 and `{"total": 0.0}`.

        Raises:
            InputError: An input is missing; a penalty does not return a scalar; a schedule does
                not give a finite number; gradient norms of NumPy arrays are requested; the call
                is inside a JAX transformation (use `compute_total`).
            GradientError: A tracked penalty has no gradient and is not `differentiable=False`.

        Example:
            >>> import torch
            >>> x = torch.tensor([3.0, 4.0])
            >>> pipeline = PenaltyPipeline([("l2", {"weight": 0.5})])
            >>> pipeline.compute(x, track_grad_norms=True)[1]
            {'l2': 25.0, 'l2_weighted': 12.5, 'l2_grad_norm': 10.0, 'total': 12.5, \
'total_grad_norm': 5.0}
        """
        flag("track_grad_norms", track_grad_norms)
        terms, weights, started = self.terms, self.weights(step), time.perf_counter()
        telemetry.execute(
            telemetry.events.PENALTIES_START,
            {"system_time": time.time()},
            {"size": len(terms)},
        )
        norms: dict[str, float] = {}
        if track_grad_norms:
            values, norms = values_and_norms(terms, weights, inputs)
        else:
            values = {term.name: term.evaluate(inputs) for term in terms}
        total = total_of(weights, values, inputs)
        refuse_traced(total)
        raw = {name: float(constant(value)) for name, value in values.items()}
        metrics = self.metrics(raw, weights, norms, float(constant(total)))
        telemetry.execute(
            telemetry.events.PENALTIES_STOP,
            {"duration": time.perf_counter() - started, "total": metrics["total"]},
            {"metrics": metrics},
        )
        return total, metrics

    def compute_total(self, inputs: Array | Mapping[str, Array], step: Any = 0) -> Array:
        """Compute the total alone; works inside `torch.compile`, `jax.jit` and `jax.grad`.

        It returns no metrics and emits no telemetry. A penalty with `differentiable=False` counts
        as a constant.

        Args:
            inputs: As in `compute`.
            step: As in `compute`; it may be traced. A traced weight cannot be checked.

        Returns:
            The total.

        Raises:
            InputError: As for `compute`.

        Example:
            >>> import numpy as np
            >>> print(PenaltyPipeline(["l1", "l2"]).compute_total(np.array([1.0, -2.0])))
            8.0
        """
        values = {term.name: term.evaluate(inputs) for term in self.terms}
        return total_of(self.weights(step), values, inputs)

    def add(
        self,
        name: str,
        fn: str | Penalty,
        *,
        weight: float | Schedule = 1.0,
        inputs: str | tuple[str, ...] | None = None,
        **settings: Any,  # the other fields of a penalty, and whatever `fn` takes
    ) -> PenaltyPipeline:
        """Return a pipeline with one more penalty at its end.

        Args:
            name: Its name in the metrics.
            fn: A built-in penalty's name or a callable that returns a scalar.
            weight: Any finite number, or a schedule `step -> weight`.
            inputs: Names of the arrays it reads, in order; `None` for a single unnamed array.
            **settings: `differentiable=False`, or `gradient="none"` as in a regularizer's spec,
                for a constant without a gradient norm; `enabled=False` to add it switched off;
                all others are passed to `fn`.

        Returns:
            A new pipeline.

        Raises:
            InputError: As for the class.

        Example:
            >>> PenaltyPipeline(["l1"]).add("spread", "l2", center="mean").names
            ('l1', 'spread')
        """
        added = build_term(name, fn, {"weight": weight, "inputs": inputs, **settings})
        return PenaltyPipeline([*self._terms, added])

    def remove(self, name: str) -> PenaltyPipeline:
        """Return a pipeline without the named penalty.

        Raises:
            InputError: No penalty has that name.
        """
        removed = self._find(name)
        return PenaltyPipeline(term for term in self._terms if term is not removed)

    def update_weight(self, name: str, weight: float | Schedule) -> PenaltyPipeline:
        """Return a pipeline in which the named penalty has another weight.

        Raises:
            InputError: No penalty has that name, or the weight is neither a finite number nor a
                schedule.
        """
        return self._replaced(name, weight=weight)

    def set_enabled(self, name: str, enabled: bool) -> PenaltyPipeline:
        """Return a pipeline in which the named penalty is switched on or off.

        Raises:
            InputError: No penalty has that name, or `enabled` is not a boolean.
        """
        return self._replaced(name, enabled=enabled)

    def __len__(self) -> int:
        return len(self._terms)

    def __repr__(self) -> str:
        summands = []
        for term in self._terms:
            schedule = getattr(term.weight, "__name__", term.weight)
            weight = schedule if callable(term.weight) else f"{term.weight:g}"
            summands.append(f"{weight} * {term.name}{'' if term.enabled else ' (off)'}")
        return f"PenaltyPipeline({' + '.join(summands)})"

    def _find(self, name: str) -> PenaltyTerm:
        for term in self._terms:
            if term.name == name:
                return term
        raise InputError(f"no penalty is called {name!r}; there are: {listed(self.names)}.")

    def _replaced(self, name: str, **changes: Any) -> PenaltyPipeline:  # fields of PenaltyTerm
        old = self._find(name)
        new = replace(old, **changes)
        return PenaltyPipeline(new if term is old else term for term in self._terms)
