"""Quick start with Tinker: wrap the training client, add a term, train, sample.

The example trains a tiny random model in this process. With an account, use
`tinker.ServiceClient()` and one of its models. Needs `steelyard[engine]`, takes seconds.
"""

from collections.abc import Sequence
from typing import Any

import torch
from tinker import types
from torch import Tensor

from steelyard import RegularizerSpec, regularize, schedules
from steelyard.engine import LocalServiceClient

TEXT = "the beam is level"


def nll(data: Sequence[Any], logprobs: Sequence[Tensor]) -> tuple[Tensor, dict[str, float]]:
    loss = -torch.cat(list(logprobs)).mean()
    return loss, {"perplexity": loss.exp().item()}


def certainty(data: Sequence[Any], logprobs: Sequence[Tensor]) -> Tensor:
    """Mean probability of the target tokens, which the term keeps below 1."""
    return torch.cat(list(logprobs)).exp().mean()


def main() -> None:
    service = LocalServiceClient()
    client = regularize(service.create_lora_training_client("tiny-random", rank=8, seed=0))
    tokenizer = client.get_tokenizer()
    tokens = tokenizer.encode(TEXT)
    datum = types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:]},
    )
    terms = [RegularizerSpec(certainty, schedules.warmup(0.2, steps=20), "certainty")]
    print("step     loss     base  + certainty   norm   cosine")
    for step in range(61):
        future = client.forward_backward_custom(
            [datum], nll, regularizers=terms, track_grad_norms=True
        )
        client.optim_step(types.AdamParams(learning_rate=5e-3))
        output = future.result()
        if step % 20 == 0:
            term = output.regularizers["certainty"]
            print(
                f"{step:4d}  {output.loss_total:7.3f}  {output.base_loss.value:7.3f}  "
                f"{term.contribution:+9.3f}   {term.grad_norm:5.3f}  "
                f"{output.cosines['base', 'certainty']:+7.2f}"
            )
    sampler = client.save_weights_and_get_sampling_client()
    answer = sampler.sample(
        types.ModelInput.from_ints(tokens[:4]),
        num_samples=1,
        sampling_params=types.SamplingParams(max_tokens=len(tokens) - 4, temperature=0.0),
    ).result()
    print("it says:", TEXT[:4] + tokenizer.decode(answer.sequences[0].tokens))


if __name__ == "__main__":
    main()
