from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
from triton import language
from triton.runtime import interpreter

from steelyard.penalties.from_logits import projection as projected
from tests.penalties.from_logits.projection_cases import CLASSES


@pytest.fixture
def chunks_of_four(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(projected, "_ELSEWHERE", 4 * CLASSES)  # 15 rows: 4, 4, 4 and 3


@pytest.fixture(scope="session", autouse=True)
def patch_triton_once() -> Iterator[None]:
    """Let a launch patch Triton's language once.

    Triton's interpreter looks for what to patch in it on every call of a device function, which
    takes most of a launch's time and finds nothing: the launch has patched it already. It serves
    machines without a GPU alone.
    """
    patch_all: Any = interpreter._patch_lang

    @cache
    def languages(fn: Any) -> list[Any]:
        return [each for each in (language, language.core) if each in fn.__globals__.values()]

    def patch_once(fn: Any) -> Any:
        if any(language.core.is_builtin(each.load) for each in languages(fn)):
            return patch_all(fn)
        return interpreter._LangPatchScope()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", patch_once)
        yield
