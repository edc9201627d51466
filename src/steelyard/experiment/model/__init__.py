"""The model of a run: where it is trained, and what is done with it afterwards."""
