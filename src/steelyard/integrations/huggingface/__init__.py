"""Hugging Face: add terms to the loss of `Trainer`, and of TRL's trainers that build on it.

* `trainer`: `RegularizerMixin` for a trainer class, `RegularizerCallback` for a trainer object
* `forward_capture`: runs the trainer's loss and collects the inputs of terms from its forward pass
* `causal_lm`: logits, log-probs and labels of a causal language model
* `logit_free_loss`: the model's own loss and the rows terms read, without materialized logits
* `metric_accumulator`: the components of the loss from micro-batch to log line
"""

from steelyard.integrations.huggingface.trainer import RegularizerCallback, RegularizerMixin

__all__ = ["RegularizerCallback", "RegularizerMixin"]
