"""Experiments: from a config to a run, and to a report of it."""

__all__: list[str] = []
