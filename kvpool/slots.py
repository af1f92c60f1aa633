"""Allocate KV slots, one token each: any free slot will do, contiguous runs are preferred.

A stack lists every free slot, each slot at most once. Small requests are taken from its top, so single decode tokens
fill the holes that were left last. Large ones first take long runs, which a scan of the state bytes finds eight slots
at a time; what they take that way stays on the stack as a stale entry and is skipped when it comes to the top. A scan
runs only when the slots that are asked for and have come back since the last one pay for it, so that the price of an
allocation is amortised over its slots however fragmented the pool is.
"""

import torch
from torch import Tensor

# A run of fewer slots is not worth looking for.
MIN_RUN_SLOTS = 16
# A scan is worth its time once 1/32 of all slots are asked for or came back since the last one.
SCAN_SHARE = 32

# State of a slot. By construction a slot that is free is on the stack.
_FREE = 0
_USED = 1
_USED_ON_STACK = 2

_WORD = 8


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
        # Each array is seen twice, as a tensor for many slots and as a memoryview for one.
        num_words = num_slots // _WORD + 1
        state = bytearray(num_words * _WORD)
        state[num_slots:] = bytes([_USED]) * (len(state) - num_slots)
        refs, stack = bytearray(4 * (num_slots + 1)), bytearray(8 * (num_slots + 1))
        self._state, self._state_of = torch.frombuffer(state, dtype=torch.uint8), memoryview(state)
        self._refs, self._refs_of = torch.frombuffer(refs, dtype=torch.int32), memoryview(refs).cast("i")
        self._stack, self._stack_at = torch.frombuffer(stack, dtype=torch.int64), memoryview(stack).cast("q")
        self._stack[:num_slots] = torch.arange(num_slots - 1, -1, -1)
        self._top = num_slots
        # The runs of the last scan, longest first, as if laid end to end: run i ends at _run_ends[i] and its slot at
        # place p is p + _run_shifts[i]. Places before _run_head are gone; later ones may have been taken since.
        self._run_ends = torch.tensor([num_slots])
        self._run_shifts = torch.zeros(1, dtype=torch.int64)
        self._run_head = 0
        self._run_total = num_slots
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
        self._num_free -= num_slots
        if num_slots == 1:
            return self._pop_one()
        parts = []
        missing = num_slots
        if num_slots >= MIN_RUN_SLOTS:
            if self._freed_since_scan and (self._freed_since_scan + num_slots) * SCAN_SHARE >= self._num_slots:
                self._scan()
            parts = self._take_runs(missing)
            missing -= sum(part.numel() for part in parts)
        if missing:
            parts.append(self._pop(missing))
        slots = parts[0] if len(parts) == 1 else torch.cat([torch.empty(0, dtype=torch.int64), *parts])
        self._refs.index_fill_(0, slots, 1)
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
        refs = self._refs[slots]
        if int(refs.min()) < 1:
            raise ValueError(f"cannot retain free slots {_head(slots[refs < 1])}: allocate them first")
        self._refs.index_add_(0, slots, torch.ones_like(refs))

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
        if slots.numel() == 1:
            self._free_one(int(slots))
            return
        before = self._refs[slots]
        one = torch.ones_like(before)
        self._refs.index_add_(0, slots, one, alpha=-1)
        after = self._refs[slots]
        if int(after.min()) < 0:
            self._refs.index_add_(0, slots, one)
            raise ValueError(f"double free of slots {_head(slots[after < 0])}: they have fewer references")
        returned = slots
        if int(before.max()) > 1:
            # Only a shared slot can be listed twice in one legal call.
            returned = torch.unique(slots[after == 0])
        # The lowest on top: it is taken first.
        pushed = returned[self._state[returned] == _USED].flip(0)
        self._stack[self._top : self._top + pushed.numel()] = pushed
        self._top += pushed.numel()
        self._state.index_fill_(0, returned, _FREE)
        self._num_free += returned.numel()
        self._freed_since_scan += returned.numel()

    def _pop_one(self) -> Tensor:
        while True:
            self._top -= 1
            slot = self._stack_at[self._top]
            is_free = self._state_of[slot] == _FREE
            self._state_of[slot] = _USED
            if is_free:
                self._refs_of[slot] = 1
                return self._stack[self._top : self._top + 1].clone()

    def _free_one(self, slot: int) -> None:
        refs = self._refs_of[slot] - 1
        if refs < 0:
            raise ValueError(f"double free of slots {[slot]}: they have fewer references")
        self._refs_of[slot] = refs
        if refs:
            return
        if self._state_of[slot] == _USED:
            self._stack_at[self._top] = slot
            self._top += 1
        self._state_of[slot] = _FREE
        self._num_free += 1
        self._freed_since_scan += 1

    def _pop(self, num_slots: int) -> Tensor:
        """Take free slots, of which there are enough, from the top of the stack."""
        parts = []
        size = missing = num_slots
        while missing:
            chunk = self._stack[max(0, self._top - size) : self._top].flip(0)
            chunk, taken = self._first_free(chunk, missing)
            self._top -= chunk.numel()
            # Also the stale ones: they are used, and no longer on the stack.
            self._state.index_fill_(0, chunk, _USED)
            parts.append(taken)
            missing -= taken.numel()
            size *= 2
        # Sorting halves of the words takes half the time.
        small = torch.cat(parts).to(torch.int32) if self._num_slots < 2**31 else torch.cat(parts)
        return small.sort().values.to(torch.int64)

    def _take_runs(self, num_slots: int) -> list[Tensor]:
        """Take up to so many slots of the runs that the last scan found."""
        parts = []
        size = missing = num_slots
        while missing and self._run_head < self._run_total:
            places = torch.arange(self._run_head, min(self._run_head + size, self._run_total))
            first, last = torch.searchsorted(self._run_ends, places[[0, -1]], right=True).tolist()
            run = first if first == last else torch.searchsorted(self._run_ends, places, right=True)
            chunk, taken = self._first_free(places + self._run_shifts[run], missing)
            self._run_head += chunk.numel()
            self._state.index_fill_(0, taken, _USED_ON_STACK)
            parts.append(taken)
            missing -= taken.numel()
            size *= 2
        return parts

    def _first_free(self, chunk: Tensor, num_slots: int) -> tuple[Tensor, Tensor]:
        """Cut a chunk after its ``num_slots``-th free slot. Returns: what is left of it, and the free ones in it."""
        is_free = self._state[chunk] == _FREE
        if chunk.numel() <= num_slots and bool(is_free.all()):
            return chunk, chunk
        free_at = is_free.nonzero().flatten()[:num_slots]
        if free_at.numel() == num_slots:
            chunk = chunk[: int(free_at[-1]) + 1]
        return chunk, chunk[free_at]

    def _scan(self) -> None:
        """Find runs of words of eight free slots."""
        free = (self._state.view(torch.int64) == 0).nonzero().flatten()
        if free.numel() == 0:
            starts = lengths = free
        else:
            breaks = (free.diff() != 1).nonzero().flatten() + 1
            bounds = torch.cat([breaks.new_zeros(1), breaks, breaks.new_tensor([free.numel()])])
            lengths = bounds.diff()
            long = (lengths >= MIN_RUN_SLOTS // _WORD).nonzero().flatten()
            lengths, order = lengths[long].sort(descending=True, stable=True)
            starts = free[bounds[long[order]]]
        ends = lengths.cumsum(0) * _WORD
        self._run_ends = ends
        self._run_shifts = starts * _WORD - (ends - lengths * _WORD)
        self._run_head = 0
        self._run_total = int(lengths.sum()) * _WORD
        self._freed_since_scan = 0

    def _check_slots(self, slots: Tensor) -> None:
        if slots.dtype != torch.int64 or slots.dim() != 1:
            raise ValueError(f"slots must be int64 [n], got {slots.dtype} {list(slots.shape)}")
        if slots.numel() == 0:
            return
        low, high = (int(bound) for bound in slots.aminmax()) if slots.numel() > 1 else (int(slots),) * 2
        if low < 0 or high >= self._num_slots:
            raise ValueError(f"slots must be in [0, {self._num_slots}), got {low} .. {high}")


def _head(slots: Tensor) -> str:
    """Name the first few slots of an error message."""
    listed = slots[:8].tolist()
    return f"{listed}" if slots.numel() <= 8 else f"{listed} and {slots.numel() - 8} more"
