"""Speed figures as ratios within one run: `python -m benchmarks [name ...]`."""
