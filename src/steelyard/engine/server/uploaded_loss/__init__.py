"""Losses that clients upload as graphs: checked against a list of operations, then interpreted."""
