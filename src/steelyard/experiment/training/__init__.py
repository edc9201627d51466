"""Training of a run: the loop, its steps, held-out data and goals."""
