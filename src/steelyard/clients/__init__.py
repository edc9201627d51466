"""Training clients with regularizers: `regularize` wraps Tinker's, the engine's or your own.

* `client_pass`: asks any client for log-probs and sends their gradient back
* `regularized`: `RegularizedClient`, which evaluates a pipeline between the two
* `custom_call`: one call of it, from the forward pass to the backward pass
* `built_terms`: terms by registry names, which keep their state from call to call
* `one_pass`: the same in one pass, as a loss that the server runs
* `wrapping`: `regularize`, which makes one
* `term_states`: the state of the terms, which `state_io` saves as JSON
"""

from steelyard.clients.one_pass import Explanation, UploadRefusedWarning
from steelyard.clients.regularized import RegularizedClient
from steelyard.clients.wrapping import regularize

__all__ = ["Explanation", "RegularizedClient", "UploadRefusedWarning", "regularize"]
