"""Losses that clients upload as graphs: validated against an allowlist, then interpreted."""
