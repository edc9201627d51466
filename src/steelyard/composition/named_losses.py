"""Losses that a training client knows by name, with Tinker's definitions: sums, never means.

With `logprobs` of the target tokens under the trained policy, `q` their log-probs when they were
sampled (the field `logprobs` of the datum), `A` the advantages and `ratio = exp(logprobs - q)`:

cross_entropy         -sum(logprobs * weights)
importance_sampling   -sum(ratio * A)
ppo                   -sum(min(ratio * A, clip(ratio, low, high) * A))
cispo                 -sum(stop_gradient(clip(ratio, low, high)) * logprobs * A)
dro                   -sum(logprobs * A - beta / 2 * (logprobs - q)^2)
gspo                  -sum(min(s * A, clip(s, low, high) * A)), with one ratio s for each sequence:
                      the geometric mean of `ratio` over its tokens

Tinker names `gspo` and publishes no definition of it: this is the one of its paper, with each token
of a sequence counted, as in the losses above. So its gradient before an update is that of
`importance_sampling`; the paper's mean over sequences has advantages divided by the length of the
sequence. The tokens of a sequence are those with a weight and a sampling log-prob other than 0.

The second term of `dro` does not depend on the advantages. As Tinker publishes it, it has all
tokens: a prompt, whose tokens have a sampling log-prob of 0, is made likelier. Where data have
`weights`, which the published loss does not read, tokens of weight 0 are left out of that term.

The engine trains with them, and `NamedBaseLoss` is one of them as the base loss of a pipeline.

On the engine `loss_fn_config` may also hold a `"temperature"`, which is no setting of the loss: the
log-probs are those of `softmax(logits / temperature)` then.

PPO: Schulman et al., 2017, arXiv:1707.06347. CISPO: MiniMax-M1, 2025, arXiv:2506.13585. DRO:
Richemond et al., 2024, arXiv:2405.19107. GSPO: Zheng et al., 2025, arXiv:2507.18071.

`RewardPart` splits such a loss by reward. The advantages are sums A = sum_k A_k of parts of single
rewards, and the loss f(A) of a token is linear in the size of A on each side of 0, as the minimum
over two multiples of A is. Then

    f(A) = sum_k u A_k + f(0),    u = e (f(e) - f(0)),    e = 1 if A >= 0 else -1

so that all parts have the clip of the *total* advantage, and their gradients add up to the
gradient of the loss. f(0) is 0 but for `dro`, whose second term belongs to no reward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from steelyard.composition.per_datum import PerDatum
from steelyard.errors import InputError
from steelyard.gradients.datum_fields import as_tensor, loss_fn_input
from steelyard.gradients.layout import LogProbs
from steelyard.spec.checks import is_finite

# Key of `loss_fn_config` for the temperature of the policy.
TEMPERATURE = "temperature"
_PART = "part"  # the field of a `RewardPart` among those of its loss
# (log-probs [T] or [T, K], fields of the datum, settings) -> loss of each token, in that shape
Elementwise = Callable[[Tensor, Mapping[str, Tensor], Mapping[str, float]], Tensor]


@dataclass(frozen=True)
class NamedLoss:
    """A loss that callers choose by name.

    Attributes:
        name: its name in `loss_fn`.
        elementwise: computes the loss of each token.
        fields: names of the fields that it reads from a datum, each with the default for a datum
            without it; None: required.
        settings: keys that `loss_fn_config` may hold, with their defaults.
        ratio: the ratio that is clipped, of each token; of a loss over advantages.
        per_sequence: whether the loss of a token depends on the other tokens of its datum.
        has_remainder: whether a part of the loss does not depend on the advantages.
    """

    name: str
    elementwise: Elementwise
    fields: Mapping[str, float | None]
    settings: Mapping[str, float]
    ratio: Callable[[Tensor, Mapping[str, Tensor]], Tensor] | None = None
    per_sequence: bool = False
    has_remainder: bool = False

    def elementwise_with(
        self, settings: Mapping[str, float]
    ) -> Callable[[Tensor, Mapping[str, Tensor]], Tensor]:
        """The loss of each token as a function of log-probs and fields."""
        return lambda logprobs, fields: self.elementwise(logprobs, fields, settings)


def loss_names() -> tuple[str, ...]:
    """Names of the losses that are defined here."""
    return tuple(LOSSES)


def find_loss(
    name: str, config: Mapping[str, float | str] | None, *, argument: str = "loss_fn_config"
) -> tuple[NamedLoss, Mapping[str, float]]:
    """Find a loss and complete its settings with the defaults.

    Args:
        name: name of the loss.
        config: its settings.
        argument: what the user calls the settings, for errors.

    Raises:
        InputError: the name is unknown, or a setting is unknown, no finite number, or a lower
            clip above the upper one.
    """
    loss = LOSSES.get(name) if isinstance(name, str) else None
    if loss is None:
        raise InputError(f"loss_fn must be one of {', '.join(LOSSES)}, got {name!r}.")
    settings = dict(loss.settings)
    for key, value in (config or {}).items():
        if key not in settings:
            raise InputError(
                f"{argument} of {name} may hold {sorted(settings)}, got the key {key!r}."
            )
        if not is_finite(value):
            raise InputError(f"{argument}[{key!r}] must be a finite number, got {value!r}.")
        settings[key] = float(value)
    low, high = (settings.get(f"clip_{end}_threshold", 0.0) for end in ("low", "high"))
    if low > high:
        raise InputError(
            f"clip_low_threshold must be at most clip_high_threshold, got {low:g} and {high:g} "
            f"({argument} of {name})."
        )
    return loss, settings


def split_temperature(
    config: Mapping[str, float | str] | None,
) -> tuple[float, dict[str, float | str]]:
    """Split `loss_fn_config` into the temperature of the policy, 1 by default, and the settings.

    Raises:
        InputError: the temperature is no finite number > 0.
    """
    settings = dict(config or {})
    temperature = settings.pop(TEMPERATURE, 1.0)
    if not is_finite(temperature) or not temperature > 0:  # type: ignore[operator]  # a number
        raise InputError(
            f"loss_fn_config[{TEMPERATURE!r}] must be a finite number > 0, got {temperature!r}."
        )
    return float(temperature), settings


@dataclass(frozen=True)
class NamedBaseLoss:
    """A named loss as the base loss of a pipeline: its sum over all tokens of the batch.

    Attributes:
        loss: the loss.
        settings: its settings, complete.

    Example:
        >>> data = [{"loss_fn_inputs": {"logprobs": [-1.0, -2.0], "advantages": [1.0, -1.0]}}]
        >>> base = NamedBaseLoss.of("importance_sampling")
        >>> base.compute(data, [torch.tensor([-1.0, -2.0])])
        tensor(0., dtype=torch.float64)
    """

    loss: NamedLoss
    settings: Mapping[str, float]

    @classmethod
    def of(cls, name: str, config: Mapping[str, float | str] | None = None) -> Self:
        """Build it from the arguments `loss_fn` and `loss_fn_config` of a training client.

        Raises:
            InputError: as `find_loss`.
        """
        return cls(*find_loss(name, config))

    def __hash__(self) -> int:
        return hash((self.loss.name, *sorted(self.settings.items())))

    @property
    def reads_fields(self) -> tuple[str, ...]:
        """Fields that a datum must have."""
        return tuple(name for name, default in self.loss.fields.items() if default is None)

    def check(self, data: Sequence[Any]) -> None:
        """Check that each datum has the fields that the loss reads.

        Raises:
            InputError: a field is missing; or a datum has one that changes the loss on a server in
                a way that is not known here.
        """
        for index, datum in enumerate(data):
            for name in self.reads_fields:
                if loss_fn_input(datum, name) is None:
                    raise InputError(
                        f"data[{index}].loss_fn_inputs must hold {name!r} for {self.loss.name}, "
                        f"got none.",
                        datum=index,
                    )
            for name in _SERVER_FIELDS:
                if loss_fn_input(datum, name) is not None:
                    raise InputError(
                        f"data[{index}].loss_fn_inputs must not hold {name!r} beside terms: only "
                        f"the server knows what it does to {self.loss.name}. Use loss_fn_config.",
                        datum=index,
                    )

    def elementwise(self, data: Sequence[Any], logprobs: LogProbs) -> list[Tensor]:
        """Compute the loss of each token, in the shapes of the log-probs.

        Raises:
            InputError: a field does not have the shape of the log-probs.
        """
        rows = [logprobs] if isinstance(logprobs, Tensor) else list(logprobs)
        return self.by_row(data, rows, self.loss.elementwise_with(self.settings))

    def by_row(
        self,
        data: Sequence[Any],
        rows: Sequence[Tensor],
        function: Callable[[Tensor, Mapping[str, Tensor]], Tensor],
        part: str = "",
    ) -> list[Tensor]:
        """Apply a function of log-probs and fields that gives a number for each token.

        Args:
            data: the batch.
            rows: log-probs of each datum.
            function: `(logprobs, fields) -> numbers`, on flat vectors.
            part: name of a field that the function gets as `"part"`; empty for none.

        Raises:
            InputError: a field does not have the shape of the log-probs, or is missing.
        """
        fields = [self._read(index, data[index], row, part) for index, row in enumerate(rows)]
        if self.loss.per_sequence:
            values = [function(row.reshape(-1), of) for row, of in zip(rows, fields, strict=True)]
        else:  # elementwise, so all data go through it as one vector
            flat = torch.cat([row.reshape(-1) for row in rows])
            joined = {name: torch.cat([of[name] for of in fields]) for name in fields[0]}
            values = list(torch.split(function(flat, joined), [row.numel() for row in rows]))
        return [value.reshape(row.shape) for value, row in zip(values, rows, strict=True)]

    def denominator(self, data: Sequence[Any], shapes: Sequence[torch.Size]) -> float | None:  # noqa: ARG002 - of a mean
        """Number that the sum is divided by; None if the loss is the sum."""
        return None

    def compute(self, data: Sequence[Any], logprobs: LogProbs) -> Tensor:
        """Compute the loss of a batch, summed in float64: a batch may have very many tokens."""
        losses = self.elementwise(data, logprobs)
        return torch.cat([loss.reshape(-1) for loss in losses]).sum(dtype=torch.float64)

    def per_datum(self, data: Sequence[Any], shapes: Sequence[torch.Size]) -> PerDatum:
        """Form per datum: see `Separable`.

        Raises:
            InputError: a field does not have the shape of the log-probs.
        """
        fields = self.fields_of(data, shapes)
        return PerDatum(self._elementwise, fields, "sum", all_tokens=True)

    def fields_of(
        self, data: Sequence[Any], shapes: Sequence[torch.Size], part: str = ""
    ) -> dict[str, list[Tensor]]:
        """Fields of each datum by the names of arguments; see `by_row`, `named_fields`."""
        rows = [
            self._read(index, data[index], torch.empty(shape), part)
            for index, shape in enumerate(shapes)
        ]
        return {
            f"field_{name}": [row[name].reshape(s) for row, s in zip(rows, shapes, strict=True)]
            for name in rows[0]
        }

    def _read(self, index: int, datum: Any, row: Tensor, part: str) -> dict[str, Tensor]:
        fields = {
            name: _field(index, datum, name, row, default)
            for name, default in self.loss.fields.items()
        }
        return {**fields, _PART: _field(index, datum, part, row, None)} if part else fields

    def _elementwise(self, logprobs: Tensor, **fields: Tensor) -> Tensor:
        return self.loss.elementwise(logprobs, named_fields(fields), self.settings)


@dataclass(frozen=True)
class RewardPart:
    """The part of a loss over advantages that is due to one reward, as a term of weight 0.

    It is a term, so that it is differentiated and compared as all terms are. Its values and its
    gradients, over all rewards, add up to those of the loss. It is not the loss that the reward
    alone would give: the scale of its advantages and the clip are those of all rewards together.

    Attributes:
        base: the loss.
        field: field of the datum with the part of the advantages that is due to the reward, of the
            shape of the log-probs; empty for what is due to none.
    """

    base: NamedBaseLoss
    field: str = ""

    def compute(self, data: Sequence[Any], logprobs: LogProbs) -> Tensor:
        """Compute the part of the loss of a batch, divided as the loss is.

        Raises:
            InputError: a field is missing, or does not have the shape of the log-probs.
        """
        rows = [logprobs] if isinstance(logprobs, Tensor) else list(logprobs)
        losses = self.base.by_row(data, rows, self._part, self.field)
        total = torch.cat([loss.reshape(-1) for loss in losses]).sum(dtype=torch.float64)
        return total / (self.base.denominator(data, [row.shape for row in rows]) or 1.0)

    def per_datum(self, data: Sequence[Any], shapes: Sequence[torch.Size]) -> PerDatum:
        """Form per datum: see `Separable`.

        Raises:
            InputError: a field is missing, or does not have the shape of the log-probs.
        """
        return PerDatum(
            self._values,
            self.base.fields_of(data, shapes, self.field),
            self.base.denominator(data, shapes) or "sum",
            all_tokens=True,
        )

    def __hash__(self) -> int:
        return hash((self.base, self.field))

    def _values(self, logprobs: Tensor, **fields: Tensor) -> Tensor:
        return self._part(logprobs, named_fields(fields))

    def _part(self, logprobs: Tensor, fields: Mapping[str, Tensor]) -> Tensor:
        advantages = fields["advantages"]

        def loss_at(advantage: Tensor) -> Tensor:
            own = {**fields, "advantages": advantage}
            return self.base.loss.elementwise(logprobs, own, self.base.settings)

        nothing = torch.zeros_like(advantages)
        if not self.field:
            return loss_at(nothing)
        sign = torch.where(advantages >= 0, torch.ones_like(advantages), -1.0)
        linear = loss_at(sign)
        if self.base.loss.has_remainder:
            linear = linear - loss_at(nothing)
        return sign * linear * fields[_PART]


def named_fields(arguments: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Fields by their names, from the arguments of a form per datum; see `fields_of`."""
    return {name.removeprefix("field_"): value for name, value in arguments.items()}


def _field(index: int, datum: Any, name: str, logprobs: Tensor, default: float | None) -> Tensor:
    """Field of a datum as a vector, or its default."""
    given = loss_fn_input(datum, name)
    if given is None and default is not None:
        return torch.full_like(logprobs, default).reshape(-1)
    if given is None:
        raise InputError(f"data[{index}].loss_fn_inputs must hold {name!r}, got none.", datum=index)
    values = as_tensor(given)
    if values.shape != logprobs.shape:
        raise InputError(
            f"data[{index}].loss_fn_inputs[{name!r}] must have the shape of the log-probs, "
            f"{list(logprobs.shape)}, got {list(values.shape)}.",
            datum=index,
        )
    return values.to(logprobs).reshape(-1)


def _cross_entropy(
    logprobs: Tensor, fields: Mapping[str, Tensor], _: Mapping[str, float]
) -> Tensor:
    return -logprobs * fields["weights"]


def _importance_sampling(
    logprobs: Tensor, fields: Mapping[str, Tensor], _: Mapping[str, float]
) -> Tensor:
    return -_ratio(logprobs, fields) * fields["advantages"]


def _ppo(logprobs: Tensor, fields: Mapping[str, Tensor], settings: Mapping[str, float]) -> Tensor:
    ratio, advantages = _ratio(logprobs, fields), fields["advantages"]
    # The minimum is the pessimistic bound: for A > 0 no gain from a ratio above `high`, for A < 0
    # none from a ratio below `low`. There the clipped branch is constant and the gradient is 0.
    return -torch.minimum(ratio * advantages, _clipped(ratio, settings) * advantages)


def _cispo(logprobs: Tensor, fields: Mapping[str, Tensor], settings: Mapping[str, float]) -> Tensor:
    # The ratio is a fixed weight: every token keeps the gradient -ratio * A, where PPO's clipping
    # would take the token out of the update.
    ratio = _clipped(_ratio(logprobs, fields), settings).detach()
    return -ratio * logprobs * fields["advantages"]


def _dro(logprobs: Tensor, fields: Mapping[str, Tensor], settings: Mapping[str, float]) -> Tensor:
    kept = (fields["weights"] != 0).to(logprobs)
    squared_log_ratio = (logprobs - fields["logprobs"]).square() * kept
    return -(logprobs * fields["advantages"] - 0.5 * settings["beta"] * squared_log_ratio)


def _gspo(logprobs: Tensor, fields: Mapping[str, Tensor], settings: Mapping[str, float]) -> Tensor:
    ratio, advantages = _sequence_ratio(logprobs, fields), fields["advantages"]
    return -torch.minimum(ratio * advantages, _clipped(ratio, settings) * advantages)


def _ratio(logprobs: Tensor, fields: Mapping[str, Tensor]) -> Tensor:
    return torch.exp(logprobs - fields["logprobs"])


def _sequence_ratio(logprobs: Tensor, fields: Mapping[str, Tensor]) -> Tensor:
    """Ratio of the sequence, at each of its tokens: exp(mean log ratio); 1 at other tokens."""
    kept = ((fields["weights"] != 0) & (fields["logprobs"] != 0)).to(logprobs)
    mean = ((logprobs - fields["logprobs"]) * kept).sum() / kept.sum().clamp_min(1.0)
    return torch.exp(mean * kept)


def _clipped(ratio: Tensor, settings: Mapping[str, float]) -> Tensor:
    return ratio.clamp(settings["clip_low_threshold"], settings["clip_high_threshold"])


_POLICY_FIELDS = {"logprobs": None, "advantages": None}
_WEIGHTED_FIELDS = {**_POLICY_FIELDS, "weights": 1.0}
# Fields that the SDK sends as numbers of each token, and whose meaning only the server knows.
_SERVER_FIELDS = ("clip_low_threshold", "clip_high_threshold", "sequence_ratio_mask")
# Ratios of whole sequences are close to 1. The clips of the paper.
_GSPO_CLIPS = {"clip_low_threshold": 1 - 3e-4, "clip_high_threshold": 1 + 4e-4}
_PPO_CLIPS = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
# No lower bound: a ratio below 1 then weighs a token as importance sampling does. Tinker's default.
_CISPO_CLIPS = {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}
LOSSES = {
    loss.name: loss
    for loss in (
        NamedLoss("cross_entropy", _cross_entropy, {"weights": 1.0}, {}),
        NamedLoss("importance_sampling", _importance_sampling, _POLICY_FIELDS, {}, _ratio),
        NamedLoss("ppo", _ppo, _POLICY_FIELDS, _PPO_CLIPS, _ratio),
        NamedLoss("cispo", _cispo, _POLICY_FIELDS, _CISPO_CLIPS, _ratio),
        NamedLoss("dro", _dro, _WEIGHTED_FIELDS, {"beta": 0.05}, _ratio, has_remainder=True),
        NamedLoss(
            "gspo",
            _gspo,
            _WEIGHTED_FIELDS,
            _GSPO_CLIPS,
            _sequence_ratio,
            per_sequence=True,
        ),
    )
}
