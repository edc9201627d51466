"""One checkpoint: its contents, the training state that they come from, and its files.

A checkpoint holds the LoRA weights, peft's description of the adapter, a description of the
training run, and, unless it is for sampling alone, the optimizer's state and the states of
companions: objects that were attached to the training client, such as the multipliers and moving
averages of its regularizers. It does not hold the base model, nor gradients that were accumulated
and not yet used by a step. Its files, with a SHA-256 sum of each:

checkpoint.json             the training run, its settings and its companions; the sums of all files
adapter_model.safetensors   the LoRA weights
adapter_config.json         the adapter's settings, as peft writes them
optimizer.safetensors       AdamW's state; a checkpoint for sampling has none

A file cannot hold the sum of its own bytes. The sum of `checkpoint.json` is that of its values
without that sum, in one fixed spelling. Format 1, which version 0.1.0 wrote, has no sums; for it
the types of the values and the finiteness of the tensors are checked alone. `checkpoints` gives
checkpoints their names.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from steelyard.engine.adapter import Adapter, LoraSettings
from steelyard.engine.memory import TokenBudget, is_limits_state
from steelyard.engine.model import Model
from steelyard.errors import CheckpointError, InputError, StateError
from steelyard.output.run_files import write_atomic
from steelyard.spec.checks import is_finite, is_whole
from steelyard.spec.protocol import Stateful

# Seconds, 136 years: a date behind the year 9999 could not be listed.
_MAX_TTL = 2**32

FORMAT = 2
DESCRIPTION = "checkpoint.json"
WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
OPTIMIZER = "optimizer.safetensors"
_SUMS = "sha256"
_LIMITS = "graph_limits"

Sums = Mapping[str, str]


@dataclass(frozen=True)
class CheckpointContents:
    """Everything that a checkpoint holds.

    Attributes:
        info: the training run, its LoRA settings, times, metadata, and the companions' states;
            JSON values.
        weights: the LoRA matrices by key, as peft names them.
        optimizer_state: AdamW's step counts and moments by `name/key`, empty before the first
            step; None in a checkpoint for sampling.
        config: the adapter's settings as peft writes them.
    """

    info: Mapping[str, Any]
    weights: Mapping[str, Tensor]
    optimizer_state: Mapping[str, Tensor] | None
    config: Mapping[str, Any]


class TrainingState:
    """State of one training run: captured into the contents of a checkpoint, restored from them.

    Args:
        model: the base model.
        adapter: the weights and the optimizer.
        token_budget: limits of its graphs.
        model_id: the name of the training run.
        user_metadata: copied into each checkpoint.
    """

    def __init__(
        self,
        model: Model,
        adapter: Adapter,
        token_budget: TokenBudget,
        model_id: str,
        user_metadata: Mapping[str, str],
    ) -> None:
        self._model = model
        self._token_budget = token_budget
        self._adapter = adapter
        self._model_id = model_id
        self._user_metadata = user_metadata
        self._companions: dict[str, Stateful] = {}
        self._loaded: dict[str, Any] = {}
        self._loaded_path = ""

    def attach(self, name: str, companion: Stateful) -> None:
        """Include the state of `companion` from now on; restore it if one was loaded before."""
        self._companions[name] = companion
        if name in self._loaded:
            self._restore_companion(name)

    def companion_states(self) -> dict[str, Any]:
        """Current state of each companion, by name."""
        return {name: companion.state_dict() for name, companion in self._companions.items()}

    def restore_companions(self) -> None:
        """Load into each companion the state that the last restored checkpoint has for it.

        Raises:
            CheckpointError: a companion cannot load its state.
        """
        for name in self._companions.keys() & self._loaded.keys():
            self._restore_companion(name)

    def _restore_companion(self, name: str) -> None:
        try:
            self._companions[name].load_state_dict(self._loaded[name])
        except Exception as error:  # a companion is anyone's, and a state may be anything
            raise CheckpointError(
                f"the checkpoint {self._loaded_path!r} must hold what the state_dict of {name!r} "
                f"returned, and loading it failed: {type(error).__name__}: {error}"
            ) from error

    def describe(
        self, ttl_seconds: int | None, user_metadata: Mapping[str, str] | None
    ) -> dict[str, Any]:
        """`info` of a checkpoint that is made now, without the companions.

        Raises:
            InputError: `ttl_seconds` breaks a rule.
        """
        check_ttl(ttl_seconds)
        now = time.time()
        return {
            "base_model": self._model.source.name,
            "model_id": self._model_id,
            "created_at": now,
            "expires_at": None if ttl_seconds is None else now + ttl_seconds,
            "user_metadata": {**self._user_metadata, **(user_metadata or {})},
            "lora": asdict(self._adapter.settings),
        }

    def capture(self, info: Mapping[str, Any], *, optimizer: bool) -> CheckpointContents:
        """Copy the adapter's weights, and the optimizer's state if `optimizer`."""
        lora: Any = self._model.lora_config(self._adapter.settings)
        # peft keeps module names in a set; JSON has none, and sorting makes files comparable.
        config = {k: sorted(v) if isinstance(v, set) else v for k, v in lora.to_dict().items()}
        source, limits = self._model.source, self._token_budget.state_dict()
        config["base_model_name_or_path"] = source.location() if source.location else source.name
        return CheckpointContents(
            info={**info, **({_LIMITS: limits} if limits else {})},
            weights=self._adapter.weights(),
            optimizer_state=self._adapter.optimizer_state() if optimizer else None,
            config=config,
        )

    def restore(self, contents: CheckpointContents, path: str, *, optimizer: bool) -> None:
        """Load the weights, and the optimizer's state if `optimizer`; otherwise it starts anew.

        The companions' states are kept for `restore_companions`.

        Args:
            contents: of the checkpoint.
            path: its path, for error messages.
            optimizer: whether the optimizer's state is loaded too.

        Raises:
            CheckpointError: the checkpoint is of another model, has no optimizer, or does not fit
                the adapter. Nothing has changed then.
        """
        ours, trained = self._model.source.name, contents.info.get("base_model")
        if trained != ours:
            raise CheckpointError(
                f"path must be that of a checkpoint of {ours!r}, and {path!r} is of {trained!r}."
            )
        if optimizer and contents.optimizer_state is None:
            raise CheckpointError(
                f"path must be that of a checkpoint with an optimizer, as save_state writes it, "
                f"and {path!r} holds weights alone."
            )
        try:
            optimizer_state = contents.optimizer_state if optimizer else None
            # An empty state is that of an optimizer that has made no step: a fresh one.
            self._adapter.load(contents.weights, optimizer_state or None)
        except StateError as error:
            raise CheckpointError(f"the checkpoint {path!r} does not fit: {error}") from error
        self._token_budget.load_state_dict(contents.info.get(_LIMITS, {}))
        self._loaded = dict(contents.info.get("companions", {}))
        self._loaded_path = path


def check_ttl(ttl_seconds: int | None) -> None:
    """Check the time after which a checkpoint expires.

    Raises:
        InputError: it breaks a rule.
    """
    if ttl_seconds is None:
        return
    if not (is_whole(ttl_seconds, at_least=1) and ttl_seconds <= _MAX_TTL):
        raise InputError(
            f"ttl_seconds must be a whole number from 1 to 2**32 or None, got {ttl_seconds!r}."
        )


def encode(name: str, contents: CheckpointContents) -> dict[str, bytes]:
    """Contents of each file of the checkpoint `name`.

    Raises:
        CheckpointError: `contents.info` or `contents.config` are no JSON, or a weight is NaN or
            infinite, so that the checkpoint could not be loaded.
    """
    tensors = {**contents.weights, **(contents.optimizer_state or {})}
    if (broken := _not_finite(tensors)) is not None:
        raise CheckpointError(
            f"the weights of the checkpoint {name!r} must be finite, and {broken} holds NaN or "
            f"infinity: go back to the checkpoint before, with a lower learning rate or "
            f"grad_clip_norm."
        )
    try:
        files = {CONFIG: _json(contents.config)}
        # As it will be read back, so that its sum is the same: without tuples and numeric keys.
        info = json.loads(json.dumps({**contents.info, "format": FORMAT}))
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"what is saved with the checkpoint {name!r} must be ready for JSON, and it is not: "
            f"{error}"
        ) from error
    files[WEIGHTS] = safetensors.torch.save(dict(contents.weights))
    if contents.optimizer_state is not None:
        files[OPTIMIZER] = safetensors.torch.save(dict(contents.optimizer_state))
    sums = {file: hashlib.sha256(content).hexdigest() for file, content in files.items()}
    return {**files, DESCRIPTION: _describe(info, sums)}


def write(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write files into a folder, and flush them and their names to the disk."""
    for name, content in files.items():
        with (folder / name).open("wb") as file:
            file.write(content)
            # The data must be on the disk before the link is, or a power cut could leave a link to
            # empty files.
            file.flush()
            os.fsync(file.fileno())
    flush_names(folder)


def flush_names(folder: Path) -> None:
    """Flush the names in a folder to the disk, on systems that can."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def read(folder: Path, path: str) -> CheckpointContents:
    """Read the checkpoint in a folder, and check it.

    Args:
        folder: of its files.
        path: of the checkpoint as the caller gave it, for error messages.

    Raises:
        CheckpointError: there is none, or a file of it is damaged or cannot be read.
    """
    info, sums = _read_description(folder, path)
    # Without sums, a checkpoint for sampling is known by the file that is not there.
    has_optimizer = OPTIMIZER in sums if sums else os.path.lexists(folder / OPTIMIZER)
    with _damage_of(CONFIG, path):
        config = _parse(_read_bytes(folder, CONFIG, sums))
    return CheckpointContents(
        info=info,
        weights=_read_tensors(folder, WEIGHTS, sums, path),
        optimizer_state=_read_tensors(folder, OPTIMIZER, sums, path) if has_optimizer else None,
        config=config,
    )


def read_info(folder: Path, path: str) -> dict[str, Any]:
    """Read the `info` of a checkpoint alone, without its tensors.

    Raises:
        CheckpointError: there is no checkpoint, or its description is damaged or cannot be read.
    """
    return _read_description(folder, path)[0]


def change_info(folder: Path, path: str, changes: Mapping[str, Any]) -> None:
    """Replace values of a checkpoint's `info`, atomically and without reading its tensors.

    Raises:
        CheckpointError: there is no checkpoint, or its description is damaged or cannot be read.
        OSError: the file cannot be written.
    """
    info, sums = _read_description(folder, path)
    write_atomic(folder / DESCRIPTION, _describe({**info, **changes}, sums))


def not_found(path: object, reason: object = None) -> CheckpointError:
    """Error for a path at which there is no checkpoint."""
    why = "" if reason is None else f": {reason}"
    return CheckpointError(f"path must be that of a checkpoint, and {path!r} is none{why}.")


def _describe(info: Mapping[str, Any], sums: Sums) -> bytes:
    """Content of `checkpoint.json`; `sums` are those of the other files, empty in format 1."""
    if not sums:
        return _json(info)
    return _json({**info, _SUMS: {**sums, DESCRIPTION: _own_sum(info, sums)}})


def _own_sum(info: Mapping[str, Any], sums: Sums) -> str:
    return hashlib.sha256(_json({**info, _SUMS: sums})).hexdigest()


def _read_description(folder: Path, path: str) -> tuple[dict[str, Any], Sums]:
    """Values of `checkpoint.json`, and the sums of the other files; none in format 1."""
    with _damage_of(DESCRIPTION, path):
        try:
            content = _read_bytes(folder, DESCRIPTION, {})
        except (FileNotFoundError, NotADirectoryError):
            raise not_found(path) from None
        info = _parse(content)
        _check_info(info)
        sums = info.pop(_SUMS, {})
        if not sums and info.get("format") == FORMAT:
            raise ValueError("it has no sums")
        if sums:
            own = sums.pop(DESCRIPTION, None)
            if own != _own_sum(info, sums) or not {WEIGHTS, CONFIG} <= sums.keys():
                raise ValueError("its values do not have the SHA-256 sum that it states")
    return info, sums


def _check_info(info: dict[str, Any]) -> None:
    if not {"base_model", "lora"} <= info.keys():
        raise ValueError("it does not say what was trained")
    rules = {
        "format": ("1 or 2; a newer version of steelyard may have written it", _is_known_format),
        "base_model": ("a string", lambda value: isinstance(value, str)),
        "model_id": ("a string", lambda value: isinstance(value, str)),
        "created_at": ("a finite number", is_finite),
        "expires_at": ("a finite number or null", lambda value: value is None or is_finite(value)),
        "user_metadata": ("an object", lambda value: isinstance(value, dict)),
        "companions": ("an object", lambda value: isinstance(value, dict)),
        "lora": ("an object", lambda value: isinstance(value, dict)),
        _LIMITS: ("limits of whole numbers >= 1", is_limits_state),
        _SUMS: ("an object", lambda value: isinstance(value, dict)),
    }
    for key, (rule, is_valid) in rules.items():
        if key in info and not is_valid(info[key]):
            raise ValueError(f"{key} must be {rule}, got {info[key]!r:.80}")
    LoraSettings(**info["lora"])


def _is_known_format(value: object) -> bool:
    return type(value) is int and 1 <= value <= FORMAT


def _read_tensors(folder: Path, file: str, sums: Sums, path: str) -> dict[str, Tensor]:
    with _damage_of(file, path):
        tensors = safetensors.torch.load(_read_bytes(folder, file, sums))
        if (key := _not_finite(tensors)) is not None:
            raise ValueError(f"{key} must hold finite numbers, and some are NaN or infinite")
    return tensors


def _not_finite(tensors: Mapping[str, Tensor]) -> str | None:
    """Name of the first tensor with NaN or infinity; None if there is none."""
    broken = (key for key, value in tensors.items() if not bool(torch.isfinite(value).all()))
    return next(broken, None)


def _read_bytes(folder: Path, name: str, sums: Sums) -> bytes:
    file = folder / name
    # Reading a pipe would wait for ever, reading a device never end.
    if not stat.S_ISREG(file.stat().st_mode):
        raise ValueError("it must be a regular file")
    content = file.read_bytes()
    if sums and hashlib.sha256(content).hexdigest() != sums[name]:
        raise ValueError(f"it must have the SHA-256 sum that {DESCRIPTION} states, and has another")
    return content


@contextlib.contextmanager
def _damage_of(file: str, path: str) -> Iterator[None]:
    """Turn every error of reading and parsing `file` into a `CheckpointError` that names it."""
    try:
        yield
    except CheckpointError:
        raise
    except PermissionError as error:
        raise CheckpointError(
            f"the checkpoint {path!r} must be readable, and {file} is not: {error}."
        ) from error
    # Whatever a damaged file makes a parser raise: json a RecursionError, safetensors an error of
    # its own or a KeyError, torch a RuntimeError.
    except Exception as error:
        raise CheckpointError(
            f"the checkpoint {path!r} must be whole, and it is damaged: {file}: "
            f"{type(error).__name__}: {error}. Load another checkpoint."
        ) from error


def _parse(content: bytes) -> dict[str, Any]:
    values = json.loads(content.decode("utf-8"))
    if not isinstance(values, dict):
        raise ValueError(f"it must hold a JSON object, got a {type(values).__name__}")  # noqa: TRY004 - `_damage_of` takes all alike
    return values


def _json(values: Mapping[str, Any]) -> bytes:
    return json.dumps(values, indent=2, sort_keys=True).encode()
