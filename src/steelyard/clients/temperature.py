"""Temperature of the policy on a server: how it is asked for, and whether the server obeys.

A policy at the temperature t has the log-probs of softmax(logits / t). The engine and `steelyard
serve` compute them if `loss_fn_config` holds a `"temperature"`. Another server may refuse the key,
or ignore it, and then the log-probs are not those that they are taken for. So a server is asked
first: differences of two log-probs at one position are differences of logits, divided by t.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from steelyard.clients.client_pass import config_at, is_refusal, logprobs_of, submit_forward
from steelyard.errors import SpecError

_ASKED = 2.0  # a temperature at which log-probs differ much from those at 1
_TOLERANCE = 0.05  # of the ratio of the differences: logits may be in bfloat16
_TOKENS = 8  # the first of the vocabulary


def check_temperature(client: Any, temperature: float) -> None:
    """Check that a client computes log-probs at a temperature other than 1.

    A client that runs the model in this process does. Another is asked for the log-probs of a few
    tokens, at two temperatures, in two forward requests.

    Raises:
        SpecError: its server refuses the temperature, or ignores it.
    """
    if temperature == 1 or hasattr(client, "open_pass"):
        return
    plain = _differences(client, 1.0)
    try:
        scaled = _differences(client, _ASKED)
    except Exception as error:
        if not is_refusal(error):
            raise
        raise SpecError(_refused(client, temperature, " ".join(str(error).split()))) from error
    ratio = float((plain @ scaled) / (plain @ plain)) * _ASKED
    if not abs(ratio - 1) < _TOLERANCE:  # NaN too
        raise SpecError(_refused(client, temperature, "it computes the same log-probs with it"))


def _differences(client: Any, temperature: float) -> Tensor:
    """Log-probs of the first tokens at one position, minus their mean: the same of the logits."""
    from tinker import types  # noqa: PLC0415 - a client of a server has the SDK

    data = [
        types.Datum(
            model_input=types.ModelInput.from_ints([0]),
            loss_fn_inputs={"target_tokens": types.TensorData.from_torch(torch.tensor([token]))},
        )
        for token in range(_TOKENS)
    ]
    found = logprobs_of(submit_forward(client, data, config_at(temperature)).result())
    values = torch.cat(found).double()
    return values - values.mean()


def _refused(client: Any, temperature: float, reason: str) -> str:
    return (
        f"temperature must be 1 for a client whose server computes log-probs at temperature 1 "
        f"alone, got {temperature!r} for {type(client).__name__}: asked for a temperature in "
        f"loss_fn_config, the server does not divide the logits by it ({reason}). Sample and "
        f"train at temperature 1, or use steelyard.engine or 'steelyard serve'."
    )
