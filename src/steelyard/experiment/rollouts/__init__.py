"""On-policy training: the model answers prompts, rewards judge the answers, it trains on them.

`answers` samples a group of answers for each prompt, compares their rewards within the group, and
makes training data of them; `steelyard.experiment.rewards` scores them, and `metrics` describes
them. `rollouts` combines these into the data source of a run.
"""
