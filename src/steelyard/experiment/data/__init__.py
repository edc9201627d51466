"""Data of a run: files, prompts, tokens and batches."""
