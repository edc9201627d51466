"""Write the run folder of a loop or a trainer that calls a `CompositeLoss`."""

from __future__ import annotations

import contextlib
import math
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from steelyard.composition.lazy_output import LazyOutput
from steelyard.doctor.alerts import alert
from steelyard.doctor.examination import Doctor
from steelyard.doctor.facts import Facts
from steelyard.doctor.finding import Finding
from steelyard.errors import RunError
from steelyard.output.accumulated import accumulated
from steelyard.output.custom_loss import CustomLossOutput, without_norms
from steelyard.output.run_files import RunFiles, read_json_object
from steelyard.output.step_metrics import skip_reasons, space_metrics
from steelyard.spec.error_messages import BASE

# Of this process, by folder: a cell of a notebook that was stopped leaves one behind.
_open: weakref.WeakValueDictionary[Path, RunRecorder] = weakref.WeakValueDictionary()


class RunRecorder:
    """Writes `config.json`, `metrics.jsonl` and `log.txt` of a run, and lets the doctor read along.

    A run that begins at step 0 needs a folder without one. A run that begins later goes on in its
    folder: the lines of this step and later ones are removed.

    Args:
        folder: the run folder, which is locked until `close`.
        config: what is declared of the run, in the form of a config of `steelyard train`; its
            `trainer` says what writes the folder.
        start: number of the first step.

    Raises:
        RunError: the folder holds another run, another process writes there, or it cannot be
            written.
    """

    def __init__(self, folder: str | Path, config: Mapping[str, Any], start: int = 0) -> None:
        self._files = RunFiles(folder)
        self.path = self._files.path
        self._check(start)
        key = self.path.resolve()
        if key in _open:
            _open[key].close()
        self._cleanup = contextlib.ExitStack()
        self._cleanup.enter_context(self._files.locked())
        weakref.finalize(self, self._cleanup.close)
        _open[key] = self
        self._files.reopen(start)
        self._config: Mapping[str, Any] = {}
        self._doctor = Doctor(Facts())
        self.declare(config)
        for step, line in {line["step"]: line for line in self._files.metrics()}.items():
            self._doctor.observe(step, line)
        self._line: dict[str, Any] = {}
        self._waiting: dict[str, Any] = {}  # for the first line
        self._step, self._clock, self._began = start - 1, time.perf_counter(), time.perf_counter()

    def declare(self, config: Mapping[str, Any]) -> None:
        """Write the config, if it is another than before."""
        if config == self._config:
            return
        self._config = config
        self._doctor.facts = Facts.of_config(config)
        self._files.write_config(config)

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Write the line of a step."""
        self.settle()
        now = time.perf_counter()
        seconds = (now - self._clock) / max(1, step - self._step)
        self._step, self._clock = step, now
        first, self._waiting = self._waiting, {}
        own = {"step": step, "time": time.time(), "seconds": seconds}
        self._line = {**own, **metrics, **first}
        self._files.append(self._line)

    def add(self, metrics: Mapping[str, Any]) -> None:
        """Add metrics to the last line, by writing it again; before the first, to that."""
        if not self._line or not metrics:
            self._waiting |= metrics
            return
        self._line = {**self._line, **metrics}
        self._files.append(self._line)

    def settle(self) -> None:
        """Let the doctor read the last line, to which nothing is added any more."""
        if self._line:
            self._report(self._doctor.observe(self._line["step"], self._line))

    def finish(self) -> None:
        """Mark the run as done, and close."""
        self.settle()
        steps, seconds = self._step + 1, time.perf_counter() - self._began
        result = {"status": "done", "steps": steps, "seconds": seconds, "metrics": self._line}
        self._files.finish(result)
        self.close()

    def close(self) -> None:
        """Release the folder."""
        self._cleanup.close()

    def _report(self, findings: Sequence[Finding]) -> None:
        for finding in findings:
            self._files.log(finding.line)
        alert(findings)

    def _check(self, start: int) -> None:
        """Raise if the folder holds what this run must not write over."""
        if not self._files.holds_run:
            return
        config = read_json_object(self._files.config_file)
        if "trainer" not in config:
            raise RunError(
                f"run must be a folder of its own, and {self.path} holds the config.json of "
                f"something else: choose another folder, such as {self.path / 'steelyard'}."
            )
        metrics = self._files.metrics_file
        if start == 0 and metrics.is_file() and metrics.stat().st_size:
            raise RunError(
                f"run must be a folder that is new or empty, and {self.path} holds a run: choose "
                f"another folder or delete it, or resume that run from its checkpoint."
            )


class CallRecorder:
    """Records the calls of a composite: a line for each step, from all calls of the step.

    Calls without gradients are an evaluation: the mean of their base losses is `held_out/loss` in
    the line of the step before them, or of the first step.

    Args:
        folder: the run folder; it is opened at the first call with gradients.

    Attributes:
        follows: whether an optimizer tells when a step ends: calls after its last step, before the
            loop ended, are then part of none.
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder = folder
        self._recorder: RunRecorder | None = None
        self._calls: list[LazyOutput] = []
        self._evaluated: list[LazyOutput] = []
        self._last: LazyOutput | None = None
        self._step = 0
        self.follows = False

    def open(self, step: int, config: Mapping[str, Any]) -> RunRecorder:
        """Open the folder before the first step.

        Raises:
            RunError: as for `RunRecorder`.
        """
        if self._recorder is None:
            self._recorder = RunRecorder(self._folder, config, step)
        return self._recorder

    def add(self, call: LazyOutput, step: int, *, trains: bool) -> None:
        """Add a call of a step, or of an evaluation."""
        if trains:
            if not self._calls:
                self._end_evaluation()
            self._calls.append(call)
            self._last, self._step = call, step
        else:
            self._evaluated.append(call)

    def end_step(
        self, step: int, config: Mapping[str, Any], last: LazyOutput | None, learning_rate: Any
    ) -> None:
        """Write the line of a step.

        Args:
            step: its number.
            config: what is declared of the run at this step.
            last: the last call of the composite; one inside of `torch.compile` was not added.
            learning_rate: of the optimizer, if it is known.
        """
        calls, self._calls = self._calls, []
        if not calls and last is not None and last.compiled and last is not self._last:
            calls, self._last = [last], last
        if not calls:
            return
        recorder = self.open(step, config)
        metrics = metrics_of_step(calls)
        if learning_rate is not None:
            metrics["optim/learning_rate"] = float(learning_rate)
        recorder.declare(config)
        recorder.write(step, metrics)
        self._end_evaluation()

    def close(self) -> None:
        """Write what is left, and release the folder: there will be no more calls."""
        recorder, calls = self._recorder, self._calls
        if recorder is None:
            return
        if calls and not self.follows:
            recorder.write(self._step, metrics_of_step(calls))
        self._end_evaluation()
        recorder.settle()
        recorder.close()

    def _end_evaluation(self) -> None:
        evaluated, self._evaluated = self._evaluated, []
        if evaluated and self._recorder is not None:
            self._recorder.add(held_out_metrics(evaluated))


def metrics_of_step(calls: Sequence[LazyOutput]) -> dict[str, Any]:
    """Metrics of a step from its calls.

    With the shares s of the calls, the base loss is Σ base / Σ s and a term Σ s · value / Σ s: the
    shares of a loss that is divided by the tokens of the whole step add up to 1, and calls whose
    shares are all 1 count alike. Norms of several calls are of different inputs, or left out: those
    with respect to the parameters would need the gradients of each call.
    """
    output = calls[0].output
    if len(calls) > 1:
        shares = [float(call.share) for call in calls]
        total = math.fsum(shares) or 1.0
        factors = [
            {BASE: 1 / total, **dict.fromkeys(call.output.regularizers, share / total)}
            for call, share in zip(calls, shares, strict=True)
        ]
        outputs = [_scaled(call.output, of) for call, of in zip(calls, factors, strict=True)]
        output = accumulated(outputs, factors)
    return {**output.metrics, **space_metrics(output), **skip_reasons(output.skipped)}


def held_out_metrics(calls: Sequence[LazyOutput]) -> dict[str, float]:
    """Mean of the base losses of an evaluation, and of each term over the calls in which it ran."""
    values: dict[str, list[float]] = {}
    for call in calls:
        values.setdefault("held_out/loss", []).append(call.output.base_loss.value)
        for name, term in call.output.regularizers.items():
            values.setdefault(f"held_out/regularizers/{name}", []).append(term.value)
    return {key: math.fsum(numbers) / len(numbers) for key, numbers in values.items()}


def _scaled(output: CustomLossOutput, factors: Mapping[str, float]) -> CustomLossOutput:
    """Output of a call as it counts in its step, for `accumulated`."""
    if output.grad_space == "parameters":
        output = without_norms(output)
    terms = {}
    for name, term in output.regularizers.items():
        factor, norm = factors[name], term.grad_norm_weighted
        terms[name] = replace(
            term,
            weight=factor * term.weight,
            contribution=factor * term.contribution,
            grad_norm_weighted=None if norm is None else factor * norm,
        )
    added = math.fsum(term.contribution for term in terms.values())
    return replace(
        output,
        loss_total=factors[BASE] * output.base_loss.value + added,
        regularizers=terms,
        regularizer_total=added,
        total_grad_norm=None,
    )
