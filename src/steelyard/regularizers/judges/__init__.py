"""Judges that regularizers and rewards share: an HTTP service that returns numbers, and Z3."""

from steelyard.regularizers.judges.json_service import JsonService, as_json, check_listener
from steelyard.regularizers.judges.solver import verdict

__all__ = ["JsonService", "as_json", "check_listener", "verdict"]
