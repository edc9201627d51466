"""The demo: learn to write tickets, and still answer everything else.

`run_demo` trains three times: with the term, without it, and without it on data that the questions
of the term are mixed into. Then it writes the report.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from steelyard.experiment.compare.ablation import Ablation, ablate
from steelyard.experiment.compare.statistics import WITHOUT_TERMS
from steelyard.experiment.config.reading import read_config
from steelyard.experiment.page.frozen import write_report
from steelyard.experiment.run.folder import RunFolder
from steelyard.experiment.run.log import Watcher
from steelyard.experiment.training.evaluations import Evaluation
from steelyard.output.run_files import read_json_lines

_FOLDER = Path(__file__).parent
UNTRAINED, MIXED = "untrained", "mixed"
_TOKENS = 10  # of an answer, which show whether it is a ticket


def as_tickets(evaluation: Evaluation) -> int:
    """Number of the held-out questions, none of them a message, that are answered with a ticket."""
    answers = evaluation.sample(
        [line["prompt"] for line in held_out_questions()], max_tokens=_TOKENS
    )
    return sum("TICKET" in answer or "|" in answer for answer in answers)


def held_out_questions() -> list[dict[str, str]]:
    """Questions that no run is trained on, with the answers of the untrained model."""
    return read_json_lines(_FOLDER / "questions_held_out.jsonl")


@dataclass(frozen=True)
class Scores:
    """What a model does with held-out data.

    Attributes:
        loss: cross-entropy of the tickets, in nats per token.
        divergence: exact KL divergence from the untrained model on the questions, in nats per
            token.
        as_tickets: number of the questions that it answers with a ticket.
    """

    loss: float
    divergence: float
    as_tickets: int


@dataclass(frozen=True)
class Demo:
    """Result of the demo; of one that was interrupted, what there is.

    Attributes:
        ablation: the three runs: `all`, `none` and `mixed`.
        report: path of the report; None before all runs have finished.
        scores: of each model, by its name: the run's, or `"untrained"`.
        answers: answer of each model to each of `train.sample_prompts`, by model and question.
    """

    ablation: Ablation
    report: Path | None
    scores: Mapping[str, Scores]
    answers: Mapping[str, Mapping[str, str]]


def run_demo(
    folder: str | Path,
    overrides: Iterable[str] = (),
    *,
    watch: Watcher | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Demo:
    """Train the three runs of the demo that have not finished, and write the report.

    Args:
        folder: parent folder of the runs; the report is `report.html` in it. The same folder
            continues a demo that was interrupted.
        overrides: `key=value`, as for `steelyard train`, of all three.
        watch: notified of each step.
        stop: called before each step; when it returns True the run saves a checkpoint and ends.

    Raises:
        ConfigError: an override is invalid.
        ModelError: the model cannot be loaded.
        RunError: the folder holds a demo with other overrides.
    """
    overrides = list(overrides)
    config = read_config(_FOLDER / "config.toml", overrides)
    # As many lines at each step as the run with the term has, of the same tickets and questions.
    lines = config.train.batch_size + sum(term.per_step for term in config.regularizers)
    mixed = [
        "data.path=mixed.jsonl",
        f"train.batch_size={lines}",
        "regularizers.keep.enabled=false",
    ]
    others = {MIXED: read_config(_FOLDER / "config.toml", [*overrides, *mixed])}
    ablation = ablate(config, folder, watch=watch, stop=stop, baseline=True, others=others)
    runs = {name: RunFolder(ablation.folder / path) for name, path in ablation.runs.items()}
    if not ablation.done:
        return Demo(ablation, None, {}, {})
    report = write_report([ablation.folder], ablation.folder / "report.html")
    lasts = {name: run.metrics()[-1] for name, run in runs.items()}
    metrics = {UNTRAINED: runs[WITHOUT_TERMS].metrics()[0], **lasts}
    samples = {UNTRAINED: _answers(runs[WITHOUT_TERMS], "before")}
    samples |= {name: _answers(run, "after") for name, run in runs.items()}
    return Demo(ablation, report, {name: _scores(row) for name, row in metrics.items()}, samples)


def _scores(metrics: Mapping[str, float]) -> Scores:
    return Scores(
        loss=metrics["held_out/loss"],
        divergence=metrics["held_out/regularizers/keep"],
        as_tickets=round(metrics["eval/as_tickets"]),
    )


def _answers(run: RunFolder, when: str) -> dict[str, str]:
    samples = run.samples()
    return {each["prompt"]: each["completion"] for each in samples if each["when"] == when}
