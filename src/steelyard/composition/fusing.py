"""Terms of a call that are computed together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

import torch

from steelyard.composition.part import Part
from steelyard.gradients import (
    Evaluation,
    Gradients,
    PullBeyond,
    leaves_of,
    tensors_in,
)


@dataclass(frozen=True, eq=False)
class Fused:
    """What came of a group of terms.

    Attributes:
        parts: the terms.
        evaluations: what came of each, without a gradient of its own.
        pull: where they pull together, and each one's norm if tracked.
    """

    parts: Sequence[Part]
    evaluations: Sequence[Evaluation]
    pull: PullBeyond


def groups_of(parts: Sequence[Part], *, tracked: bool) -> list[list[Part]]:
    """The parts that can be computed together, in groups of at least two."""
    groups: list[list[Part]] = []
    for part in (part for part in parts if part.term.may_fuse):
        for group in groups:
            if all(_go_together(member, part, tracked=tracked) for member in group):
                group.append(part)
                break
        else:
            groups.append([part])
    if tracked:  # a group tells no cosine with a term outside of it
        spaces = [part.term.grad_space for part in parts]
        groups = [g for g in groups if spaces.count(g[0].term.grad_space) == len(g)]
    return [group for group in groups if len(group) > 1]


def evaluate_together(group: Sequence[Part], *, tracked: bool) -> Fused | None:
    """What came of a group; None if something is wrong with it.

    Then its terms are to be evaluated one by one, which tells whose fault it is.
    """
    question = group[0].question
    weights = [part.weight for part in group]
    began = perf_counter()
    needed = {need: leaves_of(nest) for need, nest in question.beyond.items()}
    first, *others = (part.term.spec.fn for part in group)
    try:
        joint = first.compute_together(
            others, weights, question.data, question.copied(), tracked=tracked, **needed
        )
        leaves = {need: list(tensors_in(nest)) for need, nest in needed.items()}
        asked = [leaf for each in leaves.values() for leaf in each if leaf.requires_grad]
        differentiated = perf_counter()
        found = iter(torch.autograd.grad(joint.total, asked, allow_unused=True))
        values: list[float] = torch.stack(list(joint.values)).tolist()
    except Exception:  # noqa: BLE001 - whatever one of them raised
        return None
    if question.check_finite and not all(map(math.isfinite, values)):
        return None
    totals: Gradients = {
        need: [next(found) if leaf.requires_grad else None for leaf in each]
        for need, each in leaves.items()
    }
    names = [part.term.name for part in group]
    now, share = perf_counter(), 1 / len(group)
    return Fused(
        group,
        [
            Evaluation(
                value, {}, None, "autograd", share * (now - began), share * (now - differentiated)
            )
            for value in values
        ],
        PullBeyond(
            totals,
            dict(zip(names, joint.norms, strict=True)) if tracked else {},
            {(names[i], names[j]): cosine for (i, j), cosine in joint.cosines.items()},
        ),
    )


def joined(pulls: Sequence[PullBeyond]) -> PullBeyond:
    """Several pulls, of terms of their own, as one."""
    totals: dict[str, list[torch.Tensor | None]] = {}
    norms: dict[str, float] = {}
    cosines: dict[tuple[str, str], float] = {}
    for pull in pulls:
        for need, found in pull.totals.items():
            so_far = totals.setdefault(need, [None] * len(found))
            totals[need] = [_sum(a, b) for a, b in zip(so_far, found, strict=True)]
        norms |= pull.norms
        cosines |= pull.cosines
    return PullBeyond(totals, norms, cosines)


def _sum(a: torch.Tensor | None, b: torch.Tensor | None) -> torch.Tensor | None:
    if a is None or b is None:
        return b if a is None else a
    return a + b


def _go_together(a: Part, b: Part, *, tracked: bool) -> bool:
    same: bool = a.term.spec.fn.fuses_with(b.term.spec.fn, tracked=tracked)
    return same and a.term.spec.needs == b.term.spec.needs
