"""`Facts`: what a run declares of itself before its first step, which its metrics do not say."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from typing import Any, Literal, Self, TypeAlias

from steelyard.spec.checks import is_finite, is_whole
from steelyard.spec.registry import BUILT_IN, SHORT
from steelyard.spec.regularizer import RegularizerSpec

BoundKind: TypeAlias = Literal["", "at_most", "at_least"]
# Divergences from another model, which are 0 as long as that is the model itself.
REFERENCE_KINDS = frozenset({"kl_to_reference", "js_to_reference", "squared_log_ratio"})
_RESTRAINTS = REFERENCE_KINDS | {"ema_drift"}
_MEANS = _RESTRAINTS | {
    "chosen_nll",
    "confidence_penalty",
    "consistency",
    "demographic_parity",
    "dpo",
    "elastic_net",
    "entropy",
    "equalized_odds",
    "external_validation",
    "l1",
    "l2",
    "logical_consistency",
    "overlong_penalty",
    "relative_length",
    "whole_vocabulary",
}
# Two groups of 8 data: below that a gap between means is mostly the noise of the batch.
_SMALLEST_BATCHES = {"demographic_parity": 16, "equalized_odds": 16}
# The first words of their names, before that of the term that they wrap.
_WRAPPERS = {
    "adaptive": "adaptive",
    "masked_importance_sampling": "masked",
    "truncated_importance_sampling": "truncated",
}
# Penalties that compare two distributions, as a rule the model's and those of another model.
_PENALTIES_OF_MODELS = frozenset(
    {
        "steelyard.penalties.divergences:kl_divergence",
        "steelyard.penalties.divergences:js_divergence",
        "steelyard.penalties.from_logits.logit_terms:kl",
        "steelyard.penalties.from_logits.logit_terms:js",
    }
)
_PER_STEP = 4  # data of a term's own in one call, unless its config says otherwise
_DIVERGENCES = ("kl", "js")  # kinds of `whole_vocabulary` that measure against a reference
# Ready-made rewards that are 1 for a right answer, and never more.
_HIGHEST = dict.fromkeys(
    ("exact_match", "number_match", "reasoning_gym", "regex_match", "valid_json"), 1.0
)
_POLICY_LOSSES = frozenset({"importance_sampling", "ppo", "cispo", "dro", "gspo"})
_KINDS = {path: name for name, path in BUILT_IN.items() if name not in SHORT}


@dataclass(frozen=True)
class TermFacts:
    """Declared facts of one term.

    Attributes:
        name: name of the term.
        kind: registered name of a ready-made regularizer, the wrapped one for a wrapper; empty for
            any other.
        weight: its weight; None for a schedule and for a bound.
        bound: `"at_most"` or `"at_least"`; empty for a term with a weight.
        scale: what a violation of the bound is measured against; None: the size of the bound.
        restraint: whether it holds the model back on purpose: a divergence from a reference, or an
            anchor. Its gradient opposes that of the base loss.
        gradient: how it is differentiated, as in its spec.
        reduction: `"mean"` or `"sum"`; empty if it is not known.
        every: it runs at steps that this divides.
        space: what its gradient is with respect to; empty: the space of the base loss.
        smallest_batch: number of data that it needs for a statistic over them; None if it has none.
        run_in: where it runs, as in its spec.
        enabled: whether it is trained on.
        reference: of a divergence, the field that it is measured against, such as
            `"reference_logprobs"`; empty if it is not known.
        batch_size: number of data of its own in one call; None: it reads the batch.
        zero_means: of a term of the user, why its value is 0 if it stays 0; empty for one that
            may be 0.
    """

    name: str
    kind: str = ""
    weight: float | None = None
    bound: BoundKind = ""
    scale: float | None = None
    restraint: bool = False
    gradient: str = "auto"
    reduction: str = ""
    every: int = 1
    space: str = ""
    smallest_batch: int | None = None
    run_in: str = "auto"
    enabled: bool = True
    zero_means: str = ""
    reference: str = ""
    batch_size: int | None = None

    @property
    def compares_models(self) -> bool:
        """Whether it is a divergence from another model."""
        return self.kind in REFERENCE_KINDS

    @classmethod
    def of(cls, spec: RegularizerSpec) -> Self:
        """Facts of a spec.

        Example:
            >>> spec = RegularizerSpec(lambda data, logprobs: 0.0, at_most=0.3, name="kl")
            >>> TermFacts.of(spec).bound
            'at_most'
        """
        fn = innermost(spec.fn)
        while (inner := wrapped(fn)) is not None:
            fn = innermost(inner)
        bound: BoundKind = "at_most" if spec.at_most is not None else "at_least"
        return cls(
            name=spec.name,
            weight=spec.weight if is_finite(spec.weight) else None,  # type: ignore[arg-type]  # a number
            bound=bound if spec.is_bounded else "",
            scale=spec.scale,
            gradient=spec.gradient,
            every=spec.every,
            space="+".join(spec.needs),
            run_in=spec.run_in,
            enabled=spec.enabled,
            zero_means="" if kind_of(fn) else str(getattr(fn, "zero_means", "")),
            reference=_reference_of(fn),
            batch_size=None if spec.data is None else spec.per_step,
            **_facts_of_kind(
                kind_of(fn),
                anchor=spec.anchor or path_of(fn) in _PENALTIES_OF_MODELS,
                reduction=getattr(fn, "reduction", None),
                compared=getattr(fn, "kind", None) in _DIVERGENCES,
            ),
        )

    @classmethod
    def of_config(cls, entry: Mapping[str, Any]) -> Self:
        """Facts of an entry of `[[regularizers]]`, in a config that may hold anything.

        Example:
            >>> TermFacts.of_config({"use": "kl", "weight": {"at_most": 0.3}}).restraint
            True
        """
        options = _table(entry, "options")
        kind = own_name = _text(entry, "use")
        prefix = _WRAPPERS.get(kind)
        if prefix is not None:
            inner = options.get("regularizer")
            inner = inner if isinstance(inner, Mapping) else {"fn": inner}
            kind, options = _text(inner, "fn"), _table(inner, "options")
        kind = SHORT.get(kind, kind)
        if kind == "whole_vocabulary":
            own_name = f"whole_{options.get('kind')}"
        if prefix is not None:
            own_name = f"{prefix}_{own_name if kind == 'whole_vocabulary' else kind}"
        weight = entry.get("weight")
        table = weight if isinstance(weight, Mapping) else {}
        bound: BoundKind = (
            "at_most" if "at_most" in table else "at_least" if "at_least" in table else ""
        )
        needs = entry.get("needs")
        return cls(
            name=_text(entry, "name") or own_name,
            weight=_number(entry, "weight"),
            bound=bound,
            scale=_number(table, "scale") or None,
            gradient=_text(entry, "gradient") or "auto",
            every=_whole(entry, "every") or 1,
            space="+".join(map(str, needs)) if isinstance(needs, list) else "",
            run_in=_text(entry, "run_in") or "auto",
            enabled=entry.get("enabled") is not False,
            reference=(_text(options, "reference") or "reference_logprobs")
            if kind in REFERENCE_KINDS
            else "",
            batch_size=(_whole(entry, "per_step") or _PER_STEP) if entry.get("data") else None,
            **_facts_of_kind(
                kind if kind in BUILT_IN else "",
                anchor=entry.get("anchor") is True or kind in _PENALTIES_OF_MODELS,
                reduction=options.get("reduction"),
                compared=options.get("kind") in _DIVERGENCES,
            ),
        )


@dataclass(frozen=True)
class RewardFacts:
    """Declared facts of one reward.

    Attributes:
        name: name of the reward.
        highest: the largest value that it can have; None if it is not known.
        run_in: where it runs.
        factors: names of the rewards that it is 0 without: its gate and its scale.
    """

    name: str
    highest: float | None = None
    run_in: str = "auto"
    factors: tuple[str, ...] = ()

    @classmethod
    def of_config(cls, entry: Mapping[str, Any]) -> Self:
        """Facts of an entry of `[[rewards]]`, in a config that may hold anything."""
        use = _text(entry, "use")
        name = _text(entry, "name") or use.rpartition(":")[2]
        factors = filter(None, (_text(entry, "gate"), _text(entry, "scale_by")))
        return cls(name, _HIGHEST.get(use), _text(entry, "run_in") or "auto", tuple(factors))


@dataclass(frozen=True)
class Facts:
    """Declared facts of a run; what is not known is None or empty, and no rule needs it then.

    Attributes:
        terms: of the regularizers.
        rewards: of the rewards.
        loss: name of the base loss, such as `"cross_entropy"`.
        reduction: of the base loss, `"mean"` or `"sum"`.
        advantage: of an on-policy run: `"grpo"`, `"rloo"`, `"gdpo"` or `"none"`; else empty.
        batch_size: data in one call.
        answers: sampled answers in one step.
        substeps: optimizer steps on the answers of one step.
        learning_rate: the peak, where it is a number.
        grad_clip_norm: norm to which the gradient is clipped; 0: it is not.
        grad_space: what gradient norms are with respect to, where the metrics do not say.

    Example:
        >>> facts = Facts(terms=(TermFacts("kl", bound="at_most"),), loss="cross_entropy")
        >>> Facts.from_dict(facts.to_dict()) == facts
        True
    """

    terms: tuple[TermFacts, ...] = ()
    rewards: tuple[RewardFacts, ...] = ()
    loss: str = ""
    reduction: str = ""
    advantage: str = ""
    batch_size: int | None = None
    answers: int | None = None
    substeps: int = 1
    learning_rate: float | None = None
    grad_clip_norm: float | None = None
    grad_space: str = "logprobs"

    def term(self, name: str) -> TermFacts:
        """Facts of a term; those that are not declared have the defaults."""
        return self._terms_by_name.get(name) or TermFacts(name)

    def reward(self, name: str) -> RewardFacts:
        """Facts of a reward; those that are not declared have the defaults."""
        return self._rewards_by_name.get(name) or RewardFacts(name)

    # They are asked for at every step. Of two with one name the first counts.
    @cached_property
    def _terms_by_name(self) -> dict[str, TermFacts]:
        return {term.name: term for term in reversed(self.terms)}

    @cached_property
    def _rewards_by_name(self) -> dict[str, RewardFacts]:
        return {reward.name: reward for reward in reversed(self.rewards)}

    def with_specs(self, specs: Iterable[RegularizerSpec]) -> Facts:
        """The same facts with the terms of these specs."""
        return replace(self, terms=tuple(map(TermFacts.of, specs)))

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready mapping of all fields."""
        values = asdict(self)
        return {**values, "terms": list(values["terms"]), "rewards": list(values["rewards"])}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The inverse of `to_dict`; a field that is missing, or has another type, is not known."""
        terms = tuple(_read(TermFacts, entry) for entry in _entries(values, "terms"))
        rewards = tuple(_read(RewardFacts, entry) for entry in _entries(values, "rewards"))
        facts: Self = replace(_read(cls, values), terms=terms, rewards=rewards)
        return facts

    @classmethod
    def of_config(cls, config: Mapping[str, Any]) -> Self:
        """Facts of a config, as `config.json` of a run folder holds it; it may hold anything.

        Example:
            >>> Facts.of_config({"loss": {"use": "cross_entropy", "reduction": "sum"}}).reduction
            'sum'
        """
        train, loss = _table(config, "train"), _table(config, "loss")
        rollouts = _table(config, "rollouts")
        prompts, group = _whole(rollouts, "per_step"), _whole(rollouts, "group_size")
        answers = prompts * group if prompts and group else None
        parts = _whole(train, "gradient_accumulation_steps") or 1
        batch = max(answers // parts, 1) if answers else _whole(train, "batch_size")
        use = _text(loss, "use")
        reduces = use == "cross_entropy" or use in _POLICY_LOSSES
        return cls(
            terms=tuple(map(TermFacts.of_config, _entries(config, "regularizers"))),
            rewards=tuple(map(RewardFacts.of_config, _entries(config, "rewards"))),
            loss=use,
            reduction=_text(loss, "reduction") if reduces else "",
            advantage=_text(rollouts, "advantage"),
            batch_size=batch,
            answers=answers,
            substeps=_whole(rollouts, "substeps") or 1,
            learning_rate=_number(train, "learning_rate"),
            grad_clip_norm=_number(train, "grad_clip_norm"),
            grad_space=_text(train, "grad_space") or "logprobs",
        )


def innermost(fn: Any) -> Any:
    """The function of a term; of one over named inputs, what is called with them."""
    return getattr(fn, "owner", fn) if type(fn).__module__.startswith("steelyard.") else fn


def wrapped(fn: Any) -> Any:
    """The term inside a wrapper such as `Adaptive`; None for anything else."""
    return getattr(fn, "regularizer", None) if kind_of(fn) in _WRAPPERS else None


def kind_of(fn: Any) -> str:
    """Registered name of a ready-made regularizer; empty for any other."""
    cls = type(fn)
    if not cls.__module__.startswith("steelyard."):
        return ""
    return _KINDS.get(f"steelyard.regularizers:{cls.__name__}", "")


def path_of(fn: Any) -> str:
    """Registered name of a ready-made regularizer; of any other its path, `module:name`."""
    named = fn if hasattr(fn, "__qualname__") else type(fn)
    return kind_of(fn) or f"{named.__module__}:{named.__qualname__}"


def _reference_of(fn: Any) -> str:
    """Field that a ready-made divergence is measured against; empty for a function."""
    reference = getattr(fn, "reference", None) if kind_of(fn) in REFERENCE_KINDS else None
    return reference if isinstance(reference, str) else ""


def _facts_of_kind(kind: str, *, anchor: bool, reduction: object, compared: bool) -> dict[str, Any]:
    """Facts that follow from the kind of a term; `compared`: it has a reference as an option."""
    own = reduction if reduction in ("mean", "sum") else ""
    return {
        "kind": kind,
        "restraint": anchor or kind in _RESTRAINTS or (kind == "whole_vocabulary" and compared),
        "reduction": own or ("mean" if kind in _MEANS else ""),
        "smallest_batch": _SMALLEST_BATCHES.get(kind),
    }


def _read(cls: type[Any], values: Mapping[str, Any]) -> Any:
    """Object of a class of facts, with the defaults in place of what has another type."""
    kept = {}
    for field in fields(cls):
        value = values.get(field.name) if isinstance(values, Mapping) else None
        expected = str(field.type)
        valid = (
            (expected == "str" and isinstance(value, str))
            or (expected == "BoundKind" and value in ("", "at_most", "at_least"))
            or (expected == "bool" and isinstance(value, bool))
            or (expected.startswith("int") and is_whole(value, at_least=1))
            or (expected.startswith("float") and is_finite(value))
        )
        if valid:
            kept[field.name] = value
    return cls(**{"name": "", **kept} if "name" in {f.name for f in fields(cls)} else kept)


def _table(values: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = values.get(key) if isinstance(values, Mapping) else None
    return value if isinstance(value, Mapping) else {}


def _entries(values: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    entries = values.get(key) if isinstance(values, Mapping) else None
    if not isinstance(entries, list):
        return []
    return [entry for entry in entries if isinstance(entry, Mapping)]


def _text(values: Mapping[str, Any], key: str) -> str:
    value = values.get(key)
    return value if isinstance(value, str) else ""


def _number(values: Mapping[str, Any], key: str) -> float | None:
    value = values.get(key)
    return float(value) if is_finite(value) else None  # type: ignore[arg-type]  # a number


def _whole(values: Mapping[str, Any], key: str) -> int | None:
    value = values.get(key)
    return value if is_whole(value, at_least=1) else None
