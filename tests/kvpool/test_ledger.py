"""PlacementLedger: against a dict of positions, and its edges."""

import subprocess
import sys
from itertools import pairwise

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from loongserve.kvpool.ledger import InstanceFull, LedgerError, Move, PlacementLedger

CAPACITIES = {0: 10, 1: 40, 5: 25}
requests = st.integers(0, 3)
instances = st.sampled_from(sorted(CAPACITIES))
pieces = st.tuples(instances, st.integers(0, 40), st.integers(0, 8)).map(
    lambda piece: (piece[0], piece[1], sum(piece[1:]))
)


class LedgerMachine(RuleBasedStateMachine):
    """Any sequence of operations agrees with a dict (request, position) -> instance; all or nothing on errors."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = PlacementLedger(CAPACITIES)
        self.model: dict[tuple[int, int], int] = {}
        self.moves: list[Move] = []

    def reserved_on(self, instance: int) -> int:
        return sum(move.end - move.begin for move in self.moves if move.target == instance)

    def used_on(self, instance: int) -> int:
        return sum(holder == instance for holder in self.model.values())

    def free_on(self, instance: int) -> int:
        return CAPACITIES[instance] - self.used_on(instance) - self.reserved_on(instance)

    def on_a_move(self, request: int, begin: int, end: int) -> bool:
        return any(m.request == request and m.begin < end and begin < m.end for m in self.moves)

    @rule(request=requests, placement=st.lists(pieces, max_size=3))
    def place(self, request: int, placement: list[tuple[int, int, int]]) -> None:
        wanted = [
            ((request, position), instance) for instance, begin, end in placement for position in range(begin, end)
        ]
        overlaps = len({key for key, _ in wanted}) < len(wanted) or any(key in self.model for key, _ in wanted)
        full = any(sum(i == instance for _, i in wanted) > self.free_on(instance) for instance in CAPACITIES)
        if overlaps or full:
            with pytest.raises(LedgerError) as error:
                self.ledger.place(request, tuple(placement))
            if not overlaps:
                assert isinstance(error.value, InstanceFull)
                assert error.value.free == self.free_on(error.value.instance) < error.value.asked
            return
        self.ledger.place(request, tuple(placement))
        self.model.update(wanted)

    @rule(request=requests, instance=instances)
    def decode_step(self, request: int, instance: int) -> None:
        end = max((position for owner, position in self.model if owner == request), default=-1) + 1
        self.place(request, [(instance, end, end + 1)])

    @rule(request=requests)
    def free(self, request: int) -> None:
        held = [key for key in self.model if key[0] == request]
        if self.on_a_move(request, 0, 1000):
            with pytest.raises(LedgerError, match="are on a move"):
                self.ledger.free(request)
            return
        assert self.ledger.free(request) == {self.model[key] for key in held}
        for key in held:
            del self.model[key]

    @rule(request=requests, begin=st.integers(0, 40), num_tokens=st.integers(0, 8), source=instances, to=instances)
    def move(self, request: int, begin: int, num_tokens: int, source: int, to: int) -> None:
        wanted = [(request, position) for position in range(begin, begin + num_tokens)]
        fits = source == to or num_tokens <= self.free_on(to)
        at_rest = not self.on_a_move(request, begin, begin + num_tokens)
        if all(self.model.get(key) == source for key in wanted) and fits and at_rest:
            self.ledger.move(request, begin, begin + num_tokens, source, to)
            self.model.update(dict.fromkeys(wanted, to))
        else:
            with pytest.raises(LedgerError):
                self.ledger.move(request, begin, begin + num_tokens, source, to)

    @rule(request=requests, begin=st.integers(0, 40), num_tokens=st.integers(0, 8), source=instances, to=instances)
    def begin_move(self, request: int, begin: int, num_tokens: int, source: int, to: int) -> None:
        self.try_to_move(request, begin, begin + num_tokens, source, to)

    @rule(data=st.data(), to=instances)
    def begin_move_of_what_is_there(self, data: st.DataObject, to: int) -> None:
        placed = [(request, *piece) for request in self.ledger.requests() for piece in self.ledger.placement(request)]
        if placed:
            request, source, low, high = data.draw(st.sampled_from(placed))
            begin = data.draw(st.integers(low, high - 1))
            self.try_to_move(request, begin, data.draw(st.integers(begin + 1, high)), source, to)

    def try_to_move(self, request: int, begin: int, end: int, source: int, to: int) -> None:
        legal = (
            all(self.model.get((request, position)) == source for position in range(begin, end))
            and source != to
            and 0 < end - begin <= self.free_on(to)
            and not self.on_a_move(request, begin, end)
        )
        if legal:
            self.moves.append(self.ledger.begin_move(request, begin, end, source, to))
        else:
            with pytest.raises(LedgerError):
                self.ledger.begin_move(request, begin, end, source, to)
        assert self.ledger.moves() == tuple(self.moves)

    @precondition(lambda self: self.moves)
    @rule(data=st.data(), commits=st.booleans())
    def end_move(self, data: st.DataObject, commits: bool) -> None:
        move = self.moves.pop(data.draw(st.integers(0, len(self.moves) - 1)))
        (self.ledger.commit_move if commits else self.ledger.cancel_move)(move)
        if commits:
            self.model.update({(move.request, p): move.target for p in range(move.begin, move.end)})
        for call in (self.ledger.commit_move, self.ledger.cancel_move):
            with pytest.raises(LedgerError, match="is not open"):
                call(move)

    @rule(request=requests, end=st.integers(0, 48))
    def resident(self, request: int, end: int) -> None:
        if all((request, position) in self.model for position in range(end)):
            covered = [(p, i) for i, low, high in self.ledger.resident(request, end) for p in range(low, high)]
            assert covered == [(position, self.model[request, position]) for position in range(end)]
        else:
            with pytest.raises(LedgerError, match="lies on no instance"):
                self.ledger.resident(request, end)

    @invariant()
    def ledger_agrees(self) -> None:
        self.ledger.check()
        for instance in CAPACITIES:
            assert self.ledger.free_slots(instance) == self.free_on(instance)
            assert self.ledger.used_slots(instance) == self.used_on(instance)
            assert self.ledger.reserved_slots(instance) == self.reserved_on(instance)
            on = {owner for (owner, _), holder in self.model.items() if holder == instance}
            assert self.ledger.requests_on(instance) == tuple(sorted(on))
        assert self.ledger.total_free == sum(self.free_on(instance) for instance in CAPACITIES)
        for request in range(4):
            held = {position: i for (owner, position), i in self.model.items() if owner == request}
            placement = self.ledger.placement(request)
            assert {p: i for i, begin, end in placement for p in range(begin, end)} == held
            assert list(placement) == sorted(placement, key=lambda piece: piece[1])
            for (first, _, end), (second, begin, _) in pairwise(placement):
                assert end < begin or first != second
            assert self.ledger.holders(request) == set(held.values())
            assert self.ledger.tokens(request) == len(held)
            assert all(self.ledger.holder_of(request, p) == i for p, i in held.items())

    def teardown(self) -> None:
        for move in self.moves:
            self.ledger.cancel_move(move)
        for request in range(4):
            self.ledger.free(request)
        self.ledger.check()
        assert self.ledger.total_free == sum(CAPACITIES.values())


LedgerMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
test_random_operations_agree_with_the_model = pytest.mark.timeout(120)(LedgerMachine.TestCase)


def test_decode_tokens_extend_the_last_range() -> None:
    ledger = PlacementLedger({0: 100})
    ledger.place(1, ((0, 0, 10),))
    for position in range(10, 20):
        ledger.place(1, ((0, position, position + 1),))
    assert ledger.placement(1) == ((0, 0, 20),)


def test_a_full_instance_is_named() -> None:
    ledger = PlacementLedger({0: 100, 1: 3})
    with pytest.raises(InstanceFull, match="instance 1: asked for 4 slots, 3 are free"):
        ledger.place(1, ((0, 0, 10), (1, 10, 14)))
    assert ledger.placement(1) == ()
    assert ledger.free_slots(0) == 100


def test_a_moved_middle_splits_and_heals() -> None:
    ledger = PlacementLedger({0: 20, 1: 20})
    ledger.place(1, ((0, 0, 10),))
    ledger.move(1, 4, 6, 0, 1)
    assert ledger.placement(1) == ((0, 0, 4), (1, 4, 6), (0, 6, 10))
    assert ledger.holder_of(1, 5) == 1
    ledger.move(1, 4, 6, 1, 0)
    assert ledger.placement(1) == ((0, 0, 10),)


def test_a_request_grows_while_it_moves() -> None:
    ledger = PlacementLedger({0: 20, 1: 20})
    ledger.place(1, ((0, 0, 10),))
    move = ledger.begin_move(1, 0, 10, 0, 1)
    assert (ledger.free_slots(0), ledger.free_slots(1), ledger.placement(1)) == (10, 10, ((0, 0, 10),))
    ledger.place(1, ((0, 10, 12),))
    ledger.commit_move(move)
    assert ledger.placement(1) == ((1, 0, 10), (0, 10, 12))
    assert (ledger.free_slots(0), ledger.free_slots(1)) == (18, 10)


def test_unknown_instances_are_refused() -> None:
    ledger = PlacementLedger({0: 20})
    for call in (ledger.free_slots, ledger.used_slots, ledger.requests_on, ledger.capacity):
        with pytest.raises(LedgerError, match=r"unknown instance 3: there are \[0\]"):
            call(3)
    with pytest.raises(LedgerError, match="unknown instance"):
        ledger.place(1, ((3, 0, 1),))
    with pytest.raises(ValueError, match="at least 0"):
        PlacementLedger({0: -1})


def test_unknown_requests_hold_nothing() -> None:
    ledger = PlacementLedger({0: 20})
    assert ledger.placement(9) == ()
    assert ledger.holders(9) == ledger.free(9) == frozenset()
    assert ledger.resident(9, 0) == ()
    with pytest.raises(LedgerError, match="request 9: position 0 lies on no instance"):
        ledger.holder_of(9, 0)


def test_the_ledger_imports_no_torch() -> None:
    code = "import sys, loongserve.kvpool.ledger; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
