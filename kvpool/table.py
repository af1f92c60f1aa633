"""Which slots of one instance hold which positions of which request.

A request's positions lie in chunks: disjoint ranges in growing buffers. Decode appends a token to the last chunk in
amortised constant time, and the slots of a range within one chunk are a view.
"""

from bisect import bisect_right
from collections.abc import Iterator

import torch
from torch import Tensor

from loongserve.kvpool.slots import SlotAllocator

# Fewer slots than this are faster copied one by one than by a call of torch.
_FEW = 16


class MissingSlots(KeyError):
    """Positions [begin, end) of a request are asked for, but not held here."""

    def __init__(self, request: int, begin: int, end: int) -> None:
        super().__init__(request, begin, end)
        self.request = request
        self.begin = begin
        self.end = end

    def __str__(self) -> str:
        return f"request {self.request} has no slots here for positions [{self.begin}, {self.end})"


class _Chunk:
    """Slots of positions [begin, end); ``buffer`` may have room for more at its end."""

    __slots__ = ("begin", "buffer", "end", "room")

    def __init__(self, begin: int, slots: Tensor) -> None:
        self.begin = begin
        self.end = begin + slots.numel()
        self.buffer = slots
        # The memory of ``buffer`` as integers, for appending single tokens; None: it is somebody else's.
        self.room: memoryview | None = None

    def append(self, slots: Tensor) -> None:
        """Add the slots of the positions from ``end`` on."""
        held, added = self.end - self.begin, slots.numel()
        if self.room is None or held + added > len(self.room):
            memory = bytearray(8 * max(held + added, 2 * held, 16))
            buffer = torch.frombuffer(memory, dtype=torch.int64)
            buffer[:held] = self.buffer[:held]
            self.buffer, self.room = buffer, memoryview(memory).cast("q")
        if added < _FEW:
            for index, slot in enumerate(slots.tolist(), held):
                self.room[index] = slot
        else:
            self.buffer[held : held + added] = slots
        self.end += added

    def view(self, begin: int, end: int) -> Tensor:
        """Slots of positions [begin, end), which lie in this chunk."""
        return self.buffer[begin - self.begin : end - self.begin]


class SlotTable:
    """request -> positions -> slots of one instance's allocator. Not thread-safe."""

    def __init__(self, allocator: SlotAllocator) -> None:
        self._allocator = allocator
        # Chunks of a request, by begin.
        self._chunks: dict[int, list[_Chunk]] = {}

    @property
    def allocator(self) -> SlotAllocator:
        """Where the slots come from."""
        return self._allocator

    def reserve(self, request: int, begin: int, end: int) -> Tensor:
        """Take slots for positions [begin, end) of a request, none of which it holds yet.

        Ranges may come in any order and leave gaps.

        Returns:
            [end - begin] int64 slots, in position order. Do not write to them.

        Raises:
            OutOfSlots: Too few are free; nothing changes.
            ValueError: The range is not one, or overlaps what is held; nothing changes.
        """
        self._check_unheld(request, begin, end)
        slots = self._allocator.allocate(end - begin)
        self._insert(request, begin, slots)
        return slots

    def adopt(self, request: int, begin: int, slots: Tensor) -> None:
        """Put slots that the caller has of the same allocator to positions from ``begin`` on; they are the table's now.

        Args:
            request: May be new.
            begin: First position.
            slots: [n] int64, in position order. Do not write to them any more.

        Raises:
            ValueError: Some of the positions are held; nothing changes, and the slots stay the caller's.
        """
        self._check_unheld(request, begin, begin + slots.numel())
        self._insert(request, begin, slots)

    def slots(self, request: int, begin: int, end: int) -> Tensor:
        """Look up the slots of positions [begin, end).

        Returns:
            [end - begin] int64, in position order; a view where the range lies in one chunk. Do not write to it.

        Raises:
            MissingSlots: Naming the first positions that are not held.
            ValueError: The range is not one.
        """
        _check_range(begin, end)
        if begin == end:
            return torch.empty(0, dtype=torch.int64)
        chunks = self._chunks.get(request)
        if chunks and chunks[-1].begin <= begin and end <= chunks[-1].end:
            return chunks[-1].view(begin, end)
        parts = [chunk.view(low, high) for chunk, low, high in self._pieces(request, begin, end)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def ranges(self, request: int) -> tuple[tuple[int, int], ...]:
        """List the position ranges that a request holds here, ascending, touching ones merged."""
        merged: list[tuple[int, int]] = []
        for chunk in self._chunks.get(request, []):
            if merged and merged[-1][1] == chunk.begin:
                merged[-1] = (merged[-1][0], chunk.end)
            else:
                merged.append((chunk.begin, chunk.end))
        return tuple(merged)

    def tokens(self, request: int) -> int:
        """Count the positions that a request holds here."""
        return sum(chunk.end - chunk.begin for chunk in self._chunks.get(request, []))

    def requests(self) -> tuple[int, ...]:
        """List the requests that hold slots here, in the order in which they came."""
        return tuple(self._chunks)

    def free(self, request: int) -> int:
        """Give back all slots of a request.

        Returns:
            How many positions it held; 0 for an unknown request.
        """
        chunks = self._chunks.pop(request, [])
        if not chunks:
            return 0
        slots = [chunk.view(chunk.begin, chunk.end) for chunk in chunks]
        self._allocator.free(slots[0] if len(slots) == 1 else torch.cat(slots))
        return sum(part.numel() for part in slots)

    def drop(self, request: int, begin: int, end: int) -> None:
        """Give back the slots of positions [begin, end), all of which the request holds.

        Raises:
            MissingSlots: Naming the first positions that are not held; nothing changes.
            ValueError: The range is not one.
        """
        _check_range(begin, end)
        if begin == end:
            return
        dropped = self.slots(request, begin, end)
        kept: list[_Chunk] = []
        for chunk in self._chunks[request]:
            for low, high in ((chunk.begin, min(chunk.end, begin)), (max(chunk.begin, end), chunk.end)):
                if (low, high) == (chunk.begin, chunk.end):
                    kept.append(chunk)
                elif low < high:
                    # Without room at its end, so that an append cannot overwrite what an earlier view still shows.
                    kept.append(_Chunk(low, chunk.view(low, high)))
        self._allocator.free(dropped)
        if kept:
            self._chunks[request] = kept
        else:
            del self._chunks[request]

    def holds_any(self, request: int, begin: int, end: int) -> bool:
        """Say whether the request holds any of positions [begin, end)."""
        return self._near(request, begin, end) is not None

    def _near(self, request: int, begin: int, end: int) -> _Chunk | None:
        """Find a chunk that overlaps [begin, end)."""
        chunks = self._chunks.get(request)
        # Decode comes after all that is there.
        if not chunks or begin >= chunks[-1].end or begin == end:
            return None
        after = bisect_right(chunks, begin, key=_begin)
        for chunk in chunks[max(after - 1, 0) : after + 1]:
            if chunk.begin < end and begin < chunk.end:
                return chunk
        return None

    def _check_unheld(self, request: int, begin: int, end: int) -> None:
        _check_range(begin, end)
        near = self._near(request, begin, end)
        if near is not None:
            raise ValueError(
                f"cannot reserve positions [{begin}, {end}) of request {request}: it already holds "
                f"[{near.begin}, {near.end})"
            )

    def _insert(self, request: int, begin: int, slots: Tensor) -> None:
        """Add slots to positions that are not held."""
        if slots.numel() == 0:
            return
        chunks = self._chunks.setdefault(request, [])
        after = len(chunks) if not chunks or begin >= chunks[-1].end else bisect_right(chunks, begin, key=_begin)
        if after and chunks[after - 1].end == begin:
            chunks[after - 1].append(slots)
        else:
            chunks.insert(after, _Chunk(begin, slots))

    def _pieces(self, request: int, begin: int, end: int) -> Iterator[tuple[_Chunk, int, int]]:
        """Walk the chunks that cover [begin, end) without a gap."""
        chunks = self._chunks.get(request, [])
        index = bisect_right(chunks, begin, key=_begin) - 1
        position = begin
        while position < end:
            chunk = chunks[index] if 0 <= index < len(chunks) else None
            if chunk is None or not chunk.begin <= position < chunk.end:
                following = [c.begin for c in chunks if c.begin > position]
                raise MissingSlots(request, position, min([end, *following]))
            high = min(chunk.end, end)
            yield chunk, position, high
            position = high
            index += 1


def _check_range(begin: int, end: int) -> None:
    if not 0 <= begin <= end:
        raise ValueError(f"positions [{begin}, {end}) are not a range: 0 <= begin <= end is required")


def _begin(chunk: _Chunk) -> int:
    return chunk.begin
