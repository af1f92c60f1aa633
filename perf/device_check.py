"""Check every Triton kernel on this machine's GPU against float64, measure its speed, and write one JSON file.

    python perf/device_check.py [--out FILE]        on a machine with a CUDA or ROCm device
    python perf/device_check.py --interpret         correctness alone, tiny shapes, on a CPU in Triton's interpreter

Speed stands beside torch's scaled_dot_product_attention (SDPA), a copy and a matrix product measured in the same run.
Exit status: 0 if every result is right, 1 if one is wrong, 2 if there is no device.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# By dtype of the inputs: largest error by largest expected value, and norm of the error by norm of the expected.
# Sums are float32 and compared with float64; a bfloat16 product rounds the softmax's weights to 8 bits.
TOLERANCES = {torch.float32: (2e-5, 5e-6), torch.float16: (4e-3, 1e-3), torch.bfloat16: (3e-2, 8e-3)}


@dataclass(frozen=True)
class Check:
    """One compared result."""

    name: str
    dtype: str
    max_error: float
    error_ratio: float
    right: bool


@dataclass(frozen=True)
class Speed:
    """One measured kernel: ``value`` in ``unit``, beside ``baseline`` measured in the same run."""

    name: str
    milliseconds: float
    value: float
    unit: str
    baseline: str
    baseline_value: float

    @property
    def ratio(self) -> float:
        """How much of the baseline is reached."""
        return self.value / self.baseline_value


def cumulated(counts: list[int]) -> list[int]:
    """Answer prefix sums, from 0."""
    sums = [0]
    for count in counts:
        sums.append(sums[-1] + count)
    return sums


class Inputs:
    """Random tensors of one dtype on one device, the same in every run."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device = device
        self.dtype = dtype
        self._generator = torch.Generator().manual_seed(0)

    def rows(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Draw normal values."""
        return torch.randn(*shape, generator=self._generator).to(dtype or self.dtype).to(self.device)

    def order(self, count: int) -> Tensor:
        """Draw a permutation of 0..count-1."""
        return torch.randperm(count, generator=self._generator).to(self.device)


def compare(name: str, dtype: torch.dtype, actual: Tensor, expected: Tensor) -> Check:
    """Compare with the float64 expectation; infinities must be in the same places."""
    actual, expected = actual.double().cpu(), expected.double().cpu()
    finite = torch.isfinite(expected)
    same_infinities = bool((actual[~finite] == expected[~finite]).all())
    error = (actual[finite] - expected[finite]).abs()
    largest = float(error.max()) if error.numel() else 0.0
    scale = max(1.0, float(expected[finite].abs().max())) if error.numel() else 1.0
    # Where all that is expected is 0, the error's norm itself is the ratio.
    ratio = float(error.norm()) / max(float(expected[finite].norm()), 1e-3 * max(1, error.numel()) ** 0.5)
    max_error, max_ratio = TOLERANCES[dtype]
    # A NaN fails each comparison.
    right = same_infinities and largest <= max_error * scale and ratio <= max_ratio
    return Check(name, str(dtype).removeprefix("torch."), largest / scale, ratio, right)


def check_striped(inputs: Inputs, heads: tuple[int, int, int], lengths: tuple[list[int], ...]) -> Iterator[Check]:
    """Run two ring steps over one state, with a save, against the reference in float64."""
    from loongserve.kernels import reference
    from loongserve.kernels.state import AttentionState
    from loongserve.kernels.striped import KVSave, plan_striped_attention, striped_attention

    num_q_heads, num_kv_heads, head_dim = heads
    cu_q, cu_k = cumulated(lengths[0]), cumulated(lengths[1])
    shape: dict[str, Any] = {"num_q_heads": num_q_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    shape |= {"dtype": inputs.dtype, "device": inputs.device}
    plan = plan_striped_attention(cu_q, cu_k, lengths[2], **shape)
    expected_plan = reference.plan_striped_attention(cu_q, cu_k, lengths[2], **shape)
    state = AttentionState.empty(cu_q[-1], num_q_heads, head_dim, inputs.device)
    expected = AttentionState.empty(cu_q[-1], num_q_heads, head_dim, inputs.device, torch.float64)
    q = inputs.rows(cu_q[-1], num_q_heads, head_dim)
    label = f"striped_attention {num_q_heads}:{num_kv_heads}x{head_dim} q{lengths[0]} k{lengths[1]}"
    for step in range(2):
        k, v = (inputs.rows(cu_k[-1], num_kv_heads, head_dim) for _ in range(2))
        slots = inputs.order(cu_k[-1] + 9)[: cu_k[-1]]
        slots[::3] = -1
        caches = [torch.full((cu_k[-1] + 9, *k.shape[1:]), torch.nan).to(k) for _ in range(2)]
        striped_attention(plan, q, k, v, state, scale=head_dim**-0.5, save=KVSave(slots, caches[0], caches[1]))
        reference.striped_attention(expected_plan, q, k, v, expected, scale=head_dim**-0.5)
        kept = slots >= 0
        for name, rows, cache in (("k", k, caches[0]), ("v", v, caches[1])):
            yield compare(f"{label} step {step} saved {name}", inputs.dtype, cache[slots[kept]], rows[kept])
            foreign = int(torch.isfinite(cache).all(-1).all(-1).sum()) - int(kept.sum())
            zero = torch.zeros(1)
            yield compare(f"{label} step {step} other slots {name}", inputs.dtype, zero + foreign, zero)
    yield compare(f"{label} out", inputs.dtype, state.out, expected.out)
    yield compare(f"{label} lse", inputs.dtype, state.lse, expected.lse)


def check_paged(inputs: Inputs, heads: tuple[int, int, int], lengths: tuple[list[int], ...]) -> Iterator[Check]:
    """Run over slots in random order in a pool that is NaN elsewhere."""
    from loongserve.kernels import reference
    from loongserve.kernels.paged import paged_attention, plan_paged_attention
    from loongserve.kernels.state import AttentionState

    num_q_heads, num_kv_heads, head_dim = heads
    cu_q = cumulated(lengths[0])
    num_slots = sum(lengths[1]) + 31
    used = inputs.order(num_slots)[: sum(lengths[1])]
    caches = [torch.full((num_slots, num_kv_heads, head_dim), torch.nan).to(inputs.rows(1)) for _ in range(2)]
    for cache in caches:
        cache[used] = inputs.rows(len(used), num_kv_heads, head_dim)
    shape: dict[str, Any] = {"num_q_heads": num_q_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    shape |= {"dtype": inputs.dtype, "device": inputs.device}
    slots = list(used.split(lengths[1]))
    q = inputs.rows(cu_q[-1], num_q_heads, head_dim)
    state = AttentionState.empty(cu_q[-1], num_q_heads, head_dim, inputs.device)
    state.out.fill_(torch.nan)
    state.lse.fill_(torch.nan)
    paged_attention(plan_paged_attention(cu_q, slots, **shape), q, caches[0], caches[1], state, scale=head_dim**-0.5)
    expected = AttentionState.empty(cu_q[-1], num_q_heads, head_dim, inputs.device, torch.float64)
    plan = reference.plan_paged_attention(cu_q, slots, **shape)
    reference.paged_attention(plan, q, caches[0], caches[1], expected, scale=head_dim**-0.5)
    label = f"paged_attention {num_q_heads}:{num_kv_heads}x{head_dim} q{lengths[0]} slots{lengths[1]}"
    yield compare(f"{label} out", inputs.dtype, state.out, expected.out)
    yield compare(f"{label} lse", inputs.dtype, state.lse, expected.lse)


def check_merges(inputs: Inputs, heads: int, head_dim: int, tokens: int) -> Iterator[Check]:
    """Merge states with empty rows and large differences, by row and in whole, and round."""
    from loongserve.kernels import reference
    from loongserve.kernels.merge import finalize, merge_rows, merge_states
    from loongserve.kernels.state import AttentionState

    def draw(count: int) -> AttentionState:
        lse = inputs.rows(count, heads, dtype=torch.float32) * 100
        lse[::3] = -math.inf
        out = inputs.rows(count, heads, head_dim, dtype=torch.float32)
        return AttentionState(out.masked_fill((lse == -math.inf)[..., None], 0.0), lse)

    def double(state: AttentionState) -> AttentionState:
        return AttentionState(state.out.double(), state.lse.double())

    a, b, part = draw(tokens), draw(tokens), draw(tokens // 2)
    merged, expected = merge_states(a, b), reference.merge_states(double(a), double(b), double(a))
    yield compare("merge_states out", torch.float32, merged.out, expected.out)
    yield compare("merge_states lse", torch.float32, merged.lse, expected.lse)
    rows = inputs.order(tokens)[: tokens // 2]
    merge_rows(merged, rows, part)
    reference.merge_rows(expected, rows, double(part))
    yield compare("merge_rows out", torch.float32, merged.out, expected.out)
    yield compare("merge_rows lse", torch.float32, merged.lse, expected.lse)
    yield compare("finalize", inputs.dtype, finalize(merged, inputs.dtype), expected.out)


def check_layer(inputs: Inputs, heads: int, head_dim: int, tokens: int) -> Iterator[Check]:
    """Run the other functions of a decoder layer."""
    from loongserve.kernels import reference
    from loongserve.kernels.activation import silu_and_mul
    from loongserve.kernels.kv import save_kv
    from loongserve.kernels.norm import rms_norm
    from loongserve.kernels.rope import apply_rope

    hidden = heads * head_dim
    x, residual, weight = inputs.rows(tokens, hidden), inputs.rows(tokens, hidden), inputs.rows(hidden)
    stream = residual.clone()
    actual = rms_norm(x, weight, 1e-5, residual=stream)
    expected_stream = (residual + x).double()
    # The stream is kept in its dtype, so the float64 expectation starts from what was kept.
    wide = torch.empty(tokens, hidden, dtype=torch.float64, device=inputs.device)
    reference.rms_norm(expected_stream, weight.double(), 1e-5, residual=None, out=wide)
    yield compare("rms_norm residual", inputs.dtype, stream, expected_stream)
    yield compare("rms_norm out", inputs.dtype, actual, wide)

    x = inputs.rows(tokens, heads, head_dim)
    angles = torch.rand(4 * tokens, head_dim // 2, generator=torch.Generator().manual_seed(1)).to(inputs.device) * 6
    positions = inputs.order(4 * tokens)[:tokens]
    expected = x.double()
    reference.apply_rope(expected, angles.cos().double(), angles.sin().double(), positions)
    apply_rope(x, angles.cos(), angles.sin(), positions)
    yield compare("apply_rope", inputs.dtype, x, expected)

    x = inputs.rows(tokens, 2 * hidden)
    wide = torch.empty(tokens, hidden, dtype=torch.float64, device=inputs.device)
    yield compare("silu_and_mul", inputs.dtype, silu_and_mul(x), reference.silu_and_mul(x.double(), wide))

    k, v = inputs.rows(tokens, heads, head_dim), inputs.rows(tokens, heads, head_dim)
    caches = [torch.zeros(2 * tokens, heads, head_dim).to(k) for _ in range(2)]
    wanted = [cache.double() for cache in caches]
    slots = inputs.order(2 * tokens)[:tokens]
    slots[::4] = -1
    save_kv(k, v, slots, caches[0], caches[1])
    reference.save_kv(k.double(), v.double(), slots, wanted[0], wanted[1])
    for name, cache, want in zip("kv", caches, wanted, strict=True):
        yield compare(f"save_kv {name}", inputs.dtype, cache, want)


def all_checks(device: torch.device, tiny: bool) -> Iterator[Check]:
    """Run every kernel at its special shapes; ``tiny`` for the interpreter."""
    long = 40 if tiny else 700
    striped_lengths = ([0, 1, long, 5], [3, 1, long + 2, 5], [0, -1, 0, -1])
    paged_lengths = ([1, 1, 0, 6, 1], [3 * long, 0, 4, long + 3, 1])
    if tiny:
        heads_list = [(3, 1, 64), (4, 4, 80)]
    else:
        heads_list = [(9, 3, 64), (8, 8, 80), (8, 4, 96), (28, 7, 128), (32, 1, 128), (8, 2, 192), (4, 2, 256)]
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        inputs = Inputs(device, dtype)
        for heads in heads_list:
            yield from check_striped(inputs, heads, striped_lengths)
            yield from check_paged(inputs, heads, paged_lengths)
        yield from check_merges(inputs, 3 if tiny else 28, 80, 7 if tiny else 1001)
        yield from check_layer(inputs, 3 if tiny else 28, 80, 7 if tiny else 1001)


def measure(run: Callable[[], object]) -> float:
    """Answer the median time in milliseconds."""
    from triton.testing import do_bench

    return float(do_bench(run, warmup=50, rep=300, return_mode="median"))


def measure_limits(device: torch.device) -> dict[str, float]:
    """Measure what a copy and a matrix product reach: GB/s read and written, and bfloat16 TFLOP/s."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_ms = measure(lambda: target.copy_(source))
    a = torch.randn(8192, 8192, dtype=torch.bfloat16, device=device)
    matmul_ms = measure(lambda: a @ a)
    return {"copy_gb_per_s": 2 * source.numel() / copy_ms / 1e6, "matmul_tflops": 2 * 8192**3 / matmul_ms / 1e9}


def speed_striped(inputs: Inputs, tokens: int, heads: tuple[int, int, int], save: bool) -> Speed:
    """Measure a causal prefill of one sequence in TFLOP/s beside SDPA; with ``save`` every row is stored too."""
    from loongserve.kernels.state import AttentionState
    from loongserve.kernels.striped import KVSave, plan_striped_attention, striped_attention

    num_q_heads, num_kv_heads, head_dim = heads
    q = inputs.rows(tokens, num_q_heads, head_dim)
    k, v = (inputs.rows(tokens, num_kv_heads, head_dim) for _ in range(2))
    plan = plan_striped_attention(
        [0, tokens],
        [0, tokens],
        [0],
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=inputs.dtype,
        device=inputs.device,
    )
    state = AttentionState.empty(tokens, num_q_heads, head_dim, inputs.device)
    kv_save = KVSave(inputs.order(tokens), torch.empty_like(k), torch.empty_like(v)) if save else None
    scale = head_dim**-0.5
    ours = measure(lambda: striped_attention(plan, q, k, v, state, scale=scale, save=kv_save))
    q4, k4, v4 = (x.transpose(0, 1)[None] for x in (q, k, v))
    sdpa = torch.nn.functional.scaled_dot_product_attention
    theirs = measure(lambda: sdpa(q4, k4, v4, is_causal=True, enable_gqa=True))
    gigaflop = 4 * num_q_heads * head_dim * tokens * (tokens + 1) / 2 / 1e9
    name = f"striped_attention {num_q_heads}:{num_kv_heads}x{head_dim} {tokens} tokens{' with save' if save else ''}"
    return Speed(name, ours, gigaflop / ours, "TFLOP/s", "sdpa causal", gigaflop / theirs)


def speed_paged(inputs: Inputs, counts: list[int], lengths: list[int], heads: tuple[int, int, int]) -> Iterator[Speed]:
    """Measure queries over slots in random order: GB/s of K and V beside the copy, TFLOP/s beside SDPA."""
    from loongserve.kernels.paged import paged_attention, plan_paged_attention
    from loongserve.kernels.state import AttentionState

    num_q_heads, num_kv_heads, head_dim = heads
    total = sum(lengths)
    k_cache, v_cache = (inputs.rows(total, num_kv_heads, head_dim) for _ in range(2))
    slots = list(inputs.order(total).split(lengths))
    cu_q = cumulated(counts)
    q = inputs.rows(cu_q[-1], num_q_heads, head_dim)
    plan = plan_paged_attention(
        cu_q,
        slots,
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=inputs.dtype,
        device=inputs.device,
    )
    state = AttentionState.empty(cu_q[-1], num_q_heads, head_dim, inputs.device)
    scale = head_dim**-0.5
    ours = measure(lambda: paged_attention(plan, q, k_cache, v_cache, state, scale=scale))
    # SDPA gets what it is best at: each request's K and V gathered beforehand, one call a request.
    gathered = [
        tuple(x.transpose(0, 1)[None].contiguous() for x in (q[begin:end], k_cache[index], v_cache[index]))
        for (begin, end), index in zip(pairwise(cu_q), slots, strict=True)
    ]
    sdpa = torch.nn.functional.scaled_dot_product_attention
    theirs = measure(lambda: [sdpa(*request, enable_gqa=True) for request in gathered])
    label = f"paged_attention {num_q_heads}:{num_kv_heads}x{head_dim} {len(counts)} requests, {total} slots"
    gigabytes = 2 * total * num_kv_heads * head_dim * inputs.dtype.itemsize / 1e9
    pairs = sum(count * length for count, length in zip(counts, lengths, strict=True))
    gigaflop = 4 * num_q_heads * head_dim * pairs / 1e9
    if max(counts) == 1:
        yield Speed(label, ours, gigabytes / ours * 1e3, "GB/s", "sdpa, gathered", gigabytes / theirs * 1e3)
    else:
        yield Speed(label, ours, gigaflop / ours, "TFLOP/s", "sdpa, gathered", gigaflop / theirs)


def speed_layer(inputs: Inputs, copy_gb_per_s: float) -> Iterator[Speed]:
    """Measure the functions bound by memory in GB/s beside the copy."""
    from loongserve.kernels.activation import silu_and_mul
    from loongserve.kernels.kv import save_kv
    from loongserve.kernels.merge import merge_states
    from loongserve.kernels.norm import rms_norm
    from loongserve.kernels.rope import apply_rope
    from loongserve.kernels.state import AttentionState

    tokens, heads, head_dim = 16384, 32, 128
    x, residual = inputs.rows(tokens, heads * head_dim), inputs.rows(tokens, heads * head_dim)
    weight, out = inputs.rows(heads * head_dim), torch.empty_like(x)
    wide, half = inputs.rows(tokens, 2 * heads * head_dim), torch.empty_like(x)
    q = inputs.rows(tokens, heads, head_dim)
    tables = [inputs.rows(tokens, head_dim // 2, dtype=torch.float32) for _ in range(2)]
    order = inputs.order(tokens)
    k, v, k_cache, v_cache = (inputs.rows(tokens, 8, head_dim) for _ in range(4))
    a, b = (AttentionState.empty(tokens, heads, head_dim, inputs.device) for _ in range(2))
    a.lse.zero_()
    b.lse.zero_()
    runs: list[tuple[str, Callable[[], object], int]] = [
        ("rms_norm with residual", lambda: rms_norm(x, weight, 1e-5, residual=residual, out=out), 4 * x.nbytes),
        ("silu_and_mul", lambda: silu_and_mul(wide, half), 3 * half.nbytes),
        ("apply_rope", lambda: apply_rope(q, tables[0], tables[1], order), 2 * q.nbytes),
        ("save_kv", lambda: save_kv(k, v, order, k_cache, v_cache), 4 * k.nbytes),
        ("merge_states", lambda: merge_states(a, b, a), 3 * a.out.nbytes),
    ]
    for name, run, num_bytes in runs:
        milliseconds = measure(run)
        yield Speed(name, milliseconds, num_bytes / milliseconds / 1e6, "GB/s", "copy", copy_gb_per_s)


def all_speeds(device: torch.device, copy_gb_per_s: float) -> Iterator[Speed]:
    """Measure everything in bfloat16."""
    inputs = Inputs(device, torch.bfloat16)
    for heads in ((32, 8, 128), (9, 3, 64), (32, 32, 80), (8, 2, 256)):
        yield speed_striped(inputs, 16384, heads, save=False)
    yield speed_striped(inputs, 16384, (32, 8, 128), save=True)
    for counts, lengths in (
        ([1] * 64, [4096] * 64),
        ([1], [262144]),
        ([1] * 64, [1000] * 63 + [200000]),
        ([2048], [65536]),
    ):
        yield from speed_paged(inputs, counts, lengths, (32, 8, 128))
    yield from speed_layer(inputs, copy_gb_per_s)


def main() -> int:
    """Check, measure, write, and answer the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--interpret", action="store_true", help="correctness on a CPU, tiny shapes")
    parser.add_argument("--out", type=Path, default=Path("device_check.json"), help="where the JSON goes")
    arguments = parser.parse_args()
    if not arguments.interpret and not torch.cuda.is_available():
        print("device_check needs a CUDA or ROCm device, and torch sees none (--interpret checks on a CPU)")
        return 2
    os.environ["LOONG_KERNELS"] = "triton"
    if arguments.interpret:
        # Triton reads it when it is first imported, which is after this.
        os.environ["TRITON_INTERPRET"] = "1"
    import triton

    device = torch.device("cpu" if arguments.interpret else "cuda:0")
    record: dict[str, Any] = {
        "device": "Triton interpreter" if arguments.interpret else torch.cuda.get_device_name(device),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "checks": [],
        "speeds": [],
    }
    wrong = 0
    for check in all_checks(device, arguments.interpret):
        wrong += not check.right
        record["checks"].append(asdict(check))
        verdict = "right" if check.right else "WRONG"
        print(f"{verdict}  {check.error_ratio:.1e}  {check.dtype:9} {check.name}", flush=True)
    if not arguments.interpret:
        record["limits"] = limits = measure_limits(device)
        print(f"copy {limits['copy_gb_per_s']:.0f} GB/s, bfloat16 matrix product {limits['matmul_tflops']:.0f} TFLOP/s")
        for speed in all_speeds(device, limits["copy_gb_per_s"]):
            record["speeds"].append(asdict(speed) | {"ratio": speed.ratio})
            print(
                f"{speed.value:8.0f} {speed.unit:8} {speed.ratio:5.2f} x {speed.baseline:15} {speed.name}", flush=True
            )
    arguments.out.write_text(json.dumps(record, indent=1) + "\n")
    print(f"{len(record['checks'])} results on {record['device']}, {wrong} of them wrong; written to {arguments.out}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
