"""Plain PyTorch: add terms to the loss of an existing training loop.

`activations` records the outputs of modules for terms to read. The loss itself is
`composition.CompositeLoss`; `steelyard.integrations` has all names.
"""
