"""What the benchmarks share: a function timed beside its baseline in the same run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

ROUNDS = 15


@pytest.fixture
def ratio_to(benchmark: BenchmarkFixture) -> Callable[..., float]:
    """Time ``ours`` and ``baseline`` in turn, so that a change of the machine's speed meets both.

    Answers the baseline's median time by ours: 2 means twice as fast. ``amount`` of ``unit`` is the work of one call;
    what both achieved a second is noted beside the benchmark.
    """

    def run(ours: Callable[[], object], baseline: Callable[[], object], name: str, amount: float, unit: str) -> float:
        baseline_seconds: list[float] = []

        def time_baseline() -> None:
            begin = time.perf_counter()
            baseline()
            baseline_seconds.append(time.perf_counter() - begin)

        baseline()
        benchmark.pedantic(ours, setup=time_baseline, rounds=ROUNDS, warmup_rounds=1)
        if benchmark.stats is None:
            pytest.skip("--benchmark-disable leaves nothing to compare")
        ours_median, baseline_median = benchmark.stats.stats.median, statistics.median(baseline_seconds)
        ratio = baseline_median / ours_median
        benchmark.extra_info.update(
            {
                "baseline": name,
                "ratio": round(ratio, 3),
                f"{unit}/s": round(amount / ours_median, 2),
                f"baseline {unit}/s": round(amount / baseline_median, 2),
            }
        )
        print(
            f"\n{benchmark.name}: {amount / ours_median:.1f} {unit}/s, {name} {amount / baseline_median:.1f}, "
            f"ratio {ratio:.2f}"
        )
        return ratio

    return run
