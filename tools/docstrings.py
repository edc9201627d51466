"""Extension of the API reference: the docstring section `Example:` is shown as code."""

from __future__ import annotations

import re
from typing import Any

import griffe


class ExampleSections(griffe.Extension):
    """Rename `Example:` to `Examples:`, the name that Griffe parses as code."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rename the section in the docstring of an object."""
        if obj.docstring is not None:
            text = obj.docstring.value
            obj.docstring.value = re.sub(r"(?m)^(\s*)Example:$", r"\1Examples:", text)
