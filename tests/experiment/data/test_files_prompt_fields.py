"""Fields that terms and rewards read, checked for every prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from steelyard.errors import ConfigError, DataError
from steelyard.experiment import read_config
from steelyard.experiment.data.encoding import Encoder
from steelyard.experiment.rollouts.rollouts import check_prompts
from steelyard.experiment.training.terms import build_terms
from tests.experiment.small_runs import write_data

MATCH = {"use": "exact_match", "name": "match"}
PARITY = {"use": "demographic_parity", "weight": 0.1, "options": {"group": "side"}}


def check(folder: Path, plain: Encoder, lines: list[dict[str, Any]], **tables: Any) -> None:
    write_data(folder / "prompts.jsonl", lines)
    raw = {"rollouts": {"prompts": "prompts.jsonl"}, "rewards": [{"use": "valid_json"}], **tables}
    config = read_config(raw, folder=folder)
    assert config.rollouts is not None
    check_prompts(config.rollouts, plain, build_terms(config), seed=0)


def test_fields_of_rewards_are_looked_up_in_the_record(folder: Path, plain: Encoder) -> None:
    lines: list[dict[str, Any]] = [{"prompt": "a", "answer": "x"}, {"prompt": "b"}, {"prompt": "c"}]
    with pytest.raises(DataError) as caught:
        check(folder, plain, lines, rewards=[MATCH])
    assert str(caught.value) == (
        f"{folder / 'prompts.jsonl'}:2: must have the field 'answer' for reward 'match', got none. "
        f"(1 more lines lack it.)"
    )
    check(folder, plain, lines[:1], rewards=[MATCH])
    check(folder, plain, lines, rewards=[{**MATCH, "enabled": False}, {"use": "valid_json"}])
    pattern = {"use": "regex_match", "options": {"pattern": "[0-9]"}}
    check(folder, plain, lines, rewards=[pattern])
    with pytest.raises(DataError, match="must have the field 'form' for reward 'regex_match'"):
        check(folder, plain, lines, rewards=[{"use": "regex_match", "options": {"field": "form"}}])


def test_fields_of_terms_are_numbers_of_the_prompt_or_made_from_the_answers(
    folder: Path, plain: Encoder
) -> None:
    check(folder, plain, [{"prompt": "a", "side": 1}], regularizers=[PARITY])
    with pytest.raises(DataError, match=r"prompts\.jsonl:1: must have the field 'side', a number"):
        check(folder, plain, [{"prompt": "a", "side": "left"}], regularizers=[PARITY])
    made = {**PARITY, "options": {"group": "group"}}
    check(folder, plain, [{"prompt": "a"}], regularizers=[made], loss={"use": "ppo"})


@pytest.mark.parametrize("use", ["dpo", "chosen_nll", "steelyard.regularizers:DPO"])
def test_a_term_over_pairs_is_refused(folder: Path, plain: Encoder, use: str) -> None:
    term = {"use": use, "name": "p", "weight": 0.1}
    with pytest.raises(ConfigError, match=r"no term over pairs, and regularizer 'p' is one: train"):
        check(folder, plain, [{"prompt": "a"}], regularizers=[term])


def test_a_loss_over_pairs_is_refused(folder: Path, plain: Encoder) -> None:
    with pytest.raises(ConfigError, match="and the base loss is one"):
        check(folder, plain, [{"prompt": "a"}], loss={"use": "chosen_nll"})
