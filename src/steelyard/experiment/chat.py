"""A conversation with the model of a run, or with its base model."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any

from tinker import types

from steelyard.experiment.trained_model import TrainedModel


class Chat:
    """Messages so far, each answered in the light of those before it.

    A model without a chat template continues each text by itself, and nothing is remembered.

    Args:
        model: the model of a run.
        params: settings of the answers.
        system: the system message.
        base: whether the base model answers.
    """

    def __init__(
        self,
        model: TrainedModel,
        params: types.SamplingParams,
        *,
        system: str | None = None,
        base: bool = False,
    ) -> None:
        self._model, self._params, self._base = model, params, base
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self._exchanges: list[list[dict[str, str]]] = []

    def answer(self, text: str) -> Generator[str]:
        """Yield the answer to a text, piece by piece; a part of it is remembered if it is closed.

        If the context is full, the oldest exchanges are forgotten.

        Raises:
            InputError: the text does not fit the model's context, or a setting breaks a rule.
        """
        prompt = self._fitting_prompt(text)
        answer: list[str] = []
        stream = self._model.stream(prompt, self._params, base=self._base)
        try:
            for piece in stream:
                answer.append(piece)
                yield piece
        finally:
            question = {"role": "user", "content": text}
            self._exchanges.append([question, {"role": "assistant", "content": "".join(answer)}])

    def reset(self) -> None:
        """Forget all messages but the system message."""
        self._exchanges = []

    def _fitting_prompt(self, text: str) -> types.ModelInput:
        context = self._model.context_length
        while True:
            prompt = self._model.encode(self._record(text))
            if context is None or not self._exchanges:
                return prompt
            # Half of the context is enough for an answer, whatever its limit.
            if prompt.length + min(self._params.max_tokens or context, context // 2) <= context:
                return prompt
            del self._exchanges[0]

    def _record(self, text: str) -> Mapping[str, Any]:
        if not self._system and not self._model.has_chat_template:
            return {"prompt": text}
        said = [message for exchange in self._exchanges for message in exchange]
        return {"messages": [*self._system, *said, {"role": "user", "content": text}]}
