"""Texts of a run as JSON: samples, answers, the examples that drive each term, log and config."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, TypeAlias, get_args

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from steelyard.experiment.config.data_tables import RewardConfig
from steelyard.experiment.config.schema import Config, TermConfig
from steelyard.experiment.page.formatting import percent
from steelyard.experiment.page.load import (
    DRIVERS,
    ROLLOUTS,
    SAMPLES,
    LoadedRun,
    configured_terms,
    read_config_file,
    term_name,
)
from steelyard.experiment.page.plain_files import read_last_objects, read_tail
from steelyard.experiment.training.drivers import Piece, redact_pieces
from steelyard.output.redaction import redact
from steelyard.spec.checks import is_finite
from steelyard.spec.error_messages import BASE

Record: TypeAlias = Mapping[str, Any]

_MAX_BYTES = 2**20  # of a file, from its end
_MAX_LOG = 2**16
_MAX_LATEST = 64  # answers
_MAX_DRIVEN = 12  # steps with driving examples; of more, some are left out, never the last
_MAX_EXTREMES = 6  # steps with best and worst answers: the first, the last, and some between
_MAX_PROMPTS = 8  # held-out prompts
_MAX_CHARACTERS = 600  # of a prompt or an answer
_FAINT = 0.1  # of the strongest token shown; below that a token has no colour
_NONE = "–"
# Lists of tables with names.
_NAMED: Mapping[str, type[BaseModel]] = {"regularizers": TermConfig, "rewards": RewardConfig}


def samples(run: Path) -> dict[str, Any]:
    """Completions of the sample prompts, before and after training."""
    records, whole = read_last_objects(run / SAMPLES, _MAX_BYTES)
    return {**sample_table([("", redact(records))]), "whole": whole}


def sample_table(runs: Sequence[tuple[str, Sequence[Record]]]) -> dict[str, Any]:
    """Completions by prompt, with one column each.

    For several runs there is one column "after" per run. Runs of the same model have the same
    completions before training and share the column "before"; where they differ, each run has its
    own.

    Args:
        runs: name and samples of each run.
    """
    same_start = len({_before(records) for _, records in runs if records}) <= 1
    headings: dict[str, None] = {}
    prompts: dict[str, dict[str, str]] = {}
    for name, records in runs:
        for sample in records:
            when = str(sample.get("when", ""))
            shared = len(runs) == 1 or (same_start and when == "before")
            heading = when if shared else f"{when} · {name}"
            headings.setdefault(heading)
            answers = prompts.setdefault(str(sample.get("prompt", "")), {})
            answers[heading] = str(sample.get("completion", ""))
    shown = [{"prompt": prompt, "answers": answers} for prompt, answers in prompts.items()]
    return {"headings": list(headings), "prompts": shown}


def _before(records: Sequence[Record]) -> frozenset[tuple[str, str]]:
    return frozenset(
        (str(sample.get("prompt")), str(sample.get("completion")))
        for sample in records
        if sample.get("when") == "before"
    )


def answers(run: Path) -> dict[str, Any]:
    """Best and worst answers over time, those to held-out prompts, and the latest ones."""
    found, whole = read_last_objects(run / ROLLOUTS, _MAX_BYTES)
    records = [record for record in redact(found) if _is_answer(record)]
    settings = read_config_file(run).get("rollouts") or {}
    return {
        "extremes": _extremes([record for record in records if not record.get("held_out")]),
        "held_out": _held_out([record for record in records if record.get("held_out")]),
        "sampled": settings.get("evaluate") == "sampled",
        "latest": [_latest(record) for record in records[-_MAX_LATEST:][::-1]],
        "whole": whole,
    }


def _is_answer(record: Record) -> bool:
    rewards, step = record.get("rewards"), record.get("step")
    return isinstance(record.get("answer"), str) and isinstance(rewards, dict) and type(step) is int


def _extremes(records: Sequence[Record]) -> list[dict[str, Any]]:
    by_step: dict[int, dict[str, list[Record]]] = {}
    for record in records:
        if is_finite(record.get("reward")):
            groups = by_step.setdefault(record["step"], {})
            groups.setdefault(str(record.get("group")), []).append(record)
    return [_of_step(step, by_step[step]) for step in _spread(sorted(by_step))]


def _of_step(step: int, groups: Mapping[str, Sequence[Record]]) -> dict[str, Any]:
    """Extremes of the group with the widest range of rewards: of one prompt, to be comparable."""
    pairs = [(min(group, key=_reward), max(group, key=_reward)) for group in groups.values()]
    worst, best = max(pairs, key=lambda pair: _reward(pair[1]) - _reward(pair[0]))
    prompt = prompt_text(best.get("prompt"))
    return {"step": step, "prompt": prompt, "best": _answer(best), "worst": _answer(worst)}


def _held_out(records: Sequence[Record]) -> list[dict[str, Any]]:
    by_line: dict[str, dict[int, Record]] = {}
    for record in records:
        if is_finite(record.get("reward")):
            # Of a group of sampled answers the first one.
            by_line.setdefault(str(record.get("line")), {}).setdefault(record["step"], record)
    steps = sorted({step for own in by_line.values() for step in own})
    if not steps:
        return []
    first, last = steps[0], steps[-1]
    return [
        {
            "prompt": prompt_text(own[last].get("prompt")),
            "before": _answer(own[first]) if first in own and first < last else None,
            "after": _answer(own[last]),
        }
        for own in by_line.values()
        if last in own
    ][:_MAX_PROMPTS]


def _latest(record: Record) -> dict[str, Any]:
    return {
        **_answer(record),
        "step": record["step"],
        "prompt": prompt_text(record.get("prompt")),
        "answer": _shortened(record["answer"]),
        "advantage": record.get("advantage") if is_finite(record.get("advantage")) else None,
        "held_out": bool(record.get("held_out")),
    }


def _answer(record: Record) -> dict[str, Any]:
    rewards = {
        name: value if is_finite(value) else None for name, value in record["rewards"].items()
    }
    reward = record.get("reward")
    text = _shortened(record["answer"])
    return {"text": text, "reward": reward if is_finite(reward) else None, "rewards": rewards}


def _reward(record: Record) -> float:
    return float(record["reward"])


def prompt_text(prompt: Any) -> str:
    r"""Text of a prompt, shortened; of a chat each message with its role.

    Example:
        >>> prompt_text([{"role": "system", "content": "Be kind."}, {"role": "user"}])
        'system: Be kind.\nuser: '
    """
    if isinstance(prompt, list):
        messages = [message for message in prompt if isinstance(message, dict)]
        lines = (f"{m.get('role', '')}: {m.get('content', '')}" for m in messages)
        return _shortened("\n".join(lines))
    return _shortened(str("" if prompt is None else prompt))


def _shortened(text: str) -> str:
    return text if len(text) <= _MAX_CHARACTERS else f"{text[:_MAX_CHARACTERS].rstrip()} …"


def _spread(steps: Sequence[int]) -> list[int]:
    """At most so many steps, evenly spread, the first and the last included."""
    if len(steps) <= _MAX_EXTREMES:
        return list(steps)
    last = len(steps) - 1
    return [steps[round(index * last / (_MAX_EXTREMES - 1))] for index in range(_MAX_EXTREMES)]


def drivers(run: Path) -> dict[str, Any]:
    """The examples that drive each term, by step; of many steps some, the last one included."""
    records, whole = read_last_objects(run / DRIVERS, _MAX_BYTES)
    by_step: dict[int, list[Record]] = {}
    for record in redact(records):
        if type(record.get("step")) is int and isinstance(record.get("data"), list):
            by_step.setdefault(record["step"], []).append(record)
    steps = sorted(by_step)
    every = -(-len(steps) // _MAX_DRIVEN) or 1
    names = [term_name(term) for term in configured_terms(read_config_file(run))]
    order = [BASE, *names]

    def place(record: Record) -> int:
        name = record.get("term")
        return order.index(name) if name in order else len(order)

    shown = [
        {
            "step": step,
            "terms": [_driven(record, names) for record in sorted(by_step[step], key=place)],
        }
        for step in reversed(steps[::-1][::every])
    ]
    return {"steps": shown, "whole": whole}


def _driven(record: Record, names: Sequence[str]) -> dict[str, Any]:
    name, norm = str(record.get("term", "")), record.get("grad_norm")
    data = [datum for datum in record["data"] if isinstance(datum, dict)]
    # Of a run whose config was edited since, a secret may span several tokens.
    texts = [redact_pieces(_pieces(datum.get("tokens"))) for datum in data]
    strongest = max((share or 0.0 for pieces in texts for _, share in pieces), default=0.0)
    return {
        "name": name,
        "label": "base loss" if name == BASE else name,
        "color": names.index(name) if name in names else None,
        "grad_norm": norm if is_finite(norm) else None,
        "examples": [
            {
                "source": _source(datum, record),
                "share": datum["share"] if is_finite(datum.get("share")) else None,
                "text": percent(datum["share"]) if is_finite(datum.get("share")) else _NONE,
                "tokens": list(_tokens(pieces, strongest)),
            }
            for datum, pieces in zip(data, texts, strict=True)
        ],
    }


def _pieces(tokens: Any) -> list[Piece]:
    pairs = tokens if isinstance(tokens, list) else []
    return [
        (str(pair[0]), pair[1] if is_finite(pair[1]) else None)
        for pair in pairs
        if isinstance(pair, list) and len(pair) == 2  # noqa: PLR2004 - a text and its share
    ]


def _source(datum: Record, record: Record) -> str:
    field = f", {datum['field']}" if "field" in datum else ""
    return f"{record.get('file', _NONE)}, line {datum.get('line', _NONE)}{field}"


def _tokens(pieces: Sequence[Piece], strongest: float) -> Iterator[tuple[str, float, str]]:
    """Text, depth of colour from 0 to 1, and title; neighbours without colour are joined.

    The depth is the share of a token, divided by that of the strongest token that is shown.
    """
    scaled = [(text, share, (share or 0.0) / (strongest or 1.0)) for text, share in pieces]
    for is_colored, group in groupby(scaled, key=lambda piece: piece[2] >= _FAINT):
        if is_colored:
            yield from ((text, round(depth, 3), percent(share)) for text, share, depth in group)
        else:
            yield "".join(text for text, _, _ in group), 0.0, ""


def log(run: Path) -> dict[str, Any]:
    """The end of the log."""
    tail, whole = read_tail(run / "log.txt", _MAX_LOG)
    text = tail.decode("utf-8", errors="replace")
    return {"text": redact(text if whole else text.partition("\n")[2]), "whole": whole}


def config(run: Path) -> dict[str, Any]:
    """The config: what differs from the defaults, all settings by table, and the JSON."""
    settings = read_config_file(run)
    return {
        "different": [
            {"key": key, "value": value, "default": default}
            for key, value, default in _not_default(settings)
        ],
        "sections": list(_sections(settings)),
        "text": json.dumps(settings, indent=2, ensure_ascii=False),
        "whole": True,
    }


RECORDS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "samples": samples,
    "answers": answers,
    "drivers": drivers,
    "log": log,
    "config": config,
}


def format_setting(value: Any) -> str:
    """Text of a setting, in one line: strings as they are, anything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _sections(config: Record) -> Iterator[dict[str, Any]]:
    """Settings by table: those of a table, of each term and reward, and those in no table."""
    for table, settings in config.items():
        if isinstance(settings, Mapping):
            yield _section(table, settings)
    top_level = {
        key: value
        for key, value in config.items()
        if not isinstance(value, Mapping) and key not in _NAMED and value is not None
    }
    if top_level:
        yield _section("top level", top_level)
    for index, term in enumerate(configured_terms(config)):
        yield {**_section(term_name(term), term), "color": index}
    for reward in configured_terms(config, "rewards"):
        yield _section(f"{term_name(reward)} (reward)", reward)


def _section(title: str, settings: Record) -> dict[str, Any]:
    texts = [[key, format_setting(value)] for key, value in settings.items()]
    return {"title": title, "color": None, "settings": texts}


def _not_default(config: Record) -> Iterator[tuple[str, str, str]]:
    """Key, value and default of each setting that is not the default.

    A file is shown by its name. `python_path` is left out: it has the folder of the config anyway.
    """
    for key, value in config.items():
        if key == "python_path":
            continue
        if key in _NAMED:
            for entry in configured_terms(config, key):
                yield from _of_table(entry, _NAMED[key], f"{term_name(entry)}.")
        else:
            yield from _of_table({key: value}, Config, "")


def _of_table(table: Record, model: type[BaseModel], path: str) -> Iterator[tuple[str, str, str]]:
    for key, value in table.items():
        field = model.model_fields.get(key)
        default = _default(field)
        if value == default or (default is PydanticUndefined and value is None):
            continue
        inner = None if field is None else _model_of(field.annotation)
        if isinstance(value, Mapping) and inner is not None:
            yield from _of_table(value, inner, f"{path}{key}.")
        else:
            shown = _NONE if default in (None, PydanticUndefined) else format_setting(default)
            is_file = isinstance(value, str) and Path(value).is_absolute()
            text = Path(value).name if is_file else format_setting(value)
            yield f"{path}{key}", text, shown


def _default(field: Any) -> Any:
    """Default of a field as JSON."""
    if field is None:
        return PydanticUndefined
    try:
        default = field.get_default(call_default_factory=True)
    except (TypeError, ValueError):  # a factory that needs the other fields
        return PydanticUndefined
    if isinstance(default, BaseModel):
        return default.model_dump(mode="json")
    return list(default) if isinstance(default, tuple) else default


def _model_of(annotation: Any) -> type[BaseModel] | None:
    """Table that an annotation allows; None if it allows none."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    inner = (_model_of(argument) for argument in get_args(annotation))
    return next((model for model in inner if model is not None), None)


def config_differences(runs: Sequence[LoadedRun]) -> dict[str, list[str]]:
    """Settings in which runs differ: one value per run, "–" where the run has none.

    A regularizer or reward that only some runs have is one row, "enabled" or "–"; its options are
    not compared.
    """
    configs = [dict(run.config) for run in runs]
    for table in _NAMED:
        configs = _with_named_terms(configs, table)
    flat = [dict(_flatten(config)) for config in configs]
    keys = dict.fromkeys(key for settings in flat for key in settings)
    values = {key: [settings.get(key, _NONE) for settings in flat] for key in keys}
    return {key: row for key, row in values.items() if len(set(row)) > 1}


def _with_named_terms(configs: Sequence[Record], table: str) -> list[dict[str, Any]]:
    """Return the configs with the enabled entries of a list as a mapping by name.

    Those that not every run has get the value "enabled" instead of their options.
    """
    enabled = [
        {
            term_name(term): term
            for term in configured_terms(config, table)
            if term.get("enabled", True)
        }
        for config in configs
    ]
    shared = set.intersection(*(set(terms) for terms in enabled))
    return [
        {
            **config,
            table: {name: term if name in shared else "enabled" for name, term in terms.items()},
        }
        for config, terms in zip(configs, enabled, strict=True)
    ]


def _flatten(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield each leaf of nested mappings with its dotted path, such as `train.steps`."""
    if isinstance(value, Mapping) and (value or path in _NAMED):
        for key, inner in value.items():
            yield from _flatten(inner, f"{path}.{key}" if path else str(key))
    else:
        yield path, format_setting(value)
