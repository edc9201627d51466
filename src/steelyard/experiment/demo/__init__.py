"""Demo: fine-tune a small model with five kinds of terms, in a few minutes.

`config.toml` is its config, `data.jsonl` and `held_out.jsonl` are its data. `demo` has the judges
behind two of its terms, and runs it.
"""
