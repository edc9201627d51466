"""A folder with a tiny chat model whose output layer is tied to its embeddings, as SmolLM2's is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from steelyard.engine import tiny

TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def write_tied_model(folder: Path, *, std: float = 0.1, context: int = tiny.CONTEXT) -> Path:
    """Write the model; with a large `std` it repeats the last token of a prompt."""
    config = tiny.build(torch.float32).config
    config.tie_word_embeddings = True
    config.max_position_embeddings = context
    torch.manual_seed(0)
    model: Any = transformers.LlamaForCausalLM(config)  # type: ignore[no-untyped-call]
    # Weights like those of a trained model: with the initial 0.02 all logits would be near 0.
    torch.nn.init.normal_(model.model.embed_tokens.weight, std=std)
    model.save_pretrained(folder)
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder
