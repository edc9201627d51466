"""Properties of the demo's data that its comparison relies on."""

from __future__ import annotations

from collections import Counter

from steelyard.experiment import read_config

from .files import FOLDER, read

TICKETS, QUESTIONS = read("tickets"), read("questions")
UNSEEN_TICKETS, UNSEEN_QUESTIONS = read("tickets_held_out"), read("questions_held_out")


def test_every_line_is_a_prompt_with_its_answer() -> None:
    for line in TICKETS + UNSEEN_TICKETS + QUESTIONS + UNSEEN_QUESTIONS:
        assert set(line) == {"prompt", "completion"}
        assert all(text == text.strip() != "" for text in line.values())


def test_no_line_that_is_evaluated_is_one_that_is_trained_on() -> None:
    lines = TICKETS + UNSEEN_TICKETS + QUESTIONS + UNSEEN_QUESTIONS
    prompts = Counter(line["prompt"].lower() for line in lines)
    assert [prompt for prompt, times in prompts.items() if times > 1] == []
    tickets = Counter(line["completion"] for line in TICKETS + UNSEEN_TICKETS)
    assert [ticket for ticket, times in tickets.items() if times > 1] == []


def test_a_ticket_says_what_its_message_says() -> None:
    for line in TICKETS + UNSEEN_TICKETS:
        name, *words = line["completion"].split(" | ")
        assert name == "TICKET"
        assert len(words) == 3
        assert all(word in line["prompt"].lower() for word in words)


def test_no_answer_to_a_question_is_a_ticket() -> None:
    answers = [line["completion"] for line in QUESTIONS + UNSEEN_QUESTIONS]
    assert not any("TICKET" in answer or "|" in answer for answer in answers)


def test_the_mixed_data_are_the_same_tickets_and_questions() -> None:
    assert read("mixed") == TICKETS + QUESTIONS


def test_each_run_sees_every_line_of_its_own_once() -> None:
    config = read_config(FOLDER / "config.toml")
    (term,) = config.regularizers
    assert config.train.steps * config.train.batch_size == len(TICKETS)
    assert config.train.steps * term.per_step == len(QUESTIONS)
