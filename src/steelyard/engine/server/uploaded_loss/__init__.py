"""Losses that clients upload as graphs: validated against an allowlist, then interpreted."""

from steelyard.engine.server.uploaded_loss.interpreter import TracedLoss
from steelyard.engine.server.uploaded_loss.validate import validate_loss

__all__ = ["TracedLoss", "validate_loss"]
