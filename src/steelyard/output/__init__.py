"""Output of a call: the composed loss, the base loss and the regularizers, as plain data."""

from steelyard.output.accumulated import Accumulation, accumulated
from steelyard.output.custom_loss import CustomLossOutput
from steelyard.output.drivers import Driver, TokenShare
from steelyard.output.term_outputs import BaseLossOutput, RegularizerOutput

__all__ = [
    "Accumulation",
    "BaseLossOutput",
    "CustomLossOutput",
    "Driver",
    "RegularizerOutput",
    "TokenShare",
    "accumulated",
]
