"""Check that prompts have the fields that the terms and the rewards read."""

from __future__ import annotations

from collections.abc import Sequence

from steelyard.errors import ConfigError
from steelyard.experiment.build_terms import Terms
from steelyard.experiment.data_fields import NUMBERS, fields_read, reads_pairs, refuse_lines
from steelyard.experiment.rollouts.prompts import MADE_FIELDS, Prompt
from steelyard.spec import title


def check_prompt_fields(terms: Terms, prompts: Sequence[Prompt], path: str) -> None:
    """Check that every prompt has the fields that the terms and the rewards read.

    A reward declares them as a term does, by an attribute `reads_fields`, and reads them from the
    record. One that is not enabled is not checked.

    Raises:
        DataError: a line has no such field.
        ConfigError: a term reads pairs, and answers to prompts are none.
    """
    for name, fn in terms.required():
        if reads_pairs(fn):
            raise ConfigError(
                f"[rollouts] must have no loss and no term over pairs, and {title(name)} is one: "
                f"train it under [data] on lines with 'chosen' and 'rejected'."
            )
        for field in fields_read(fn):
            if field not in MADE_FIELDS:
                missing = [prompt.line for prompt in prompts if field not in prompt.fields]
                refuse_lines(missing, f"{field!r}{NUMBERS}", title(name), path)
    for reward in terms.rewards:
        for field in fields_read(reward.fn) if reward.enabled else ():
            missing = [prompt.line for prompt in prompts if field not in prompt.record]
            refuse_lines(missing, repr(field), reward.title, path)
