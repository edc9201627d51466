"""Gradients of terms: computing the gradient of one, and algebra over those of several.

`layout` flattens the log-probs into one vector and maps over nested containers; `datum_fields`
reads the fields of a datum. `parse_result` validates what a term returns. `isolated` is a call of
a term on detached copies of its inputs; `estimators` has the numerical and the score-function
gradient of terms that autograd cannot differentiate. `algebra` has weighted sums, the Gram matrix,
norms and cosines; `sharded` the same for tensors and modules that are spread over processes.
"""
