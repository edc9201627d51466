"""Settings of a run that can be changed while it goes on.

`learning_rate`; weight, bound and switch of a term, `<term>.weight`, `<term>.at_most`,
`<term>.at_least` and `<term>.enabled`; weight and switch of a reward, `rewards.<reward>.weight` and
`rewards.<reward>.enabled`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from steelyard.errors import ConfigError, SteelyardError
from steelyard.experiment.build_terms import Terms, check_schedule
from steelyard.experiment.config import Config, TermConfig
from steelyard.experiment.config_errors import format_errors
from steelyard.experiment.config_io import parse_value
from steelyard.experiment.config_rollouts import RewardConfig
from steelyard.experiment.config_weights import fields_of, range_of, schedule_of
from steelyard.experiment.rewards import Reward, check_weights
from steelyard.spec import RegularizerSpec, lookup

RATE = "learning_rate"
_BOUNDS = ("at_most", "at_least")
_KEYS = ("weight", *_BOUNDS, "enabled")
_REWARD_KEYS = ("weight", "enabled")
_REWARDS = "rewards."  # begins the keys of rewards
_NO_WEIGHT = {"weight": None, "at_most": None, "at_least": None, "scale": None}


def term_names(config: Config) -> list[str]:
    """Name of each regularizer of a config; its `use` if it has none there and is not built in.

    No module of the user is imported for that: whoever changes a run need not trust its config.
    """
    return [entry.name or _own_name(entry.use) or entry.use for entry in config.regularizers]


def _reward_names(config: Config) -> list[str]:
    """Name of each reward of a config; that of its function if it has none there."""
    return [entry.name or entry.use.rpartition(":")[2] for entry in config.rewards]


def parse_settings(assignments: Iterable[str]) -> dict[str, Any]:
    """Parse `key=value`, as `kl.weight=0.2`; values are TOML or JSON, or else strings.

    Raises:
        ConfigError: one is not of that form.

    Example:
        >>> parse_settings(["kl.weight=0.2", "judge.enabled=false"])
        {'kl.weight': 0.2, 'judge.enabled': False}
    """
    settings = {}
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals or not key.strip() or not text.strip():
            raise ConfigError(f"a setting must look like kl.weight=0.2, got {assignment!r}.")
        settings[key.strip()] = parse_value(text)
    return settings


def changed_config(config: Config, settings: Mapping[str, Any]) -> Config:
    """Copy of a config with other settings.

    Args:
        config: the config.
        settings: new values by key, as above.

    Raises:
        ConfigError: a key is unknown, or a value breaks its rule.
    """
    return merged_config(config, [settings])


def merged_config(config: Config, changes: Iterable[Mapping[str, Any]]) -> Config:
    """Copy of a config with all of these settings, the later before the earlier.

    It is checked once, however many there are.

    Raises:
        ConfigError: a key is unknown, or a value that is left breaks its rule.
    """
    raw = config.model_dump(mode="json")
    names = {"regularizers": term_names(config), "rewards": _reward_names(config)}
    for key, value in (pair for settings in changes for pair in settings.items()):
        table, index, field = _find(key, names)
        if table == "train":
            raw["train"][RATE] = value
            continue
        entry = raw[table][index]
        if field == "enabled":
            entry["enabled"] = value
            continue
        weight = _bound(field, value, entry["weight"]) if field in _BOUNDS else value
        if range_of(weight) is not None:
            raise ConfigError(f"{key} must be one value, not a range to tune, got {value!r}.")
        entry["weight"] = weight
    try:
        return Config.model_validate(raw)
    except ValidationError as error:
        raise ConfigError(format_errors(error)) from None


def changed_terms(terms: Terms, config: Config) -> Terms:
    """Terms and rewards of a run with the weights, bounds and switches of another config.

    Raises:
        SpecError: a schedule yields an invalid weight.
    """
    pairs = zip(terms.specs, config.regularizers, strict=True)
    specs = tuple(_changed_spec(spec, entry) for spec, entry in pairs)
    for spec in specs:
        check_schedule(spec, config.train.steps)
    both = zip(terms.rewards, config.rewards, strict=True)
    rewards = tuple(_changed_reward(reward, entry) for reward, entry in both)
    for reward in rewards:
        check_weights(reward, config.train.steps)
    return replace(terms, specs=specs, rewards=rewards)


def current_settings(config: Config) -> dict[str, Any]:
    """Value of every setting that can be changed, by key."""
    settings: dict[str, Any] = {RATE: config.train.learning_rate}
    for name, entry in zip(term_names(config), config.regularizers, strict=True):
        weight = entry.weight
        bounds = [key for key in _BOUNDS if isinstance(weight, dict) and key in weight]
        settings |= {f"{name}.{key}": weight[key] for key in bounds}
        settings |= {} if bounds else {f"{name}.weight": weight}
        settings[f"{name}.enabled"] = entry.enabled
    for name, reward in zip(_reward_names(config), config.rewards, strict=True):
        settings[f"{_REWARDS}{name}.weight"] = reward.weight
        settings[f"{_REWARDS}{name}.enabled"] = reward.enabled
    return settings


def _bound(field: str, value: Any, before: Any) -> dict[str, Any]:
    """Bound of a config, with the scale that the term had before."""
    scale = {"scale": before["scale"]} if isinstance(before, dict) and "scale" in before else {}
    return {field: value, **scale}


def _changed_spec(spec: RegularizerSpec, entry: TermConfig) -> RegularizerSpec:
    fields: dict[str, Any] = {**_NO_WEIGHT, **fields_of(entry.weight), "enabled": entry.enabled}
    if all(getattr(spec, key) == value for key, value in fields.items()):
        return spec
    return replace(spec, **fields)


def _changed_reward(reward: Reward, entry: RewardConfig) -> Reward:
    return replace(reward, weight=schedule_of(entry.weight), enabled=entry.enabled)


def _find(key: str, names: Mapping[str, Sequence[str]]) -> tuple[str, int, str]:
    """Table and index of the entry that a key is about, and the setting in it.

    Args:
        key: the key.
        names: names of the entries of `regularizers` and of `rewards`.
    """
    terms, rewards = names["regularizers"], names["rewards"]
    plain = key.removeprefix("regularizers.").removeprefix("train.")
    if plain == RATE:
        return "train", 0, RATE
    name, _, field = plain.rpartition(".")
    name = name.strip('"')
    if name in terms and field in _KEYS:
        return "regularizers", terms.index(name), field
    name = name.removeprefix(_REWARDS).strip('"')
    if plain.startswith(_REWARDS) and name in rewards and field in _REWARD_KEYS:
        return "rewards", rewards.index(name), field
    known = [RATE, *(f"{each}.{setting}" for each in terms for setting in _KEYS)]
    known += [f"{_REWARDS}{each}.{setting}" for each in rewards for setting in _REWARD_KEYS]
    near = difflib.get_close_matches(plain, known, n=1)
    hint = f"; did you mean {near[0]}?" if near else "."
    of_rewards = f", or that of a reward ({', '.join(rewards)}): rewards.<reward>.weight or "
    of_rewards += "rewards.<reward>.enabled"
    raise ConfigError(
        f"a setting must be {RATE}, or that of a term ({', '.join(terms) or 'none'}): "
        f"<term>.weight, <term>.at_most, <term>.at_least or <term>.enabled"
        f"{of_rewards if rewards else ''}, got {key!r}{hint}"
    )


def _own_name(use: str) -> str:
    try:
        name = "" if ":" in use else getattr(lookup(use), "name", "")
    except SteelyardError:  # a name that the user's modules register
        return ""
    return name if isinstance(name, str) else ""
