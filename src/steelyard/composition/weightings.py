"""TorchJD's weightings as aggregators: factors from the Gram matrix of the terms' gradients.

A weighting W maps the Gram matrix G of the rows wᵢgᵢ to factors a = W(G). Most do not depend on
its scale, W(cG) = W(G), except through small constants, below which they take G for zero: the
gradient of a mean over 65,000 tokens has squares of about 1e-5. They get G / trace(G), so that a
mean and a sum have the same factors.
"""

from __future__ import annotations

import inspect
import json
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from steelyard._extras import cure
from steelyard.composition.aggregate import Aggregator, WeightedSum
from steelyard.errors import AggregationError, MissingExtraError, SpecError, StateError
from steelyard.execution.random_state import taken_turn
from steelyard.spec.checks import is_whole
from steelyard.spec.protocol import Stateful

if TYPE_CHECKING:
    from torchjd.aggregation import Weighting

# A name, a name with options, a weighting of TorchJD, or an aggregator; see `aggregator_of`.
AggregatorLike: TypeAlias = str | Mapping[str, Any] | nn.Module | Aggregator

# Names for `aggregate`, and the classes in torchjd.aggregation. Those that read the gradients
# themselves (ConFIG, ExcessMTL, GradDrop, MoDo, NashMTL, SDMGrad, TrimmedMean) are not among them.
WEIGHTINGS: Mapping[str, str] = {
    "aligned_mtl": "AlignedMTLWeighting",
    "cagrad": "CAGradWeighting",
    "constant": "ConstantWeighting",
    "cr_mogm": "CRMOGMWeighting",
    "dualproj": "DualProjWeighting",
    "fairgrad": "FairGradWeighting",
    "gradvac": "GradVacWeighting",
    "imtl_g": "IMTLGWeighting",
    "krum": "KrumWeighting",
    "mean": "MeanWeighting",
    "mgda": "MGDAWeighting",
    "pcd": "PCDWeighting",
    "pcgrad": "PCGradWeighting",
    "random": "RandomWeighting",
    "upgrad": "UPGradWeighting",
}
_NEED_SCALE = frozenset({"FairGradWeighting", "PCDWeighting"})
_INVERT = frozenset({"AlignedMTLWeighting", "IMTLGWeighting", "PCDWeighting"})
_DRAW = frozenset({"GradVacWeighting", "PCGradWeighting", "RandomWeighting"})
_READ_ROWS = frozenset({"ExcessMTLWeighting", "MoDoWeighting", "SDMGradWeighting"})
# Attributes with a number for each row; that of PCD has one for each but the first.
_PER_ROW = {
    "AlignedMTLWeighting": "pref_vector",
    "CRMOGMWeighting": "_initial_weights",  # it has no public name, only the constructor's
    "ConstantWeighting": "weights",
    "DualProjWeighting": "pref_vector",
    "PCDWeighting": "tau",
    "UPGradWeighting": "pref_vector",
}
# The vectors of a weighting are cut to the rows of a call, and restored.
_fitting = threading.Lock()
# The rows of a call: their names, or their number for a call without names.
Rows: TypeAlias = tuple[str, ...] | int


class GramWeighting(Aggregator):
    """A TorchJD weighting as an aggregator.

    A preference vector that is None becomes ones, one for each row: without a conflict the factors
    of UPGrad and DualProj are then 1, as in the sum. One that is given, like the weights of
    `ConstantWeighting`, has a number for each term that may have a row, the base loss first; at a
    step where some have none it is cut to the others. Statistics are kept for each set of rows.

    Args:
        weighting: a `torchjd.aggregation.Weighting` of Gram matrices. It is not copied: its
            attributes can be changed between steps.
        seed: seed of its random numbers; they are its own, and part of its state.
        name: in messages; None is the name of its class.
    """

    def __init__(self, weighting: Weighting[Any], seed: int = 0, name: str | None = None) -> None:
        self.weighting = weighting
        self.name = name or type(weighting).__name__
        parts = {type(part).__name__ for part in weighting.modules()}
        known = parts <= {*WEIGHTINGS.values(), "_Composition"}
        self._draws = not known or bool(parts & _DRAW)
        self._scale_free = known and not parts & _NEED_SCALE
        self.in_float64 = not known or bool(parts & _INVERT)
        self._ones: Tensor | None = None
        self._generator = torch.Generator().manual_seed(seed).get_state()
        self._rows: Rows = 0
        self._statistics: dict[Rows, dict[str, Tensor]] = {}  # of other rows than those

    @property
    def by_row(self) -> bool:
        """Whether it has constant weights or a preference vector."""
        return any(name in ("weights", "pref_vector") for _, name in self._vectors)

    @property
    def stateful(self) -> Stateful | None:
        """Itself, if it draws random numbers or keeps statistics from step to step."""
        return self if self._draws or self._with_memory else None

    def factors(
        self,
        values: Sequence[float],  # noqa: ARG002 - only the gradients count
        weights: Sequence[float],  # noqa: ARG002
        products: Sequence[Sequence[float]],
    ) -> Sequence[float]:
        """Compute the factor of each term from the Gram matrix of the weighted gradients.

        Raises:
            AggregationError: the solver failed, or found no finite numbers.
        """
        gramian = np.array(products)
        trace = gramian.trace()
        if trace == 0:  # all gradients are zero: any factors do
            return [1.0] * len(products)
        if self._scale_free:
            gramian /= trace
        try:
            combined = self._call(torch.from_numpy(gramian))
            factors: list[float] = combined.tolist()
        except Exception as error:
            raise AggregationError(
                f"{self.name} failed on {len(products)} gradients: {type(error).__name__}: {error}"
            ) from error
        if not all(map(math.isfinite, factors)):
            raise AggregationError(
                f"{self.name} must find finite factors for {len(products)} gradients, "
                f"got {factors}."
            )
        return factors

    def factors_of(
        self,
        rows: Sequence[str],
        declared: Sequence[str],
        values: Sequence[float],
        weights: Sequence[float],
        products: Sequence[Sequence[float]],
    ) -> Sequence[float]:
        """As `factors`; what it has for each declared row is cut to those of this step.

        Raises:
            AggregationError: as `factors`; or a vector has no number for each declared row.
        """
        with _fitting, self._fitted(rows, declared):
            return self.factors(values, weights, products)

    def state_dict(self) -> dict[str, Any]:
        """Random state, and the statistics of the weighting for each set of rows, as JSON."""
        every = {**self._statistics, self._rows: self._own_statistics}
        return {
            "generator": self._generator,
            "statistics": {json.dumps(rows): own for rows, own in every.items() if own},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned, here or in 0.1.0.

        Raises:
            StateError: it is not that.
        """
        rule = f"the state of {self.name} must hold what its state_dict returned, got {state!r}."
        try:
            generator = state["generator"].cpu()  # torch.load may have put it on a GPU
            # 0.1.0 had those of one set of rows, by their number.
            by_rows = (
                state["statistics"]
                if "rows" not in state
                else {json.dumps(state["rows"]): state["weighting"]}
            )
            statistics = {_rows_of(rows): dict(own) for rows, own in by_rows.items()}
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise StateError(rule) from error
        if not all(isinstance(x, Tensor) for own in statistics.values() for x in own.values()):
            raise StateError(rule)
        self._begin(0)
        self._generator, self._statistics = generator, statistics

    @property
    def _with_memory(self) -> list[Any]:
        # TorchJD's statistics can be reset; its class for this has no public name.
        return [part for part in self.weighting.modules() if hasattr(part, "reset")]

    @property
    def _own_statistics(self) -> dict[str, Tensor]:
        return {key: value.clone() for key, value in self.weighting.state_dict().items()}

    @property
    def _vectors(self) -> list[tuple[Any, str]]:
        """Parts of the weighting that have a number for each row, and the attribute's name."""
        parts = [
            (part, name)
            for part in self.weighting.modules()
            if (name := _PER_ROW.get(type(part).__name__)) is not None
            and isinstance(getattr(part, name), Tensor)
        ]
        # A preference vector is held by a constant weighting inside.
        inner = [part.weighting for part, name in parts if name == "pref_vector"]
        return [
            (part, name)
            for part, name in parts
            if part not in inner and getattr(part, name) is not self._ones
        ]

    @contextmanager
    def _fitted(self, rows: Sequence[str], declared: Sequence[str]) -> Iterator[None]:
        """Cut the vectors to the rows of a call, and select the statistics of these rows."""
        vectors = [(part, name, getattr(part, name)) for part, name in self._vectors]
        places = [declared.index(name) for name in rows]
        try:
            for part, name, vector in vectors:
                first = 1 if name == "tau" else 0
                if len(vector) != len(declared) - first:
                    raise AggregationError(
                        f"{name.strip('_')} of {self.name} must have one number for each of "
                        f"{', '.join(map(repr, declared[first:]))}, got {len(vector)}."
                    )
                if len(places) < len(declared):
                    setattr(part, name, vector[[place - first for place in places[first:]]])
            if self._rows != (key := tuple(rows)):
                self._select(key)
            yield
        finally:
            for part, name, vector in vectors:
                setattr(part, name, vector)

    def _select(self, rows: Rows) -> None:
        """Keep the statistics of the last rows, and restore those of `rows`, if there are any.

        Raises:
            StateError: they were loaded, and do not fit the weighting.
        """
        if own := self._own_statistics:
            self._statistics[self._rows] = own
        count = self._begin(rows)
        # Those of a call without names, or of a state of 0.1.0, are of any rows of that number.
        own = self._statistics.pop(rows, {}) or self._statistics.pop(count, {})
        if own:
            generator = self._generator
            try:
                # A call creates statistics of the right size, which the saved ones then replace.
                self._call(torch.eye(count, dtype=torch.float64))
                self.weighting.load_state_dict(own)
            except Exception as error:
                raise StateError(
                    f"the statistics of {self.name} for {rows} must be its own, and loading them "
                    f"failed: {error}"
                ) from error
            self._generator = generator

    def _begin(self, rows: Rows) -> int:
        """Begin anew with some rows, and return their number."""
        self._rows, count = rows, rows if isinstance(rows, int) else len(rows)
        for part in self._with_memory:
            part.reset()
        ones = torch.ones(count, dtype=torch.float64)
        for part in self.weighting.modules():
            preference = getattr(part, "pref_vector", 0)
            if preference is None or preference is self._ones:
                part.pref_vector = ones
        self._ones = ones
        return count

    def _call(self, gramian: Tensor) -> Tensor:
        count = self._rows if isinstance(self._rows, int) else len(self._rows)
        if len(gramian) != count:
            self._select(len(gramian))
        if not self._draws:
            return self.weighting(gramian)
        # Its weighting draws from torch's global generator, as terms of other pipelines may.
        with taken_turn() as turn, turn.inside(), torch.random.fork_rng(devices=[]):
            torch.set_rng_state(self._generator)
            combined = self.weighting(gramian)
            self._generator = torch.get_rng_state()
        return combined


def aggregator_of(aggregate: AggregatorLike) -> Aggregator:
    """Find an aggregator.

    Args:
        aggregate: `"sum"`; the name of a weighting, such as `"upgrad"`; a mapping with its name as
            `use`, its options, and `seed` if it is random; a weighting of TorchJD; or an
            `Aggregator`, which is returned unchanged.

    Raises:
        SpecError: it is none of these, or an option breaks a rule.
        MissingExtraError: TorchJD, or the solver of the weighting, is not installed.

    Example:
        >>> aggregator = aggregator_of({"use": "mgda", "max_iters": 50})
        >>> aggregator.factors([1.0, 1.0], [1.0, 1.0], [[4.0, -2.0], [-2.0, 4.0]])
        [0.5, 0.5]
    """
    if isinstance(aggregate, Aggregator):
        return aggregate
    if isinstance(aggregate, nn.Module):
        return GramWeighting(_weighting_in(aggregate))
    options: dict[str, Any] = (
        dict(aggregate) if isinstance(aggregate, Mapping) else {"use": aggregate}
    )
    name = options.pop("use", None)
    if name == "sum" and not options:
        return WeightedSum()
    if not isinstance(name, str) or name not in WEIGHTINGS:
        known = ", ".join(repr(name) for name in ("sum", *WEIGHTINGS))
        raise SpecError(
            f"aggregate must be one of {known}, a mapping with one of these as 'use' and its "
            f"options, a weighting of TorchJD or an Aggregator, got {aggregate!r}."
        )
    seed = options.pop("seed", 0)
    if not is_whole(seed, at_least=0):
        raise SpecError(f"seed of aggregate={name!r} must be a whole number >= 0, got {seed!r}.")
    return GramWeighting(_build(name, options), seed, name)


def _rows_of(text: str) -> Rows:
    """Rows from their JSON: a list of names, or their number.

    Raises:
        ValueError: it is neither.
    """
    rows = json.loads(text)
    if isinstance(rows, list):
        return tuple(map(str, rows))
    if not is_whole(rows, at_least=0):
        raise ValueError(f"rows must be a list of names or a whole number >= 0, got {text}")
    return int(rows)


def _weighting_in(module: nn.Module) -> Any:
    """The weighting that a module of TorchJD is, or the one that its aggregator has."""
    module = getattr(module, "gramian_weighting", module)
    parts = {type(part).__name__ for part in module.modules()}
    if not isinstance(module, _torchjd("aggregate").Weighting) or parts & _READ_ROWS:
        raise SpecError(
            f"aggregate must be computed from a Gram matrix, as {', '.join(WEIGHTINGS)} are, "
            f"got {type(module).__name__}."
        )
    return module


def _build(name: str, options: Mapping[str, Any]) -> Any:
    """Build a weighting.

    Raises:
        SpecError: an option breaks a rule.
        MissingExtraError: TorchJD, or the solver of the weighting, is not installed.
    """
    title = f"aggregate={name!r}"
    kind = getattr(_torchjd(title), WEIGHTINGS[name])
    from steelyard.composition.dual_cone import DirectProjector  # noqa: PLC0415 - needs TorchJD

    own = set(inspect.signature(kind).parameters)
    solver = set(inspect.signature(DirectProjector).parameters) if "projector" in own else set()
    known = (own | solver) - {"projector"}
    if not options.keys() <= known:
        raise SpecError(
            f"the options of {title} must be among {sorted(known)}, got {sorted(options)}."
        )
    arguments = {key: _argument(value) for key, value in options.items() if key in own}
    if name == "cr_mogm":
        arguments["weighting"] = _smoothed(options.get("weighting", "upgrad"))
    try:
        if solver:
            settings = {key: value for key, value in options.items() if key in solver}
            arguments["projector"] = DirectProjector(**settings)
        return kind(**arguments)
    except ImportError as error:  # TorchJD's message has the command that installs the solver
        raise MissingExtraError(
            f"{title} needs a solver that is not installed: {error}."
        ) from error
    except (AttributeError, TypeError, ValueError) as error:
        raise SpecError(
            f"the options of {title} must be valid, got {dict(options)!r}: {error}"
        ) from error


def _torchjd(what: str) -> ModuleType:
    """Module of TorchJD's weightings.

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        from torchjd import aggregation  # noqa: PLC0415 - an extra
    except ModuleNotFoundError as error:
        raise cure(what, error) from error
    module: ModuleType = aggregation
    return module


def _smoothed(aggregate: AggregatorLike) -> Any:
    """The weighting whose factors CR-MOGM smooths."""
    inner = aggregator_of(aggregate)
    if not isinstance(inner, GramWeighting):
        raise SpecError(
            f"weighting of aggregate='cr_mogm' must be one of {', '.join(WEIGHTINGS)}, "
            f"got {aggregate!r}."
        )
    return inner.weighting


def _argument(value: object) -> object:
    """A list of a config file as a vector; any other value unchanged."""
    return torch.tensor(value, dtype=torch.float64) if isinstance(value, list) else value
