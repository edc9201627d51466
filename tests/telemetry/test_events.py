from __future__ import annotations

from steelyard.telemetry import events


def test_the_events_are_those_of_the_design() -> None:
    # Other people's handlers are attached to exactly these names.
    assert events.ALL == (
        "steelyard.custom_loss.start",
        "steelyard.custom_loss.stop",
        "steelyard.custom_loss.exception",
        "steelyard.custom_loss.gradient",
        "steelyard.regularizer.compute.start",
        "steelyard.regularizer.compute.stop",
        "steelyard.regularizer.compute.exception",
        "steelyard.regularizer.compose.complete",
        "steelyard.penalties.compute.start",
        "steelyard.penalties.compute.stop",
    )


def test_every_constant_is_listed_and_says_its_event() -> None:
    constants = {
        name: value
        for name, value in vars(events).items()
        if isinstance(value, str) and name.isupper()
    }
    assert set(constants.values()) == set(events.ALL)
    assert len(constants) == len(events.ALL)
    subjects = {"TERM": "regularizer.compute", "COMPOSE": "regularizer.compose"}
    subjects |= {"PENALTIES": "penalties.compute"}
    for name, value in constants.items():
        subject, _, verb = name.rpartition("_")
        spoken = subjects.get(subject, subject.lower() or "custom_loss")
        assert value == f"steelyard.{spoken}.{verb.lower()}"
