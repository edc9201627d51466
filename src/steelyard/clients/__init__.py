"""Training clients with regularizers: `regularize` wraps one, of Tinker, the engine or one's own.

`passes` asks any client for log-probs and gives it their gradient; `regularized` puts a pipeline
between the two; `states` keeps what terms remember.
"""

from steelyard.clients.regularized import RegularizedClient, regularize

__all__ = ["RegularizedClient", "regularize"]
