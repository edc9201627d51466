"""Hidden states and an output layer with random numbers, and the same terms by torch alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from steelyard.penalties import from_logits
from steelyard.penalties.from_logits import (
    Projection,
)
from tests.penalties.from_logits.cases import KINDS, TERMS, expected

SHAPE, FEATURES, CLASSES = (3, 5), 3, 9


class Case:
    """Hidden states, an output layer, a reference of other features, targets and a mask."""

    def __init__(self, seed: int, dtype: torch.dtype = torch.float64) -> None:
        made = torch.Generator().manual_seed(seed)

        def drawn(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=made, dtype=torch.float64).to(dtype)

        self.leaves = [drawn(*SHAPE, FEATURES), drawn(CLASSES, FEATURES), drawn(CLASSES)]
        self.beside = [drawn(*SHAPE, 4), drawn(CLASSES, 4), drawn(CLASSES)]
        self.reference = Projection(*self.beside)
        self.targets = torch.randint(0, CLASSES, SHAPE, generator=made)
        self.mask = torch.rand(SHAPE, generator=made) > 0.3
        for leaf in self.leaves:
            leaf.requires_grad_()

    @property
    def projection(self) -> Projection:
        return Projection(*self.leaves)

    def rows(self, name: str, **options: Any) -> Tensor:
        """One value per row in float64, by torch's own operations."""
        z = torch.nn.functional.linear(*(leaf.double() for leaf in self.leaves)).flatten(0, 1)
        r = self.reference.logits().detach().double().flatten(0, 1)
        return expected(name, z, r, self.targets.flatten(), **options).reshape(SHAPE)


def call(name: str, z: Any, case: Case, **options: Any) -> Tensor:
    own = {key: value for key, value in TERMS[name].items() if key != "weight"}
    fn = getattr(from_logits, KINDS.get(name, name))
    second = {"cross_entropy": [case.targets], "entropy": [], "z_loss": []}
    value: Tensor = fn(z, *second.get(name, [case.reference]), **own, **options)
    return value


def gradients(value: Tensor, case: Case) -> list[Tensor]:
    return [each.double() for each in torch.autograd.grad(value, case.leaves)]
