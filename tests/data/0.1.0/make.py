"""Makes what stands beside it, with the `steelyard` of 0.1.0; see README.md."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import torch
from tinker import types
from torch import Tensor, nn
from torch.nn import functional

from steelyard import RegularizerSpec, regularize, schedules
from steelyard.engine import LocalServiceClient
from steelyard.experiment import resume
from steelyard.integrations import CompositeLoss
from steelyard.regularizers import Adaptive, EMADrift

HERE = Path(__file__).resolve().parent
PROJECT = HERE / "project"
KILLED = """
import os, signal
from steelyard.experiment import read_config, train

class Killer:
    def say(self, text): ...
    def step(self, step, steps, metrics):
        if step == 4:
            os.kill(os.getpid(), signal.SIGKILL)

train(read_config("c.toml"), "run", watch=Killer())
"""
REGULARIZERS: list[dict[str, Any]] = [
    {"fn": "ema_drift", "name": "drift", "weight": 0.5, "options": {"decay": 0.5}},
    {
        "fn": "adaptive",
        "name": "size",
        "weight": 0.1,
        "options": {"regularizer": "l1", "target": 1.0},
    },
]


def make_run() -> None:
    """A run that was killed two steps after a checkpoint, and the metrics once it went on."""
    lines = [
        {"prompt": f"{n} plus one is", "completion": f" {n + 1}.", "number": n} for n in range(12)
    ]
    text = "".join(f"{json.dumps(line)}\n" for line in lines)
    (PROJECT / "train.jsonl").write_text(text)
    subprocess.run([sys.executable, "-c", KILLED], cwd=PROJECT, check=False)
    shutil.copytree(PROJECT / "run", PROJECT / "continued", symlinks=True)
    resume(PROJECT / "continued")
    shutil.copy(PROJECT / "continued" / "metrics.jsonl", HERE / "continued.jsonl")
    shutil.rmtree(PROJECT / "continued")
    (PROJECT / "run" / ".lock").unlink(missing_ok=True)
    for name in ("config.json", "data.json"):
        file = PROJECT / "run" / name
        file.write_text(file.read_text().replace(str(PROJECT), "PROJECT"))
    pack(PROJECT / "run")


def make_client() -> None:
    """A checkpoint of a client with stateful terms, and the file of their state alone."""
    folder = HERE / "client"
    service = LocalServiceClient(checkpoint_dir=folder / "checkpoints", device="cpu")
    client = regularize(service.create_lora_training_client("tiny-random", rank=2, seed=0))

    def step() -> Any:
        batch = [datum([1, 2, 3]), datum([5, 6, 7, 8])]
        return client.forward_backward_custom(batch, nll, regularizers=REGULARIZERS).result()

    for _ in range(3):
        step()
        client.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    path = client.save_state("saved").result().path
    client.save_pipeline_state(folder / "pipeline.json")
    expected = {"path": path, "state": client.state_dict(), "regularizers": REGULARIZERS}
    write(HERE / "client.json", {**expected, "next": numbers(step())})
    service.close("success").result()
    pack(folder)


def datum(tokens: list[int]) -> types.Datum:
    """A sequence, and the tokens that follow."""
    targets = torch.tensor(tokens) + 1
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens),
        loss_fn_inputs={"target_tokens": types.TensorData.from_torch(targets)},
    )


def nll(_: Any, logprobs: list[Tensor]) -> Tensor:
    """The base loss of the client."""
    return -torch.cat(logprobs).mean()


def numbers(output: Any) -> dict[str, Any]:
    """The numbers of an output that no clock changes."""
    return {key: value for key, value in output.metrics.items() if not key.endswith("/duration")}


class Scaled(nn.Module):
    """A base loss with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Cross-entropy of scaled logits."""
        return functional.cross_entropy(logits * self.scale, labels)


def composite() -> CompositeLoss:
    """A composite with two stateful terms, one of them with a schedule as its weight."""
    terms = [
        RegularizerSpec(EMADrift(decay=0.5), 0.5, "drift"),
        RegularizerSpec(
            Adaptive(regularizer="l1", target=1.0), schedules.linear(0.1, 0.2, 10), "size"
        ),
    ]
    return CompositeLoss(Scaled(), terms)


def call(loss: CompositeLoss, step: int) -> Tensor:
    """The total of a batch that depends on the step."""
    logits = torch.arange(6.0).reshape(2, 3) / (step + 1)
    logprobs = [logits.log_softmax(-1)[i, label : label + 1] for i, label in enumerate((0, 2))]
    total: Tensor = loss(logits=logits, labels=torch.tensor([0, 2]), data=[], logprobs=logprobs)
    return total


def make_composite() -> None:
    """The state of a composite after three steps."""
    loss = composite()
    optimizer = torch.optim.SGD(loss.parameters(), lr=0.1)
    loss.follow(optimizer)
    for step in range(3):
        optimizer.zero_grad()
        call(loss, step).backward()  # type: ignore[no-untyped-call]  # torch leaves it so
        optimizer.step()
    torch.save(loss.state_dict(), HERE / "composite.pt")
    (scale,) = loss.parameters()
    expected = {"state": loss.get_extra_state(), "scale": scale.item()}
    call(loss, 3)
    write(HERE / "composite.json", {**expected, "next": numbers(loss.output)})


def pack(folder: Path) -> None:
    """Put a folder into an archive, since its files have names that not every system takes."""

    def nobody(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.uid = member.gid = 0
        member.uname = member.gname = ""
        return member

    with tarfile.open(HERE / f"{folder.name}.tar.gz", "w:gz") as archive:
        archive.add(folder, folder.name, filter=nobody)
    shutil.rmtree(folder)


def write(path: Path, content: Any) -> None:
    """Write JSON."""
    path.write_text(f"{json.dumps(content, indent=1)}\n")


if __name__ == "__main__":
    make_run()
    make_client()
    make_composite()
