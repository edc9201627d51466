"""`tiny-random`: a Llama with about 140,000 random weights, for tests; built here, no download."""

from __future__ import annotations

from typing import Any

import torch

NAME = "tiny-random"
VOCABULARY = 512
CONTEXT = 512
_END = "<|end|>"


def config() -> Any:
    """Config of the model, as transformers has it."""
    import transformers  # noqa: PLC0415 - takes seconds

    return transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        bos_token_id=None,
        eos_token_id=256,
        pad_token_id=256,
        tie_word_embeddings=False,
    )


def build(dtype: torch.dtype) -> Any:
    """Build the model, with the same weights every time."""
    import transformers  # noqa: PLC0415 - takes seconds

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = transformers.LlamaForCausalLM(config())  # type: ignore[no-untyped-call]
        return model.to(dtype)


def tokenizer() -> Any:
    """Build a tokenizer with one token for each byte, and 256 for the end of a text."""
    import tokenizers  # noqa: PLC0415 - comes with transformers
    import transformers  # noqa: PLC0415 - takes seconds

    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    model = tokenizers.models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[])
    raw = tokenizers.Tokenizer(model)
    raw.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = tokenizers.decoders.ByteLevel()
    raw.add_special_tokens([_END])
    return transformers.PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=raw, eos_token=_END
    )
