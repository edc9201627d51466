"""Hugging Face: terms in the loss of `Trainer`, and of TRL's trainers that build on it.

`RegularizerMixin` goes in front of a trainer class; `RegularizerCallback` is for a trainer that
is already built. Either way every component is logged, raw and weighted, with the same scaling
as the loss under gradient accumulation.
"""

from steelyard.integrations.huggingface.trainer import RegularizerCallback, RegularizerMixin

__all__ = ["RegularizerCallback", "RegularizerMixin"]
