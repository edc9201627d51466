from __future__ import annotations

import os
import threading

import pytest
import torch

from steelyard.execution.executor import Ticket
from steelyard.execution.threads_and_coroutines import ThreadExecutor
from steelyard.execution.workers import Workers

from .tickets import run, wait_until


def test_threads_are_used_again_and_ended() -> None:
    before = set(threading.enumerate())
    workers = Workers()
    seen = set()
    for _ in range(20):
        ticket = Ticket("t", "thread", threading.get_ident, ())
        run(workers, ticket)
        seen.add(ticket.result())
    assert len(seen) <= 2
    workers.close()
    assert set(threading.enumerate()) <= before


def test_a_thread_that_comes_back_late_finds_the_door_closed() -> None:
    before = threading.active_count()
    executor = ThreadExecutor()
    go = threading.Event()
    executor.submit(Ticket("t", "thread", go.wait, ()))
    executor.close()
    go.set()
    # Fewer is fine: a thread that another test left stuck may have ended meanwhile.
    wait_until(lambda: threading.active_count() <= before)


def test_no_more_idle_threads_are_kept_than_are_of_use() -> None:
    before = threading.active_count()
    with Workers() as workers:
        barrier = threading.Barrier(30)
        tickets = [Ticket(f"t{i}", "thread", barrier.wait, (), 300.0) for i in range(30)]
        run(workers, *tickets, width=30)
        kept = before + max(2, os.cpu_count() or 1)
        wait_until(lambda: threading.active_count() <= kept)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.filterwarnings("error")
def test_a_matrix_product_is_the_first_operation_of_a_thread() -> None:
    """Without a CUDA context of the thread, cuBLAS warns."""
    x = torch.randn(4, 4, device="cuda")
    ticket = Ticket("t", "thread", torch.mm, (x, x))
    with Workers() as workers:
        run(workers, ticket)
    torch.testing.assert_close(ticket.result(), x @ x)
