"""Training data of answers: tokens, sampling log-probs and advantages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from tinker import types

from steelyard.experiment.backend import Backend
from steelyard.experiment.encoding import EncodedRecord
from steelyard.experiment.reference_logprobs import with_reference
from steelyard.experiment.rollouts.answers import ScoredAnswer


def datum_of(scored: ScoredAnswer) -> types.Datum:
    """Datum of an answer that was not dropped.

    Its fields, of which the first four have one number for each token after the first:
    `target_tokens`, `weights` (1 for tokens of the answer), `logprobs` (when they were sampled),
    `advantages` (both 0 for tokens of the prompt); `reward`, `group`, and the fields of the line
    that are numbers. Its `record` is the line, with the text of the answer as `"completion"`.
    """
    answer = scored.answer
    tokens = [*answer.prompt.tokens, *answer.tokens]
    # Token t predicts token t + 1: the first token is never a target.
    before, after = len(answer.prompt.tokens) - 1, len(answer.tokens)
    fields: dict[str, Any] = {
        "target_tokens": tokens[1:],
        "weights": [0.0] * before + [1.0] * after,
        "logprobs": [0.0] * before + list(answer.logprobs),
        "advantages": [0.0] * before + [float(scored.advantage or 0.0)] * after,
        "reward": np.array([scored.reward], np.float32),
        "group": np.array([answer.group], np.int64),
    }
    datum = EncodedRecord(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={**answer.prompt.fields, **fields},
    )
    record = {**answer.prompt.record, "completion": answer.text}
    object.__setattr__(datum, "record", record)  # the class is frozen
    return datum


def add_base_logprobs(
    data: Sequence[types.Datum], backend: Backend, temperature: float = 1.0
) -> list[types.Datum]:
    """Copies of data with `reference_logprobs`, computed now with the base model."""
    logprobs = backend.base.logprobs(data, temperature=temperature)
    return [with_reference(datum, row) for datum, row in zip(data, logprobs, strict=True)]
