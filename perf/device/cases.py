"""The list of all cases, in the order in which they run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from device import attention, instances, large, layer, speed_attention, speed_decode, speed_layer, timing
from device.bench import Bench, Heads, name_of
from device.results import Result

FLOAT32, BFLOAT16, FLOAT16 = torch.float32, torch.bfloat16, torch.float16
DTYPES = (FLOAT32, BFLOAT16, FLOAT16)
# Every head_dim that has a tile of its own, and ratios 3:1, 1:1, 2:1, 4:1 (eight and seven groups), and one KV head.
HEADS: tuple[Heads, ...] = (
    (9, 3, 64),
    (8, 8, 80),
    (8, 4, 96),
    (32, 8, 128),
    (28, 7, 128),
    (32, 1, 128),
    (8, 2, 192),
    (4, 2, 256),
)


@dataclass(frozen=True)
class Case:
    """Something that runs by itself and yields results."""

    section: str
    name: str
    run: Callable[[Bench], Iterator[Result]]

    @property
    def is_speed(self) -> bool:
        """Whether it may be left out when the time is up."""
        return self.section.startswith("speed")

    @property
    def alone(self) -> bool:
        """Whether nothing else may run on the device meanwhile."""
        return self.is_speed or self.section in ("large", "limits")


def all_cases(tiny: bool) -> list[Case]:
    """List the cases for a device, or the ``tiny`` ones that prove the same code on a CPU."""
    return _tiny_cases() if tiny else [*_checks(), *_speeds()]


def _case(section: str, function: Callable[..., Iterator[Result]], *arguments: object, **options: object) -> Case:
    def word(value: object) -> str:
        if isinstance(value, torch.dtype):
            return str(value).removeprefix("torch.")
        if isinstance(value, tuple):
            return name_of(value)
        if isinstance(value, list):
            return f"{len(value)} of {min(value)}-{max(value)}"
        return str(value)

    words = [word(argument) for argument in arguments] + [f"{name} {word(value)}" for name, value in options.items()]
    name = " ".join([function.__name__, *words])
    return Case(section, name, lambda bench: function(bench, *arguments, **options))


def _checks() -> Iterator[Case]:
    counts, lengths = [1, 1, 0, 6, 1, 70], [2100, 0, 4, 703, 1, 300]
    ring, block, paged = (
        partial(_case, "attention", f) for f in (attention.check_ring, attention.check_block, attention.check_paged)
    )
    for index, (heads, dtype) in enumerate((heads, dtype) for heads in HEADS for dtype in DTYPES):
        yield ring(dtype, heads, 1 + index % 8)
        yield paged(dtype, heads, counts, lengths)
    for dop in range(1, 9):
        yield ring(BFLOAT16, (9, 3, 64), dop, window=90)
        yield ring(FLOAT32, (32, 8, 64), dop)
    yield ring(BFLOAT16, (32, 8, 128), 4, window=50, soft_cap=20.0)
    yield ring(FLOAT16, (4, 2, 256), 3, soft_cap=5.0)
    yield ring(BFLOAT16, (8, 8, 80), 5, window=200)
    for dtype, heads in zip((BFLOAT16, FLOAT16, FLOAT32, BFLOAT16) * 2, HEADS, strict=True):
        yield block(dtype, heads)
    # Sizes that fill no tile, the smallest among them.
    yield block(BFLOAT16, (6, 2, 112))
    yield block(FLOAT16, (2, 1, 16))
    yield block(BFLOAT16, (32, 8, 128), banded=True)
    yield block(FLOAT32, (9, 3, 64), banded=True, soft_cap=30.0)
    yield block(FLOAT16, (8, 2, 192), banded=True)
    positions = partial(_case, "attention", attention.check_positions)
    for dtype, heads, window in (
        (FLOAT32, (9, 3, 64), None),
        (BFLOAT16, (32, 8, 128), 60),
        (FLOAT16, (8, 8, 80), 1),
        (BFLOAT16, (4, 2, 256), None),
    ):
        yield positions(dtype, heads, window)
    # One long request among many short ones; decode alone; windows and caps.
    yield paged(BFLOAT16, (8, 2, 64), [1] * 101, [1000] * 50 + [100000] + [7] * 50)
    yield paged(BFLOAT16, (32, 8, 128), [1] * 64, [513] * 64)
    yield paged(FLOAT32, (9, 3, 64), counts, lengths, window=200)
    yield paged(BFLOAT16, (32, 8, 128), counts, lengths, window=600, soft_cap=20.0)
    yield paged(FLOAT16, (8, 8, 80), counts, lengths, window=1)
    yield paged(BFLOAT16, (4, 2, 256), counts, lengths, soft_cap=5.0)
    yield paged(BFLOAT16, (32, 1, 128), [300, 2, 1], [900, 5000, 40])
    for dtype, heads in ((BFLOAT16, (32, 8, 128)), (FLOAT16, (9, 3, 64)), (FLOAT32, (9, 3, 64))):
        yield _case("attention", attention.check_error_beside_sdpa, dtype, heads)
    for dtype in DTYPES:
        for heads_and_dim in ((28, 80), (3, 64), (32, 128), (2, 256)):
            yield _case("layer", layer.check_merges, dtype, *heads_and_dim)
            yield _case("layer", layer.check_kv, dtype, *heads_and_dim)
            yield _case("layer", layer.check_elementwise, dtype, *heads_and_dim)
        if dtype != FLOAT32:
            yield _case("layer", layer.check_flash_attn, dtype)
    yield _case("layer", layer.check_compiled)
    yield _case("layer", layer.check_graph)
    yield _case("instances", instances.check_ring_of_threads)
    yield _case("instances", instances.check_instances, FLOAT32)
    yield _case("instances", instances.check_instances, BFLOAT16)
    for check in (
        large.check_large_pool,
        large.check_large_queries,
        large.check_large_merge,
        large.check_large_elementwise,
    ):
        yield _case("large", check)


def _speeds() -> Iterator[Case]:
    """What the goals speak of comes first: the time may be up before the end."""
    yield _case("limits", timing.measure_limits)
    prefill = partial(_case, "speed of prefill", speed_attention.speed_prefill)
    heads, narrow = (32, 8, 128), (32, 8, 64)

    def decode(lengths: list[int], title: str) -> Case:
        return _case("speed of decode", speed_decode.speed_decode, BFLOAT16, heads, lengths, title)

    yield prefill(BFLOAT16, heads, 16384)
    yield decode([4096] * 64, "64 x 4k")
    yield _case("speed of save", speed_attention.speed_save, BFLOAT16, heads, 16384)
    yield _case("speed of launch", speed_attention.speed_launch)
    for dop in (2, 4, 8):
        yield _case("speed of ring", speed_attention.speed_ring, BFLOAT16, heads, 32768, dop)
    for title, lengths in (
        ("1 x 500k", [500_000]),
        ("64 x 1k and one of 500k", [1024] * 64 + [500_000]),
        ("256 x 4k", [4096] * 256),
        ("256 x 1k", [1024] * 256),
        ("16 x 32k", [32768] * 16),
        ("1 x 1k", [1024]),
        ("1 x 32k", [32768]),
    ):
        yield decode(lengths, title)
    yield _case("speed of layer", speed_layer.speed_layer, BFLOAT16)
    for tokens in (1024, 4096, 65536, 131072):
        # Fewer heads where a call would take seconds.
        yield prefill(BFLOAT16, heads if tokens < 65536 else (8, 2, 128), tokens)
    yield prefill(BFLOAT16, narrow, 16384)
    yield prefill(FLOAT16, heads, 16384, with_flex=False)
    yield prefill(FLOAT16, narrow, 16384, with_flex=False)
    for tokens in (1024, 4096, 65536, 131072):
        yield prefill(BFLOAT16, narrow if tokens < 65536 else (8, 2, 64), tokens, with_flex=False)
    for title, lengths in (
        ("8 x 128k", [131072] * 8),
        ("4 x 500k", [500_000] * 4),
        ("16 x 1k", [1024] * 16),
        ("64 x 32k", [32768] * 64),
    ):
        yield decode(lengths, title)
    yield _case("speed of decode", speed_decode.speed_decode, BFLOAT16, (32, 32, 128), [8192] * 16, "16 x 8k")
    yield _case("speed of decode", speed_decode.speed_decode, BFLOAT16, narrow, [4096] * 64, "64 x 4k")
    yield _case("speed of decode", speed_decode.speed_chunk, BFLOAT16, heads, 2048, 65536)
    yield _case("speed of save", speed_attention.speed_save, BFLOAT16, narrow, 16384)
    yield _case("speed of ring", speed_attention.speed_ring, BFLOAT16, narrow, 32768, 4)


def _tiny_cases() -> list[Case]:
    heads, group = (3, 1, 64), (4, 4, 80)
    return [
        _case("attention", attention.check_ring, FLOAT32, heads, 3, window=9, soft_cap=20.0),
        _case("attention", attention.check_ring, FLOAT16, group, 2),
        _case("attention", attention.check_block, FLOAT32, heads, banded=True),
        _case("attention", attention.check_block, BFLOAT16, group),
        _case("attention", attention.check_positions, FLOAT32, heads, 7),
        _case("attention", attention.check_paged, FLOAT32, heads, [1, 0, 7], [600, 4, 30], window=90, soft_cap=9.0),
        _case("attention", attention.check_paged, BFLOAT16, group, [1, 2, 1], [40, 9, 0]),
        _case("attention", attention.check_error_beside_sdpa, FLOAT32, heads),
        *(_case("layer", check, FLOAT16, 3, 80) for check in (layer.check_merges, layer.check_kv)),
        _case("layer", layer.check_elementwise, FLOAT32, 3, 64),
        _case("layer", layer.check_flash_attn, FLOAT16),
        _case("layer", layer.check_compiled),
        _case("layer", layer.check_graph),
        _case("instances", instances.check_ring_of_threads),
        _case("instances", instances.check_instances, FLOAT32),
        _case("large", large.check_large_pool),
        _case("large", large.check_large_queries),
        _case("large", large.check_large_merge),
        _case("large", large.check_large_elementwise),
        _case("limits", timing.measure_limits),
        _case("speed of prefill", speed_attention.speed_prefill, FLOAT16, heads, 20),
        _case("speed of save", speed_attention.speed_save, FLOAT16, heads, 20),
        _case("speed of launch", speed_attention.speed_launch),
        _case("speed of ring", speed_attention.speed_ring, FLOAT16, heads, 20, 2),
        _case("speed of decode", speed_decode.speed_decode, FLOAT16, heads, [40] * 3, "3 x 40"),
        _case("speed of decode", speed_decode.speed_decode, FLOAT16, heads, [40, 7], "40 and 7"),
        _case("speed of decode", speed_decode.speed_chunk, FLOAT16, heads, 20, 40),
        _case("speed of layer", speed_layer.speed_layer, FLOAT16),
    ]
