"""Terms that the tests of this folder share."""

from __future__ import annotations

import asyncio
from typing import Any

import torch
from torch import Tensor

from steelyard import Pipeline, RegularizerSpec

LOGPROBS = [torch.tensor([-0.5, -1.5, -2.0]), torch.tensor([-1.0]), torch.tensor([-0.1, -3.0])]


def nll(_: Any, logprobs: list[Tensor]) -> tuple[Tensor, dict[str, float]]:
    flat = torch.cat(logprobs)
    return -flat.mean(), {"tokens": float(len(flat))}


def l2(_: Any, logprobs: list[Tensor]) -> Tensor:
    return torch.cat(logprobs).square().sum()


def surprise(_: Any, logprobs: list[Tensor]) -> tuple[Tensor, dict[str, float]]:
    flat = torch.cat(logprobs)
    return (flat.exp() * flat).sum(), {"largest": flat.max().item()}


async def patient(data: Any, logprobs: list[Tensor]) -> tuple[Tensor, dict[str, float]]:
    await asyncio.sleep(0.001)
    return surprise(data, logprobs)


def constant(_: Any, logprobs: list[Tensor]) -> float:
    return 2.0


def broken(_: Any, logprobs: list[Tensor]) -> Tensor:
    raise KeyError("nothing here")


def spec(fn: Any = l2, weight: Any = 0.1, name: str = "l2", **more: Any) -> RegularizerSpec:
    return RegularizerSpec(fn, weight, name, **more)


def unwatched(pipeline: Pipeline) -> Pipeline:
    """The pipeline, whose terms count as seen to draw no random numbers.

    The calls in which that is watched run one after the other.
    """
    for each in pipeline.due():
        each.statistics.calls = 2
    return pipeline


class Counter:
    """Counts its calls, as a stateful regularizer."""

    name = "counter"

    def __init__(self) -> None:
        self.calls = 0

    def compute(self, data: Any, logprobs: list[Tensor]) -> Tensor:
        self.calls += 1
        return torch.cat(logprobs).sum() * self.calls

    def state_dict(self) -> dict[str, int]:
        return {"calls": self.calls}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]
