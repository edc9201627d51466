"""Find a loss that a trainer adds by itself and that a term adds a second time.

Three of TRL's losses are of a kind that terms often have: the KL to the reference (`beta`), the
entropy bonus (`entropy_coef`), and the load-balancing loss of a mixture of experts
(`router_aux_loss_coef`), which models of transformers add to their own loss too.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

from steelyard import penalties
from steelyard.composition.composite import CompositeLoss
from steelyard.composition.input_names import Reads
from steelyard.errors import SpecError
from steelyard.integrations.huggingface.completion_inputs import (
    REFERENCE,
    reads_reference_of_data,
    wrapped_functions,
)
from steelyard.integrations.huggingface.trainer_kinds import KINDS, TrainerKind, trainer_name
from steelyard.penalties import from_logits
from steelyard.regularizers.entropy import ConfidencePenalty, Entropy
from steelyard.regularizers.reference import KLToReference
from steelyard.spec.regularizer import RegularizerSpec

# With a coefficient of 0 a trainer computes neither its reference nor the router's logits; a
# smaller one is there for these alone.
NEGLIGIBLE = 1e-6
_KL = (from_logits.kl, penalties.kl_divergence)
_ENTROPY = (from_logits.entropy, penalties.entropy)
_BALANCING = "load_balancing_loss_func"  # of transformers, in the module of each model


@dataclass(frozen=True)
class _OwnLoss:
    """A loss that a trainer adds by itself.

    Attributes:
        what: the loss and its coefficient.
        short: the loss, in a word or two.
        read: what a term of this kind reads.
        cure: what leaves it to the term.
    """

    what: str
    short: str
    read: str
    cure: str


def check_duplicate_terms(trainer: Any, kind: TrainerKind | None, composite: CompositeLoss) -> None:
    """Check that no loss is counted twice, by the trainer and by a term.

    Raises:
        SpecError: a term is known to be a loss that the trainer has with a coefficient above 1e-6:
            a KL to the reference, an entropy, the router's load-balancing loss. A term of another
            kind that reads the same is a warning.
    """
    kl, entropy = _own_kl(trainer, kind), _own_entropy(trainer, kind)
    router = _own_router_loss(trainer, kind)
    for spec in composite.specs:
        # A term with data of its own is about other tokens than the trainer's loss.
        if not spec.enabled or spec.gradient == "none" or spec.weight == 0 or spec.data is not None:
            continue
        for own, is_same, reads_it in (
            (kl, _is_kl, _reads_reference),
            (entropy, _is_entropy, _reads_entropy),
            (router, _is_balancing, _reads_router),
        ):
            if own is None:
                continue
            message = (
                f"{trainer_name(trainer, kind)} has {own.what}, and regularizer {spec.name!r} "
                f"{{}}: remove the term, or {own.cure}."
            )
            if is_same(spec):
                raise SpecError(message.format(f"adds the same {own.short} once more"))
            if reads_it(spec):
                warnings.warn(message.format(f"reads {own.read} too"), stacklevel=2)


def _own_kl(trainer: Any, kind: TrainerKind | None) -> _OwnLoss | None:
    beta = getattr(getattr(trainer, "args", None), "beta", 0.0)
    if kind is None or not kind.has_kl or abs(beta) <= NEGLIGIBLE:
        return None
    return _OwnLoss(
        f"a KL penalty to its reference with beta={beta:g}",
        "KL",
        "this reference",
        "set beta=1e-9, with which the trainer still computes the reference",
    )


def _own_entropy(trainer: Any, kind: TrainerKind | None) -> _OwnLoss | None:
    args = getattr(trainer, "args", None)
    coefficient = getattr(args, "entropy_coef", 0.0)
    adapts = getattr(args, "use_adaptive_entropy", False)
    if kind is None or not (adapts or abs(coefficient) > NEGLIGIBLE):
        return None
    with_, cure = f"entropy_coef={coefficient:g}", "set entropy_coef=0"
    if adapts:
        with_, cure = "use_adaptive_entropy=True", f"{cure} and use_adaptive_entropy=False"
    return _OwnLoss(f"an entropy bonus with {with_}", "entropy", "this entropy", cure)


def _own_router_loss(trainer: Any, kind: TrainerKind | None) -> _OwnLoss | None:
    coefficient, place = 0.0, "the config that the model is loaded with"
    if kind is KINDS["Trainer"] and not _takes_loss_of_model(trainer):
        return None
    if getattr(trainer, "aux_loss_enabled", False):  # TRL's; ORPO and CPO have the second name
        own = hasattr(trainer, "router_aux_loss_coef")
        coefficient = trainer.router_aux_loss_coef if own else trainer.aux_loss_coef
        place = "its config" if own else place
    elif kind is KINDS["Trainer"] and not hasattr(trainer, "aux_loss_enabled"):
        coefficient = _router_coefficient_of_model(trainer)
    if abs(coefficient) <= NEGLIGIBLE:
        return None
    return _OwnLoss(
        f"a load-balancing loss of the router with router_aux_loss_coef={coefficient:g}",
        "loss",
        "this router",
        f"set router_aux_loss_coef=1e-9 in {place}, with which the model still returns what the "
        f"term reads",
    )


def _takes_loss_of_model(trainer: Any) -> bool:
    """Whether `Trainer` or `SFTTrainer` computes its loss in the model, with that of the router."""
    smooths = trainer.label_smoother is not None
    if getattr(trainer.args, "loss_type", "nll") != "nll":  # SFT then ignores the smoothing
        smooths = False
    return trainer.compute_loss_func is None and not smooths


def _router_coefficient_of_model(trainer: Any) -> float:
    """Coefficient of the router's loss in the model's own loss."""
    model = trainer.model
    config = getattr(model, "config", None)
    text = None if config is None else config.get_text_config()
    if not getattr(text, "output_router_logits", False):
        return 0.0
    # The model has copied it from its config when it was built.
    known = getattr(text, "router_aux_loss_coef", 0.0)
    coefficient: float = getattr(model, "router_aux_loss_coef", known)
    return coefficient


def _is_kl(spec: RegularizerSpec) -> bool:
    wrapped = list(wrapped_functions(spec.fn))
    if any(isinstance(fn, KLToReference) for fn in wrapped) and reads_reference_of_data(spec):
        return True
    return _is_one_of(wrapped, _KL) and _reads_reference(spec)


def _reads_reference(spec: RegularizerSpec) -> bool:
    return bool(REFERENCE & _read_by(spec)) or reads_reference_of_data(spec)


def _is_entropy(spec: RegularizerSpec) -> bool:
    wrapped = list(wrapped_functions(spec.fn))
    return any(isinstance(fn, Entropy) for fn in wrapped) or (
        _is_one_of(wrapped, _ENTROPY)
        and bool({"completion_logits", "projection", "logits"} & _read_by(spec))
    )


def _reads_entropy(spec: RegularizerSpec) -> bool:
    sampled = any(isinstance(fn, ConfidencePenalty) for fn in wrapped_functions(spec.fn))
    return sampled or "completion_entropy" in _read_by(spec)


def _is_balancing(spec: RegularizerSpec) -> bool:
    return "aux_loss" in _read_by(spec) or any(
        getattr(fn, "__name__", "") == _BALANCING for fn in wrapped_functions(spec.fn)
    )


def _reads_router(spec: RegularizerSpec) -> bool:
    return "router_logits" in _read_by(spec)


def _is_one_of(wrapped: list[Any], functions: tuple[Any, ...]) -> bool:
    return any(fn is function for fn in wrapped for function in functions)


def _read_by(spec: RegularizerSpec) -> set[str]:
    """Names of the inputs of a term over named inputs, without what follows a dot."""
    fn = spec.fn
    names = (*fn.required, *fn.optional) if isinstance(fn, Reads) else ()
    return {name.partition(".")[0] for name in names}
