"""Losses that clients upload as graphs: validated against an allowlist, then interpreted.

`validate` checks a graph on upload; `program` decodes its operations, and `interpreter` runs them
over the data of a batch; `budget` limits the memory and the time that they take. All of that
happens in the process of `loss_process`, whose end costs no other client.
"""

from steelyard.engine.server.uploaded_loss.budget import LossBudget
from steelyard.engine.server.uploaded_loss.interpreter import BoundLoss, TracedLoss
from steelyard.engine.server.uploaded_loss.loss_process import LossProcess
from steelyard.engine.server.uploaded_loss.validate import validate_loss

__all__ = ["BoundLoss", "LossBudget", "LossProcess", "TracedLoss", "validate_loss"]
