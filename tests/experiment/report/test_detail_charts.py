"""Charts of held-out values, of the terms' own metrics and of the optimizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from steelyard.experiment.report import write_report
from tests.experiment.folders import write_lines, write_run

from .parsed_page import page_charts, series, text_of, trace_points


def more(step: int) -> dict[str, Any]:
    """Further metrics of a step."""
    return {
        "accuracy": 0.5 + 0.01 * step,
        "loss:sum": 1.0,
        "regularizers/judge/custom/p_value": 0.05 * step,
        "regularizers/evenness/custom/gap/max": -1.0 * step,
        "optim/learning_rate": 0.001 * step,
        "optim/unclipped_grad_l2:mean": 3.0 + step,
        **({"held_out/regularizers/confidence": 2.0 * step} if step % 4 == 0 else {}),
        **({"base_loss/progress": -0.1 * step} if step % 4 == 0 else {}),
        **({"regularizers/confidence/progress": 0.2 * step} if step % 4 == 0 else {}),
    }


def page_of(folder: Path, name: str, extra: Any = more, **train: Any) -> tuple[Path, list[Any]]:
    rows = [row | extra(row["step"]) for row in write_run(folder / name)]
    write_lines(folder / name / "metrics.jsonl", rows)
    path = folder / name / "config.json"
    config = json.loads(path.read_text())
    config["train"] |= train
    path.write_text(json.dumps(config))
    return write_report([folder / name], folder / f"{name}.html"), rows


def test_charts_show_the_metrics(tmp_path: Path) -> None:
    page, rows = page_of(tmp_path, "run", grad_clip_norm=4.0)
    drawn = page_charts(page)
    held_out = series(rows, "held_out/regularizers/confidence")
    assert held_out[0] == [0, 4, 8]
    assert trace_points(drawn["held-out-1"]) == {"confidence": held_out}
    assert drawn["held-out-1"]["data"][0]["meta"] == {"color": "c2"}
    changes = [trace_points(figure) for key, figure in drawn.items() if key.startswith("progress")]
    assert changes == [
        {"base loss": series(rows, "base_loss/progress")},
        {"confidence": series(rows, "regularizers/confidence/progress")},
    ]
    own = [trace_points(figure) for key, figure in drawn.items() if key.startswith("own-")]
    assert own == [
        {"base loss: accuracy": series(rows, "accuracy")},
        {"evenness: gap/max": series(rows, "regularizers/evenness/custom/gap/max")},
        {"judge: p_value": series(rows, "regularizers/judge/custom/p_value")},
    ]
    assert trace_points(drawn["optimizer-learning-rate"]) == {
        "learning rate": series(rows, "optim/learning_rate")
    }
    assert trace_points(drawn["optimizer-grad-norm"]) == {
        "gradient norm": series(rows, "optim/unclipped_grad_l2:mean"),
        "clipped to": ([0, 11], [4.0, 4.0]),
    }


def test_evaluations_say_which_are_of_the_model_before_training(tmp_path: Path) -> None:
    page, rows = page_of(tmp_path, "run", extra=lambda step: {"eval/f1": 0.1 * step})
    assert trace_points(page_charts(page)["eval-0"]) == {"f1": series(rows, "eval/f1")}
    assert "returned; the first ones are of the model before training." in text_of(page)
    page, _ = page_of(tmp_path, "one", extra=lambda step: {"eval/f1": 0.5} if step == 0 else {})
    assert "Numbers that your evaluation functions returned." in text_of(page)


def test_without_clipping_there_is_no_limit(tmp_path: Path) -> None:
    page, _ = page_of(tmp_path, "run", grad_clip_norm=0.0)
    assert list(trace_points(page_charts(page)["optimizer-grad-norm"])) == ["gradient norm"]


def test_what_a_run_did_not_measure_has_no_section(tmp_path: Path) -> None:
    page, _ = page_of(tmp_path, "run", extra=lambda _: {})
    text = text_of(page)
    for title in ("Every term on held-out data", "Metrics of the terms", "Optimizer"):
        assert title not in text
    page, _ = page_of(tmp_path, "rate", extra=lambda step: {"optim/learning_rate": 0.1})
    assert "Gradient norm before clipping" not in text_of(page)
    assert "optimizer-learning-rate" in page_charts(page)


def test_of_many_metrics_the_others_are_counted(tmp_path: Path) -> None:
    page, _ = page_of(tmp_path, "run", extra=lambda _: {f"metric{i}": 1.0 for i in range(30)})
    own = [key for key in page_charts(page) if key.startswith("own-")]
    assert len(own) == 24
    assert "6 more are in metrics.jsonl." in text_of(page)


def test_several_runs_have_one_line_each(tmp_path: Path) -> None:
    _, first = page_of(tmp_path, "a")
    _, second = page_of(tmp_path, "b", extra=lambda _: {})
    drawn = page_charts(write_report([tmp_path / "a", tmp_path / "b"], tmp_path / "both.html"))
    assert trace_points(drawn["held-out-1"]) == {
        "a": series(first, "held_out/regularizers/confidence")
    }
    assert trace_points(drawn["optimizer-grad-norm"]) == {
        "a": series(first, "optim/unclipped_grad_l2:mean")
    }
    assert len(second) == len(first)
