"""Training clients with regularizers: `regularize` wraps Tinker's, the engine's or your own.

* `client_pass`: asks any client for log-probs and sends their gradient back
* `regularized`: `RegularizedClient`, which evaluates a pipeline between the two
* `client_settings`: the settings of a client, and those that a call may have of its own
* `blocking`: one body of the plain and the async form of a call
* `one_pass`: the same in one pass, as a loss that the server runs
* `wrapping`: `regularize`, which makes one
* `term_states`: the terms from call to call, and their states, saved as JSON
"""

from steelyard.clients.one_pass.one_pass import Explanation, UploadRefusedWarning
from steelyard.clients.regularized import RegularizedClient
from steelyard.clients.wrapping import regularize

__all__ = ["Explanation", "RegularizedClient", "UploadRefusedWarning", "regularize"]
