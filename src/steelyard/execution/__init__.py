"""Executors of offloaded terms: threads, processes, an event loop, and tasks of Ray.

A `Ticket` is one unit of work; a `Batch` runs the tickets of one call on the executors of some
`Workers`, each with limited concurrency, and yields them as they are settled. All executors
keep one contract: a ticket is settled exactly once, with a value or an error; a failure or a
timeout affects that ticket alone; work that is no longer waited for is stopped if possible.

`executor` has the contract, which `threads_and_coroutines`, `processes` and `ray_tasks` keep.
A worker process is started and killed by `process_lifecycle`, and runs `worker_process`;
`transport` packs what is sent to it. `random_state` seeds the random numbers that terms draw.
"""
