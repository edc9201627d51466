"""Executors of offloaded terms: threads, processes, an event loop, and tasks of Ray.

A `Ticket` is one unit of work; a `Batch` runs the tickets of one call on the executors of some
`Workers`, each with limited concurrency, and yields them as they are settled. All executors
keep one contract: a ticket is settled exactly once, with a value or an error; a failure or a
timeout affects that ticket alone; work that is no longer waited for is stopped if possible.
"""

from steelyard._renamed import leave_aliases as _leave_aliases
from steelyard.execution.batch import Batch, Cancelled, Ticket
from steelyard.execution.executor import Executor
from steelyard.execution.generators import Randomness
from steelyard.execution.processes import check_picklable
from steelyard.execution.spawn_context import lead_group, worker_context
from steelyard.execution.turns import Turn, taken_turn
from steelyard.execution.workers import Workers, default_workers

__all__ = [
    "Batch",
    "Cancelled",
    "Executor",
    "Randomness",
    "Ticket",
    "Turn",
    "Workers",
    "check_picklable",
    "default_workers",
    "lead_group",
    "taken_turn",
    "worker_context",
]

_leave_aliases(__name__, {"Lane": "builtins:str"})
