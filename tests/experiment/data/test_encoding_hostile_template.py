"""The chat template of a base model that somebody else wrote: text, and no way out of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from steelyard.engine.tiny import tokenizer
from steelyard.experiment.data.encoding import Encoder

RECORD = {"messages": [{"role": "user", "content": "hi"}]}


def received(folder: Path, template: str) -> Encoder:
    """Encoder of a tokenizer that is read from a folder, with its template."""
    written = tokenizer()
    written.chat_template = template
    written.save_pretrained(folder)
    return Encoder(AutoTokenizer.from_pretrained(folder), max_length=64)


@pytest.mark.parametrize(
    "template",
    [
        "{{{{ cycler.__init__.__globals__.os.system({command}) }}}}",
        "{{{{ lipsum.__globals__['os'].system({command}) }}}}",
        "{{{{ joiner.__init__.__globals__.__builtins__.exec({python}) }}}}",
        "{{{{ raise_exception.__globals__['os'].system({command}) }}}}",
        "{{{{ strftime_now.__globals__['os'].system({command}) }}}}",
        "{{{{ (messages|attr('__class__')).__mro__[1].__subclasses__() }}}}",
        "{{{{ ''.__class__.__mro__[1].__subclasses__()[0].__init__.__globals__ }}}}",
        "{{{{ messages.append(1) }}}}",
        "{{{{ messages[0].update(role=1) }}}}",
        "{{% include '/etc/hostname' %}}",
        "{{% import 'os' as os %}}{{{{ os.system({command}) }}}}",
        "{{% for n in range(10**9) %}}x{{% endfor %}}",
    ],
)
def test_a_template_executes_nothing(tmp_path: Path, template: str) -> None:
    mark = tmp_path / "executed"
    values = {"command": repr(f"touch {mark}"), "python": repr(f"open({str(mark)!r}, 'w')")}
    encoder = received(tmp_path / "model", template.format(**values))
    with pytest.raises(ValueError, match="the chat template refuses"):
        encoder.open_prompt(RECORD)
    assert not mark.exists()
    assert RECORD == {"messages": [{"role": "user", "content": "hi"}]}


def test_the_same_template_executes_its_command_outside_of_the_sandbox(tmp_path: Path) -> None:
    """So the test above can fail."""
    import jinja2  # noqa: PLC0415 - what transformers renders with

    mark = tmp_path / "executed"
    template = "{{ cycler.__init__.__globals__.os.system(command) }}"
    jinja2.Template(template).render(command=f"touch {mark}")
    assert mark.exists()
