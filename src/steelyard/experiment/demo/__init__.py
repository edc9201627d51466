"""The demo: its config and its data, and how it is run.

`tickets.jsonl` are messages to a help desk and their tickets, `questions.jsonl` other questions
with the answers of the untrained model, `mixed.jsonl` both; the files that end in `_held_out.jsonl`
are for evaluation alone.
"""
