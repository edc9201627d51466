"""The names of the events the library emits."""

from __future__ import annotations

from typing import Final

CUSTOM_LOSS_START: Final = "steelyard.custom_loss.start"
CUSTOM_LOSS_STOP: Final = "steelyard.custom_loss.stop"
CUSTOM_LOSS_EXCEPTION: Final = "steelyard.custom_loss.exception"
GRADIENT: Final = "steelyard.custom_loss.gradient"
TERM_START: Final = "steelyard.regularizer.compute.start"
TERM_STOP: Final = "steelyard.regularizer.compute.stop"
TERM_EXCEPTION: Final = "steelyard.regularizer.compute.exception"
COMPOSE_COMPLETE: Final = "steelyard.regularizer.compose.complete"
PENALTIES_START: Final = "steelyard.penalties.compute.start"
PENALTIES_STOP: Final = "steelyard.penalties.compute.stop"

ALL: Final = (
    CUSTOM_LOSS_START,
    CUSTOM_LOSS_STOP,
    CUSTOM_LOSS_EXCEPTION,
    GRADIENT,
    TERM_START,
    TERM_STOP,
    TERM_EXCEPTION,
    COMPOSE_COMPLETE,
    PENALTIES_START,
    PENALTIES_STOP,
)
