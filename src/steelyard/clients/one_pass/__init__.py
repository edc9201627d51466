"""One pass on a remote model: base and terms as one uploaded loss.

* `one_pass`: `OnePass`, which decides, uploads and sends
* `lowering`: the terms of a batch as one loss: `term_forms` gives each term's form per datum,
  `function_trace` and `separability` that of a plain function, `request_inputs` the inputs
* `loss_graph`: the loss that is uploaded; `graph_builder` builds it, `reverse_mode` adds the
  gradients by the rules of `derivatives`, and `sample` compares them with autograd
* `upload`: each graph once in a session
* `results`: the output of a request, or the call in two passes if it failed; `term_gradients`
  computes gradients of single terms here
"""

from steelyard.clients.one_pass.one_pass import (
    Explanation,
    OnePass,
    ServerSide,
    UploadRefusedWarning,
)
from steelyard.clients.one_pass.results import TwoPassCall

__all__ = ["Explanation", "OnePass", "ServerSide", "TwoPassCall", "UploadRefusedWarning"]
