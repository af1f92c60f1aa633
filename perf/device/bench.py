"""Where the cases run, and the random tensors that they run on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

Heads = tuple[int, int, int]


class NotRun(Exception):
    """A case cannot run here, and why: what it needs and what there is."""


@dataclass(frozen=True)
class Bench:
    """The device, or the CPU under Triton's interpreter: then ``tiny``, and the same code runs on small shapes."""

    device: torch.device

    @property
    def tiny(self) -> bool:
        """Whether shapes must be small."""
        return self.device.type == "cpu"

    def choose(self, on_device: Any, in_interpreter: Any) -> Any:
        """Answer a size for where this runs."""
        return in_interpreter if self.tiny else on_device

    def require_memory(self, num_bytes: int) -> None:
        """Say no before a case allocates more than there is.

        Raises:
            NotRun: less than ``num_bytes`` and a tenth more is free on the device.
        """
        if self.tiny:
            return
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info(self.device)[0]
        if free < 1.1 * num_bytes:
            raise NotRun(f"needs {1.1 * num_bytes / 2**30:.1f} GiB of free device memory, {free / 2**30:.1f} are free")

    def synchronize(self) -> None:
        """Wait for the device: errors of launches come up here."""
        if not self.tiny:
            torch.cuda.synchronize(self.device)


class Inputs:
    """Random tensors of one dtype on one device, the same in every run."""

    def __init__(self, bench: Bench, dtype: torch.dtype) -> None:
        self.device = bench.device
        self.dtype = dtype
        self._generator = torch.Generator().manual_seed(0)
        self._device_generator = torch.Generator(bench.device).manual_seed(0)

    def rows(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Draw normal values, the same on every device."""
        return torch.randn(*shape, generator=self._generator).to(dtype or self.dtype).to(self.device)

    def fast_rows(self, *shape: int) -> Tensor:
        """Draw normal values on the device: for tensors of gigabytes."""
        out = torch.empty(*shape, dtype=self.dtype, device=self.device)
        return out.normal_(generator=self._device_generator)

    def order(self, count: int) -> Tensor:
        """Draw a permutation of 0..count-1."""
        return torch.randperm(count, generator=self._generator).to(self.device)

    def shape(self, heads: Heads) -> dict[str, Any]:
        """Answer the keywords that plans of these inputs take."""
        names = ("num_q_heads", "num_kv_heads", "head_dim")
        return dict(zip(names, heads, strict=True)) | {"dtype": self.dtype, "device": self.device}


def cumulated(counts: list[int]) -> list[int]:
    """Answer prefix sums, from 0."""
    return [0, *accumulate(counts)]


def name_of(heads: Heads) -> str:
    """Write heads as 32:8x128."""
    return f"{heads[0]}:{heads[1]}x{heads[2]}"


@contextmanager
def environment(**values: str) -> Iterator[None]:
    """Set environment variables for a while."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name)
            else:
                os.environ[name] = value
