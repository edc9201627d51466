"""Rewards of on-policy training: functions `(record, answer) -> float`.

`reward` builds them from a config, and `scoring` runs them on the answers of a step. The ready-made
ones: `text_match` and `text_form` judge the text itself, `logic_check` asks Z3, `http_validation` a
service, and `reward_model` a model.
"""

from steelyard.experiment.rewards.reward import REWARDS, Reward, build_rewards, check_weights
from steelyard.experiment.rewards.scoring import LARGEST, Answer, Score, score

__all__ = [  # noqa: RUF022 - sorted as Python sorts
    "Answer",
    "LARGEST",
    "REWARDS",
    "Reward",
    "Score",
    "build_rewards",
    "check_weights",
    "score",
]
