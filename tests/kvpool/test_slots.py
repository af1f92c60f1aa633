"""SlotAllocator: against a plain-Python model, and its edges."""

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from loongserve.kvpool.slots import MIN_RUN_SLOTS, OutOfSlots, SlotAllocator


def num_runs(slots: torch.Tensor) -> int:
    return 1 + int((slots.diff() != 1).sum())


class AllocatorMachine(RuleBasedStateMachine):
    """Any sequence of operations agrees with a dict of counts and ends with every slot free."""

    @initialize(num_slots=st.sampled_from([0, 1, 7, 64, 100, 300, 3000]))
    def start(self, num_slots: int) -> None:
        self.allocator = SlotAllocator(num_slots)
        self.counts = dict.fromkeys(range(num_slots), 0)
        self.held: list[torch.Tensor] = []

    def free_count(self) -> int:
        return sum(count == 0 for count in self.counts.values())

    @rule(num_slots=st.one_of(st.integers(0, 5), st.integers(MIN_RUN_SLOTS - 2, 80), st.integers(900, 2500)))
    def allocate(self, num_slots: int) -> None:
        free = self.free_count()
        if num_slots > free:
            with pytest.raises(OutOfSlots) as error:
                self.allocator.allocate(num_slots)
            assert (error.value.asked, error.value.free) == (num_slots, free)
            return
        slots = self.allocator.allocate(num_slots)
        assert slots.dtype == torch.int64
        assert slots.shape == (num_slots,)
        assert len(set(slots.tolist())) == num_slots
        for slot in slots.tolist():
            assert self.counts[slot] == 0
            self.counts[slot] = 1
        self.held.append(slots)

    @rule(data=st.data())
    def retain(self, data: st.DataObject) -> None:
        if self.held:
            slots = data.draw(st.sampled_from(self.held))
            self.allocator.retain(slots)
            for slot in slots.tolist():
                self.counts[slot] += 1
            self.held.append(slots)

    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        if self.held:
            slots = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
            cut = data.draw(st.integers(0, slots.numel()))
            # In two parts and out of order: any subset may come back.
            for part in (slots[cut:].flip(0), slots[:cut]):
                self.allocator.free(part)
            for slot in slots.tolist():
                self.counts[slot] -= 1

    @rule(data=st.data())
    def free_twice_in_one_call(self, data: st.DataObject) -> None:
        if self.held:
            slots = data.draw(st.sampled_from(self.held))
            listed = torch.cat([slots] * (1 + max((self.counts[slot] for slot in slots.tolist()), default=0)))
            if slots.numel():
                with pytest.raises(ValueError, match="double free"):
                    self.allocator.free(listed)

    @rule(slot=st.integers(0, 299))
    def touch_free_slot(self, slot: int) -> None:
        if self.counts.get(slot) == 0:
            with pytest.raises(ValueError, match="double free"):
                self.allocator.free(torch.tensor([slot]))
            with pytest.raises(ValueError, match="cannot retain"):
                self.allocator.retain(torch.tensor([slot]))

    @invariant()
    def counts_agree(self) -> None:
        if hasattr(self, "allocator"):
            assert self.allocator.num_free == self.free_count()

    def teardown(self) -> None:
        if hasattr(self, "allocator"):
            for slots in self.held:
                self.allocator.free(slots)
            assert self.allocator.num_free == self.allocator.num_slots
            everything = self.allocator.allocate(self.allocator.num_slots)
            assert sorted(everything.tolist()) == list(range(self.allocator.num_slots))


AllocatorMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
test_random_operations_agree_with_the_model = pytest.mark.timeout(120)(AllocatorMachine.TestCase)


def test_a_fresh_pool_gives_ascending_runs() -> None:
    allocator = SlotAllocator(1000)
    assert allocator.allocate(100).tolist() == list(range(100))
    assert allocator.allocate(1).tolist() == [100]
    assert allocator.allocate(300).tolist() == list(range(101, 401))


def test_a_large_request_takes_the_run_and_a_small_one_the_holes() -> None:
    allocator = SlotAllocator(1000)
    slots = allocator.allocate(1000)
    allocator.free(slots[:400:2])
    allocator.free(slots[700:900])
    large = allocator.allocate(150)
    assert num_runs(large) == 1
    assert 700 <= large[0] <= 708
    assert all(slot < 400 for slot in allocator.allocate(3).tolist())


def test_neighbours_freed_apart_become_one_run_again() -> None:
    allocator = SlotAllocator(256)
    slots = allocator.allocate(256)
    for slot in torch.randperm(256, generator=torch.Generator().manual_seed(0)).tolist():
        allocator.free(slots[slot : slot + 1])
    assert num_runs(allocator.allocate(200)) == 1


def test_a_shared_slot_comes_back_with_its_last_reference() -> None:
    allocator = SlotAllocator(4)
    slots = allocator.allocate(2)
    allocator.retain(slots[:1])
    allocator.free(slots)
    assert allocator.num_free == 3
    allocator.free(slots[:1])
    assert allocator.num_free == 4


def test_a_shared_slot_may_be_dropped_twice_in_one_call() -> None:
    allocator = SlotAllocator(4)
    slots = allocator.allocate(2)
    allocator.retain(slots)
    allocator.free(torch.cat([slots, slots]))
    assert sorted(allocator.allocate(4).tolist()) == [0, 1, 2, 3]


def test_a_fully_fragmented_pool_gives_every_slot() -> None:
    allocator = SlotAllocator(10_000)
    slots = allocator.allocate(10_000)
    allocator.free(slots[::2])
    assert sorted(allocator.allocate(5000).tolist()) == list(range(0, 10_000, 2))


@pytest.mark.parametrize("pattern", ["every-other", "random-30-percent", "last-few", "blocks-of-16"])
def test_a_request_fits_exactly_when_as_many_are_free(pattern: str) -> None:
    """Over several blocks, freed in random order: all sizes up to what is free succeed, one more never."""
    generator = torch.Generator().manual_seed(1)
    num_slots = 20_000
    order = torch.randperm(num_slots, generator=generator)
    freed = {
        "every-other": order[order % 2 == 0],
        "random-30-percent": order[: num_slots * 3 // 10],
        "last-few": order[order > num_slots - 100],
        "blocks-of-16": order[order % 32 < 16],
    }[pattern]
    num_free = freed.numel()
    for size in (1, 2, 15, 16, 63, 64, 100, num_free - 1, num_free):
        if size > num_free:
            continue
        allocator = SlotAllocator(num_slots)
        allocator.allocate(num_slots)
        for part in freed.split(70):
            allocator.free(part)
        taken: list[int] = []
        while allocator.num_free >= size:
            slots = allocator.allocate(size)
            assert slots.numel() == size
            taken += slots.tolist()
            if len(taken) > 2000:
                break
        assert len(set(taken)) == len(taken) == num_free - allocator.num_free
        assert set(taken) <= set(freed.tolist())
        with pytest.raises(OutOfSlots):
            allocator.allocate(allocator.num_free + 1)
        rest = allocator.allocate(allocator.num_free).tolist()
        assert sorted(taken + rest) == sorted(freed.tolist())


@pytest.mark.parametrize("count", [20, 70], ids=["few", "many"])
def test_slots_that_come_back_to_full_blocks_are_found(count: int) -> None:
    """Once blocks are known as full, by holes and by single slots, what comes back anywhere opens them again."""
    num_slots = 100_000
    allocator = SlotAllocator(num_slots)
    slots = allocator.allocate(num_slots)
    allocator.free(slots[::2])
    for _ in range(num_slots // 2 // 5000):
        allocator.allocate(5000)
    with pytest.raises(OutOfSlots):
        allocator.allocate(1)
    for shift in range(4):
        back = slots[shift * 300 :: num_slots // count][:count]
        allocator.free(back)
        assert allocator.num_free == count
        if shift % 2:
            assert sorted(allocator.allocate(count).tolist()) == back.tolist()
        else:
            assert sorted(int(allocator.allocate(1)) for _ in range(count)) == back.tolist()


def test_slots_that_wait_to_be_handed_out_one_by_one_may_be_taken_otherwise() -> None:
    allocator = SlotAllocator(200)
    assert allocator.allocate(1).tolist() == [0]
    everything = allocator.allocate(199)
    with pytest.raises(OutOfSlots):
        allocator.allocate(1)
    allocator.free(everything[5:6])
    assert allocator.allocate(1).tolist() == [6]
    allocator.free(everything[:100])
    singles = [int(allocator.allocate(1)) for _ in range(100)]
    assert sorted(singles) == list(range(1, 101))


def test_a_slot_in_long_use_keeps_its_references_beside_runs() -> None:
    """A run and holes are taken around shared slots without touching their counts."""
    allocator = SlotAllocator(5000)
    slots = allocator.allocate(5000)
    shared = slots[::7]
    allocator.retain(torch.cat([shared, shared]))
    allocator.free(slots)
    assert allocator.num_free == 5000 - shared.numel()
    allocator.free(allocator.allocate(allocator.num_free))
    allocator.free(shared)
    assert allocator.num_free == 5000 - shared.numel()
    allocator.free(shared)
    assert allocator.num_free == 5000
    with pytest.raises(ValueError, match="double free"):
        allocator.free(shared)


@pytest.mark.parametrize("count", [3, 100], ids=["few", "many"])
def test_a_double_free_in_the_midst_changes_nothing(count: int) -> None:
    allocator = SlotAllocator(1000)
    slots = allocator.allocate(count)
    other = allocator.allocate(1)
    allocator.free(other)
    for wrong in (torch.cat([slots, other]), torch.cat([slots, slots[1:2]])):
        with pytest.raises(ValueError, match=rf"double free of slots \[{int(wrong[-1])}\]"):
            allocator.free(wrong)
        assert allocator.num_free == 1000 - count
    with pytest.raises(ValueError, match=r"\[0, 1000\), got 0 .. 1000"):
        allocator.free(torch.cat([slots, torch.tensor([1000])]))
    allocator.free(slots)
    assert allocator.num_free == 1000


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        pytest.param(torch.tensor([4]), r"\[0, 4\)", id="past-the-end"),
        pytest.param(torch.tensor([-1]), r"\[0, 4\)", id="negative"),
        pytest.param(torch.tensor([[0]]), r"int64 \[n\]", id="two-dimensional"),
        pytest.param(torch.tensor([0], dtype=torch.int32), r"int64 \[n\]", id="int32"),
    ],
)
def test_bad_slots_are_refused(slots: torch.Tensor, message: str) -> None:
    allocator = SlotAllocator(4)
    allocator.allocate(4)
    for call in (allocator.free, allocator.retain):
        with pytest.raises(ValueError, match=message):
            call(slots)
    assert allocator.num_free == 0


def test_negative_counts_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 0"):
        SlotAllocator(-1)
    with pytest.raises(ValueError, match="at least 0"):
        SlotAllocator(4).allocate(-1)
