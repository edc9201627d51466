"""Change or pause a run while it goes on.

requests.jsonl   settings that `steelyard set`, or the page of `watch`, asks for
changes.jsonl    those that the run has taken, with the step from which on they hold
paused           there while the run is to wait between two steps

Only the run itself writes `changes.jsonl`. A resumed run takes the changes there at the same steps
again, before it reads further requests, so that it repeats every bit.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from steelyard.errors import ConfigError, RunError, SteelyardError
from steelyard.experiment.config.reading import parse_value, validate_config
from steelyard.experiment.config.schema import Config, TermConfig
from steelyard.experiment.config.weights import range_of, schedule_of, weight_fields
from steelyard.experiment.rewards.reward import check_weights
from steelyard.experiment.run.folder import RunFolder, is_locked
from steelyard.experiment.training.terms import Terms, check_schedule
from steelyard.output.redaction import redact
from steelyard.spec.registry import lookup
from steelyard.spec.regularizer import RegularizerSpec


def request_settings(
    folder: str | Path, settings: Iterable[str] | Mapping[str, Any]
) -> tuple[dict[str, Any], bool]:
    """Ask a run for other settings, from its next step on.

    Args:
        folder: run folder.
        settings: `key=value`, or values by key; see `changed_config`.

    Returns:
        The settings, and whether the run is going on; if it is not, it takes them when resumed.

    Raises:
        RunError: the folder holds no run, the run has ended, or the folder is not writable.
        ConfigError: a key is unknown, or a value breaks its rule.
    """
    run = _unfinished(folder)
    parsed = dict(settings) if isinstance(settings, Mapping) else parse_settings(settings)
    # Together with what was asked for before: a bound may need the scale of an earlier one.
    changed_config(current_config(run), parsed)
    if parsed:
        line = json.dumps(redact({"time": time.time(), "set": parsed}))
        _write(run.requests, f"{line}\n".encode())
    return parsed, is_locked(run.path) is not False


def describe_settings(folder: str | Path) -> dict[str, Any]:
    """Value of every setting of a run that can be changed, by key, with what was asked for.

    Raises:
        RunError: the folder holds no run.
    """
    config = current_config(RunFolder(folder))
    settings: dict[str, Any] = {RATE: config.train.learning_rate}
    for name, entry in zip(term_names(config), config.regularizers, strict=True):
        weight = entry.weight
        bounds = [key for key in _BOUNDS if isinstance(weight, dict) and key in weight]
        settings |= {f"{name}.{key}": weight[key] for key in bounds}
        settings |= {} if bounds else {f"{name}.weight": weight}
        settings[f"{name}.enabled"] = entry.enabled
    for name, reward in zip(reward_names(config), config.rewards, strict=True):
        settings[f"{_REWARDS}{name}.weight"] = reward.weight
        settings[f"{_REWARDS}{name}.enabled"] = reward.enabled
    return settings


def current_config(run: RunFolder) -> Config:
    """Config of a run with all changes that were asked for; those that are invalid are left out.

    Raises:
        RunError: the folder holds no run.
    """
    config, requests = run.config(), _complete_requests(run.requests, 0).settings
    try:
        return merged_config(config, requests)
    except ConfigError:
        pass
    for settings in requests:
        with contextlib.suppress(ConfigError):  # the run refuses it too
            config = changed_config(config, settings)
    return config


def pause_run(folder: str | Path) -> None:
    """Let a run wait after its current step, until `continue_run`.

    Raises:
        RunError: the folder holds no run, no process trains it, or it is not writable.
    """
    run = _unfinished(folder)
    if is_locked(run.path) is False:
        raise RunError(
            f"{run.path} must be a run that is going on, and no process trains it: go on with "
            f"'steelyard resume {run.path}'."
        )
    _write(run.paused, b"")


def continue_run(folder: str | Path) -> bool:
    """Let a paused run go on; return whether it was paused.

    Raises:
        RunError: the folder holds no run, the run has ended, or it is not writable.
    """
    run = _unfinished(folder)
    try:
        run.paused.unlink()
    except FileNotFoundError:
        return False
    except OSError as error:
        raise _not_writable(run.path, error) from error
    return True


class ChangeLog:
    """The changes of a run, as the run itself takes them.

    Args:
        run: the run folder, which is locked.
    """

    def __init__(self, run: RunFolder) -> None:
        self._run = run
        self._recorded = run.changes()
        # Number of bytes of the requests that were read.
        self._size = max((record["requests"] for record in self._recorded), default=0)

    def apply(
        self, config: Config, terms: Terms, step: int, say: Callable[[str], None]
    ) -> tuple[Config, Terms]:
        """Apply the changes that hold from this step on, and record those that are new.

        New requests wait until all recorded changes are repeated. Invalid ones are left out.

        Args:
            config: config of the run so far.
            terms: its terms so far.
            step: number of the step that comes next.
            say: called with a message about each change.

        Returns:
            The config and the terms from this step on; the same objects if nothing changes.
        """
        due = [record for record in self._recorded if record["step"] <= step]
        self._recorded = self._recorded[len(due) :]
        for settings in (settings for record in due for settings in record["set"]):
            config = changed_config(config, settings)
            terms = changed_terms(terms, config)
        if self._recorded:
            return config, terms
        requests = _complete_requests(self._run.requests, self._size)
        self._size = requests.end
        for number in requests.damaged:
            say(f"step {step}: line {number} of {self._run.requests.name} is no request: left out")
        taken = []
        for settings in requests.settings:
            shown = ", ".join(f"{key} = {value}" for key, value in settings.items())
            try:
                changed = changed_config(config, settings)
                config, terms = changed, changed_terms(terms, changed)
            except SteelyardError as error:
                say(f"step {step}: {shown} was refused: {error}")
                continue
            say(f"step {step}: {shown} from now on")
            taken.append(settings)
        if taken:
            self._run.append_changes([{"step": step, "set": taken, "requests": self._size}])
        return config, terms


def _unfinished(folder: str | Path) -> RunFolder:
    run = RunFolder(folder)
    if not run.holds_run:
        run.config()  # raises
    run.check_trained_here()
    if run.result() is not None:
        raise RunError(
            f"{run.path} must be a run that has not ended, and it is done: train another one with "
            f"other settings."
        )
    return run


def _write(path: Path, content: bytes) -> None:
    """Append to a file in one write, so that lines of several processes do not mix.

    A line that an earlier writer left incomplete, on a full disk, is ended first: it asks for
    nothing, and must not swallow this one.
    """
    try:
        file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        try:
            size = os.fstat(file).st_size
            if content and size and os.pread(file, 1, size - 1) != b"\n":
                content = b"\n" + content
            written = os.write(file, content)
            os.fsync(file)
        finally:
            os.close(file)
    except OSError as error:
        raise _not_writable(path.parent, error) from error
    if written < len(content):
        raise RunError(
            f"{path} must take a line of {len(content)} bytes, and took {written}: the disk is "
            f"full. Make room there, and give the command again; nothing was changed."
        )


class _Requests(NamedTuple):
    """Whole lines of `requests.jsonl`: settings, numbers of damaged lines, and the byte after."""

    settings: list[dict[str, Any]]
    damaged: list[int]
    end: int


def _complete_requests(path: Path, start: int) -> _Requests:
    """Settings of the whole lines of a file from a byte on."""
    try:
        with path.open("rb") as file:
            number = 1 + file.read(start).count(b"\n")
            content = file.read()
    except OSError:
        return _Requests([], [], start)
    whole = content[: content.rfind(b"\n") + 1]
    requests = _Requests([], [], start + len(whole))
    for line in whole.split(b"\n")[:-1]:
        try:
            request = json.loads(line) if line.strip() else None
        except (ValueError, RecursionError):
            request = {}
        if isinstance(request, dict) and isinstance(request.get("set"), dict):
            requests.settings.append(request["set"])
        elif request is not None:
            requests.damaged.append(number)
        number += 1
    return requests


def _not_writable(path: Path, error: OSError) -> RunError:
    return RunError(
        f"{path} must be writable to change the run there, and it is not: {error.strerror}. Give "
        f"the command on the machine, and as the user, that trains it."
    )


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


def reward_names(config: Config) -> list[str]:
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
    names = {"regularizers": term_names(config), "rewards": reward_names(config)}
    for key, value in (pair for settings in changes for pair in settings.items()):
        table, index, field = _find(key, names)
        if table == "train":
            if value is None:
                raise ConfigError(f"{RATE} must be a number >= 0 or a schedule, got None.")
            raw["train"][RATE] = value
            continue
        entry = raw[table][index]
        if field == "enabled":
            entry["enabled"] = value
            continue
        weight, before = value, entry["weight"]
        if field in _BOUNDS:  # with the scale that the term had before
            has_scale = isinstance(before, dict) and "scale" in before
            weight = {field: value, **({"scale": before["scale"]} if has_scale else {})}
        if range_of(weight) is not None:
            raise ConfigError(f"{key} must be one value, not a range to tune, got {value!r}.")
        entry["weight"] = weight
    return validate_config(raw)


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
    rewards = tuple(
        replace(reward, weight=schedule_of(entry.weight), enabled=entry.enabled)
        for reward, entry in both
    )
    for reward in rewards:
        check_weights(reward, config.train.steps)
    return replace(terms, specs=specs, rewards=rewards)


def _changed_spec(spec: RegularizerSpec, entry: TermConfig) -> RegularizerSpec:
    fields: dict[str, Any] = {**_NO_WEIGHT, **weight_fields(entry.weight), "enabled": entry.enabled}
    if all(getattr(spec, key) == value for key, value in fields.items()):
        return spec
    return replace(spec, **fields)


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
    known = [RATE, *(f"{term}.{setting}" for term in terms for setting in _KEYS)]
    known += [f"{_REWARDS}{reward}.{setting}" for reward in rewards for setting in _REWARD_KEYS]
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
