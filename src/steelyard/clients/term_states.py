"""States of a client's terms: saved together, and restored when a term appears."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from steelyard.clients import state_io
from steelyard.errors import StateError
from steelyard.spec import Stateful


class TermStates:
    """The stateful terms that a client has seen, by name, and loaded states of others."""

    def __init__(self) -> None:
        self._terms: dict[str, Stateful] = {}
        # Loaded states, encoded, of terms that no call has mentioned since.
        self._pending: dict[str, Any] = {}

    def add_all(self, terms: Mapping[str, Stateful]) -> None:
        """Keep the state of terms, by name, from now on, and restore those that were loaded.

        Raises:
            StateError: a loaded state is not one of its term.
        """
        for name, term in terms.items():
            if self._terms.get(name) is not term:
                self._restore(name, term)
                self._terms[name] = term

    def encoded(self) -> dict[str, Any]:
        """The state of each term, ready for JSON.

        Raises:
            StateError: a state holds something that JSON cannot.
        """
        states = {
            name: state_io.encode(name, term.state_dict()) for name, term in self._terms.items()
        }
        return {**self._pending, **states}

    def load(self, states: Mapping[str, Any]) -> None:
        """Restore what `encoded` returned; the state of a term that is not known yet waits for it.

        Raises:
            StateError: a state is not one of its term.
        """
        self._pending = dict(states)
        for name, term in self._terms.items():
            self._restore(name, term)

    def _restore(self, name: str, term: Stateful) -> None:
        if name not in self._pending:
            return
        state = state_io.decode(name, self._pending[name])
        try:
            term.load_state_dict(state)
        except StateError:
            raise
        except Exception as error:  # a term is anyone's, and a damaged state may be anything
            raise StateError(
                f"the state of {name!r} must be what its state_dict returned, and loading it "
                f"failed: {type(error).__name__}: {error}"
            ) from error
        # Only here: a term whose state did not load must not run without it in the next call.
        del self._pending[name]
