"""An iteration as its members see it, against the plain meaning of a segment."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loongserve.kvpool.slots import SlotAllocator
from loongserve.kvpool.table import SlotTable
from loongserve.runtime.batch import at_step, is_local, plan_member, saved_here
from loongserve.runtime.protocol import Iteration, SamplingParams, Segment

GREEDY = SamplingParams()


@st.composite
def placements(draw, begin, end, instances):
    cuts = sorted({begin, end, *draw(st.lists(st.integers(begin, end), max_size=3))})
    return tuple((draw(st.sampled_from(instances)), b, e) for b, e in itertools.pairwise(cuts))


@st.composite
def iterations(draw):
    dop = draw(st.integers(1, 5))
    group = tuple(draw(st.permutations(range(6)))[:dop])
    segments = []
    for request in range(draw(st.integers(1, 4))):
        begin = draw(st.integers(0, 9))
        count = draw(st.one_of(st.just(1), st.integers(1, 17)))
        segments.append(
            Segment(
                request=request,
                begin=begin,
                tokens=tuple(1000 * request + begin + t for t in range(count)),
                resident=draw(placements(0, begin, group)),
                save=draw(placements(begin, begin + count, group)),
                rotation=draw(st.integers(0, dop - 1)),
                sampling=GREEDY,
            )
        )
    return Iteration(1, 0, group, tuple(segments))


def tables(iteration):
    """The slots of every member: what is resident, and what it will save."""
    result = {}
    for instance in iteration.group:
        table = SlotTable(SlotAllocator(512))
        for segment in iteration.segments:
            for begin, end in saved_here((*segment.resident, *segment.save), instance):
                table.reserve(segment.request, begin, end)
        result[instance] = table
    return result


@settings(max_examples=300, deadline=None)
@given(iterations())
def test_every_query_sees_every_earlier_token_exactly_once(iteration):
    table = tables(iteration)
    batches = {
        instance: plan_member(iteration, iteration.segments, m, table[instance])
        for m, instance in enumerate(iteration.group)
    }
    striped = [s for s in iteration.segments if not is_local(s, iteration.group)]
    holds = {}  # instance -> slot -> (request, position)
    for instance in iteration.group:
        holds[instance] = {}
        for segment in iteration.segments:
            for begin, end in saved_here((*segment.resident, *segment.save), instance):
                slots = table[instance].slots(segment.request, begin, end).tolist()
                holds[instance].update(dict(zip(slots, ((segment.request, p) for p in range(begin, end)), strict=True)))

    computed, seen = [], {}
    for batch in batches.values():
        for token, position in zip(batch.tokens.tolist(), batch.positions.tolist(), strict=True):
            computed.append((token // 1000, position))
            seen[(token // 1000, position)] = []
    expected = [(s.request, s.begin + t) for s in iteration.segments for t in range(s.count)]
    assert sorted(computed) == sorted(expected)

    for me, batch in batches.items():
        rows = [(t // 1000, p) for t, p in zip(batch.tokens.tolist(), batch.positions.tolist(), strict=True)]
        for source, block in batch.blocks.items():
            if source != batch.member and not batch.uses_ring:
                continue
            other = batches[iteration.group[source]]
            keys = [(t // 1000, p) for t, p in zip(other.tokens.tolist(), other.positions.tolist(), strict=True)]
            assert block.cu_seqlens_k == other.cu_seqlens_striped
            assert batch.ring_rows[source] == other.num_striped
            for i in range(len(striped)):
                q0, q1 = batch.cu_seqlens_striped[i], batch.cu_seqlens_striped[i + 1]
                k0, k1 = block.cu_seqlens_k[i], block.cu_seqlens_k[i + 1]
                for a in range(q1 - q0):
                    for b in range(k1 - k0):
                        if b <= a + block.diagonals[i]:
                            seen[rows[q0 + a]].append(keys[k0 + b])
        for i, slots in enumerate(batch.resident_slots):
            for row in range(batch.cu_seqlens_resident[i], batch.cu_seqlens_resident[i + 1]):
                seen[rows[row]].extend(holds[me][slot] for slot in slots.tolist())
        for peer, index in batch.query_rows.items():
            remote = batches[peer].remote[me]
            assert remote.num_rows == len(index)
            for i, slots in enumerate(remote.slots):
                for n in range(remote.cu_seqlens_q[i], remote.cu_seqlens_q[i + 1]):
                    seen[rows[index[n]]].extend(holds[peer][slot] for slot in slots.tolist())
        for peer in batch.remote:
            assert me in batches[peer].query_rows
    for (request, position), keys in seen.items():
        assert sorted(keys) == [(request, p) for p in range(position + 1)]


@settings(max_examples=300, deadline=None)
@given(iterations())
def test_every_new_token_is_stored_exactly_once_where_save_says(iteration):
    table = tables(iteration)
    stored = {}
    for member, me in enumerate(iteration.group):
        batch = plan_member(iteration, iteration.segments, member, table[me])
        others = {
            j: plan_member(iteration, iteration.segments, j, table[other]) for j, other in enumerate(iteration.group)
        }
        writes = []
        for source, block in batch.blocks.items():
            if block.slots is not None and (source == member or batch.uses_ring):
                other = others[source]
                for row, slot in enumerate(block.slots.tolist()):
                    if slot >= 0:
                        writes.append((other.tokens[row].item() // 1000, other.positions[row].item(), slot))
        for row, slot in enumerate(batch.local_slots.tolist()):
            index = batch.num_striped + row
            writes.append((batch.tokens[index].item() // 1000, batch.positions[index].item(), slot))
        for request, position, slot in writes:
            assert (request, position) not in stored
            stored[(request, position)] = me
            assert table[me].slots(request, position, position + 1).tolist() == [slot]
    expected = {
        (s.request, p): instance
        for s in iteration.segments
        for instance, begin, end in s.save
        for p in range(begin, end)
    }
    assert stored == expected


@settings(max_examples=100, deadline=None)
@given(iterations())
def test_one_member_samples_the_last_token_of_each_segment(iteration):
    table = tables(iteration)
    samples = []
    for member, me in enumerate(iteration.group):
        batch = plan_member(iteration, iteration.segments, member, table[me])
        samples += [(s.segment.request, batch.positions[s.row].item()) for s in batch.samples]
    assert sorted(samples) == [(s.request, s.begin + s.count - 1) for s in iteration.segments]


def test_later_steps_move_the_new_token_along_the_saved_range():
    segment = Segment(3, 10, (7,), ((0, 0, 10),), ((1, 10, 12), (0, 12, 14)), 1, GREEDY)
    later = at_step(segment, 3, 99)
    assert (later.begin, later.tokens) == (13, (99,))
    assert later.resident == ((0, 0, 10), (1, 10, 12), (0, 12, 13))
    assert later.save == ((0, 13, 14),)
    assert at_step(segment, 0, None) is segment


@pytest.mark.parametrize("rotation", [0, 1, 2])
def test_a_prompt_shorter_than_the_group_leaves_members_without_rows(rotation):
    segment = Segment(0, 0, (5, 6), (), ((0, 0, 2),), rotation, GREEDY)
    iteration = Iteration(1, 0, (0, 1, 2), (segment,))
    table = tables(iteration)
    batches = [plan_member(iteration, iteration.segments, m, table[m]) for m in range(3)]
    assert sorted(b.num_rows for b in batches) == [0, 1, 1]
    assert all(b.tokens.dtype == torch.int64 for b in batches)
