"""Results of the base model that a run computes once: reference log-probs, and answers to prompts.

Log-probs are for terms that keep the model close to the base model, such as a KL term; they are in
`reference.safetensors`, by a digest of the model and of the tokens of a datum. Answers are for
terms whose data are prompts alone; they are sampled, and in `base_answers.jsonl`. Both files are in
the run folder, so that a resumed run, and each step, has the same. Runs of an ablation or a search,
which have the same model and data, share them in the folder of all of them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import filelock
import safetensors
import safetensors.torch
from tinker import types
from torch import Tensor

from steelyard.experiment.config.data_tables import TermDataConfig
from steelyard.experiment.config.schema import ModelConfig
from steelyard.experiment.data.encoding import Group, with_answer
from steelyard.experiment.model.backend import Backend
from steelyard.experiment.run.folder import RunFolder
from steelyard.output.redaction import redact
from steelyard.output.run_files import read_json_lines, write_file
from steelyard.spec.checks import is_whole

FIELD = "reference_logprobs"
REFERENCE_FILE = "reference.safetensors"
ANSWERS_FILE = "base_answers.jsonl"
_PROMPTS_AT_ONCE = 16  # prompts that are answered together
_SEED_BITS = 31  # of the SDK's seeds
_LEVELS = 2  # a shared cache is in the parent of a run folder, or in the parent of that

_Request = tuple[types.ModelInput, int, types.SamplingParams]


def add_reference_logprobs(
    groups: Sequence[Group],
    backend: Backend,
    run: RunFolder,
    say: Callable[[str], None] = lambda _: None,
    *,
    temperature: float = 1.0,
) -> list[Group]:
    """Add the field `reference_logprobs`, `[T]`, to each datum that does not have it.

    The client must be untrained: an untrained LoRA adapter (B = 0) leaves the model unchanged, so
    its log-probs are those of the base model. Only data that are not in the cache are computed.
    They are those of softmax(logits / temperature).
    """
    data = [datum for group in groups for datum in group if FIELD not in datum.loss_fn_inputs]
    if not data:
        return list(groups)
    model = run.config().model
    digests = [_digest(model, datum, temperature) for datum in data]
    file = cache_folder(run.path) / REFERENCE_FILE
    with locked_cache(file, run.path):
        by_digest = dict(zip(digests, data, strict=True))
        cached = _look_up(by_digest, backend, file, say, temperature)
    logprobs = (cached[digest] for digest in digests)

    def complete(datum: types.Datum) -> types.Datum:
        known = FIELD in datum.loss_fn_inputs
        return datum if known else with_reference(datum, next(logprobs))

    return [[complete(datum) for datum in group] for group in groups]


def with_reference(datum: types.Datum, logprobs: Tensor) -> types.Datum:
    """Copy of a datum with the field `reference_logprobs`."""
    fields = {**datum.loss_fn_inputs, FIELD: types.TensorData.from_torch(logprobs)}
    completed = replace(datum, loss_fn_inputs=fields)
    object.__setattr__(completed, "record", getattr(datum, "record", {}))
    return completed


def share_reference_logprobs(folder: Path) -> None:
    """Let the runs in this folder share one cache, which begins empty."""
    if not (folder / REFERENCE_FILE).exists():
        write_file(folder / REFERENCE_FILE, safetensors.torch.save({}))


def _look_up(
    data: Mapping[str, types.Datum],
    backend: Backend,
    file: Path,
    say: Callable[[str], None],
    temperature: float,
) -> dict[str, Tensor]:
    """Log-probs of these data, by digest: from the cache, or computed and added to it."""
    known = _read_logprobs(file)
    missing = {digest: datum for digest, datum in data.items() if digest not in known}
    if missing:
        say("computing the base model's log-probs")
        report = report_tenths("base model's log-probs", len(missing), say)
        computed = backend.logprobs(list(missing.values()), report, temperature=temperature)
        known |= zip(missing, computed, strict=True)
        write_file(file, safetensors.torch.save(known))
    return known


def report_tenths(what: str, count: int, say: Callable[[str], None]) -> Callable[[int], None]:
    """Function of the number of data that are done, which says each tenth of `count` but the last.

    Example:
        >>> report = report_tenths("base model's log-probs", 40, print)
        >>> for done in (16, 17, 32, 40):
        ...     report(done)
        base model's log-probs: 16 of 40 examples
        base model's log-probs: 32 of 40 examples
    """
    said = 0

    def report(computed: int) -> None:
        nonlocal said
        tenths = 10 * computed // count
        if said < tenths and computed < count:
            said = tenths
            say(f"{what}: {computed} of {count} examples")

    return report


def cache_folder(run: Path) -> Path:
    """Folder for what the base model gives: one that several runs share, or that of the run."""
    parents = list(run.absolute().parents)[:_LEVELS]
    return next((folder for folder in parents if (folder / REFERENCE_FILE).is_file()), run)


def locked_cache(file: Path, run: Path) -> AbstractContextManager[Any]:
    """Lock a file that several runs share.

    Runs that start at the same time wait for the first one instead of computing the same. The
    folder of a run is locked by it already.
    """
    is_shared = file.parent != run
    return filelock.FileLock(file.with_name(f".{file.name}.lock")) if is_shared else nullcontext()


def _read_logprobs(file: Path) -> dict[str, Tensor]:
    """Content of a cache; empty if there is none, or if it is damaged."""
    try:
        return safetensors.torch.load(file.read_bytes())
    except (FileNotFoundError, safetensors.SafetensorError):
        return {}


def _digest(model: ModelConfig, datum: types.Datum, temperature: float) -> str:
    """SHA-256 of what the log-probs depend on: the model, the tokens and the temperature."""
    targets = datum.loss_fn_inputs["target_tokens"].to_torch().tolist()
    more = [] if temperature == 1 else [temperature]
    return digest_of(model, datum.model_input.to_ints(), targets, *more)


def digest_of(model: ModelConfig, *content: Any) -> str:
    """SHA-256 of a base model and of what it was given."""
    settings = [model.backend, model.base_url, model.base_model, model.dtype]
    return hashlib.sha256(json.dumps([settings, *content]).encode()).hexdigest()


def add_base_answers(
    groups: Sequence[Group],
    backend: Backend,
    run: RunFolder,
    settings: TermDataConfig,
    max_length: int,
    say: Callable[[str], None] = lambda _: None,
) -> list[Group]:
    """Add the base model's answer to each prompt; a prompt without one gives an empty group.

    An answer follows from the model, the prompt and the settings alone: its seed is a digest of
    them. Only answers that are in no cache are sampled.

    Args:
        groups: data of prompts, as `Encoder.encode` gives them.
        backend: samples from the base model.
        run: run folder.
        settings: maximum of tokens, and temperature.
        max_length: maximum tokens of a prompt with its answer.
        say: receives messages about the progress.
    """
    model = run.config().model
    requests: dict[str, _Request] = {}
    digests = []
    for (datum,) in groups:
        prompt = datum.model_input.to_ints()
        tokens = min(settings.max_tokens, max_length - len(prompt))
        digests.append(digest_of(model, prompt, tokens, settings.temperature))
        seed = int(digests[-1], 16) % 2**_SEED_BITS
        params = backend.sampling_params(
            max_tokens=tokens, temperature=settings.temperature, seed=seed
        )
        requests[digests[-1]] = (datum.model_input, 1, params)
    own, shared = run.path / ANSWERS_FILE, cache_folder(run.path) / ANSWERS_FILE
    with locked_cache(shared, run.path):
        known = {**_read_answers(shared), **_read_answers(own)}
        missing = [digest for digest in requests if digest not in known]
        if missing:
            say(f"sampling the base model's answers to {len(missing)} prompts")
        report = report_tenths("base model's answers", len(missing), say)
        for start in range(0, len(missing), _PROMPTS_AT_ONCE):
            part = missing[start : start + _PROMPTS_AT_ONCE]
            sampled = backend.sample_base([requests[digest] for digest in part])
            for digest, (sequence,) in zip(part, sampled, strict=True):
                known[digest] = _answer_record(
                    digest, requests[digest][0], sequence, backend.tokenizer
                )
            # After each part: what was sampled before an interruption is not sampled again.
            _write_answers(shared, known)
            report(start + len(part))
    _write_answers(own, {**_read_answers(own), **{digest: known[digest] for digest in digests}})
    # The text is that of the tokens: in the file it has no secrets, and runs would differ.
    answers = [known[digest]["tokens"] for digest in digests]
    return [
        [with_answer(datum, tokens, _text_of(tokens, backend.tokenizer))] if tokens else []
        for (datum,), tokens in zip(groups, answers, strict=True)
    ]


def _answer_record(
    digest: str, prompt: types.ModelInput, sequence: types.SampledSequence, tokenizer: Any
) -> dict[str, Any]:
    tokens, end = list(sequence.tokens), tokenizer.eos_token_id
    truncated = sequence.stop_reason == "length"
    if tokens and not truncated and end is not None and tokens[-1] != end:
        tokens.append(end)  # some services leave out the token that ended the answer
    return {
        "digest": digest,
        "prompt": tokenizer.decode(prompt.to_ints()),
        "answer": _text_of(tokens, tokenizer),
        "truncated": truncated,
        "tokens": tokens,
    }


def _text_of(tokens: Sequence[int], tokenizer: Any) -> str:
    text: str = tokenizer.decode(list(tokens), skip_special_tokens=True)
    return text


def _read_answers(file: Path) -> dict[str, dict[str, Any]]:
    """Records of a cache by digest; those that are damaged are sampled again."""
    records = read_json_lines(file)
    return {str(record.get("digest")): record for record in records if _is_answer(record)}


def _is_answer(record: Mapping[str, Any]) -> bool:
    tokens = record.get("tokens")
    return (
        isinstance(tokens, list)
        and all(is_whole(token, at_least=0) for token in tokens)
        and isinstance(record.get("answer"), str)
    )


def _write_answers(file: Path, records: Mapping[str, Mapping[str, Any]]) -> None:
    lines = (json.dumps(redact(record), ensure_ascii=False) for record in records.values())
    write_file(file, "".join(f"{line}\n" for line in lines).encode())
