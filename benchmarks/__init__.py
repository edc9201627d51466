"""Benchmarks, as ratios within one run: `python -m benchmarks [name ...]`."""
