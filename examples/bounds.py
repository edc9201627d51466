"""A bound instead of a weight: the model stays near the base model while the loss falls.

The same training without the term and with it; a controller finds its multiplier. The data are
fixed, so that `KLToReference` is no KL divergence, but a penalty on the log-ratio of their tokens:
half its square is held at 0.1. Needs `steelyard[engine]`.
"""

import torch
from tinker import types
from torch import Tensor

from steelyard import RegularizerSpec, regularize
from steelyard.engine import LocalServiceClient
from steelyard.regularizers import KLToReference

STEPS = 60


def nll(data: list[types.Datum], logprobs: list[Tensor]) -> Tensor:
    return -torch.cat(logprobs).mean()


def make_data() -> list[types.Datum]:
    rows = torch.randint(0, 500, (4, 17), generator=torch.Generator().manual_seed(0)).tolist()
    return [
        types.Datum(
            model_input=types.ModelInput.from_ints(row[:-1]),
            loss_fn_inputs={"target_tokens": row[1:]},
        )
        for row in rows
    ]


def train(terms: list[RegularizerSpec]) -> None:
    training = LocalServiceClient().create_lora_training_client("tiny-random", rank=8, seed=0)
    data = make_data()
    before = training.forward(data, "cross_entropy").result().loss_fn_outputs
    for datum, found in zip(data, before, strict=True):
        datum.loss_fn_inputs["reference_logprobs"] = found["logprobs"]
    client = regularize(training, terms)
    measured = KLToReference()
    for step in range(STEPS):
        output = client.forward_backward_custom(data, nll).result()
        client.optim_step(types.AdamParams(learning_rate=5e-3)).result()
        if step % 15 == 0 or step == STEPS - 1:
            logprobs = [found["logprobs"].to_torch() for found in output.loss_fn_outputs]
            penalty, _ = measured.compute(data, logprobs)
            multiplier = output.regularizers["near"].weight if terms else 0.0
            print(f"{step:4d}  {output.base_loss.value:6.3f}  {penalty:7.3f}  {multiplier:10.1f}")


def main() -> None:
    for title, terms in (
        ("without a bound", []),
        ("at most 0.1", [RegularizerSpec(KLToReference(), name="near", at_most=0.1)]),
    ):
        print(f"{title}\nstep     nll  penalty  multiplier")
        train(terms)


if __name__ == "__main__":
    main()
