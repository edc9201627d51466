"""The one core: evaluate the terms that are due, aggregate their gradients, build the output.

`term_set` holds the terms, `evaluate` runs them (`inline_or_offloaded` decides where, `call_events`
reports failures), `inputs` are their inputs, `bounds` finds the weights of terms with a bound, and
`aggregate` makes one gradient and one output of their results, with the plain sum or with one of
TorchJD's `weightings`. The core has two interfaces: `Pipeline` on one flat vector of log-probs, and
`CompositeLoss` on named tensors in the caller's graph. `named_losses` are the losses that training
clients know by name, and `advantages` those of sampled answers.
"""
