"""The folder of a run: files, checkpoints, changes, metrics and logs."""
