"""SlotTable: against a dict of positions, and its edges."""

from itertools import pairwise

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from loongserve.kvpool.slots import OutOfSlots, SlotAllocator
from loongserve.kvpool.table import MissingSlots, SlotTable

NUM_SLOTS = 120
requests = st.integers(0, 3)
positions = st.integers(0, 60)


class TableMachine(RuleBasedStateMachine):
    """Any sequence of operations agrees with a dict (request, position) -> slot, and ends with every slot free."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = SlotAllocator(NUM_SLOTS)
        self.table = SlotTable(self.allocator)
        self.model: dict[tuple[int, int], int] = {}
        # Views handed out, with what they showed: they must not change while their positions stay.
        self.views: list[tuple[int, int, torch.Tensor, list[int]]] = []

    def held(self, request: int) -> list[int]:
        return sorted(position for owner, position in self.model if owner == request)

    @rule(request=requests, begin=positions, num_tokens=st.integers(0, 20))
    def reserve(self, request: int, begin: int, num_tokens: int) -> None:
        end = begin + num_tokens
        if any((request, position) in self.model for position in range(begin, end)):
            with pytest.raises(ValueError, match="already holds"):
                self.table.reserve(request, begin, end)
            return
        if num_tokens > NUM_SLOTS - len(self.model):
            with pytest.raises(OutOfSlots):
                self.table.reserve(request, begin, end)
            return
        slots = self.table.reserve(request, begin, end).tolist()
        self.model.update({(request, begin + i): slot for i, slot in enumerate(slots)})

    @rule(request=requests)
    def decode_step(self, request: int) -> None:
        end = max(self.held(request), default=-1) + 1
        self.reserve(request, end, 1)

    @rule(request=requests, begin=positions, num_tokens=st.integers(0, 40))
    def slots(self, request: int, begin: int, num_tokens: int) -> None:
        end = begin + num_tokens
        missing = [position for position in range(begin, end) if (request, position) not in self.model]
        if missing:
            with pytest.raises(MissingSlots) as error:
                self.table.slots(request, begin, end)
            assert error.value.begin == missing[0]
            following = [p for p in self.held(request) if p > missing[0]]
            assert error.value.end == min([end, *following])
            return
        view = self.table.slots(request, begin, end)
        expected = [self.model[request, position] for position in range(begin, end)]
        assert view.tolist() == expected
        self.views.append((request, begin, view, expected))

    @rule(request=requests, begin=positions, num_tokens=st.integers(0, 20))
    def adopt(self, request: int, begin: int, num_tokens: int) -> None:
        wanted = [(request, position) for position in range(begin, begin + num_tokens)]
        held = any(key in self.model for key in wanted)
        assert self.table.holds_any(request, begin, begin + num_tokens) == held
        if num_tokens > NUM_SLOTS - len(self.model):
            return
        slots = self.allocator.allocate(num_tokens)
        if held:
            with pytest.raises(ValueError, match="already holds"):
                self.table.adopt(request, begin, slots)
            self.allocator.free(slots)
        else:
            self.table.adopt(request, begin, slots)
            self.model.update(zip(wanted, slots.tolist(), strict=True))

    @rule(request=requests)
    def free(self, request: int) -> None:
        held = self.held(request)
        assert self.table.free(request) == len(held)
        for position in held:
            del self.model[request, position]

    @rule(request=requests, begin=positions, num_tokens=st.integers(0, 10))
    def drop(self, request: int, begin: int, num_tokens: int) -> None:
        wanted = [(request, position) for position in range(begin, begin + num_tokens)]
        if all(key in self.model for key in wanted):
            self.table.drop(request, begin, begin + num_tokens)
            for key in wanted:
                del self.model[key]
        else:
            with pytest.raises(MissingSlots):
                self.table.drop(request, begin, begin + num_tokens)

    @invariant()
    def table_agrees(self) -> None:
        assert self.allocator.num_free == NUM_SLOTS - len(self.model)
        assert len(set(self.model.values())) == len(self.model)
        for request in range(4):
            held = self.held(request)
            assert self.table.tokens(request) == len(held)
            ranges = self.table.ranges(request)
            assert [p for begin, end in ranges for p in range(begin, end)] == held
            assert all(end < begin for (_, end), (begin, _) in pairwise(ranges))
        assert set(self.table.requests()) == {request for request, _ in self.model}
        for _, _, view, shown in self.views:
            assert view.tolist() == shown

    def teardown(self) -> None:
        for request in range(4):
            self.table.free(request)
        assert self.allocator.num_free == NUM_SLOTS


TableMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
test_random_operations_agree_with_the_model = pytest.mark.timeout(120)(TableMachine.TestCase)


def test_a_long_request_is_looked_up_without_copying() -> None:
    table = SlotTable(SlotAllocator(4096))
    table.reserve(1, 0, 1000)
    for position in range(1000, 1100):
        table.reserve(1, position, position + 1)
    whole = table.slots(1, 0, 1100)
    part = table.slots(1, 500, 1100)
    assert part.data_ptr() == whole.data_ptr() + 500 * whole.element_size()


def test_a_missing_range_is_named() -> None:
    table = SlotTable(SlotAllocator(100))
    table.reserve(7, 0, 10)
    table.reserve(7, 20, 30)
    with pytest.raises(MissingSlots, match=r"request 7 has no slots here for positions \[10, 20\)"):
        table.slots(7, 5, 25)
    with pytest.raises(MissingSlots, match=r"request 8 .* \[0, 1\)"):
        table.slots(8, 0, 1)


@pytest.mark.parametrize("call", ["reserve", "slots", "drop"])
def test_bad_ranges_are_refused(call: str) -> None:
    table = SlotTable(SlotAllocator(8))
    for begin, end in ((3, 2), (-1, 2)):
        with pytest.raises(ValueError, match="not a range"):
            getattr(table, call)(1, begin, end)


def test_freeing_an_unknown_request_is_ignored() -> None:
    assert SlotTable(SlotAllocator(8)).free(99) == 0
