"""Rewards of on-policy training: functions `(record, answer) -> float`.

`reward` builds them from a config, and `scoring` runs them on the answers of a step.
"""

from steelyard.experiment.rewards.reward import REWARDS, Reward, build_rewards, close_rewards
from steelyard.experiment.rewards.scoring import Answer, Score, score

__all__ = ["REWARDS", "Answer", "Reward", "Score", "build_rewards", "close_rewards", "score"]
