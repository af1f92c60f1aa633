"""Allocate KV slots, one token each: any free slot will do, contiguous runs are preferred.

Two arrays hold all that there is to know: the references of each slot, and one byte a slot that is 1 where it is free.
Free slots are taken lowest first, so that small requests fill the holes at the low end and long runs stay whole at the
high end; a request that is long enough looks for runs of its own length, and of fractions of it, before it takes holes.
Bytes are searched by ``bytearray.find``, at the speed of memchr, in blocks; blocks that are known to be full are passed
over, and a block becomes known as full at the price of one search for each time that a slot came back to it. So the
price of a slot is the same however large, full or fragmented the pool is.
"""

from array import array
from collections import Counter

import torch
from torch import Tensor

# A run of fewer slots is not worth looking for.
MIN_RUN_SLOTS = 16
# A run of n slots is looked for in the first n * max(n, 64) slots, so that the search costs well below 1 us a slot.
_LEAST_SEARCH = 64
# Fewer slots than this are faster handled one by one in Python than by a dozen calls of torch.
_SMALL = 64
_BLOCK = 1024

_ONE_FREE = b"\1"


class OutOfSlots(RuntimeError):
    """Fewer slots are free than were asked for; nothing was allocated."""

    def __init__(self, asked: int, free: int) -> None:
        super().__init__(f"asked for {asked} KV slots, {free} are free: free or evict requests first")
        self.asked = asked
        self.free = free


class SlotAllocator:
    """Reference-counted slots 0 .. num_slots - 1. All tensors are on the CPU; not thread-safe."""

    def __init__(self, num_slots: int) -> None:
        """Make a pool with every slot free. Raises: ValueError when ``num_slots`` is negative."""
        if num_slots < 0:
            raise ValueError(f"num_slots must be at least 0, got {num_slots}")
        self._num_slots = num_slots
        self._num_free = num_slots
        # References beyond the first of each slot, all slots together.
        self._num_shares = 0
        # Each array is seen twice, as a tensor for many slots and as bytes for few. One spare entry: torch refuses
        # empty buffers.
        self._free_bytes = bytearray(_ONE_FREE * num_slots + b"\0")
        self._free = torch.frombuffer(self._free_bytes, dtype=torch.uint8)
        self._refs_of = array("i", bytes(4 * (num_slots + 1)))
        self._refs = torch.frombuffer(self._refs_of, dtype=torch.int32)
        # 1 where a block of slots may have a free one; 0 is certain.
        self._open_bytes = bytearray(_ONE_FREE * (num_slots // _BLOCK + 1))
        self._open = torch.frombuffer(self._open_bytes, dtype=torch.uint8)
        # Low slots that were free when this was filled, lowest last, each with the tensor to hand out.
        self._ready: list[tuple[int, Tensor]] = []

    @property
    def num_slots(self) -> int:
        """Slots in all."""
        return self._num_slots

    @property
    def num_free(self) -> int:
        """Slots that nobody holds."""
        return self._num_free

    def allocate(self, num_slots: int) -> Tensor:
        """Take ``num_slots`` free slots, each with a reference count of 1.

        Args:
            num_slots: How many; 0 is legal.

        Returns:
            [num_slots] int64: distinct slots, in as few contiguous ascending runs as is cheap to find. Do not write to
            it: slots that are handed out one by one share their memory.

        Raises:
            OutOfSlots: Fewer are free; nothing changes.
            ValueError: ``num_slots`` is negative.
        """
        if num_slots > self._num_free:
            raise OutOfSlots(num_slots, self._num_free)
        if num_slots == 1:
            return self._take_one()
        if num_slots < 0:
            raise ValueError(f"cannot allocate {num_slots} slots: the count must be at least 0")
        parts = self._take_runs(num_slots) if num_slots >= MIN_RUN_SLOTS else []
        missing = num_slots - sum(part.numel() for part in parts)
        if missing >= _SMALL:
            parts += self._take_holes(missing)
        elif missing:
            parts.append(_to_tensor(self._take_few(missing)))
        self._num_free -= num_slots
        if len(parts) == 1:
            return parts[0]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)

    def retain(self, slots: Tensor) -> None:
        """Add one reference to each slot (to one listed twice, two).

        Args:
            slots: [n] int64, all allocated.

        Raises:
            ValueError: A slot is out of range or free; nothing changes.
        """
        _check_tensor(slots)
        if slots.numel() == 0:
            return
        self._check_range(slots)
        refs = self._refs.gather(0, slots)
        if int(refs.min()) < 1:
            raise ValueError(f"cannot retain free slots {_head(slots[refs < 1].tolist())}: allocate them first")
        self._refs.scatter_add_(0, slots, torch.ones_like(refs))
        self._num_shares += slots.numel()

    def free(self, slots: Tensor) -> None:
        """Drop one reference of each slot; a slot without references is free again.

        Args:
            slots: [n] int64, all allocated, in any order.

        Raises:
            ValueError: A slot is out of range, or has fewer references than it is listed (a double free); nothing
                changes.
        """
        _check_tensor(slots)
        count = slots.numel()
        if count >= _SMALL:
            self._free_many(slots)
        elif count:
            self._free_few(slots.tolist())

    def _take_one(self) -> Tensor:
        while True:
            if not self._ready:
                lowest = self._find_few(_SMALL)
                self._ready = list(zip(lowest, _to_tensor(lowest).view(-1, 1).unbind(), strict=True))[::-1]
            slot, tensor = self._ready.pop()
            if self._free_bytes[slot]:
                self._free_bytes[slot] = 0
                self._refs_of[slot] = 1
                self._num_free -= 1
                return tensor

    def _take_few(self, num_slots: int) -> list[int]:
        slots = self._find_few(num_slots)
        for slot in slots:
            self._free_bytes[slot] = 0
            self._refs_of[slot] = 1
        return slots

    def _find_few(self, num_slots: int) -> list[int]:
        """List the lowest free slots, up to so many."""
        slots: list[int] = []
        find, block = self._free_bytes.find, 0
        while (block := self._open_bytes.find(_ONE_FREE, block)) >= 0:
            end = (block + 1) * _BLOCK
            slot = find(_ONE_FREE, block * _BLOCK, end)
            if slot < 0:
                self._open_bytes[block] = 0
            while slot >= 0:
                slots.append(slot)
                if len(slots) == num_slots:
                    return slots
                slot = find(_ONE_FREE, slot + 1, end)
            block += 1
        return slots

    def _take_runs(self, num_slots: int) -> list[Tensor]:
        """Take runs of all, a quarter, a sixteenth, ... of what is asked for, while there are such near the low end."""
        parts: list[Tensor] = []
        missing = size = num_slots
        low = self._open_bytes.find(_ONE_FREE) * _BLOCK
        high = low + num_slots * max(num_slots, _LEAST_SEARCH)
        # A part costs some microseconds: shorter ones than these are as well taken as holes.
        least = max(MIN_RUN_SLOTS, num_slots // _SMALL)
        while missing and size >= least:
            begin, run = low, _ONE_FREE * size
            while missing >= size and (begin := self._free_bytes.find(run, begin, high)) >= 0:
                end = begin + size
                self._free[begin:end] = 0
                self._refs[begin:end] = 1
                parts.append(torch.arange(begin, end))
                missing -= size
                begin = end
            size = min(size // 4, missing) if missing >= least else 0
        return parts

    def _take_holes(self, num_slots: int) -> list[Tensor]:
        """Take the lowest free slots, of which there are enough."""
        parts: list[Tensor] = []
        missing, end = num_slots, 0
        # As far as they would reach if free slots lay evenly, and a bit more.
        size = num_slots * self._num_slots // self._num_free * 17 // 16
        while missing:
            first = self._open_bytes.find(_ONE_FREE, end // _BLOCK)
            begin = first * _BLOCK
            end = min(self._num_slots, (first + size // _BLOCK + 1) * _BLOCK)
            slots = self._free[begin:end].view(torch.bool).nonzero().flatten()
            if slots.numel() >= missing:
                slots = slots[:missing]
                end = begin + int(slots[-1]) + 1
            # All that was free before `end` is taken now.
            self._free[begin:end] = 0
            self._refs[begin:end].clamp_(min=1)
            full = end // _BLOCK if end < self._num_slots else len(self._open_bytes)
            self._open_bytes[first:full] = bytes(full - first)
            parts.append(slots + begin if begin else slots)
            missing -= slots.numel()
            size *= 2
        return parts

    def _free_few(self, slots: list[int]) -> None:
        refs = self._refs_of
        for index, slot in enumerate(slots):
            if not 0 <= slot < self._num_slots or refs[slot] < 1:
                for dropped in slots[:index]:
                    refs[dropped] += 1
                raise self._bad_slots(slots)
            refs[slot] -= 1
        for slot in slots:
            if refs[slot] or self._free_bytes[slot]:
                self._num_shares -= 1
            else:
                self._free_bytes[slot] = 1
                self._open_bytes[slot // _BLOCK] = 1
                self._num_free += 1

    def _free_many(self, slots: Tensor) -> None:
        low, high = self._check_range(slots)
        one = torch.ones(slots.numel(), dtype=torch.int32)
        self._refs.scatter_add_(0, slots, -one)
        left = self._refs.gather(0, slots)
        if int(left.min()) < 0:
            self._refs.scatter_add_(0, slots, one)
            raise self._bad_slots(slots.tolist())
        returned = slots
        if self._num_shares:
            # Only a shared slot can be left with references, or be listed twice in one legal call.
            returned = torch.unique(slots[left == 0])
            self._num_shares -= slots.numel() - returned.numel()
        self._free.scatter_(0, returned, torch.ones(returned.numel(), dtype=torch.uint8))
        first, last = low // _BLOCK, high // _BLOCK
        if last - first < returned.numel():
            self._open_bytes[first : last + 1] = _ONE_FREE * (last + 1 - first)
        else:
            self._open.index_fill_(0, returned // _BLOCK, 1)
        self._num_free += returned.numel()

    def _check_range(self, slots: Tensor) -> tuple[int, int]:
        low, high = (int(bound) for bound in slots.aminmax())
        if low < 0 or high >= self._num_slots:
            raise self._bad_slots([low, high])
        return low, high

    def _bad_slots(self, slots: list[int]) -> ValueError:
        """Say what is wrong with slots that cannot be freed; on an error time does not matter."""
        low, high = min(slots), max(slots)
        if low < 0 or high >= self._num_slots:
            return ValueError(f"slots must be in [0, {self._num_slots}), got {low} .. {high}")
        twice = [slot for slot, listed in Counter(slots).items() if self._refs_of[slot] < listed]
        return ValueError(f"double free of slots {_head(twice)}: they have fewer references")


def _to_tensor(slots: list[int]) -> Tensor:
    # A third of the time of torch.tensor.
    return torch.frombuffer(array("q", slots), dtype=torch.int64)


def _check_tensor(slots: Tensor) -> None:
    if slots.dtype != torch.int64 or slots.dim() != 1:
        raise ValueError(f"slots must be int64 [n], got {slots.dtype} {list(slots.shape)}")


def _head(slots: list[int]) -> str:
    """Name the first few slots of an error message."""
    return f"{slots[:8]}" if len(slots) <= 8 else f"{slots[:8]} and {len(slots) - 8} more"
