"""Base class of the tables of a config."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from steelyard.experiment.config.tables import Options, Table
from steelyard.output.redaction import remember


class Endpoint(Table):
    retries: int = 1
    options: Options = {}  # noqa: RUF012 - pydantic copies it


def test_a_table_converts_nothing_and_knows_its_keys() -> None:
    with pytest.raises(ValidationError, match="valid integer"):
        Endpoint.model_validate({"retries": "2"})
    with pytest.raises(ValidationError, match="not permitted"):
        Endpoint.model_validate({"retry": 2})


def test_repr_of_a_table_shows_no_secret() -> None:
    raw = {"options": {"api_key": "hunter2-hunter2"}}
    remember(raw)
    assert "hunter2" not in repr(Endpoint.model_validate(raw))
