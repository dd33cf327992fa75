"""What both workers of `training.py` share: the loop over requests, and memory from the kernel's books."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def resident_mib(field: str) -> float:
    """`VmRSS` (now) or `VmHWM` (the highest since the last reset) of this process, in MiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def serve(step: Callable[[], None], others: dict[str, Callable[[], dict[str, Any]]]) -> None:
    """Answers "step", "reset_peak", "peak" and the requests in `others`, a JSON line each, until stdin ends."""
    at_rest = 0.0
    for request in map(str.strip, sys.stdin):
        if request == "step":
            start = time.perf_counter()
            step()
            answer: dict[str, Any] = {"seconds": time.perf_counter() - start}
        elif request == "reset_peak":
            Path("/proc/self/clear_refs").write_text("5")
            at_rest = resident_mib("VmRSS")
            answer = {"at_rest_mib": at_rest}
        elif request == "peak":
            peak = resident_mib("VmHWM")
            answer = {"peak_mib": peak, "step_mib": peak - at_rest}
        else:
            answer = others[request]()
        print(json.dumps(answer), flush=True)


def median_seconds(work: Callable[[], Any], repeats: int = 7) -> float:
    """Median wall seconds of `work()`, which waits for its own result; one untimed call goes before."""
    work()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2]
