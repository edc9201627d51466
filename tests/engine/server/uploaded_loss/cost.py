"""CPU time and memory that this process and the one that runs losses take."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import psutil

from steelyard.engine.server.uploaded_loss.loss_process import LossProcesses


@dataclass(frozen=True)
class Cost:
    """CPU time and growth of the memory, each of the process where it is larger.

    Attributes:
        seconds: CPU time.
        growth: bytes from the beginning to the peak; where the system does not tell the peak, to
            the end.
    """

    seconds: float
    growth: int


class Meter:
    """Measures the CPU time and the memory from now on.

    Args:
        process: runs losses, and has run one.
    """

    def __init__(self, process: LossProcesses) -> None:
        self.pid = pid_of(process)
        processes = [psutil.Process(), psutil.Process(self.pid)]
        self._has_peak = [_begin_peak(each.pid) for each in processes]
        self._processes = processes
        self._began = [self._read(number) for number in range(len(processes))]

    def cost(self) -> Cost:
        """Return the cost so far; zero of a process that has ended."""
        differences = []
        for number, (seconds, size) in enumerate(self._began):
            try:
                now = self._read(number)
            except psutil.NoSuchProcess:
                continue
            differences.append((now[0] - seconds, now[1] - size))
        return Cost(*(max(column) for column in zip(*differences, strict=True)))

    def _read(self, number: int) -> tuple[float, int]:
        process = self._processes[number]
        times = process.cpu_times()
        size = _peak_bytes(process.pid) if self._has_peak[number] else process.memory_info().rss
        return times.user + times.system, size


def pid_of(process: LossProcesses) -> int:
    """Return the id of the one process that runs losses; wait until it is idle."""
    with process._changed:
        assert process._changed.wait_for(lambda: process._idle, 600)
        (child,) = process._idle
    pid = child._process.pid
    assert isinstance(pid, int)
    return pid


def _begin_peak(pid: int) -> bool:
    """Let the largest size of a process begin again at the present one; False where it cannot."""
    try:
        Path(f"/proc/{pid}/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _peak_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError as error:
        raise psutil.NoSuchProcess(pid) from error
    peaks = [int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")]
    if not peaks:  # a zombie
        raise psutil.NoSuchProcess(pid)
    return peaks[0]
