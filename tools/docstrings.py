"""How the API reference reads docstrings: an example is code, also where it is the only one."""

from __future__ import annotations

import re
from typing import Any

import griffe


class ExampleSections(griffe.Extension):
    """Griffe knows the section `Examples:`, and takes `Example:` for a note in Markdown."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rename the section."""
        if obj.docstring is not None:
            text = obj.docstring.value
            obj.docstring.value = re.sub(r"(?m)^(\s*)Example:$", r"\1Examples:", text)
