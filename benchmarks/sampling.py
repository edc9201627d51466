"""Rate of sampling from the real model, against `generate` of transformers, and its overheads.

`python -m benchmarks.sampling` takes the real model, on a CPU; with `--device cuda` it takes four
random layers as wide as SmolLM2-1.7B, on a GPU.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from tinker import types
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.measure import Row, Timing, against, in_turn, show
from steelyard.engine import LocalSamplingClient, LocalServiceClient
from steelyard.engine.decoding import DecodingBatch
from steelyard.engine.token_choice import RowChoice, choose_tokens

# If this model cannot be fetched, use another one of the same size.
MODEL = os.environ.get("STEELYARD_BENCH_MODEL", "smollm2-135m")
PROMPT, TOKENS, GROUP, ROWS, REPEATS, STEPS = 24, 24, 8, 16, 5, 9


def prompt_of(seed: int, length: int = PROMPT) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(100, 40_000, (length,), generator=generator).tolist()


def params_of(seed: int) -> types.SamplingParams:
    return types.SamplingParams(max_tokens=TOKENS, seed=seed, stop=[])


def generated(client: LocalSamplingClient, rows: int) -> Callable[[], object]:
    """The same number of tokens from `generate`, at the same temperature and without an end."""
    net = client._worker.model._net
    tokens = torch.tensor([prompt_of(0)], device=client._worker.model.device)
    settings: dict[str, Any] = {
        "do_sample": True,
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "num_return_sequences": rows,
        "min_new_tokens": TOKENS,
        "max_new_tokens": TOKENS,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    mask = torch.ones_like(tokens)

    @torch.inference_mode()
    def run() -> Tensor:
        found: Tensor = net.generate(tokens, attention_mask=mask, **settings)
        assert found.shape == (rows, PROMPT + TOKENS)
        return found

    return run


def sampled(client: LocalSamplingClient, rows: int) -> Callable[[], object]:
    prompt = types.ModelInput.from_ints(prompt_of(0))
    return lambda: client.sample(prompt, rows, params_of(0)).result()


def concurrent(client: LocalSamplingClient, prompts: Sequence[list[int]]) -> Callable[[], object]:
    inputs = [types.ModelInput.from_ints(prompt) for prompt in prompts]

    def run() -> list[types.SampleResponse]:
        futures = [client.sample(each, 1, params_of(seed)) for seed, each in enumerate(inputs)]
        return [future.result() for future in futures]

    return run


def choosing(client: LocalSamplingClient, **settings: Any) -> Timing:
    """Time of choosing tokens, relative to the model's own for the same rows."""
    model = client._worker.model
    batch = DecodingBatch(model, None)
    params = types.SamplingParams(**settings)
    model_time, choice_time = [], []

    def now() -> float:
        if model.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    with torch.inference_mode():
        (prefix,) = batch.prefill([torch.tensor(prompt_of(0))])
        batch.join([prefix] * ROWS)
        logits = prefix.logits.expand(ROWS, -1)
        for position in range(STEPS + 2):
            began = now()
            rows = [RowChoice(params, 0, sample, position) for sample in range(ROWS)]
            choice = choose_tokens(logits, rows)
            choice.tokens.tolist(), choice.logprobs.tolist()
            chosen = now()
            logits = batch.advance(choice.tokens)
            ended = now()
            if position > 1:
                choice_time.append(chosen - began)
                model_time.append(ended - chosen)
    pairs = zip(choice_time, model_time, strict=True)
    return Timing(choice_time, [choice / model for choice, model in pairs])


def rows_of(client: LocalSamplingClient) -> list[Row]:
    one = in_turn(
        {"generate": generated(client, 1), "ours": sampled(client, 1)}, repeats=REPEATS, warmup=1
    )
    group = in_turn(
        {
            "generate": generated(client, GROUP),
            "ours": sampled(client, GROUP),
        },
        repeats=REPEATS,
        warmup=1,
    )
    same = [prompt_of(0)] * GROUP
    others = [prompt_of(seed) for seed in range(GROUP)]
    ragged = [prompt_of(seed, PROMPT - 2 * seed) for seed in range(GROUP)]
    many = in_turn(
        {
            "one": sampled(client, GROUP),
            "same": concurrent(client, same),
            "others": concurrent(client, others),
            "ragged": concurrent(client, ragged),
        },
        repeats=REPEATS,
        warmup=1,
    )
    share = 1 / 0.85
    return [
        against("1 sample, against `generate`", one["ours"], 1.0),
        against(f"{GROUP} samples, against `generate` with {GROUP} rows", group["ours"], 1.0),
        against(f"{GROUP} concurrent requests of one prompt, against 1", many["same"], share),
        against(f"{GROUP} requests of prompts of one length, the same", many["others"]),
        against(f"{GROUP} requests of other lengths, the same", many["ragged"]),
        against(f"choosing tokens, {ROWS} rows, against the model's time", choosing(client), 0.1),
        against("the same with top_p = 0.9", choosing(client, top_p=0.9), 0.1),
        against("the same with top_k = 50", choosing(client, top_k=50), 0.1),
    ]


def wide_model(folder: str) -> str:
    """Save a model with the width of SmolLM2-1.7B, four layers and random weights in bfloat16."""
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=4,
        num_attention_heads=32,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    model: Any = LlamaForCausalLM(config)  # type: ignore[no-untyped-call]  # in transformers
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    device = parser.parse_args().device
    with tempfile.TemporaryDirectory() as folder:
        model = MODEL if device == "cpu" else wide_model(folder)
        client = LocalServiceClient(device=device).create_sampling_client(base_model=model)
        named = MODEL if device == "cpu" else "4 layers of 2048 features in bfloat16 on a GPU"
        show(
            "Sampling",
            f"{named}, prompts of {PROMPT} tokens, {TOKENS} new tokens a sample; ratios of times: "
            "below 1 is faster",
            rows_of(client),
            repeats=f"{REPEATS} calls, {STEPS} tokens",
        )


if __name__ == "__main__":
    main()
