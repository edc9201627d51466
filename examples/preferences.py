"""DPO with two regularizers: 0.1 · NLL of the chosen answers + 0.001 · mean squared log-ratio.

The two answers of a pair are consecutive in the batch, the chosen one first. Each datum has the
log-probs of the model before training. Needs `steelyard[engine]`, takes seconds.
"""

import numpy as np
from tinker import types

from steelyard import regularize
from steelyard.engine import LocalServiceClient
from steelyard.regularizers import DPO

PAIRS = [("is it level? yes", "is it level? eh"), ("salt or gold? gold", "salt or gold? dunno")]


def main() -> None:
    training = LocalServiceClient().create_lora_training_client("tiny-random", rank=8, seed=0)
    tokenizer = training.get_tokenizer()
    data = []
    for text in (text for pair in PAIRS for text in pair):
        tokens = tokenizer.encode(text)
        question = text.index("?") + 1
        inputs = {
            "target_tokens": tokens[1:],
            "weights": [0.0] * question + [1.0] * (len(tokens) - 1 - question),
        }
        data.append(
            types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)
        )
    before = training.forward(data, "cross_entropy").result().loss_fn_outputs
    for datum, given in zip(data, before, strict=True):
        reference = np.asarray(given["logprobs"].data, dtype=np.float32)
        datum.loss_fn_inputs["reference_logprobs"] = types.TensorData.from_numpy(reference)

    client = regularize(training)
    terms = [
        {"fn": "chosen_nll", "weight": 0.1},
        {"fn": "squared_log_ratio", "weight": 0.001},
    ]
    print("step    dpo  accuracy  margin  + nll of chosen  + log-ratio")
    for step in range(21):
        future = client.forward_backward_custom(data, DPO(beta=0.1).compute, regularizers=terms)
        client.optim_step(types.AdamParams(learning_rate=1e-2))
        output = future.result()
        if step % 10 == 0:
            custom, parts = output.base_loss.custom, output.regularizers
            print(
                f"{step:4d}  {output.base_loss.value:.3f}  {custom['accuracy']:8.2f}"
                f"  {custom['margin']:6.2f}  {parts['chosen_nll'].contribution:15.3f}"
                f"  {parts['squared_log_ratio'].contribution:11.3f}"
            )


if __name__ == "__main__":
    main()
