"""An iteration as one member of its group sees it: rows, ring blocks, saved rows, peers. Host work only, once a step.

Every size here follows from the iteration alone, so all members agree on what is sent without a word. A member's rows
stand in two runs. First the *striped* rows, whose fresh KV other rows of the step need, or which is saved elsewhere:
they go round the ring. Then the *local* rows: single new tokens that are saved where they are computed (ordinary
decode); their KV is stored first and then is part of the resident shard, so that one paged attention serves them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from loongserve.kvpool.table import SlotTable
from loongserve.runtime.protocol import Iteration, Placement, Segment


def first_token(member: int, rotation: int, dop: int) -> int:
    """Return the first token of a segment that falls to ``member``: the least t with (t + rotation) % dop == member."""
    return (member - rotation) % dop


def num_rows(segment: Segment, member: int, dop: int) -> int:
    """Return how many of the segment's new tokens fall to ``member``."""
    return len(range(first_token(member, segment.rotation, dop), segment.count, dop))


def is_local(segment: Segment, group: Sequence[int]) -> bool:
    """Say whether the segment is one new token that is saved where it is computed."""
    if segment.count != 1:
        return False
    owner = group[segment.rotation % len(group)]
    return any(instance == owner and begin <= segment.begin < end for instance, begin, end in segment.save)


def at_step(segment: Segment, step: int, token: int | None) -> Segment:
    """Return a decode segment as it stands ``step`` steps later, with new token ``token`` (None: not known here)."""
    if step == 0:
        return segment
    begin = segment.begin + step
    done = tuple((i, b, min(e, begin)) for i, b, e in segment.save if b < begin)
    ahead = tuple((i, max(b, begin), e) for i, b, e in segment.save if e > begin)
    return Segment(
        request=segment.request,
        begin=begin,
        tokens=(0 if token is None else token,),
        resident=segment.resident + done,
        save=ahead,
        rotation=segment.rotation,
        sampling=segment.sampling,
        return_logits=segment.return_logits,
    )


@dataclass(frozen=True, slots=True)
class RingBlock:
    """The striped rows of one member, against this member's striped rows."""

    cu_seqlens_k: list[int]
    diagonals: list[int]
    # [rows of the block] int64, -1 where this member does not save; None: it saves none of them.
    slots: Tensor | None


@dataclass(frozen=True, slots=True)
class RemoteQueries:
    """Query rows that arrive from one peer, and the resident slots here that they attend."""

    cu_seqlens_q: list[int]
    slots: list[Tensor]

    @property
    def num_rows(self) -> int:
        """Rows that arrive."""
        return self.cu_seqlens_q[-1]


@dataclass(frozen=True, slots=True)
class Sample:
    """A segment whose next token this member samples."""

    segment: Segment
    # Which of the member's rows holds the last new token.
    row: int


@dataclass(frozen=True, slots=True)
class MemberBatch:
    """One step of an iteration for one member. Row indices are into the member's rows: striped first, then local."""

    member: int
    group: tuple[int, ...]
    # [rows] int64.
    tokens: Tensor
    positions: Tensor
    num_striped: int
    # Prefix sums over the striped segments (all of them, also those without a row here).
    cu_seqlens_striped: list[int]
    # By member of the group; rows of each member's ring block.
    ring_rows: tuple[int, ...]
    blocks: dict[int, RingBlock]
    # [local rows] int64: where the local rows' own KV goes.
    local_slots: Tensor
    # Resident attention of own rows: prefix sums over all rows, one slot tensor a sequence; empty: nothing is here.
    cu_seqlens_resident: list[int]
    resident_slots: list[Tensor]
    # peer rank -> indices [n] int64 of own rows that it holds KV for.
    query_rows: dict[int, Tensor]
    # peer rank -> what arrives from it.
    remote: dict[int, RemoteQueries]
    samples: list[Sample]

    @property
    def num_rows(self) -> int:
        """Rows that this member computes."""
        return self.tokens.shape[0]

    @property
    def uses_ring(self) -> bool:
        """Whether KV goes round the ring in this step."""
        return len(self.group) > 1 and sum(self.ring_rows) > 0


def plan_member(iteration: Iteration, segments: Sequence[Segment], member: int, table: SlotTable) -> MemberBatch:
    """See one step of ``iteration`` as the member with index ``member`` does.

    Args:
        iteration: names the group.
        segments: the iteration's segments as they stand in this step.
        member: index in the group.
        table: this instance's slots; what this member saves in this step is already reserved in it.

    Returns:
        The member's batch, all tensors on the CPU.
    """
    group, dop, me = iteration.group, len(iteration.group), iteration.group[member]
    striped: list[Segment] = []
    local: list[Segment] = []
    remote_local: list[Segment] = []
    for segment in segments:
        if not is_local(segment, group):
            striped.append(segment)
        else:
            (local if segment.rotation % dop == member else remote_local).append(segment)

    tokens: list[int] = []
    positions: list[int] = []
    cu_striped = [0]
    for segment in striped:
        first = first_token(member, segment.rotation, dop)
        tokens.extend(segment.tokens[first::dop])
        positions.extend(range(segment.begin + first, segment.begin + segment.count, dop))
        cu_striped.append(len(tokens))
    for segment in local:
        tokens.append(segment.tokens[0])
        positions.append(segment.begin)

    own = [(s, cu_striped[i], cu_striped[i + 1]) for i, s in enumerate(striped)]
    own += [(s, cu_striped[-1] + i, cu_striped[-1] + i + 1) for i, s in enumerate(local)]
    samples = []
    for segment, _, end in own:
        if segment.sampling is not None and segment.sampler_member(dop) == member:
            samples.append(Sample(segment, end - 1))

    local_slots = [table.slots(s.request, s.begin, s.begin + 1) for s in local]
    # The new token of a local row is stored before the attention, so it is one more resident token.
    resident_slots = [_held(s, me, table, s.resident) for s in striped]
    resident_slots += [_held(s, me, table, (*s.resident, (me, s.begin, s.begin + 1))) for s in local]
    any_resident = any(len(slots) for slots in resident_slots)

    return MemberBatch(
        member=member,
        group=group,
        tokens=torch.tensor(tokens, dtype=torch.int64),
        positions=torch.tensor(positions, dtype=torch.int64),
        num_striped=cu_striped[-1],
        cu_seqlens_striped=cu_striped,
        ring_rows=tuple(sum(num_rows(s, j, dop) for s in striped) for j in range(dop)),
        blocks={j: _ring_block(striped, j, member, group, table) for j in range(dop)},
        local_slots=torch.cat(local_slots) if local_slots else torch.empty(0, dtype=torch.int64),
        cu_seqlens_resident=[0, *(end for _, _, end in own)] if any_resident else [0],
        resident_slots=resident_slots if any_resident else [],
        query_rows=_query_rows(own, me, group),
        remote=_remote_queries([*striped, *remote_local], member, group, table),
        samples=samples,
    )


def saved_here(placement: Placement, instance: int) -> list[tuple[int, int]]:
    """Return the ranges [begin, end) of a placement that lie on ``instance``, none empty."""
    return [(begin, end) for where, begin, end in placement if where == instance and end > begin]


def _held(segment: Segment, instance: int, table: SlotTable, placement: Placement) -> Tensor:
    ranges: list[tuple[int, int]] = []
    for begin, end in saved_here(placement, instance):
        # Adjacent ranges become one, so that the table can answer with a view.
        if ranges and ranges[-1][1] == begin:
            ranges[-1] = (ranges[-1][0], end)
        else:
            ranges.append((begin, end))
    if len(ranges) == 1:
        return table.slots(segment.request, *ranges[0])
    parts = [table.slots(segment.request, begin, end) for begin, end in ranges]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)


def _ring_block(
    striped: Sequence[Segment], source: int, member: int, group: tuple[int, ...], table: SlotTable
) -> RingBlock:
    dop, me = len(group), group[member]
    cu_seqlens = [0]
    diagonals = []
    for segment in striped:
        cu_seqlens.append(cu_seqlens[-1] + num_rows(segment, source, dop))
        key_first = first_token(source, segment.rotation, dop)
        query_first = first_token(member, segment.rotation, dop)
        diagonals.append(0 if key_first <= query_first else -1)
    slots = torch.full((cu_seqlens[-1],), -1, dtype=torch.int64)
    saves = False
    for index, segment in enumerate(striped):
        first = segment.begin + first_token(source, segment.rotation, dop)
        for begin, end in saved_here(segment.save, me):
            # The block's rows of this segment are positions first, first + dop, ...: those in [begin, end).
            low = max(0, -(-(begin - first) // dop))
            high = min(cu_seqlens[index + 1] - cu_seqlens[index], -(-(end - first) // dop))
            if low >= high:
                continue
            saves = True
            held = table.slots(segment.request, begin, end)
            offset = first + low * dop - begin
            slots[cu_seqlens[index] + low : cu_seqlens[index] + high] = held[offset::dop][: high - low]
    return RingBlock(cu_seqlens, diagonals, slots if saves else None)


def _query_rows(own: Sequence[tuple[Segment, int, int]], me: int, group: tuple[int, ...]) -> dict[int, Tensor]:
    rows: dict[int, list[int]] = {}
    for segment, begin, end in own:
        if begin == end:
            continue
        for holder in {instance for instance, b, e in segment.resident if e > b and instance != me}:
            rows.setdefault(holder, []).extend(range(begin, end))
    return {holder: torch.tensor(rows[holder], dtype=torch.int64) for holder in group if holder in rows}


def _remote_queries(
    segments: Sequence[Segment], member: int, group: tuple[int, ...], table: SlotTable
) -> dict[int, RemoteQueries]:
    dop, me = len(group), group[member]
    remote: dict[int, RemoteQueries] = {}
    held = [(s, _held(s, me, table, s.resident)) for s in segments]
    held = [(s, slots) for s, slots in held if len(slots)]
    for other, peer in enumerate(group):
        if other == member:
            continue
        cu_seqlens = [0]
        slots = []
        for segment, resident in held:
            # Of a local segment too: its one row is its master's.
            count = num_rows(segment, other, dop)
            if count:
                cu_seqlens.append(cu_seqlens[-1] + count)
                slots.append(resident)
        if slots:
            remote[peer] = RemoteQueries(cu_seqlens, slots)
    return remote
