"""Slots of a fragmented pool of a million: beside the least that a free list could do for the same result."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from loongserve.kvpool.slots import SlotAllocator
from loongserve.kvpool.table import SlotTable

NUM_SLOTS = 1_000_000
# The baselines keep a list of free slots and nothing else: no references, no checks, no runs.
LEAST_RATIO_LARGE, LEAST_RATIO_ONE, LEAST_RATIO_DECODE = 0.35, 1.2, 1.4


def fragmented(pattern: str) -> SlotAllocator:
    """A pool of which slots come back in random order, a hundred at a time."""
    allocator = SlotAllocator(NUM_SLOTS)
    generator = torch.Generator().manual_seed(0)
    order = allocator.allocate(NUM_SLOTS)[torch.randperm(NUM_SLOTS, generator=generator)]
    freed = order[order % 2 == 0] if pattern == "every-other" else order[: NUM_SLOTS * 3 // 10]
    for part in freed.split(100):
        allocator.free(part)
    return allocator


@pytest.mark.parametrize("pattern", ["every-other", "random-30-percent"])
def test_large_request(ratio_to: Callable[..., float], pattern: str) -> None:
    """100,000 tokens, all or nothing, ascending: beside cutting a stack and sorting the piece."""
    tokens = 100_000
    allocator = fragmented(pattern)
    free = allocator.num_free
    slots = allocator.allocate(tokens)
    assert (slots.diff() > 0).all()
    allocator.free(slots)
    assert allocator.num_free == free

    generator = torch.Generator().manual_seed(1)
    stack = torch.randperm(NUM_SLOTS, generator=generator)

    def ours() -> None:
        allocator.free(allocator.allocate(tokens))

    def baseline() -> None:
        piece = stack[-tokens:].to(torch.int32).sort().values.to(torch.int64)
        # Back on the stack in another order: what comes back in a real pool is not sorted.
        stack[-tokens:] = piece.view(-1, 100).flip(1).t().reshape(-1)

    assert ratio_to(ours, baseline, "cut and sort", 1.0, "request") > LEAST_RATIO_LARGE


def test_one_token(ratio_to: Callable[..., float]) -> None:
    """Single tokens, each its own tensor, a thousand taken and given back: beside a list of integers."""
    count = 1000
    allocator = fragmented("random-30-percent")
    numbers = list(range(NUM_SLOTS))

    def ours() -> None:
        held = [allocator.allocate(1) for _ in range(count)]
        for slots in held:
            allocator.free(slots)

    def baseline() -> None:
        held = [torch.tensor([numbers.pop()]) for _ in range(count)]
        numbers.extend(int(slots) for slots in held)

    assert ratio_to(ours, baseline, "list and torch.tensor", count, "token") > LEAST_RATIO_ONE


def test_decode_steps(ratio_to: Callable[..., float]) -> None:
    """What a decode step asks of a table, 64 requests that grow by one token: beside dicts of lists."""
    requests, steps = 64, 16
    allocator = fragmented("random-30-percent")

    def ours() -> None:
        table = SlotTable(allocator)
        for request in range(requests):
            table.reserve(request, 0, 100)
        for step in range(100, 100 + steps):
            for request in range(requests):
                table.reserve(request, step, step + 1)
                table.slots(request, 0, step + 1)
        for request in range(requests):
            table.free(request)

    numbers = list(range(NUM_SLOTS))

    def baseline() -> None:
        held = {request: [numbers.pop() for _ in range(100)] for request in range(requests)}
        for _ in range(steps):
            for request in range(requests):
                held[request].append(numbers.pop())
                torch.tensor(held[request])
        for slots in held.values():
            numbers.extend(slots)

    assert ratio_to(ours, baseline, "lists and torch.tensor", requests * steps, "token") > LEAST_RATIO_DECODE
