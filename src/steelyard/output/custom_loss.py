"""`CustomLossOutput`: the composed loss, its terms and their metrics."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from steelyard.errors import InputError

_OF_TERMS = frozenset({"term_gradients", "parameter_gradients", "data"})


@dataclass(frozen=True)
class CustomLossOutput:
    """Output of one call of a pipeline.

    Attributes:
        loss_total: base loss + sum of all contributions.
        base_loss: the base loss.
        regularizers: the regularizers that ran, by name, in the order of their specs.
        regularizer_total: sum of their contributions.
        total_grad_norm: L2 norm of the gradient of loss_total with respect to `grad_space`; what
            terms have with respect to extra inputs is not in it. None unless tracked.
        gradients: d loss_total / d logprobs, structured like the log-probs; not serialised.
        extra_gradients: d loss_total / d the extra inputs that terms need, by need; not
            serialised. Where gradients are compared with respect to the parameters,
            `"parameters"` is the whole gradient, also through the model.
        term_gradients: d term / d logprobs of the base loss and each term, before the weight, by
            name, structured like the log-probs; None unless tracked. Not serialised, not pickled.
        parameter_gradients: d term / d parameters of the terms whose norm is with respect to them,
            by name: a tensor or None for each parameter, of minus a term that has a lower bound.
            `accumulated` reads them; None unless tracked, in a call with a `share`. Not serialised,
            not pickled.
        data: those that the gradients are of: the batch, and behind it data of terms' own; not
            serialised, not pickled.
        cosines: cosine between the gradients of two terms, by pair of names in the order of
            the specs, `"base"` first; empty unless tracked. 0 where a gradient is zero. Of minus
            the gradient of a term that has a lower bound, which is subtracted from the loss.
        factors: factor, by name, that an aggregator put on the weighted gradient of a term in
            `gradients`, the base loss as `"base"`; empty for the plain sum.
        grad_space: what norms and cosines are with respect to: `"logprobs"` or `"parameters"`, and
            in a `CompositeLoss` `"inputs"` or `"parameters"`. A term that reads extra inputs may
            have another: see `RegularizerOutput.grad_space`.
        skipped: reasons, by name, of terms that failed and were skipped (`on_error="skip"`).
        failed_at: index of the datum at which a term in `skipped` failed, by name, where that is
            known; not serialised.
        not_run: names of terms that were disabled, not due at this step, or had nothing to measure
            in this batch: they returned None.
        loss_fn_outputs: from a training client: its outputs for each datum; not serialised.
        loss_fn_output_type: from a training client: the type of these outputs.
        server_metrics: from a training client: the metrics of the backward pass, with the loss
            that was composed here as `loss:sum` and the one sent as `surrogate_loss:sum`.
        passes: from a training client: its forward passes for this call, 1 or 2; not serialised.

    Example:
        >>> base = BaseLossOutput(2.5, custom={"perplexity": 12.2})
        >>> term = RegularizerOutput("l1", value=22.4, weight=0.01, contribution=0.224)
        >>> output = CustomLossOutput(2.724, base, {"l1": term}, 0.224)
        >>> output.metrics["regularizers/l1/contribution"], output.metrics["perplexity"]
        (0.224, 12.2)
        >>> CustomLossOutput.from_dict(output.to_dict()) == output
        True
    """

    loss_total: float
    base_loss: BaseLossOutput
    regularizers: Mapping[str, RegularizerOutput] = field(default_factory=dict)
    regularizer_total: float = 0.0
    total_grad_norm: float | None = None
    # A torch tensor or a list of them; comparing tensors has no single answer.
    gradients: Any = field(default=None, compare=False, repr=False)
    extra_gradients: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    term_gradients: Mapping[str, Any] | None = field(default=None, compare=False, repr=False)
    parameter_gradients: Mapping[str, Sequence[Any]] | None = field(
        default=None, compare=False, repr=False
    )
    data: Sequence[Any] | None = field(default=None, compare=False, repr=False)
    cosines: Mapping[tuple[str, str], float] = field(default_factory=dict)
    factors: Mapping[str, float] = field(default_factory=dict)
    skipped: Mapping[str, str] = field(default_factory=dict)
    failed_at: Mapping[str, int] = field(default_factory=dict, kw_only=True, compare=False)
    not_run: tuple[str, ...] = ()
    loss_fn_outputs: Sequence[Mapping[str, Any]] = field(default=(), compare=False, repr=False)
    loss_fn_output_type: str = ""
    server_metrics: Mapping[str, float] = field(default_factory=dict)
    grad_space: str = "logprobs"
    passes: int | None = field(default=None, compare=False)

    def __getstate__(self) -> dict[str, Any]:
        # As large as the log-probs, or the parameters, for each term: too much to send to another
        # process.
        return {key: x for key, x in self.__dict__.items() if key not in _OF_TERMS}

    @property
    def loss(self) -> float:
        """The same as `loss_total`."""
        return self.loss_total

    @property
    def metrics(self) -> dict[str, float]:
        """Every number under a flat, slash-separated key; the base loss's own keys stay bare.

        `skipped/<name>` is 1 for each term that was skipped: its sum over steps is their count.
        `regularizers/<name>/share` is the weighted norm of a gradient divided by the sum of the
        weighted norms and that of the base loss, for terms in the space of the base loss.
        """
        nested = {**self.to_dict(), "skipped": dict.fromkeys(self.skipped, 1.0)}
        for name, share in self._shares().items():
            nested["regularizers"][name]["share"] = share
        server = nested.pop("server_metrics", {})
        custom = nested["base_loss"].pop("custom")
        return {**server, **custom, **dict(_flatten(nested))}

    def _shares(self) -> dict[str, float]:
        norms = {
            name: term.grad_norm_weighted
            for name, term in self.regularizers.items()
            if term.grad_norm_weighted is not None and term.grad_space == self.grad_space
        }
        base = self.base_loss.grad_norm
        total = math.inf if base is None else base + math.fsum(norms.values())
        # Norms that are not finite (check_finite=False) have no share.
        if not (0 < total < math.inf):
            return {}
        return {name: norm / total for name, norm in norms.items()}

    def drivers(self, name: str, n: int = 5) -> list[Driver]:
        """The data that drive a term: those with the largest share of its gradient.

        The share of a token is |d term / d its log-prob|, divided by the sum of this over all
        tokens of the batch; that of a datum is the sum over its tokens. See `Driver`.

        Args:
            name: name of the term; `"base"` is the base loss.
            n: number of data, at least 1; those with a share of 0 are left out.

        Raises:
            InputError: `n` or the name breaks a rule, the gradients of the terms were not kept,
                or the term has no gradient with respect to the log-probs.

        Example:
            >>> import torch
            >>> from steelyard import compute
            >>> logprobs = [torch.tensor([-1.0]), torch.tensor([-3.0, -6.0])]
            >>> def l2(data, logprobs):
            ...     return torch.cat(logprobs).square().sum()
            >>> output = compute([], logprobs, l2, track_grad_norms=True)
            >>> [(d.datum, d.share, d.tokens[0].position) for d in output.drivers("base")]
            [(1, 0.9, 1), (0, 0.1, 0)]
        """
        if type(n) is not int or n < 1:
            raise InputError(f"n must be a whole number >= 1, got {n!r}.")
        known = {"base": "logprobs"} | {k: r.grad_space for k, r in self.regularizers.items()}
        if name not in known:
            listed = ", ".join(repr(name) for name in known)
            raise InputError(f"name must be that of a term that ran, {listed}, got {name!r}.")
        if self.term_gradients is None:
            raise InputError(
                "drivers needs the gradient of each term, which this output does not hold: compute "
                "it by a Pipeline or a regularized client with track_grad_norms=True, and ask "
                "before it is pickled or written as JSON."
            )
        if name not in self.term_gradients and known[name] != "logprobs":
            raise InputError(
                f"drivers needs a gradient with respect to log-probs, and the gradient of {name!r} "
                f"is with respect to {known[name]}."
            )
        if name not in self.term_gradients:
            raise InputError(f"drivers needs a gradient, and {name!r} has none.")
        return find_drivers(self.term_gradients[name], n)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready mapping; fields that are empty or were not tracked are left out."""
        values: dict[str, Any] = {
            "loss_total": self.loss_total,
            "base_loss": self.base_loss.to_dict(),
            "regularizers": {name: r.to_dict() for name, r in self.regularizers.items()},
            "regularizer_total": self.regularizer_total,
        }
        if self.total_grad_norm is not None:
            values["total_grad_norm"] = self.total_grad_norm
            values["grad_space"] = self.grad_space
        if self.cosines:
            nested: dict[str, dict[str, float]] = {}
            for (a, b), value in self.cosines.items():
                nested.setdefault(a, {})[b] = value
            values["cosines"] = nested
        if self.factors:
            values["factors"] = dict(self.factors)
        if self.skipped:
            values["skipped"] = dict(self.skipped)
        if self.not_run:
            values["not_run"] = list(self.not_run)
        if self.loss_fn_output_type:
            values["loss_fn_output_type"] = self.loss_fn_output_type
        if self.server_metrics:
            values["server_metrics"] = dict(self.server_metrics)
        return values

    def to_json(self, **options: Any) -> str:
        """`to_dict` as JSON text; `options` go to `json.dumps`."""
        return json.dumps(self.to_dict(), **options)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> CustomLossOutput:
        """The inverse of `to_dict`: everything but the gradients and other tensors."""
        regularizers = {
            name: RegularizerOutput.from_dict({"name": name, **r})
            for name, r in values.get("regularizers", {}).items()
        }
        cosines = {
            (a, b): value
            for a, row in values.get("cosines", {}).items()
            for b, value in row.items()
        }
        return cls(
            loss_total=values["loss_total"],
            base_loss=BaseLossOutput.from_dict(values["base_loss"]),
            regularizers=regularizers,
            regularizer_total=values.get("regularizer_total", 0.0),
            total_grad_norm=values.get("total_grad_norm"),
            grad_space=values.get("grad_space", "logprobs"),
            cosines=cosines,
            factors=dict(values.get("factors", {})),
            skipped=dict(values.get("skipped", {})),
            not_run=tuple(values.get("not_run", ())),
            loss_fn_output_type=values.get("loss_fn_output_type", ""),
            server_metrics=dict(values.get("server_metrics", {})),
        )


def without_norms(output: CustomLossOutput) -> CustomLossOutput:
    """Copy of an output without norms and cosines."""
    terms = {
        name: replace(term, grad_norm=None, grad_norm_weighted=None)
        for name, term in output.regularizers.items()
    }
    base = replace(output.base_loss, grad_norm=None)
    return replace(output, base_loss=base, regularizers=terms, cosines={}, total_grad_norm=None)


def _flatten(nested: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Numbers in nested mappings, by their paths."""
    for key, value in nested.items():
        if isinstance(value, int | float):
            yield f"{prefix}{key}", value
        elif isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}/")


@dataclass(frozen=True)
class BaseLossOutput:
    """The base loss of one call.

    Attributes:
        value: the loss.
        grad_norm: L2 norm of d base / d logprobs; None unless tracked.
        custom: the metrics the loss function returned.
    """

    value: float
    grad_norm: float | None = None
    custom: Mapping[str, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready mapping; `grad_norm` is there only when tracked."""
        return _without_none(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> BaseLossOutput:
        """The inverse of `to_dict`."""
        return cls(**values)


@dataclass(frozen=True)
class RegularizerOutput:
    """One regularizer of one call.

    Attributes:
        name: the name in its spec.
        value: the raw value, before the weight.
        weight: the weight at this step; under a bound, the multiplier.
        contribution: weight * value, what it adds to the loss; -weight * value under a lower
            bound.
        grad_norm: L2 norm of d value / d logprobs; None unless tracked, and for a term
            without a gradient.
        grad_norm_weighted: weight * grad_norm.
        custom: the metrics the regularizer returned.
        duration: seconds it took, its gradient included.
        grad_space: what its gradient is with respect to.
        bound: the bound of its value at this step; None for a term with a weight.
        violation: by how much the value is beyond the bound, 0 if it is not; None for a term
            with a weight.
    """

    name: str
    value: float
    weight: float
    contribution: float
    grad_norm: float | None = None
    grad_norm_weighted: float | None = None
    custom: Mapping[str, float] = field(default_factory=dict)
    duration: float = 0.0
    grad_space: str = "logprobs"
    bound: float | None = None
    violation: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready mapping; gradient fields are there only when tracked."""
        values = _without_none(self)
        if self.grad_norm is None and self.grad_space == "logprobs":
            del values["grad_space"]
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RegularizerOutput:
        """The inverse of `to_dict`."""
        return cls(**values)


def _without_none(output: BaseLossOutput | RegularizerOutput) -> dict[str, Any]:
    values = {**vars(output), "custom": dict(output.custom)}
    return {name: value for name, value in values.items() if value is not None}


class TokenShare(NamedTuple):
    """Share of one token.

    Attributes:
        position: index of the token in the log-probs of its datum.
        share: its part of the whole gradient of the term.
    """

    position: int
    share: float


@dataclass(frozen=True)
class Driver:
    """A datum that drives a term, and its tokens.

    With g the gradient of the term with respect to all log-probs of the batch, a token has the
    share Σ|g| over its log-probs / Σ|g| over all log-probs. A token has one log-prob for `[T]`
    and K of them for `[T, K]`. The share of a datum is the sum over its tokens, so the shares of
    all data add up to 1. If every log-prob moves by at most ε, the token changes the term by at
    most ε · Σ|g| over its log-probs, to first order.

    Attributes:
        datum: index of the datum in the batch.
        share: its part of the whole gradient of the term.
        tokens: its tokens with a share above 0, the largest first.
    """

    datum: int
    share: float
    tokens: tuple[TokenShare, ...]


def find_drivers(gradients: Any, n: int) -> list[Driver]:
    """The `n` data with the largest share of a gradient, the largest first.

    Args:
        gradients: d term / d logprobs, a tensor per datum in a list; or one tensor, one datum.
        n: number of data; those with a share of 0 are left out.

    Raises:
        InputError: the gradient is not finite.
    """
    data = gradients if isinstance(gradients, Sequence) else [gradients]
    by_token = [_sizes(gradient) for gradient in data]
    by_datum = [float(sizes.sum()) for sizes in by_token]
    total = math.fsum(by_datum)
    if not math.isfinite(total):
        raise InputError(f"the gradient must be finite to find its drivers, got a sum of {total}.")
    # Equal shares stay in the order of the batch: the sort is stable.
    order = sorted(range(len(data)), key=lambda index: -by_datum[index])[:n]
    return [
        Driver(index, by_datum[index] / total, _tokens(by_token[index], total))
        for index in order
        if by_datum[index] > 0
    ]


def _sizes(gradient: Any) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Σ|g| of each token: over all dimensions but the first."""
    values = np.atleast_1d(np.abs(gradient.detach().cpu().double().numpy()))
    sizes: np.ndarray[Any, np.dtype[np.float64]] = values.sum(axis=tuple(range(1, values.ndim)))
    return sizes


def _tokens(sizes: np.ndarray[Any, np.dtype[np.float64]], total: float) -> tuple[TokenShare, ...]:
    order = np.argsort(-sizes, kind="stable")
    return tuple(TokenShare(int(i), float(sizes[i]) / total) for i in order if sizes[i] > 0)
