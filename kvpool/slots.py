"""Allocate KV slots, one token each: any free slot will do, contiguous runs are preferred.

The truth is a reference count a slot. Free slots are also kept in two places that are cheap to take from: ``runs``
(long contiguous runs, longest first, consumed from the front) and ``loose`` (a stack of fragments and of what came back
since the runs were last built). Large requests take from the runs and small ones from the loose slots, so that single
decode tokens fill the holes and leave the runs whole. Runs are rebuilt from the counts by one vectorised scan, and only
when the slots that came and went since the last scan pay for it.
"""

import torch
from torch import Tensor

# A run of at least so many free slots is kept whole for allocations of at least so many.
MIN_RUN_SLOTS = 16
# A scan of all slots is worth its time once 1/32 of them were asked for or came back since the last one.
SCAN_SHARE = 32


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
        self._refs = torch.zeros(num_slots, dtype=torch.int32)
        self._runs = torch.arange(num_slots, dtype=torch.int64)
        self._runs_head = 0
        self._loose = torch.empty(num_slots, dtype=torch.int64)
        self._num_loose = 0
        self._freed_since_scan = 0

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
            [num_slots] int64: distinct slots, in as few contiguous ascending runs as is cheap to find.

        Raises:
            OutOfSlots: Fewer are free; nothing changes.
            ValueError: ``num_slots`` is negative.
        """
        if num_slots < 0:
            raise ValueError(f"cannot allocate {num_slots} slots: the count must be at least 0")
        if num_slots > self._num_free:
            raise OutOfSlots(num_slots, self._num_free)
        if num_slots == 0:
            return torch.empty(0, dtype=torch.int64)
        large = num_slots >= MIN_RUN_SLOTS
        if large and self._freed_since_scan and (self._freed_since_scan + num_slots) * SCAN_SHARE >= self._num_slots:
            self._rebuild_runs()
        in_runs = self._runs.numel() - self._runs_head
        if large or self._num_loose < num_slots:
            slots = self._take_run(min(num_slots, in_runs))
            if slots.numel() < num_slots:
                slots = torch.cat([slots, self._take_loose(num_slots - slots.numel())])
        else:
            slots = self._take_loose(num_slots)
        self._refs.index_fill_(0, slots, 1)
        self._num_free -= num_slots
        return slots

    def retain(self, slots: Tensor) -> None:
        """Add one reference to each slot (to one listed twice, two).

        Args:
            slots: [n] int64, all allocated.

        Raises:
            ValueError: A slot is out of range or free; nothing changes.
        """
        self._check_slots(slots)
        if slots.numel() == 0:
            return
        if int(self._refs[slots].min()) < 1:
            free = slots[self._refs[slots] < 1]
            raise ValueError(f"cannot retain free slots {_head(free)}: allocate them first")
        self._refs.index_add_(0, slots, torch.ones_like(slots, dtype=torch.int32))

    def free(self, slots: Tensor) -> None:
        """Drop one reference of each slot; a slot without references is free again.

        Args:
            slots: [n] int64, all allocated.

        Raises:
            ValueError: A slot is out of range, or has fewer references than it is listed (a double free); nothing
                changes.
        """
        self._check_slots(slots)
        if slots.numel() == 0:
            return
        shared = int(self._refs[slots].max()) > 1
        self._refs.index_add_(0, slots, torch.ones_like(slots, dtype=torch.int32), alpha=-1)
        if int(self._refs[slots].min()) < 0:
            twice = slots[self._refs[slots] < 0]
            self._refs.index_add_(0, slots, torch.ones_like(slots, dtype=torch.int32))
            raise ValueError(f"double free of slots {_head(twice)}")
        returned = slots
        if shared:
            # Only a shared slot can be listed twice in one legal call.
            returned = torch.unique(slots[self._refs[slots] == 0])
        num_returned = returned.numel()
        self._loose[self._num_loose : self._num_loose + num_returned] = returned
        self._num_loose += num_returned
        self._num_free += num_returned
        self._freed_since_scan += num_returned

    def _take_run(self, num_slots: int) -> Tensor:
        slots = self._runs[self._runs_head : self._runs_head + num_slots].clone()
        self._runs_head += num_slots
        return slots

    def _take_loose(self, num_slots: int) -> Tensor:
        slots = self._loose[self._num_loose - num_slots : self._num_loose].clone()
        self._num_loose -= num_slots
        return slots if num_slots == 1 else slots.sort().values

    def _rebuild_runs(self) -> None:
        """Sort all free slots anew into long runs, longest first, and loose slots."""
        free = (self._refs == 0).nonzero().flatten()
        breaks = (free[1:] - free[:-1] != 1).nonzero().flatten() + 1
        bounds = torch.cat([torch.zeros(1, dtype=torch.int64), breaks, torch.tensor([free.numel()])])
        lengths = bounds.diff()
        long = lengths >= MIN_RUN_SLOTS
        if bool(long.any()):
            order = lengths[long].sort(descending=True, stable=True).indices
            run_lengths = lengths[long][order]
            # Index of each run's first element in `free`, repeated, plus the position within the run.
            first = bounds[:-1][long][order] - torch.cat([run_lengths.new_zeros(1), run_lengths.cumsum(0)[:-1]])
            self._runs = free[first.repeat_interleave(run_lengths) + torch.arange(int(run_lengths.sum()))]
            loose = free[~long.repeat_interleave(lengths)]
        else:
            self._runs = free[:0]
            loose = free
        self._runs_head = 0
        # Descending, because the stack is taken from its end.
        self._num_loose = loose.numel()
        self._loose[: self._num_loose] = loose.flip(0)
        self._freed_since_scan = 0

    def _check_slots(self, slots: Tensor) -> None:
        if slots.dtype != torch.int64 or slots.dim() != 1:
            raise ValueError(f"slots must be int64 [n], got {slots.dtype} {list(slots.shape)}")
        if slots.numel() == 0:
            return
        low, high = slots.aminmax()
        if int(low) < 0 or int(high) >= self._num_slots:
            raise ValueError(f"slots must be in [0, {self._num_slots}), got {int(low)} .. {int(high)}")


def _head(slots: Tensor) -> str:
    """Name the first few slots of an error message."""
    listed = slots[:8].tolist()
    return f"{listed}" if slots.numel() <= 8 else f"{listed} and {slots.numel() - 8} more"
