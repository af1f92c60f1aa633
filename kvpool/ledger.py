"""Who holds what: the manager's account of all pools, in tokens. Slot numbers are each instance's own business."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

# ((instance, begin, end), ...): positions begin..end-1 of one request lie on that instance.
Placement = tuple[tuple[int, int, int], ...]


class LedgerError(RuntimeError):
    """A change that would break the account; nothing was changed."""


class InstanceFull(LedgerError):
    """An instance has fewer free slots than a placement asks for."""

    def __init__(self, instance: int, asked: int, free: int) -> None:
        super().__init__(f"instance {instance}: asked for {asked} slots, {free} are free")
        self.instance = instance
        self.asked = asked
        self.free = free


@dataclass(frozen=True, slots=True)
class Move:
    """Positions [begin, end) of a request on their way: they lie at the source, and slots at the target wait."""

    number: int
    request: int
    begin: int
    end: int
    source: int
    target: int

    @property
    def num_tokens(self) -> int:
        """Positions that move."""
        return self.end - self.begin


class PlacementLedger:
    """Placements of all requests over instances of given, possibly unequal, capacities."""

    def __init__(self, capacities: Mapping[int, int]) -> None:
        """Open the account with all slots free.

        Args:
            capacities: Slots of each instance.

        Raises:
            ValueError: A capacity is negative.
        """
        for instance, num_slots in capacities.items():
            if num_slots < 0:
                raise ValueError(f"instance {instance}: capacity must be at least 0 slots, got {num_slots}")
        self._capacities = dict(capacities)
        self._free = dict(capacities)
        # Ranges of a request, by begin; touching ranges on one instance are one.
        self._ranges: dict[int, list[tuple[int, int, int]]] = {}
        # instance -> request -> tokens there
        self._tokens: dict[int, dict[int, int]] = {instance: {} for instance in capacities}
        # Open moves, by number.
        self._moves: dict[int, Move] = {}
        self._num_moves = 0

    @property
    def instances(self) -> tuple[int, ...]:
        """All instances, ascending."""
        return tuple(sorted(self._capacities))

    @property
    def total_free(self) -> int:
        """Free slots of all instances together."""
        return sum(self._free.values())

    def capacity(self, instance: int) -> int:
        """Slots of an instance in all. Raises: LedgerError when it is unknown."""
        return self._capacities[self._known(instance)]

    def free_slots(self, instance: int) -> int:
        """Slots of an instance that hold nothing and wait for nothing. Raises: LedgerError when it is unknown."""
        return self._free[self._known(instance)]

    def used_slots(self, instance: int) -> int:
        """Slots of an instance that hold KV. Raises: LedgerError when it is unknown."""
        return self._capacities[self._known(instance)] - self._free[instance] - self.reserved_slots(instance)

    def reserved_slots(self, instance: int) -> int:
        """Slots of an instance that wait for the tokens of open moves. Raises: LedgerError when it is unknown."""
        self._known(instance)
        return sum(move.num_tokens for move in self._moves.values() if move.target == instance)

    def moves(self) -> tuple[Move, ...]:
        """All open moves, oldest first."""
        return tuple(self._moves.values())

    def requests(self) -> tuple[int, ...]:
        """All requests with KV, ascending."""
        return tuple(sorted(self._ranges))

    def requests_on(self, instance: int) -> tuple[int, ...]:
        """The requests with KV on an instance, ascending. Raises: LedgerError when it is unknown."""
        return tuple(sorted(self._tokens[self._known(instance)]))

    def tokens(self, request: int) -> int:
        """Count the positions of a request that lie anywhere."""
        return sum(held.get(request, 0) for held in self._tokens.values())

    def placement(self, request: int) -> Placement:
        """Give all ranges of a request, by position; () when it has none."""
        return tuple(self._ranges.get(request, ()))

    def holders(self, request: int) -> frozenset[int]:
        """The instances with KV of a request."""
        return frozenset(instance for instance, held in self._tokens.items() if request in held)

    def holder_of(self, request: int, position: int) -> int:
        """The instance that holds one position. Raises: LedgerError when none does."""
        ranges = self._ranges.get(request, [])
        index = bisect_right(ranges, position, key=_begin) - 1
        if index < 0 or position >= ranges[index][2]:
            raise LedgerError(f"request {request}: position {position} lies on no instance")
        return ranges[index][0]

    def resident(self, request: int, end: int) -> Placement:
        """Place positions [0, end) of a request.

        Raises:
            LedgerError: Some of them lie nowhere.
        """
        return self._cut(request, 0, end)

    def place(self, request: int, placement: Iterable[tuple[int, int, int]]) -> None:
        """Add ranges to a request: all of them or, on an error, none.

        Args:
            request: May be new.
            placement: (instance, begin, end) in any order; empty ranges are ignored.

        Raises:
            InstanceFull: Naming the instance, what was asked of it and what it has free.
            LedgerError: An unknown instance, a range that is none, or positions that already lie somewhere.
        """
        added = sorted(placement, key=_begin)
        asked: Counter[int] = Counter()
        for instance, begin, end in added:
            self._known(instance)
            if not 0 <= begin <= end:
                raise LedgerError(f"request {request}: positions [{begin}, {end}) are not a range")
            asked[instance] += end - begin
        added = [piece for piece in added if piece[1] < piece[2]]
        self._check_disjoint(request, added)
        for instance, num_tokens in asked.items():
            if num_tokens > self._free[instance]:
                raise InstanceFull(instance, num_tokens, self._free[instance])
        for piece in added:
            self._insert(request, piece)

    def free(self, request: int) -> frozenset[int]:
        """Forget a request and return its slots.

        Returns:
            The instances that held it; empty for an unknown request.

        Raises:
            LedgerError: Some of it is on a move: commit or cancel that first.
        """
        self._check_at_rest(request, 0, None)
        holders = self.holders(request)
        for instance in holders:
            self._free[instance] += self._tokens[instance].pop(request)
        self._ranges.pop(request, None)
        return holders

    def move(self, request: int, begin: int, end: int, source: int, target: int) -> None:
        """Re-place positions [begin, end), all on ``source``, on ``target``.

        Raises:
            InstanceFull: ``target`` has too few free slots.
            LedgerError: An unknown instance, some of the positions do not lie on ``source``, or are on a move.
        """
        self._check_source(request, begin, end, source, target)
        if begin == end or source == target:
            return
        if end - begin > self._free[target]:
            raise InstanceFull(target, end - begin, self._free[target])
        self._remove(request, begin, end)
        self._insert(request, (target, begin, end))

    def begin_move(self, request: int, begin: int, end: int, source: int, target: int) -> Move:
        """Reserve slots on ``target`` for positions [begin, end), all on ``source``, where they still lie.

        The request may grow meanwhile; it can be freed, and these positions moved otherwise, only after the move.

        Raises:
            InstanceFull: ``target`` has too few free slots.
            LedgerError: An unknown instance, the range is empty, source and target are one, or some of the positions do
                not lie on ``source`` or are on a move.
        """
        self._check_source(request, begin, end, source, target)
        if begin == end or source == target:
            raise LedgerError(
                f"request {request}: positions [{begin}, {end}) cannot go from instance {source} to {target}: at least "
                "one position and two instances are needed"
            )
        if end - begin > self._free[target]:
            raise InstanceFull(target, end - begin, self._free[target])
        self._num_moves += 1
        move = Move(self._num_moves, request, begin, end, source, target)
        self._moves[move.number] = move
        self._free[target] -= move.num_tokens
        return move

    def commit_move(self, move: Move) -> None:
        """Let the positions lie on the target, and free their slots on the source. Raises: LedgerError if not open."""
        self._close(move)
        self._remove(move.request, move.begin, move.end)
        self._insert(move.request, (move.target, move.begin, move.end))

    def cancel_move(self, move: Move) -> None:
        """Let the positions stay, and free what was reserved on the target. Raises: LedgerError if not open."""
        self._close(move)

    def check(self) -> None:
        """Recount everything. Raises: LedgerError naming the first account that does not add up."""
        used: Counter[int] = Counter()
        for request, ranges in self._ranges.items():
            held: Counter[int] = Counter()
            last_instance, last_end = None, 0
            for instance, begin, end in ranges:
                if not last_end <= begin < end:
                    raise LedgerError(f"request {request}: range [{begin}, {end}) follows position {last_end}")
                if last_instance == instance and last_end == begin:
                    raise LedgerError(f"request {request}: two ranges on instance {instance} meet at {begin}")
                held[instance] += end - begin
                last_instance, last_end = instance, end
            for instance, by_request in self._tokens.items():
                if by_request.get(request, 0) != held[instance]:
                    raise LedgerError(
                        f"request {request} has {held[instance]} tokens on instance {instance}, booked are "
                        f"{by_request.get(request, 0)}"
                    )
            used.update(held)
        for instance, num_slots in self._capacities.items():
            stray = set(self._tokens[instance]) - set(self._ranges)
            if stray:
                raise LedgerError(f"instance {instance} has tokens of unknown requests {sorted(stray)}")
            reserved = self.reserved_slots(instance)
            if self._free[instance] != num_slots - used[instance] - reserved or self._free[instance] < 0:
                raise LedgerError(
                    f"instance {instance}: {used[instance]} of {num_slots} slots used, {reserved} reserved, "
                    f"{self._free[instance]} free"
                )
        for move in self._moves.values():
            if any(instance != move.source for instance, _, _ in self._cut(move.request, move.begin, move.end)):
                raise LedgerError(f"{move}: not all of it lies on its source")

    def _known(self, instance: int) -> int:
        if instance not in self._capacities:
            raise LedgerError(f"unknown instance {instance}: there are {list(self.instances)}")
        return instance

    def _close(self, move: Move) -> None:
        if self._moves.get(move.number) != move:
            raise LedgerError(f"{move} is not open: it was committed or cancelled, or is of another ledger")
        del self._moves[move.number]
        self._free[move.target] += move.num_tokens

    def _check_source(self, request: int, begin: int, end: int, source: int, target: int) -> None:
        """Check that positions lie on ``source``, at rest."""
        self._known(source)
        self._known(target)
        for instance, low, high in self._cut(request, begin, end):
            if instance != source:
                raise LedgerError(
                    f"request {request}: positions [{low}, {high}) lie on instance {instance}, not on {source}"
                )
        self._check_at_rest(request, begin, end)

    def _check_at_rest(self, request: int, begin: int, end: int | None) -> None:
        """Check that no position from ``begin`` to before ``end`` (None: to the last) is on a move."""
        for move in self._moves.values():
            if move.request == request and begin < move.end and (end is None or move.begin < end):
                raise LedgerError(
                    f"request {request}: positions [{move.begin}, {move.end}) are on a move from instance "
                    f"{move.source} to {move.target}: commit or cancel it first"
                )

    def _check_disjoint(self, request: int, added: list[tuple[int, int, int]]) -> None:
        ranges = self._ranges.get(request, [])
        last_end = 0
        for _, begin, end in added:
            if begin < last_end:
                raise LedgerError(f"request {request}: position {begin} is placed twice")
            last_end = end
            index = bisect_right(ranges, begin, key=_begin)
            for instance, low, high in ranges[max(index - 1, 0) : index + 1]:
                if low < end and begin < high:
                    raise LedgerError(
                        f"request {request}: positions [{max(low, begin)}, {min(high, end)}) already lie on instance "
                        f"{instance}"
                    )

    def _cut(self, request: int, begin: int, end: int) -> Placement:
        """Give the ranges within [begin, end), which must all lie somewhere."""
        if not 0 <= begin <= end:
            raise LedgerError(f"request {request}: positions [{begin}, {end}) are not a range")
        ranges = self._ranges.get(request, [])
        pieces = []
        position = begin
        for instance, low, high in ranges[max(bisect_right(ranges, begin, key=_begin) - 1, 0) :]:
            if low >= end or position >= end:
                break
            if high <= position:
                continue
            if low > position:
                break
            pieces.append((instance, position, min(high, end)))
            position = min(high, end)
        if position < end:
            raise LedgerError(f"request {request}: position {position} lies on no instance")
        return tuple(pieces)

    def _insert(self, request: int, piece: tuple[int, int, int]) -> None:
        instance, begin, end = piece
        self._free[instance] -= end - begin
        self._tokens[instance][request] = self._tokens[instance].get(request, 0) + end - begin
        ranges = self._ranges.setdefault(request, [])
        index = bisect_right(ranges, begin, key=_begin)
        if index < len(ranges) and ranges[index][:2] == (instance, end):
            end = ranges.pop(index)[2]
        if index > 0 and (ranges[index - 1][0], ranges[index - 1][2]) == (instance, begin):
            ranges[index - 1] = (instance, ranges[index - 1][1], end)
        else:
            ranges.insert(index, (instance, begin, end))

    def _remove(self, request: int, begin: int, end: int) -> None:
        """Take out [begin, end), which lies on one instance."""
        ranges = self._ranges[request]
        index = bisect_right(ranges, begin, key=_begin) - 1
        instance, low, high = ranges[index]
        ranges[index : index + 1] = [
            (instance, first, last) for first, last in ((low, begin), (end, high)) if first < last
        ]
        self._free[instance] += end - begin
        left = self._tokens[instance][request] - (end - begin)
        if left:
            self._tokens[instance][request] = left
        else:
            del self._tokens[instance][request]


def _begin(piece: tuple[int, int, int]) -> int:
    return piece[1]
