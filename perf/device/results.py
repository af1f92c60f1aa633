"""What a case reports, and the one comparison that every check goes through."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

# By dtype of the inputs: largest error by largest expected value, and norm of the error by norm of the expected.
# Sums are float32 and compared with float64; a bfloat16 product rounds the softmax's weights to 8 bits.
TOLERANCES = {torch.float32: (2e-5, 5e-6), torch.float16: (4e-3, 1e-3), torch.bfloat16: (3e-2, 8e-3)}


@dataclass(frozen=True)
class Check:
    """One compared result. ``error_ratio``: of what ``limit`` bounds."""

    name: str
    dtype: str
    max_error: float
    error_ratio: float
    limit: float
    right: bool


@dataclass(frozen=True)
class Speed:
    """One measured thing: ``value`` in ``unit``, and the same of each baseline in the same run."""

    name: str
    # Median of at least 20 repeats, on the device's clock.
    milliseconds: float
    value: float
    unit: str
    # name -> value in ``unit``.
    baselines: dict[str, float] = field(default_factory=dict)
    # A baseline that could not be measured -> why.
    missing_baselines: dict[str, str] = field(default_factory=dict)
    # Whatever else was measured, unit in the name.
    details: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Missing:
    """A case without a result: it raised or ended its process (failed), cannot run here, or ran out of time."""

    name: str
    status: Literal["failed", "not run", "skipped"]
    reason: str


Result = Check | Speed | Missing


def to_plain(result: Result) -> dict[str, Any]:
    """Turn a result into JSON's values: ``status`` says what it is; what is not finite becomes a string."""
    status = {Check: "right" if getattr(result, "right", False) else "wrong", Speed: "measured"}
    plain = {"status": status.get(type(result), "")} | asdict(result)
    plain.pop("right", None)
    if isinstance(result, Speed):
        plain["ratios"] = {name: result.value / value for name, value in result.baselines.items() if value}
    return {
        key: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in plain.items()
    }


def compare(name: str, dtype: torch.dtype, actual: Tensor, expected: Tensor) -> Check:
    """Compare with the float64 expectation; infinities must be in the same places. ``dtype``: of the inputs."""
    label = str(dtype).removeprefix("torch.")
    max_error, max_ratio = TOLERANCES[dtype]
    if actual.shape != expected.shape:
        return Check(f"{name} (shape {list(actual.shape)})", label, math.inf, math.inf, max_ratio, False)
    actual, expected = actual.to(expected.device).double(), expected.double()
    finite = torch.isfinite(expected)
    same_infinities = bool((actual[~finite] == expected[~finite]).all())
    error = (actual[finite] - expected[finite]).abs()
    largest = float(error.max()) if error.numel() else 0.0
    scale = max(1.0, float(expected[finite].abs().max())) if error.numel() else 1.0
    # Where all that is expected is 0, the error's norm itself is the ratio.
    ratio = float(error.norm()) / max(float(expected[finite].norm()), 1e-3 * max(1, error.numel()) ** 0.5)
    # A NaN fails each comparison.
    right = same_infinities and largest <= max_error * scale and ratio <= max_ratio
    return Check(name, label, largest / scale, ratio, max_ratio, right)


def same(name: str, actual: Tensor, expected: Tensor) -> Check:
    """Compare bit for bit; a NaN equals nothing."""
    differing = actual.numel() if actual.shape != expected.shape else int((actual != expected).sum())
    share = differing / max(1, actual.numel())
    return Check(name, str(actual.dtype).removeprefix("torch."), float(differing), share, 0.0, differing == 0)


def within(name: str, dtype: torch.dtype, value: float, limit: float) -> Check:
    """Check that a figure is not above its limit; a NaN is."""
    return Check(name, str(dtype).removeprefix("torch."), value, value, limit, value <= limit)
