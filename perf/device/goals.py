"""What the device should reach. Reported only: a goal that is not met is no wrong result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

FLASH_PART = 0.9
H200_TFLOPS = 550.0
DECODE_PART = 0.85
# Below these a call is about its launch, not about arithmetic or memory.
LEAST_TOKENS = 4096
LEAST_KV_BYTES = 256 << 20


@dataclass(frozen=True)
class Goal:
    """A goal and how the worst case that it speaks of stands to it."""

    name: str
    status: Literal["met", "not met", "not applicable"]
    target: float
    # Of the worst case; None where there is none.
    value: float | None
    # The worst case, or why the goal does not apply.
    about: str


def judge(results: Sequence[dict[str, Any]], device_name: str) -> list[dict[str, Any]]:
    """Hold the measured results, as JSON has them, against the goals."""
    speeds = [result for result in results if result["status"] == "measured"]
    prefills = [s for s in speeds if s["name"].startswith("striped_attention, causal")]
    decodes = [s for s in speeds if s["name"].startswith("paged_attention, decode")]

    def by_flash(speed: dict[str, Any]) -> float | None:
        ratios = speed["ratios"]
        # The library where it is installed, else torch's copy of it.
        ratio = ratios.get("flash-attn", ratios.get("sdpa flash"))
        return None if ratio is None else float(ratio)

    long = [s for s in prefills if s["details"]["tokens"] >= LEAST_TOKENS]
    at_16k = [s for s in prefills if (s["details"]["tokens"], s["details"]["head_dim"]) == (16384, 128)]
    big = [s for s in decodes if s["details"]["kv_bytes"] >= LEAST_KV_BYTES]
    name = f"causal prefill of {LEAST_TOKENS} tokens and more, by flash-attn 2 (else torch's copy of it)"
    goals = [_judge(name, FLASH_PART, long, by_flash, "no such prefill was measured beside flash-attn")]
    name = "TFLOP/s of a causal prefill of 16384 tokens, head_dim 128, on an H200"
    if "H200" in device_name:
        goals.append(_judge(name, H200_TFLOPS, at_16k, lambda s: float(s["value"]), "it was not measured"))
    else:
        goals.append(Goal(name, "not applicable", H200_TFLOPS, None, f"this is {device_name}"))
    name = f"decode over {LEAST_KV_BYTES >> 20} MiB of KV and more, by copy bandwidth"
    missing = "no such decode was measured"
    goals.append(_judge(name, DECODE_PART, big, lambda s: float(s["ratios"]["copy"]), missing))
    return [asdict(goal) for goal in goals]


def _judge(
    name: str,
    target: float,
    speeds: Sequence[dict[str, Any]],
    value_of: Callable[[dict[str, Any]], float | None],
    missing: str,
) -> Goal:
    values = [(value, str(speed["name"])) for speed in speeds if (value := value_of(speed)) is not None]
    if not values:
        return Goal(name, "not applicable", target, None, missing)
    worst, about = min(values)
    return Goal(name, "met" if worst >= target else "not met", target, worst, about)
