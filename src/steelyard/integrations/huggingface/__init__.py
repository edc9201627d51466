"""Hugging Face: add terms to the loss of `Trainer`, and of TRL's trainers that build on it.

* `trainer`: `RegularizerMixin` for a trainer class, `RegularizerCallback` for a trainer object
* `trainer_kinds`: the table of trainers: where each has its completion and its reference model
* `forward_capture`: runs the trainer's loss and captures its forward pass; the model's own loss and
  the rows that terms read without materialized logits
* `completion`, `completion_inputs`: the tokens that the loss counts, as inputs of terms; the
  sequences of a batch whose rows hold several
* `causal_lm`: forward pass, logits, projection and labels of a causal language model
* `accumulation`: how much a micro-batch counts in its optimizer step
* `metrics`: the components of the loss, norms, cosines and the terms' own metrics of a step
* `input_names`: the inputs that terms read
* `duplicate_terms`: refuses a KL penalty, entropy or router loss that the trainer has already
* `internals`: what is read of private parts of transformers and TRL
"""

from steelyard.integrations.huggingface.trainer import RegularizerCallback, RegularizerMixin

__all__ = ["RegularizerCallback", "RegularizerMixin"]
