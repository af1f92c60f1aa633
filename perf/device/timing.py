"""Time on the device's clock, with a cold cache, several candidates in turn; and what the machine itself can do."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from functools import cache

import torch
from torch import Tensor

from device.bench import Bench
from device.results import Result, Speed

Run = Callable[[], object]

MIN_REPEATS = 20
MAX_REPEATS = 100
# What the repeats of one candidate should take together, where MIN_REPEATS allow it.
MEASURE_MS = 200.0


def measure(bench: Bench, *runs: Run, repeats: int | None = None) -> list[list[float]]:
    """Time the candidates in turn, so that a change of the machine's speed meets all alike.

    Before each call a buffer far larger than the cache is written: that empties the cache, and gives the host a head
    start, so that what it does to launch the call is not counted.

    Args:
        bench: where they run.
        runs: the candidates.
        repeats: calls of each. None: at least 20, more of what is short; in the interpreter 2.

    Returns:
        For each candidate the milliseconds of each of its calls.
    """
    for run in runs:
        run()
    if bench.tiny:
        return [list(times) for times in zip(*([_host_ms(r) for r in runs] for _ in range(repeats or 2)), strict=True)]
    if repeats is None:
        bench.synchronize()
        begin = time.perf_counter()
        for run in runs:
            run()
        bench.synchronize()
        each_ms = (time.perf_counter() - begin) * 1e3 / len(runs)
        repeats = max(MIN_REPEATS, min(MAX_REPEATS, int(MEASURE_MS / max(each_ms, 1e-3))))
    flush = _flush_buffer(bench)
    events = []
    for _ in range(repeats):
        for index, run in enumerate(runs):
            begin_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            flush.zero_()
            begin_event.record()
            run()
            end_event.record()
            events.append((index, begin_event, end_event))
        # Bounds what is queued; the device idles for a moment, but never within a measurement.
        bench.synchronize()
    times: list[list[float]] = [[] for _ in runs]
    for index, begin_event, end_event in events:
        times[index].append(float(begin_event.elapsed_time(end_event)))
    return times


def median_ms(bench: Bench, run: Run) -> float:
    """Answer the median of one candidate."""
    return statistics.median(measure(bench, run)[0])


def host_us(bench: Bench, run: Run) -> float:
    """Answer how many microseconds the host takes for a call that it does not wait for: the median of batches."""
    calls = bench.choose(10, 1)
    batches = []
    run()
    for _ in range(bench.choose(30, 2)):
        bench.synchronize()
        begin = time.perf_counter()
        for _ in range(calls):
            run()
        batches.append((time.perf_counter() - begin) / calls * 1e6)
    bench.synchronize()
    return statistics.median(batches)


@cache
def copy_gb_per_s(bench: Bench) -> float:
    """Measure the GB/s of a large copy, bytes read and written both counted; once a process."""
    num_bytes = bench.choose(min(1 << 30, _free_bytes(bench) // 8), 1 << 16)
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    return 2 * num_bytes / median_ms(bench, lambda: target.copy_(source)) / 1e6


def measure_limits(bench: Bench) -> Iterator[Result]:
    """Measure what a copy and matrix products reach here: what everything else is held against."""
    copied = copy_gb_per_s(bench)
    yield Speed("copy bandwidth", 2 * 2**30 / copied / 1e6, copied, "GB/s")
    size = bench.choose(8192, 64)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        a, b = (torch.randn(size, size, device=bench.device).to(dtype) for _ in range(2))
        product = torch.empty_like(a)

        def multiply(a: Tensor = a, b: Tensor = b, product: Tensor = product) -> None:
            torch.mm(a, b, out=product)

        milliseconds = median_ms(bench, multiply)
        name = f"matrix product of {size}, {str(dtype).removeprefix('torch.')}"
        yield Speed(name, milliseconds, 2 * size**3 / milliseconds / 1e9, "TFLOP/s")


def _host_ms(run: Run) -> float:
    begin = time.perf_counter()
    run()
    return (time.perf_counter() - begin) * 1e3


def _free_bytes(bench: Bench) -> int:
    return 1 << 30 if bench.tiny else int(torch.cuda.mem_get_info(bench.device)[0])


@cache
def _flush_buffer(bench: Bench) -> Tensor:
    return torch.empty(min(1 << 30, _free_bytes(bench) // 8), dtype=torch.uint8, device=bench.device)
