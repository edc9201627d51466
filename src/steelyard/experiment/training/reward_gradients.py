"""Gradient of the base loss by reward: terms of weight 0 that are compared with the other terms.

The advantage of an answer is the sum of parts of single rewards (`composition.advantages`), and so
is the gradient of a loss over advantages (`RewardPart` of `composition.named_losses`). Each part is
a term of weight 0, so that the pipeline computes its norm and its cosines in any grad space. With
respect to the log-probs, and before an update, when all ratios are 1, the cosine of two rewards is
the correlation of their advantages, each counted once for every token of its answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from steelyard.composition.named_losses import RewardPart
from steelyard.experiment.training.base_losses import PolicyLoss
from steelyard.output.custom_loss import CustomLossOutput
from steelyard.spec.error_messages import BASE
from steelyard.spec.regularizer import RegularizerSpec

_PREFIX = "rewards/"
_REMAINDER = "base_loss/remainder"


def advantage_field(reward: str) -> str:
    """Name of the field of a datum with the part of its advantages that is due to a reward."""
    return f"advantages/{reward}"


@dataclass(frozen=True)
class RewardGradients:
    """Terms that split the gradient of the base loss by reward.

    Attributes:
        rewards: names of the rewards that have a weight.
        specs: a term for each of them, and for what is due to none of them; empty where the base
            loss has a single part.
    """

    rewards: tuple[str, ...] = ()
    specs: tuple[RegularizerSpec, ...] = ()

    @classmethod
    def of(cls, loss: Any, weights: Mapping[str, float]) -> RewardGradients:
        """Build the terms.

        Args:
            loss: the base loss; one of the user's own is not split.
            weights: weights of the enabled rewards, by name.
        """
        rewards = tuple(name for name, weight in weights.items() if weight)
        if not isinstance(loss, PolicyLoss):
            return cls()
        parts = {f"{_PREFIX}{name}": RewardPart(loss, advantage_field(name)) for name in rewards}
        if loss.loss.has_remainder:
            parts[_REMAINDER] = RewardPart(loss)
        if len(parts) < 2:  # noqa: PLR2004 - the only reward is the whole loss
            return cls(rewards)
        specs = [
            # An aggregator leaves an anchor alone, and a term of weight 0 adds nothing to the sum.
            RegularizerSpec(part, 0.0, name, run_in="inline", anchor=True)
            for name, part in parts.items()
        ]
        return cls(rewards, tuple(specs))

    def split(self, output: CustomLossOutput) -> tuple[CustomLossOutput, dict[str, float]]:
        """Take the terms out of an output, and return it with their metrics.

        `rewards/<name>/grad_norm`; `rewards/<name>/cosines/base`, `…/cosines/rewards/<other>` and
        `…/cosines/regularizers/<term>`; `base_loss/remainder/grad_norm` of what is due to no
        reward. Empty unless norms were tracked.
        """
        names = {str(spec.name) for spec in self.specs}
        metrics = dict(self._metrics(output, names))
        if not names:
            return output, metrics
        gradients = output.term_gradients
        return (
            replace(
                output,
                regularizers=_without(output.regularizers, names),
                term_gradients=None if gradients is None else _without(gradients, names),
                cosines={
                    pair: cosine
                    for pair, cosine in output.cosines.items()
                    if names.isdisjoint(pair)
                },
                factors=_without(output.factors, names),
                not_run=tuple(name for name in output.not_run if name not in names),
            ),
            metrics,
        )

    def progress_without(self, progress: Mapping[str, float]) -> dict[str, float]:
        """Changes of the terms by a step, without those of the parts."""
        return _without(progress, {str(spec.name) for spec in self.specs})

    def _metrics(self, output: CustomLossOutput, names: set[str]) -> Iterator[tuple[str, float]]:
        if not names and len(self.rewards) == 1 and output.base_loss.grad_norm is not None:
            key = f"{_PREFIX}{self.rewards[0]}"
            yield f"{key}/grad_norm", output.base_loss.grad_norm
            for pair, cosine in output.cosines.items():
                if pair[0] == BASE:
                    yield f"{key}/cosines/regularizers/{pair[1]}", cosine
        for name, term in output.regularizers.items():
            norm = term.grad_norm
            if name in names and norm is not None:
                yield f"{name}/grad_norm", norm
        for (first, second), cosine in output.cosines.items():
            part, other = (first, second) if first in names else (second, first)
            if part in names:
                yield f"{part}/cosines/{_place(other, names)}", cosine


def _place(name: str, parts: set[str]) -> str:
    """Name of a term in the key of a cosine."""
    return name if name == BASE or name in parts else f"regularizers/{name}"


def _without(by_name: Mapping[str, Any], names: set[str]) -> dict[str, Any]:
    return {name: value for name, value in by_name.items() if name not in names}
