"""Rewards of on-policy training: functions `(record, answer) -> float`.

`reward` builds them from a config, and `scoring` runs them on the answers of a step. The ready-made
ones: `text` judges the text itself, `judges` asks Z3, a service or a model.
"""
