"""One pass on a remote model: base and terms as one uploaded loss.

* `one_pass`: `OnePass`, which decides, uploads each graph once in a session, and sends
* `lowering`: the terms of a batch as one loss, and the inputs of the request
* `term_forms`: the form per datum of each term; that of a plain function is found by tracing it
* `loss_graph`: the loss that is uploaded, with its gradient; compared with autograd on a sample
* `torch_operations`: traces a function and its derivatives to operations that can be uploaded
* `results`: the output of a request, or the call in two passes if it failed
"""
