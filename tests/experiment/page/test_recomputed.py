"""Every number of one report, computed again from the saved adapters with transformers and peft.

Only the tokens and the order of the batches are taken from Steelyard.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor

from steelyard.engine import tiny
from steelyard.experiment import read_config, train
from steelyard.experiment.data.batches import batch, split
from steelyard.experiment.data.encoding import Encoder
from steelyard.experiment.data.files import read_records
from steelyard.experiment.page.formatting import number
from steelyard.experiment.page.frozen import write_report
from steelyard.experiment.page.load import load_runs
from steelyard.experiment.page.run_statistics import statistics_of

from .frozen_page import points, run_of

LINES = [
    {"prompt": prompt, "completion": completion}
    for prompt, completion in (
        ("a b", " c d e"), ("x", " y"), ("hello", " world, it is"), ("one", " two three"),
        ("red", " green blue"), ("up", " down left right"), ("I", " am"), ("we", " are here"),
    )
]  # fmt: skip
STEPS, BATCH, SEED = 8, 2, 3
WEIGHTS = {"kl": 0.2, "l2": 0.5, "size": 0.01}


def size(data: Any, logprobs: Any, *, parameters: dict[str, Tensor]) -> Tensor:
    """Half the squared norm of the adapter."""
    return 0.5 * sum((each.square().sum() for each in parameters.values()), torch.zeros(()))


def config(folder: Path) -> dict[str, Any]:
    return {
        "model": {"base_model": "tiny-random", "rank": 4},
        "data": {"path": "train.jsonl", "held_out": 0.25},
        "train": {
            "steps": STEPS, "batch_size": BATCH, "learning_rate": 0.01, "seed": SEED,
            "save_every": 1, "keep": STEPS, "evaluate_every": 3, "track_grad_norms": True,
        },
        "regularizers": [
            {"use": "kl_to_reference", "name": "kl", "weight": WEIGHTS["kl"], "every": 2},
            {"use": "l2", "weight": WEIGHTS["l2"]},
            {"use": f"{__name__}:size", "name": "size", "weight": WEIGHTS["size"],
             "needs": ["parameters"]},
        ],
    }  # fmt: skip


@dataclass
class Step:
    """Recomputed values, and weighted gradients with respect to the log-probs."""

    values: dict[str, float]
    gradients: dict[str, Tensor]

    def norm(self, name: str) -> float:
        return float(self.gradients[name].norm())

    def cosine(self, name: str) -> float:
        a, b = self.gradients["base"], self.gradients[name]
        return float(a @ b / (a.norm() * b.norm()))


class Recomputed:
    """The run, from the base model and the adapters in its folder."""

    def __init__(self, folder: Path) -> None:
        self._checkpoints = folder / "run" / "checkpoints"
        encoder = Encoder(tiny.tokenizer(), max_length=128)
        groups = read_records(folder / "train.jsonl", encoder.encode, skip_bad=False).groups
        self._train, self._held_out = split(groups, 0.25, SEED)

    def step(self, step: int) -> Step:
        """Terms of a training step, at the weights after `step` steps."""
        lines = [self._train[index] for index in batch(step, BATCH, len(self._train), SEED)]
        return self._terms(lines, step)

    def held_out(self, completed: int) -> dict[str, float]:
        return self._terms(self._held_out, completed).values

    def _terms(self, lines: Sequence[Any], completed: int) -> Step:
        data = [datum for line in lines for datum in line]
        own = torch.cat(self._logprobs(data, completed)).requires_grad_()
        reference = torch.cat(self._logprobs(data, 0)).detach()
        delta = own - reference
        terms = {
            "base": -own.mean(),
            "kl": 0.5 * delta.square().mean(),
            "l2": own.square().mean(),
        }
        weights = {"base": 1.0, **WEIGHTS}
        gradients = {
            name: weights[name] * torch.autograd.grad(term, own, retain_graph=True)[0]
            for name, term in terms.items()
        }
        values = {name: term.item() for name, term in terms.items()}
        adapter = self._adapter(completed)
        if adapter is not None:
            values["size"] = 0.5 * sum(float(each.square().sum()) for each in adapter)
        return Step(values, gradients)

    def _logprobs(self, data: Sequence[Any], completed: int) -> list[Tensor]:
        model = tiny.build(torch.float32)
        if completed:
            model = peft.PeftModel.from_pretrained(model, self._folder(completed))
        found = []
        for datum in data:
            tokens = torch.tensor([datum.model_input.to_ints()])
            targets = torch.tensor(datum.loss_fn_inputs["target_tokens"].data)
            counted = torch.tensor(datum.loss_fn_inputs["weights"].data) != 0
            with torch.no_grad():
                rows = model(input_ids=tokens).logits[0].double().log_softmax(-1)
            found.append(rows[torch.arange(len(targets)), targets][counted])
        return found

    def _adapter(self, completed: int) -> list[Tensor] | None:
        """Tensors of the adapter; before the first step they were not saved."""
        if not completed:
            return None
        model = peft.PeftModel.from_pretrained(
            tiny.build(torch.float32), self._folder(completed), is_trainable=True
        )
        return [each.detach().double() for each in model.parameters() if each.requires_grad]

    def _folder(self, completed: int) -> Path:
        (folder,) = self._checkpoints.glob(f"*/weights/step-{completed:08}")
        return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recomputed")
    text = "".join(json.dumps(line) + "\n" for line in LINES)
    (folder / "train.jsonl").write_text(text, encoding="utf-8")
    train(read_config(config(folder), folder=folder), folder / "run")
    return folder


@pytest.fixture(scope="module")
def steps(folder: Path) -> list[Step]:
    recomputed = Recomputed(folder)
    return [recomputed.step(step) for step in range(STEPS)]


def close(value: float) -> Any:
    return pytest.approx(value, rel=2e-4, abs=1e-6)


def test_values_contributions_norms_and_cosines(folder: Path, steps: list[Step]) -> None:
    page = run_of(write_report([folder / "run"], folder / "report.html"))

    def drawn(metric: str) -> list[float | None]:
        return points(page, metric)[1]

    pairs = page["cosines"]["pairs"]
    cosines = {
        metric.removeprefix("cosines/base/"): page["cosines"]["rows"][row]
        for row, metric in enumerate(pairs)
    }
    assert drawn("base_loss/value") == [close(step.values["base"]) for step in steps]
    for name, every in (("kl", 2), ("l2", 1)):
        ran = [values for step, values in enumerate(steps) if step % every == 0]
        at = f"regularizers/{name}"
        assert drawn(f"{at}/value") == [close(step.values[name]) for step in ran]
        expected = [close(WEIGHTS[name] * step.values[name]) for step in ran]
        assert drawn(f"{at}/contribution") == expected
        assert drawn(f"{at}/grad_norm_weighted") == [close(step.norm(name)) for step in ran]
    assert drawn("base_loss/grad_norm") == [close(step.norm("base")) for step in steps]

    def rounded(value: float) -> Any:
        return pytest.approx(value, abs=1e-4)  # four digits in the heat-map

    # The first KL is that of the base model to itself: its gradient is rounding or 0.
    assert cosines["kl"][1:] == [
        None if step % 2 else rounded(values.cosine("kl"))
        for step, values in enumerate(steps)
        if step
    ]
    assert cosines["l2"] == [rounded(step.cosine("l2")) for step in steps]
    assert "size" not in cosines
    sizes = drawn("regularizers/size/value")
    assert sizes[1:] == [close(step.values["size"]) for step in steps[1:]]
    # d (½ |x|²) / dx = x, so the norm is the root of twice the value.
    norms = [WEIGHTS["size"] * math.sqrt(2 * step.values["size"]) for step in steps[1:]]
    assert drawn("regularizers/size/grad_norm_weighted")[1:] == [close(norm) for norm in norms]
    titles = {key: chart["title"] for chart in page["charts"] for key in chart["curves"]}
    assert titles["regularizers/size/grad_norm_weighted"].endswith(", parameters")
    assert titles["regularizers/l2/grad_norm_weighted"].endswith(", log-probs")


def test_totals(folder: Path, steps: list[Step]) -> None:
    rows = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    for step in range(1, STEPS):
        values, gradients = steps[step].values, steps[step].gradients
        names = [name for name in WEIGHTS if name != "kl" or step % 2 == 0]
        total = values["base"] + sum(WEIGHTS[name] * values[name] for name in names)
        assert rows[step]["loss_total"] == close(total)
        added = sum(gradients[name] for name in ("base", *names) if name != "size")
        assert rows[step]["total_grad_norm"] == close(float(torch.as_tensor(added).norm()))


def test_shares_and_the_fraction_cancelled(folder: Path, steps: list[Step]) -> None:
    found = statistics_of(load_runs([folder / "run"]).runs[0])
    kl, l2, adapter = found.terms
    even = steps[::2]
    sums = {
        "base": sum(each.norm("base") for each in steps),
        "kl": sum(each.norm("kl") for each in even),
        "l2": sum(each.norm("l2") for each in steps),
    }
    shares = {"base": found.base.share, "kl": kl.share, "l2": l2.share}
    total = sum(sums.values())
    assert shares == {name: close(norm / total) for name, norm in sums.items()}
    assert sum(share or 0.0 for share in shares.values()) == pytest.approx(1)
    assert (adapter.space, adapter.share) == ("parameters", 1.0)
    for term, ran in ((kl, even), (l2, steps)):
        products = sum(float(each.gradients["base"] @ each.gradients[term.name]) for each in ran)
        squares = sum(each.norm("base") ** 2 for each in steps)
        assert term.cancelled == close(-products / squares)


def test_held_out_values(folder: Path) -> None:
    rows = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    recomputed = Recomputed(folder)
    measured = [row for row in rows if "held_out/loss" in row]
    assert [row["step"] for row in measured] == [0, 3, 6, 7]
    for row in measured:
        completed = row["step"] + 1 if row["step"] else 0
        expected = recomputed.held_out(completed)
        assert row["held_out/loss"] == close(expected["base"])
        for name in ("kl", "l2"):
            assert row[f"held_out/regularizers/{name}"] == close(expected[name])


def test_sentences_and_rows(folder: Path, steps: list[Step]) -> None:
    page = run_of(write_report([folder / "run"], folder / "report.html"))
    base = [step.values["base"] for step in steps]
    first, last = sum(base[:2]) / 2, sum(base[-2:]) / 2
    verb = "fell" if last < first else "rose"
    assert f"the base loss per token {verb} from {first:.3f} to {last:.3f}" in page["headline"]
    recomputed = Recomputed(folder)
    start, end = (recomputed.held_out(completed)["base"] for completed in (0, STEPS))
    assert re.search(f"held-out (fell|rose) from {start:.3f} to {end:.3f}", page["headline"])
    total = "The total loss, over the 4 steps with the same terms and weights,"
    assert page["sentences"][0].startswith(total)
    assert any("The gradient of “size” is with respect to the parameters" in sentence
               for sentence in page["sentences"])  # fmt: skip
    rows = {row["name"]: row for row in page["terms"]}
    kl = [step.values["kl"] for step in steps[::2]]
    assert rows["kl"]["value"]["first"] == close(kl[0])
    assert rows["kl"]["value"]["last"] == close(kl[-1])
    assert rows["kl"]["texts"]["weight"] == number(WEIGHTS["kl"])
    assert rows["kl"]["texts"]["steps"] == f"4 of {STEPS}"
    assert rows["size"]["texts"]["space"] == "parameters"
    cosines = [step.cosine("l2") for step in steps]
    assert rows["l2"]["cosine"] == close(sum(cosines) / STEPS)
