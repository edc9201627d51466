"""Properties of the demo's data that its terms rely on."""

from __future__ import annotations

import re
from collections import Counter
from itertools import pairwise

from .files import DATA, HELD_OUT

POLITE = r"\b(please|kindly|could you|would you|may i|how may|grateful|like to)\b"


def words(text: str) -> str:
    return " ".join(re.findall(r"\w+", text.lower()))


def test_the_data_have_at_least_200_lines_on_10_topics() -> None:
    assert len(DATA) >= 200
    topics = Counter(line["topic"] for line in DATA)
    assert len(topics) >= 10
    assert max(topics.values()) <= 0.25 * len(DATA)


def test_every_line_has_all_fields() -> None:
    for line in DATA + HELD_OUT:
        assert set(line) - {"claim"} == {"prompt", "completion", "topic", "group", "bad"}
        assert line["group"] in (0, 1)
        assert line["bad"] in (0, 1)
        assert line["prompt"] == line["prompt"].strip()
        assert line["completion"] == " " + line["completion"].strip()


def test_prompts_and_long_answers_are_unique() -> None:
    prompts = [words(line["prompt"]) for line in DATA + HELD_OUT]
    assert [prompt for prompt, times in Counter(prompts).items() if times > 1] == []
    answers = [words(line["completion"]) for line in DATA + HELD_OUT]
    long = [answer for answer in answers if len(answer.split()) > 3]
    assert [answer for answer, times in Counter(long).items() if times > 1] == []


def test_bad_answers_are_spread_evenly_and_none_is_held_out() -> None:
    places = [index for index, line in enumerate(DATA) if line["bad"]]
    assert 0.12 <= len(places) / len(DATA) <= 0.18
    gaps = [after - before for before, after in pairwise(places)]
    assert max(gaps) <= 2 * min(gaps)
    assert not any(line["bad"] for line in HELD_OUT)
    assert len(HELD_OUT) >= 20


def test_groups_are_balanced_and_group_1_is_polite() -> None:
    polite = re.compile(POLITE, re.IGNORECASE)
    for line in DATA + HELD_OUT:
        unquoted = re.sub(r'"[^"]*"', "", line["prompt"])  # a quoted text may be polite by itself
        assert bool(polite.search(unquoted)) == bool(line["group"]), line
    shares = [sum(line["group"] for line in part) / len(part) for part in (DATA, HELD_OUT)]
    assert all(0.4 <= share <= 0.6 for share in shares)
