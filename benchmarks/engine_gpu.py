"""Training on one GPU: the engine, transformers + PEFT with and without Liger-Kernel, the floor.

    PYTHONPATH=src python -m benchmarks.engine_gpu                    # 135 M, 1.2 B and 8 B
    PYTHONPATH=src python -m benchmarks.engine_gpu 1.2b --save benchmarks/results/engine_gpu.json
    PYTHONPATH=src python -m benchmarks.engine_gpu tiny               # shapes for a CPU, to try it

Models have the shapes of SmolLM2 and of Llama 3, and random weights in bfloat16; LoRA has rank 32
on all linear layers but the output layer. A step is `forward_backward(...).result()`, with the
per-token log-probs, and `optim_step(...).result()`; others' steps are a forward pass with labels, a
backward pass and AdamW. Times are medians of the wall clock. The floor is
4 · parameters · tokens FLOP (no gradient of frozen weights) at the rate of a bfloat16 matrix
product that is measured in the same run. Memory is the peak above the weights.
"""

from __future__ import annotations

import argparse
import datetime as dt
import gc
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from tinker import types

from benchmarks.gpu import machine
from benchmarks.measure import Row, show
from steelyard import RegularizerSpec, regularize
from steelyard.engine import LocalServiceClient, LocalTrainingClient, tiny
from steelyard.engine.fast_paths import FastPaths
from steelyard.engine.memory import GraphLimits
from steelyard.engine.model import Model
from steelyard.engine.model_sources import ModelSource
from steelyard.engine.worker_thread import WorkerThread
from steelyard.regularizers import L2, ConfidencePenalty, Entropy, KLToReference

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if CUDA else torch.device("cpu")
DTYPE = torch.bfloat16
RANK, WARMUP, REPEATS = 32, 2, 5
ADAM = types.AdamParams(learning_rate=1e-4)
EVEN = [1024] * 16
# From 48 to 2048 tokens, 10,200 together.
VARIED = [
    2048, 1300, 900, 780, 620, 520, 440, 380, 330, 290, 256, 228, 206, 187, 170, 155,
    142, 131, 121, 112, 104, 97, 90, 84, 79, 74, 70, 66, 62, 58, 52, 48,
]  # fmt: skip
SHORT = [56] * 128
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True,
    },
    "135m": {
        "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536,
        "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
        "tie_word_embeddings": True,
    },
    "1.2b": {
        "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192,
        "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    },
    "8b": {
        "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "tie_word_embeddings": False,
    },
}  # fmt: skip
# Milliseconds that a row should reach, by model, batch and row.
REACH: dict[tuple[str, str, str], float] = {
    ("1.2b", "16 × 1024", "engine"): 225,
    ("1.2b", "varied", "engine"): 165,
    ("8b", "16 × 1024", "engine"): 1075,
    ("8b", "varied", "engine"): 660,
    ("135m", "128 × 56", "engine"): 80,
    ("135m", "128 × 56", "engine, reference log-probs"): 30,
}
RATIOS = {"three terms, tracked": 1.03, "three terms and exact entropy, tracked": 1.10}
MEMORY = {"engine": 23.0, "three terms, layers recomputed": 4.0}


def build(shape: str) -> Any:
    """Build a model with random weights on the device."""
    settings: dict[str, Any] = {"max_position_embeddings": 4096, "pad_token_id": 0}
    config = transformers.LlamaConfig(**SHAPES[shape], **settings)
    torch.manual_seed(0)
    with DEVICE:
        default = torch.get_default_dtype()
        torch.set_default_dtype(DTYPE)
        try:
            base: Any = transformers.LlamaForCausalLM(config)  # type: ignore[no-untyped-call]
        finally:
            torch.set_default_dtype(default)
    return base


def data_of(lengths: Sequence[int], vocabulary: int) -> list[types.Datum]:
    """Random tokens with every field that the losses and terms read."""
    generator = torch.Generator().manual_seed(0)
    data = []
    for length in lengths:
        tokens = torch.randint(1, vocabulary, (length + 1,), generator=generator)
        noise = torch.randn(2, length, generator=generator)
        fields = {
            "target_tokens": tokens[1:],
            "weights": torch.ones(length),
            "logprobs": -10 + noise[0] / 10,
            "reference_logprobs": -10 + noise[1] / 10,
            "advantages": torch.ones(length),
        }
        inputs: Any = {name: types.TensorData.from_torch(value) for name, value in fields.items()}
        prompt = types.ModelInput.from_ints(tokens[:-1].tolist())
        data.append(types.Datum(model_input=prompt, loss_fn_inputs=inputs))
    return data


@contextmanager
def engine(
    shape: str, dtype: torch.dtype = DTYPE, paths: FastPaths | None = None
) -> Iterator[LocalTrainingClient]:
    """A training client; its weights are those of bfloat16, whatever the dtype."""
    source = ModelSource(
        shape, lambda to, *_: build(shape).to(to), tiny.tokenizer, None, tiny.config
    )
    own = FastPaths.of
    if paths is not None:
        FastPaths.of = lambda *_: paths  # type: ignore[method-assign]
    try:
        model = Model(source, DEVICE, dtype)
    finally:
        FastPaths.of = own  # type: ignore[method-assign]
    name = f"random/{shape}"
    with LocalServiceClient(device=DEVICE) as service:
        service._workers[name] = WorkerThread(model, None)
        yield service.create_lora_training_client(name, RANK, seed=0, train_unembed=False)


def synchronize() -> None:
    if CUDA:
        torch.cuda.synchronize()


def free() -> None:
    gc.collect()
    if CUDA:
        torch.cuda.empty_cache()


def timed(step: Callable[[], object]) -> tuple[float, float]:
    """Median milliseconds of a step, and its peak in GB above the memory before it."""
    free()
    before = torch.cuda.memory_allocated() if CUDA else 0
    for _ in range(WARMUP):
        step()
    synchronize()
    if CUDA:
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        step()
        synchronize()
        times.append(1e3 * (time.perf_counter() - began))
    peak = torch.cuda.max_memory_allocated() - before if CUDA else 0
    return statistics.median(times), peak / 1e9


class Table:
    """Rows of one model and batch; a row that fails says why, and the others go on."""

    def __init__(self, shape: str, batch: str, floor: float, deadline: float) -> None:
        self.shape, self.batch, self.floor, self._deadline = shape, batch, floor, deadline
        self.rows: list[Row] = [("floor", f"{floor:.0f} ms", "", None)]
        self.milliseconds: dict[str, float] = {}

    def add(self, name: str, step: Callable[[], object], against: str | None = None) -> None:
        """Time a step; `against` names the row that it is compared with."""
        if time.monotonic() > self._deadline:
            self.rows.append((name, "no time left", "", None))
            return
        try:
            milliseconds, memory = timed(step)
        except torch.OutOfMemoryError:
            self.rows.append((name, "out of memory", "", None))
            return
        except Exception as error:  # noqa: BLE001 - the other rows count
            traceback.print_exc()
            self.rows.append((name, f"{type(error).__name__}: {error}"[:160], "", None))
            return
        self.milliseconds[name] = milliseconds
        text = f"{milliseconds:.1f} ms, {milliseconds / self.floor:.2f} × floor, +{memory:.1f} GB"
        target, met = "", None
        key = (self.shape, self.batch, name)
        if key in REACH:
            target, met = f"≤ {REACH[key]:g} ms", milliseconds <= REACH[key]
        if against in self.milliseconds:
            ratio = milliseconds / self.milliseconds[str(against)]
            text = f"{text}, {ratio:.3f} × {against}"
            if name in RATIOS:
                target, met = f"≤ {RATIOS[name]:g} ×", ratio <= RATIOS[name]
        if self.shape == "1.2b" and self.batch == "16 × 1024" and name in MEMORY:
            target = f"{target}, ≤ {MEMORY[name]:g} GB".strip(", ")
            met = met is not False and memory <= MEMORY[name]
        self.rows.append((name, text, target, met))
        print(f"{self.shape} {self.batch} {name}: {text}", flush=True)


def rate() -> float:
    """FLOP a second of a bfloat16 matrix product on random data."""
    size = 8192 if CUDA else 256
    a, b = (torch.randn(size, size, device=DEVICE, dtype=DTYPE) for _ in range(2))
    for _ in range(3):
        a @ b
    synchronize()
    began = time.perf_counter()
    for _ in range(10):
        a @ b
    synchronize()
    return 10 * 2 * size**3 / (time.perf_counter() - began)


def parameters_of(shape: str) -> int:
    with torch.device("meta"):
        base: Any = transformers.LlamaForCausalLM(  # type: ignore[no-untyped-call]
            transformers.LlamaConfig(**SHAPES[shape])
        )
    return sum(parameter.numel() for parameter in base.parameters())


def terms() -> list[RegularizerSpec]:
    return [
        RegularizerSpec(L2(), 0.01),
        RegularizerSpec(KLToReference(), 0.05),
        RegularizerSpec(ConfidencePenalty(threshold=2.0), 0.01),
    ]


def engine_rows(
    client: LocalTrainingClient, table: Table, data: list[types.Datum], *, whole: bool
) -> None:
    def stepping(backward: Callable[[], Any]) -> Callable[[], object]:
        def step() -> None:
            backward().result()
            client.optim_step(ADAM).result()

        return step

    def composed(specs: list[RegularizerSpec]) -> Callable[[], object]:
        wrapped = regularize(client, specs, track_grad_norms=True)
        return stepping(lambda: wrapped.forward_backward(data, "importance_sampling"))

    table.add("engine", stepping(lambda: client.forward_backward(data, "cross_entropy")))
    if table.shape == "135m":
        reference = "engine, reference log-probs"
        table.add(reference, lambda: client.forward(data, "cross_entropy").result())
        return
    table.add("three terms, tracked", composed(terms()), "engine")
    if not whole:
        return
    entropy = RegularizerSpec(Entropy(), 0.01, needs=("projection",))
    table.add("three terms and exact entropy, tracked", composed([*terms(), entropy]), "engine")
    budget = client._worker.token_budget
    limits = dict(budget._limits)
    budget._limits = dict.fromkeys((True, False), GraphLimits(64, 2**20))
    table.add("three terms, layers recomputed", composed(terms()), "engine")
    budget._limits = limits


def others_step(base: Any, lengths: Sequence[int], rank: int = RANK) -> Callable[[], object]:
    """A step of transformers + PEFT, with every row padded to the longest."""
    config = peft.LoraConfig(
        r=rank,
        lora_alpha=32,
        target_modules=[
            "q_proj",
            "k_proj",
            "v_proj",
            "o_proj",
            "gate_proj",
            "up_proj",
            "down_proj",
        ],
    )
    # In the model's dtype, which is faster than peft's default of float32.
    net: Any = peft.get_peft_model(base, config, autocast_adapter_dtype=False)
    net.train()
    weights = [parameter for parameter in net.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=1e-4, fused=CUDA)
    data = data_of(lengths, base.config.vocab_size)
    longest = max(lengths)
    tokens = torch.zeros(len(lengths), longest, dtype=torch.int64)
    labels, mask = torch.full_like(tokens, -100), torch.zeros_like(tokens)
    for row, datum in enumerate(data):
        length = lengths[row]
        tokens[row, :length] = torch.tensor(datum.model_input.to_ints())
        labels[row, :length] = tokens[row, :length]
        mask[row, :length] = 1
    inputs = {"input_ids": tokens, "labels": labels}
    if min(lengths) < longest:
        inputs["attention_mask"] = mask
    inputs = {name: value.to(DEVICE) for name, value in inputs.items()}

    def step() -> None:
        net(**inputs, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def add_others(table: Table, lengths: Sequence[int], name: str, *, liger: bool) -> None:
    free()
    try:
        base = build(table.shape)
        if liger:
            from liger_kernel.transformers import apply_liger_kernel_to_llama  # noqa: PLC0415

            apply_liger_kernel_to_llama(model=base)
        step = others_step(base, lengths)
    except Exception as error:  # noqa: BLE001 - the other rows count
        table.rows.append((name, f"{type(error).__name__}: {error}"[:160], "", None))
        return
    table.add(name, step)


BATCHES: dict[str, dict[str, list[int]]] = {
    "tiny": {"4 × 32": [32] * 4, "varied": [40, 3, 17, 9]},
    "135m": {"128 × 56": SHORT},
    "1.2b": {"16 × 1024": EVEN, "varied": VARIED},
    "8b": {"16 × 1024": EVEN, "varied": VARIED},
}


def errors(shape: str = "tiny", lengths: Sequence[int] = (40, 3, 17, 9)) -> list[Row]:
    """Distance of bfloat16 gradients and log-probs from those in float32, ours and PEFT's.

    Both have the same weights, rounded to bfloat16, and the same adapter after one step.
    """
    found: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    weights = None
    ways = {
        "float32": (torch.float32, FastPaths()),
        "transformers + PEFT": (torch.bfloat16, FastPaths()),
        "engine": (torch.bfloat16, None),
    }
    data = data_of(lengths, SHAPES[shape]["vocab_size"])
    for name, (dtype, paths) in ways.items():
        with engine(shape, dtype, paths) as client:
            if weights is None:
                client.forward_backward(data, "cross_entropy").result()
                client.optim_step(types.AdamParams(learning_rate=1e-2)).result()
                weights = client.weights()
            client._worker.submit(client._trainer.adapter.load, weights, None).result()
            output = client.forward_backward(data, "cross_entropy").result()
            rows = [row["logprobs"].to_torch() for row in output.loss_fn_outputs]
            parts = [gradient.flatten() for gradient in client.gradients().values()]
            found[name] = (torch.cat(rows).double(), torch.cat(parts).double())
        free()
    exact = found.pop("float32")
    lines: list[Row] = []
    distances = {}
    for name, (logprobs, gradients) in found.items():
        by_logprobs = float((logprobs - exact[0]).abs().mean())
        distances[name] = float((gradients - exact[1]).norm() / exact[1].norm())
        text = f"gradient {distances[name]:.2e} relative, log-probs {by_logprobs:.2e} nats"
        lines.append((f"{name} in bfloat16, against float32", text, "", None))
    ratio = distances["engine"] / distances["transformers + PEFT"]
    lines.append(("error of the gradient, ours ÷ PEFT's", f"{ratio:.2f} ×", "≤ 1", ratio <= 1))
    for line in lines:
        print(*line[:2], flush=True)
    return lines


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shapes", nargs="*", default=["135m", "1.2b", "8b"])
    parser.add_argument("--save", type=Path)
    parser.add_argument("--seconds", type=float, default=3600.0, help="begin no row after these")
    parser.add_argument("--only-ours", action="store_true")
    given = parser.parse_args()
    if not CUDA and given.shapes != ["tiny"]:
        sys.exit("benchmarks.engine_gpu needs a GPU and a torch with CUDA; 'tiny' runs on a CPU.")
    deadline = time.monotonic() + given.seconds
    peak = rate()
    print(machine() if CUDA else "CPU", f"{peak / 1e12:.0f} TFLOP/s in bfloat16", flush=True)
    shown = [
        show(
            "Gradients on a GPU",
            "a random Llama in bfloat16 against float32, the same weights",
            errors("tiny" if not CUDA else "135m"),
            repeats="1",
        )
    ]
    tables: list[tuple[Table, list[int]]] = []
    for shape in given.shapes:
        count = parameters_of(shape)
        with engine(shape) as client:
            print(shape, client._worker.model.paths, client._worker.model.fused_kinds, flush=True)
            for batch, lengths in BATCHES[shape].items():
                table = Table(shape, batch, 1e3 * 4 * count * sum(lengths) / peak, deadline)
                data = data_of(lengths, SHAPES[shape]["vocab_size"])
                engine_rows(client, table, data, whole=batch in ("16 × 1024", "4 × 32"))
                tables.append((table, lengths))
            print(client._worker.token_budget.state_dict(), flush=True)
        del client
        free()
    # Liger-Kernel replaces functions of transformers for all models: its rows come last.
    for liger in () if given.only_ours else (False, True):
        name = "transformers + PEFT" + (" + Liger-Kernel" if liger else "") + ", padded"
        for table, lengths in tables:
            if table.shape in ("1.2b", "8b", "tiny") and (CUDA or not liger):
                add_others(table, lengths, name, liger=liger)
    shown += [
        show(
            f"Training on a GPU: {table.shape}, {table.batch}",
            f"{sum(lengths)} tokens, LoRA of rank {RANK}; floor at {peak / 1e12:.0f} TFLOP/s",
            table.rows,
            repeats=str(REPEATS),
        )
        for table, lengths in tables
    ]
    if given.save is not None:
        kept = {
            "command": "python -m benchmarks.engine_gpu --save benchmarks/results/engine_gpu.json",
            "date": str(dt.datetime.now(tz=dt.UTC).date()),
            "machine": machine() if CUDA else "CPU",
            "tables": [asdict(table) for table in shown],
        }
        given.save.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(kept, indent=1, ensure_ascii=False) + "\n"
        given.save.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
