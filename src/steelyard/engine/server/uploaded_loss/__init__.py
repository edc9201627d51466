"""Losses that clients upload as graphs: validated against an allowlist, then interpreted.

`validate` checks a graph on upload; `operations` has those that are allowed, and `interpreter` runs
them over the data of a batch; `budget` limits the memory and the time that they take. All of that
happens in a process of `loss_process`, whose end costs no other client. `loss_queue` says whose
loss runs when.
"""
