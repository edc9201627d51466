"""Training clients with regularizers: `regularize` wraps Tinker's, the engine's or your own.

* `client_pass`: asks any client for log-probs and sends their gradient back
* `regularized`: `regularize`, which evaluates a pipeline between the two
* `state_io`: saves the state of the terms as JSON
"""

from steelyard.clients.regularized import RegularizedClient, regularize

__all__ = ["RegularizedClient", "regularize"]
