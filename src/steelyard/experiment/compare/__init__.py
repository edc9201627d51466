"""Comparisons of runs: ablations, searches, their statistics, and runs on a Ray cluster."""
