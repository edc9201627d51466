"""Hugging Face: add terms to the loss of `Trainer`, and of TRL's trainers that build on it.

* `trainer`: `RegularizerMixin` for a trainer class, `RegularizerCallback` for a trainer object
* `trainers`: the table of trainers: where each has its completion and its reference model
* `forward_capture`: runs the trainer's loss and captures its forward pass
* `completion`, `completion_inputs`: the tokens that the loss counts, as inputs of terms
* `packed_sequences`: the sequences of a batch whose rows hold several
* `causal_lm`: forward pass, logits, projection and labels of a causal language model
* `logit_free_loss`: the model's own loss and the rows terms read, without materialized logits
* `accumulation`: how much a micro-batch counts in its optimizer step
* `step_state`: moves the state of terms once per optimizer step
* `metric_accumulator`: the components of the loss from micro-batch to log line
* `step_details`: norms, cosines and the terms' own metrics of an optimizer step
* `input_names`: the inputs that terms read
* `duplicate_terms`: refuses a KL penalty, entropy or router loss that the trainer has already
* `rloo_reference`: keeps the reference's log-probs in RLOO's batches
"""

from steelyard.integrations.huggingface.trainer import RegularizerCallback, RegularizerMixin

__all__ = ["RegularizerCallback", "RegularizerMixin"]
