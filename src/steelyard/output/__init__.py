"""Outputs of calls as plain data, their metrics, and the files that runs write; no torch."""
