"""Inputs of terms: their names, those that describe the completion, and errors for absent ones."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from steelyard.composition.input_names import Reads
from steelyard.errors import InputError
from steelyard.integrations.huggingface.causal_lm import token_count, with_shards
from steelyard.integrations.huggingface.completion import Completion, packed_spans
from steelyard.integrations.huggingface.internals import loss_shifts_labels
from steelyard.integrations.huggingface.trainer_kinds import (
    TrainerKind,
    given_to_the_model,
    trainer_name,
)
from steelyard.spec.regularizer import RegularizerSpec

if TYPE_CHECKING:
    from steelyard.integrations.huggingface.forward_capture import CapturedForward


TOKENS = frozenset({"logits", "labels"})
COMPLETION = frozenset(
    {
        "completion_logprobs",
        "completion_entropy",
        "completion_logits",
        "completion_mask",
        "projection",
    }
)
REFERENCE = frozenset({"reference_logprobs", "reference_logits"})
_BY_DATUM = frozenset({"data", "logprobs"})


def completion_of(
    trainer: Any,
    kind: TrainerKind | None,
    captured: CapturedForward,
    batch: Mapping[str, Any],
    names: set[str],
) -> Completion | None:
    """Completion of a batch; None if terms read nothing of it, or the batch has none.

    Args:
        trainer: the trainer.
        kind: how it runs its model; None if it is unknown. Then the completion is told from the
            labels that it passes to the model.
        captured: its forward pass.
        batch: its batch.
        names: of all inputs that terms read.
    """
    if not names & (COMPLETION | REFERENCE | _BY_DATUM):
        return None
    return _completion(trainer, kind, captured, batch)


def uncounted_inputs(
    trainer: Any, completion: Completion | None, batch: Mapping[str, Any], names: set[str]
) -> frozenset[str]:
    """Names of the inputs with nothing to measure, since no token of the micro-batch counts.

    A term that reads one is left out: a mean over its tokens would be 0/0.
    """
    uncounted: frozenset[str] = frozenset()
    if completion is not None and not completion.mask.any():
        uncounted |= COMPLETION | REFERENCE | _BY_DATUM
    if names & TOKENS:
        tokens = token_count(batch, shifted=loss_shifts_labels(trainer))
        uncounted |= TOKENS if tokens is not None and tokens == 0 else frozenset()
    return uncounted


def completion_inputs(
    completion: Completion | None,
    kind: TrainerKind | None,
    captured: CapturedForward,
    batch: Mapping[str, Any],
    names: set[str],
) -> dict[str, Any]:
    """Inputs of terms that describe the completion of a batch, those that `names` has.

    Args:
        completion: the tokens that count; None if the batch has none.
        kind: how the trainer runs its model; None if it is unknown. Then only `data` and `logprobs`
            are there.
        captured: its forward pass.
        batch: its batch.
        names: of all inputs that terms read.
    """
    if completion is None:
        return {}
    inputs: dict[str, Any] = {}
    if kind is not None:
        outputs = _reference(kind, captured, batch, names, completion)
        inputs = {**_described(completion, names), **outputs}
        # A field of the batch that happens to be called `targets` or `mask` stays the batch's.
        inputs = {k: v for k, v in inputs.items() if k not in {"targets", "mask"} & batch.keys()}
    if names & _BY_DATUM:
        known = inputs.get("completion_logprobs")
        logprobs = completion.logprobs() if known is None else known
        sampled = None
        if kind is not None and kind.samples:
            sampled = sampling_logprobs(batch, logprobs.detach(), completion)
        reference = inputs.get("reference_logprobs")
        inputs["logprobs"] = completion.by_sequence(logprobs)
        inputs["data"] = completion.data(reference_logprobs=reference, logprobs=sampled)
    return inputs


def sampling_logprobs(batch: Mapping[str, Any], logprobs: Tensor, completion: Completion) -> Tensor:
    """Log-probs at which the tokens of a completion were sampled, `[B, W]`.

    Those of the batch: of the engine that generated it, or of the policy at that time. A trainer
    whose policy has not changed since has neither, and they are the present ones. So are those of
    tokens that the engine could not score, which are NaN.
    """
    for name in ("sampling_per_token_logps", "old_per_token_logps"):
        values = batch.get(name)
        if values is not None:
            kept = completion.keep(values).to(logprobs)
            return kept.where(kept.isfinite(), logprobs)
    return logprobs


def check_available(
    trainer: Any, kind: TrainerKind | None, required: Mapping[str, str], available: Container[str]
) -> None:
    """Check that the inputs of the completion that terms read are available.

    Args:
        trainer: the trainer.
        kind: how it runs its model; None if it is unknown.
        required: the inputs that terms read, and the name of a term that reads each.
        available: the names of all inputs.

    Raises:
        InputError: one is not; it names the trainer and the input.
    """
    own = COMPLETION | REFERENCE | (_BY_DATUM if kind is not None else frozenset())
    for name, term in required.items():
        if name in own and name not in available:
            raise InputError(
                f"{trainer_name(trainer, kind)} has no input {name!r}, which regularizer {term!r} "
                f"reads: {_reason(kind, name)}."
            )


def _reason(kind: TrainerKind | None, name: str) -> str:
    if kind is None:
        return (
            "its compute_loss is not one that Steelyard knows, so that the tokens of the "
            "completion cannot be told; read logits and the fields of its batch, or, if it runs "
            'its model as a trainer that is known, say so: completion_like = "SFTTrainer" in its '
            "class"
        )
    if kind.no_completion:
        return kind.no_completion
    if name in REFERENCE:
        return kind.no_reference
    return "the batch has no labels [B, T] that say which tokens count; read logits"


def _completion(
    trainer: Any, kind: TrainerKind | None, captured: CapturedForward, batch: Mapping[str, Any]
) -> Completion | None:
    labels_of = given_to_the_model if kind is None else kind.labels
    labels = None if labels_of is None else labels_of(trainer, batch, captured.forward)
    if not isinstance(labels, Tensor) or labels.dim() != 2:  # noqa: PLR2004 - [B, T]
        return None
    shifted = loss_shifts_labels(trainer)
    if "shift_labels" in batch:
        labels, shifted = batch["shift_labels"], False
    rows = captured.loss.rows if captured.loss is not None else None
    field = None if kind is None else kind.width_of
    return Completion(
        captured.unwrapped,
        captured.forward,
        labels,
        shifted=shifted,
        width=None if field is None else batch[field].shape[1],
        temperature=trainer.temperature if kind is not None and kind.has_temperature else 1.0,
        head=captured.head,
        rows=None if rows is None else with_shards(captured.unwrapped, rows.projection),
        spans=packed_spans(captured.forward.inputs, labels.shape) if field is None else None,
    )


def _described(completion: Completion, names: set[str]) -> dict[str, Any]:
    """Outputs of the trained model for the completion."""
    makers = {
        "completion_mask": lambda: completion.mask,
        "completion_logprobs": completion.logprobs,
        "completion_entropy": completion.entropy,
        "completion_logits": completion.logits,
        "projection": completion.projection,
    }
    inputs: dict[str, Any] = {name: make() for name, make in makers.items() if name in names}
    if "projection" in names:
        inputs |= {"targets": completion.targets, "mask": completion.positions}
    return inputs


def _reference(
    kind: TrainerKind,
    captured: CapturedForward,
    batch: Mapping[str, Any],
    names: set[str],
    completion: Completion,
) -> dict[str, Any]:
    """Outputs of the reference model for the completion, where the trainer runs it."""
    wanted = names & REFERENCE
    if not wanted:
        return {}
    if kind.reference_field is not None:
        values = batch.get(kind.reference_field)
        return {} if values is None else {"reference_logprobs": completion.keep(values)}
    forward, policy = captured.reference, captured.forward
    # KTO runs other passes without a graph. The one over the same tokens has the same labels.
    same = forward is not None and forward.inputs.get("labels") is policy.inputs.get("labels")
    if forward is None or not forward.ran or not same:
        return {}
    reference = completion.seen_by(captured.reference_unwrapped, forward)
    makers = {"reference_logprobs": reference.logprobs, "reference_logits": reference.logits}
    with torch.no_grad():
        return {name: makers[name]() for name in wanted}


class InputNames(NamedTuple):
    """Inputs that terms read, without what follows a dot.

    Attributes:
        required: required inputs, and the name of a term that reads each.
        all: all inputs, also those that a term can do without.
    """

    required: Mapping[str, str]
    all: set[str]


def input_names(specs: Sequence[RegularizerSpec]) -> InputNames:
    """Collect the names of all inputs that terms read.

    Raises:
        InputError: a term over `(data, logprobs)` needs a projection for each datum.
    """
    required: dict[str, str] = {}
    optional: set[str] = set()
    for spec in specs:
        fn = spec.fn
        read = fn.required if isinstance(fn, Reads) else ("data", "logprobs")
        if reads_reference_of_data(spec):
            read = (*read, "reference_logprobs")
        required |= {name.partition(".")[0]: spec.name for name in (*read, *spec.needs)}
        optional |= set(fn.optional) if isinstance(fn, Reads) else set()
        if "projection" in spec.needs:
            raise InputError(
                f"a term that needs a projection for each datum must run on steelyard.engine; "
                f"here read that of the batch, term(..., inputs='projection') "
                f"(regularizer {spec.name!r})."
            )
    return InputNames(required, required.keys() | optional)


def reads_reference_of_data(spec: RegularizerSpec) -> bool:
    """Whether a term over `(data, logprobs)` reads `reference_logprobs` from each datum."""
    fields = [getattr(fn, "reference", None) for fn in wrapped_functions(spec.fn)]
    return "reference_logprobs" in [field for field in fields if isinstance(field, str)]


def wrapped_functions(fn: Any) -> Iterator[Any]:
    """A regularizer, and those that it wraps: `Adaptive(regularizer=KLToReference())`."""
    while fn is not None:
        yield fn
        if isinstance(fn, Reads):
            fn = fn.owner
        else:
            fn = fn.func if isinstance(fn, partial) else getattr(fn, "regularizer", None)
