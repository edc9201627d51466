"""On-policy training: the model answers prompts, rewards judge the answers, it trains on them.

`prompts` reads the prompts, `prompt_fields` checks their fields, `answers` samples a group of
answers for each, `steelyard.experiment.rewards` scores them, `advantages` compares the rewards
within a group, `answer_data` makes training data of it, and `rollout_metrics` describes it.
`rollouts` combines these into the data source of a run.
"""

from steelyard.experiment.rollouts.rollouts import Rollouts, check_prompts, open_rollouts

__all__ = ["Rollouts", "check_prompts", "open_rollouts"]
