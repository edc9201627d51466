"""How well bounds hold on a real model, beside fixed weights and no term.

    PYTHONPATH=src python -m benchmarks.bounds --processes 8 --save benchmarks/results/bounds.json
    PYTHONPATH=src python -m benchmarks.bounds --model tiny-random --seeds 0           # a trial

Runs that the saved file has already are not repeated: delete it after a change of the controller.
Each run trains a fresh LoRA of `smollm2-135m` for 40 steps. Three kinds of runs:

* `fixed`: supervised on `short_answers.jsonl` and on help-desk messages that become tickets, 8 a
  step, none of them twice; the term is ½ (log p - log r)² of their tokens;
* `own`: supervised on the tickets; the term is the exact KL to the base model on the short answers,
  data of the term's own, 8 a step;
* `policy`: 16 sampled answers a step with a reward for short ones; the term is k3 of their tokens.
"""

from __future__ import annotations

import argparse
import datetime as dt
import itertools
import json
import math
import os
import random
import time
import warnings
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from tinker import types
from torch import Tensor

from benchmarks.measure import CONSOLE, Row, Shown
from benchmarks.page import processor
from steelyard import RegularizerSpec, regularize
from steelyard.engine import LocalServiceClient
from steelyard.regularizers import KLToReference

SHORT_ANSWERS = Path(__file__).parent / "short_answers.jsonl"
PROMPTS = Path(__file__).parents[1] / "examples/on_policy_prompts.jsonl"
STEPS, BATCH, HELD_OUT = 40, 8, 32
GROUPS, GROUP = 4, 4  # on policy: prompts a step, and answers to each
MAX_TOKENS = 24
KINDS = ("fixed", "own", "policy")
WEIGHTS = {"fixed": (0.7, 1.2, 2.0, 4.0), "own": (0.2, 0.5, 1.2), "policy": (0.03, 0.1, 0.3)}
SEEDS = (0, 1, 2)
LEARNING_RATES = (5e-5, 2e-4, 5e-4)
BOUNDS = (0.1, 0.3)
DEVICES = ("printer", "projector", "coffee machine", "door lock", "heater", "lamp", "phone")
PLACES = ("room 12", "the lobby", "the kitchen", "floor 3", "the lab", "the workshop")
FAULTS = ("is broken", "makes a loud noise", "does not start", "is leaking", "shows an error")
FRAMES = (
    "The {0} in {1} {2}.",
    "Could somebody help? The {0} in {1} {2}.",
    "I am in {1}, and the {0} {2}.",
    "Since this morning the {0} in {1} {2}.",
)


@dataclass(frozen=True)
class Cell:
    """One run: its kind, and a bound, a weight or neither."""

    kind: str
    rate: float
    seed: int
    at_most: float | None = None
    weight: float = 0.0
    model: str = "smollm2-135m"
    steps: int = STEPS


@dataclass
class Result:
    """What a run gave: values and multipliers of all steps, and the end on held-out data."""

    cell: Cell
    values: list[float] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    base: list[float] = field(default_factory=list)
    held_out: float = math.nan
    task: float = math.nan
    said: list[str] = field(default_factory=list)
    said_at: int | None = None
    seconds: float = 0.0

    @property
    def late(self) -> float:
        """Mean value of the second half of the steps."""
        late = self.values[len(self.values) // 2 :]
        return sum(late) / len(late)


def datum(prompt: list[int], answer: list[int], **fields: list[float]) -> types.Datum:
    """Tokens of a prompt and of its answer; the answer counts."""
    tokens, pad = prompt + answer, [0.0] * (len(prompt) - 1)
    inputs: dict[str, Any] = {  # the SDK converts lists
        "target_tokens": tokens[1:],
        "weights": pad + [1.0] * len(answer),
        **{name: pad + values for name, values in fields.items()},
    }
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


def counted(datum: types.Datum) -> Tensor:
    return datum.loss_fn_inputs["weights"].to_torch()


def nll(data: Sequence[types.Datum], logprobs: Sequence[Tensor]) -> Tensor:
    """Mean negative log-likelihood of the tokens that count."""
    weights = torch.cat([counted(d) for d in data]).to(logprobs[0])
    return -(torch.cat(list(logprobs)) * weights).sum() / weights.sum()


def split(data: Sequence[types.Datum]) -> tuple[list[types.Datum], list[types.Datum]]:
    """Held-out lines, evenly spread over the reference's losses, and the others.

    A random draw of 32 had 0.9 nats less than the others before training, and a lower KL after it.
    """
    ordered = sorted(data, key=lambda d: nll([d], [reference(d)]).item())
    every = len(data) // HELD_OUT
    chosen = range(every // 2, every * HELD_OUT, every)
    return [ordered[i] for i in chosen], [d for i, d in enumerate(ordered) if i not in chosen]


def reference(datum: types.Datum) -> Tensor:
    return datum.loss_fn_inputs["reference_logprobs"].to_torch()


def policy_loss(data: Sequence[types.Datum], logprobs: Sequence[Tensor]) -> Tensor:
    """Mean of -w A over the tokens of the answers."""
    total, count = logprobs[0].new_zeros(()), 0.0
    for d, now in zip(data, logprobs, strict=True):
        old = d.loss_fn_inputs["logprobs"].to_torch().to(now)
        advantages = d.loss_fn_inputs["advantages"].to_torch().to(now)
        weights = counted(d).to(now)
        total = total - (weights * (now - old).exp() * advantages).sum()
        count += weights.sum().item()
    return total / count


class Run:
    """One run."""

    def __init__(self, cell: Cell, service: LocalServiceClient) -> None:
        self.cell, self.random, self.service = cell, random.Random(cell.seed), service
        self.training = self.service.create_lora_training_client(
            cell.model, rank=16, seed=cell.seed
        )
        self.tokenizer = self.training.get_tokenizer()
        self.base_model = self.service.create_sampling_client(base_model=cell.model)
        self.eos = self.tokenizer.eos_token_id

    def encode(self, text: str) -> list[int]:
        """Tokens of a text."""
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def chat(self, question: str) -> list[int]:
        """Tokens of a question in the chat template of the model."""
        if self.tokenizer.chat_template is None:
            return self.encode(question)
        return list(
            self.tokenizer.apply_chat_template(
                [{"role": "user", "content": question}],
                add_generation_prompt=True,
                tokenize=True,
                return_dict=False,
            )
        )

    def with_reference(self, data: list[types.Datum]) -> list[types.Datum]:
        """Add the base model's log-probs; before training those of the fresh adapter."""
        assert self.reference is not None
        for start in range(0, len(data), 64):
            part = data[start : start + 64]
            found = self.reference.forward(part, "cross_entropy").result().loss_fn_outputs
            for d, output in zip(part, found, strict=True):
                d.loss_fn_inputs["reference_logprobs"] = output["logprobs"]
        return data

    def sample(
        self, client: Any, prompts: list[list[int]], count: int, seed: int, temperature: float
    ) -> list[list[Any]]:
        """Answers to each prompt."""
        params = [
            types.SamplingParams(
                max_tokens=MAX_TOKENS, temperature=temperature, seed=seed + i, stop=[self.eos]
            )
            for i in range(len(prompts))
        ]
        futures = [
            client.sample(types.ModelInput.from_ints(p), num_samples=count, sampling_params=s)
            for p, s in zip(prompts, params, strict=True)
        ]
        return [list(f.result().sequences) for f in futures]

    def short_answers(self) -> list[types.Datum]:
        """Questions with short answers."""
        lines = [json.loads(line) for line in SHORT_ANSWERS.read_text("utf-8").splitlines()]
        return [self.line(line["prompt"], line["completion"].strip()) for line in lines]

    def tickets(self, count: int) -> list[types.Datum]:
        """Messages to a help desk, each with the ticket to write; no two are the same."""
        parts = list(itertools.product(DEVICES, PLACES, FAULTS, FRAMES))
        return [
            self.line(frame.format(*words), f"TICKET | {' | '.join(words)}")
            for *words, frame in random.Random(0).sample(parts, count)
        ]

    def line(self, prompt: str, answer: str) -> types.Datum:
        """Datum of a question and its answer."""
        return datum(self.chat(prompt), [*self.encode(answer), self.eos])

    def spec(self, data: list[types.Datum] | None) -> RegularizerSpec:
        """The term, with data of its own or none."""
        cell = self.cell
        amount: dict[str, Any] = (
            {"weight": cell.weight} if cell.at_most is None else {"at_most": cell.at_most}
        )
        own: dict[str, Any] = {} if data is None else {"data": data, "per_step": 8}
        return RegularizerSpec(KLToReference(), name="kl", **amount, **own)

    def run(self) -> Result:
        """Train, and evaluate on held-out data."""
        result, began = Result(self.cell), time.perf_counter()
        self.reference = self.training  # the same as the base model until it is trained
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            self.warnings, self.result = caught, result
            if self.cell.kind == "policy":
                self.on_policy(result)
            else:
                self.supervised(result)
        result.seconds = time.perf_counter() - began
        return result

    def note(self, output: Any) -> None:
        """Keep the numbers of a step."""
        term = output.regularizers.get("kl")
        result = self.result
        result.values.append(math.nan if term is None else term.value)
        result.weights.append(math.nan if term is None else term.weight)
        result.base.append(output.base_loss.value)
        said = [str(w.message) for w in self.warnings if "Bound" in w.category.__name__]
        if said and result.said_at is None:
            result.said_at = len(result.values) - 1
        result.said = said

    def supervised(self, result: Result) -> None:
        """Train on fixed data."""
        count, own = STEPS * BATCH + HELD_OUT, None  # no line is seen twice
        answers = self.short_answers()
        random.Random(1).shuffle(answers)  # the held-out lines are those of all seeds
        if self.cell.kind == "own":
            data = self.tickets(count)
            measured, own = answers[:HELD_OUT], answers[HELD_OUT:]
            held_out, data = data[:HELD_OUT], data[HELD_OUT:]
        else:
            data = self.with_reference([*answers, *self.tickets(count - len(answers))])
            held_out, data = split(data)
            measured = held_out
        client = regularize(self.training, [self.spec(own)])
        order: list[int] = []
        for _ in range(self.cell.steps):
            if len(order) < BATCH:
                order += self.random.sample(range(len(data)), len(data))
            chosen, order = order[:BATCH], order[BATCH:]
            batch = [data[i] for i in chosen]
            output = client.forward_backward_custom(batch, nll).result()
            client.optim_step(types.AdamParams(learning_rate=self.cell.rate)).result()
            self.note(output)
        found = self.training.forward(held_out, "cross_entropy").result().loss_fn_outputs
        logprobs = [f["logprobs"].to_torch() for f in found]
        result.task = nll(held_out, logprobs).item()
        kl = RegularizerSpec(KLToReference(estimator="exact" if own else "auto"), 1.0, "kl")
        last = regularize(self.training, [kl])
        output = last.forward_backward_custom(measured, nll).result()
        result.held_out = output.regularizers["kl"].value

    def answers(
        self, prompts: list[list[int]], count: int, seed: int
    ) -> tuple[list[types.Datum], list[float]]:
        """Sampled answers to prompts as data, and their rewards."""
        client = self.training.save_weights_and_get_sampling_client()
        data, rewards = [], []
        for prompt, group in zip(
            prompts, self.sample(client, prompts, count, seed, 1.0), strict=True
        ):
            reward = [self.reward(list(a.tokens)) for a in group]
            mean = sum(reward) / len(reward)
            spread = (sum((r - mean) ** 2 for r in reward) / max(1, len(reward) - 1)) ** 0.5
            for a, r in zip(group, reward, strict=True):
                tokens = list(a.tokens)
                advantage = [(r - mean) / (spread + 1e-4)] * len(tokens)
                data.append(datum(prompt, tokens, logprobs=list(a.logprobs), advantages=advantage))
            rewards += reward
        return data, rewards

    def reward(self, tokens: list[int]) -> float:
        """The example's: 1 for 3 to 10 words, and less the further away; 0 if cut off."""
        words = len(self.tokenizer.decode(tokens, skip_special_tokens=True).split())
        away = max(0, 3 - words, words - 10)
        return 0.7**away

    def on_policy(self, result: Result) -> None:
        """Train on sampled answers."""
        texts = [json.loads(line)["prompt"] for line in PROMPTS.read_text("utf-8").splitlines()]
        questions = [t.removeprefix("Q: ").removesuffix("\nA:") for t in texts]
        prompts = [self.chat(q) for q in questions]
        held_out, prompts = prompts[:4], prompts[4:]
        # A second client stays as the base model is: the first one is trained.
        self.reference = self.service.create_lora_training_client(self.cell.model, rank=1, seed=0)
        client = regularize(self.training, [self.spec(None)])
        order: list[int] = []
        for step in range(self.cell.steps):
            if len(order) < GROUPS:
                order += self.random.sample(range(len(prompts)), len(prompts))
            chosen, order = order[:GROUPS], order[GROUPS:]
            seed = 100_000 * self.cell.seed + 100 * step
            data, _ = self.answers([prompts[i] for i in chosen], GROUP, seed)
            self.with_reference(data)
            output = client.forward_backward_custom(data, policy_loss).result()
            client.optim_step(types.AdamParams(learning_rate=self.cell.rate)).result()
            self.note(output)
        data, rewards = self.answers(held_out, 32, 999)
        self.with_reference(data)
        result.task = -sum(rewards) / len(rewards)
        found = self.training.forward(data, "cross_entropy").result().loss_fn_outputs
        logprobs = [f["logprobs"].to_torch() for f in found]
        result.held_out = KLToReference().compute(data, logprobs)[0].item()


def run(cell: Cell) -> Result:
    """Run a cell with one thread."""
    torch.set_num_threads(1)
    with LocalServiceClient(dtype="float32") as service:
        return Run(cell, service).run()


def grid(model: str, seeds: Sequence[int], kinds: Sequence[str]) -> list[Cell]:
    """All cells: without the term, with each bound, and with fixed weights."""
    amounts: list[dict[str, float]] = [{}, *({"at_most": bound} for bound in BOUNDS)]
    cells = []
    for kind, seed, rate in itertools.product(kinds, seeds, LEARNING_RATES):
        fixed = [{"weight": weight} for weight in WEIGHTS[kind]]
        cells += [Cell(kind, rate, seed, model=model, **given) for given in [*amounts, *fixed]]  # type: ignore[arg-type]  # numbers
    return cells


def row(kind: str, bound: float, rate: float, results: Sequence[Result]) -> Row | None:
    """Row of one kind, bound and learning rate: a number for each seed.

    It is met or missed only where runs without the bound are known not to stay within it.
    """
    mine = [r for r in results if (r.cell.kind, r.cell.rate) == (kind, rate)]
    held = sorted((r for r in mine if r.cell.at_most == bound), key=lambda r: r.cell.seed)
    if not held:
        return None
    free = [r.late for r in mine if r.cell.at_most is None and not r.cell.weight]
    numbers = [
        ("steps 21–40", [r.late / bound for r in held]),
        ("held out", [r.held_out / bound for r in held]),
        ("peak", [max(r.values) / bound for r in held]),
        ("loss", [r.task for r in held]),
    ]
    late, end, peak, loss = (found for _, found in numbers)
    fits = all(0.75 <= number <= 1.1 for number in [*late, *end]) and max(peak) <= 3
    fixed = [loss_at(r, [f for f in mine if f.cell.seed == r.cell.seed]) for r in held]
    if not any(math.isnan(number) for number in fixed):
        numbers.append(("loss of a fixed weight", fixed))
        fits = fits and all(a <= b + 0.02 for a, b in zip(loss, fixed, strict=True))
    texts = [f"{name} {', '.join(f'{n:.2f}' for n in found)}" for name, found in numbers]
    if free:
        texts.append(f"without the bound {sum(free) / len(free) / bound:.1f}")
    exceeds = free and sum(free) / len(free) > bound
    label = f"{kind}, at most {bound:g}, {rate:g}, seeds {[r.cell.seed for r in held]}"
    return label, "; ".join(texts), "0.75–1.10, peak ≤ 3", fits if exceeds else None


def loss_at(held: Result, others: Sequence[Result]) -> float:
    """Loss that a fixed weight has at the held-out value of this run, between two that were run."""
    fixed = sorted((r.held_out, r.task) for r in others if r.cell.weight)
    for (low, before), (high, after) in itertools.pairwise(fixed):
        if low <= held.held_out <= high:
            return before + (after - before) * (held.held_out - low) / ((high - low) or 1.0)
    return math.nan


def table(results: Sequence[Result], notes: Sequence[str] = ()) -> Shown:
    """Table of all rows."""
    rows = [row(*key, results) for key in itertools.product(KINDS, BOUNDS, LEARNING_RATES)]
    conditions = "Values divided by the bound, one number for each seed; the task's held-out loss"
    return Shown("Bounds on a real model", conditions, [r for r in rows if r], notes)


def save(results: Sequence[Result], path: Path, notes: Sequence[str] = ()) -> None:
    """Save the results and their table for `benchmarks.page`."""
    whole = len(grid(results[0].cell.model, SEEDS, KINDS))
    notes = [f"{len(results)} of the {whole} runs of the grid.", *notes]
    shared = f"{os.cpu_count()} shared CPU cores, {processor()}"
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else shared
    kept = {
        "command": "python -m benchmarks.bounds --save benchmarks/results/bounds.json",
        "date": str(dt.datetime.now(tz=dt.UTC).date()),
        "machine": f"{device}, torch {version('torch')}, transformers {version('transformers')}",
        "tables": [asdict(table(results, notes))],
        "runs": [asdict(result) for result in results],
    }
    path.write_text(json.dumps(kept, ensure_ascii=False) + "\n", encoding="utf-8")


def saved(path: Path) -> list[Result]:
    """Results that `save` wrote."""
    kept = json.loads(path.read_text(encoding="utf-8"))
    return [Result(**{**run, "cell": Cell(**run["cell"])}) for run in kept["runs"]]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--seeds", type=int, nargs="*", default=SEEDS)
    parser.add_argument("--kinds", nargs="*", default=KINDS, choices=KINDS)
    parser.add_argument("--rates", type=float, nargs="*", default=LEARNING_RATES)
    parser.add_argument("--bounds", type=float, nargs="*", default=BOUNDS)
    parser.add_argument("--bounds-only", action="store_true", help="no run without a bound")
    parser.add_argument("--processes", type=int, default=1, help="that run cells side by side")
    parser.add_argument("--save", type=Path)
    given = parser.parse_args()
    results = [] if given.save is None or not given.save.exists() else saved(given.save)
    there = {result.cell for result in results}
    cells = [
        cell
        for cell in grid(given.model, given.seeds, given.kinds)
        if cell not in there
        and cell.rate in given.rates
        and (cell.at_most in given.bounds or not (cell.at_most or given.bounds_only))
    ]
    with ProcessPoolExecutor(given.processes, mp_context=get_context("spawn")) as pool:
        for done in as_completed([pool.submit(run, cell) for cell in cells]):
            result = done.result()
            results.append(result)
            print(f"{result.cell}, {result.seconds:.0f} s, {len(results)} runs", flush=True)
            if given.save is not None:
                save(results, given.save)
    CONSOLE.print(table(results).rows)


if __name__ == "__main__":
    main()
