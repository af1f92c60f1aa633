"""Prefill in a ring that saves to any placement, then attention over what it saved: together one pass."""

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loongserve.kernels import reference
from loongserve.kernels.merge import merge_states
from loongserve.kernels.paged import paged_attention, plan_paged_attention
from loongserve.kernels.state import AttentionState
from loongserve.kernels.striped import KVSave, plan_striped_attention, striped_attention

HEADS = {"num_q_heads": 3, "num_kv_heads": 1, "head_dim": 64, "dtype": torch.float32}
SCALE = 0.125


def make_rows(*shape, seed):
    return torch.randn(*shape, 64, generator=torch.Generator().manual_seed(seed))


class Pool:
    """The KV pool of one member: NaN, but for slots that were saved to."""

    def __init__(self, tokens, size, seed, device):
        order = torch.randperm(size, generator=torch.Generator().manual_seed(seed))
        self.tokens = tokens
        self.slots = order[: len(tokens)]
        self.k_cache, self.v_cache = (torch.full((size, 1, 64), torch.nan, device=device) for _ in "kv")

    def slots_of(self, passing, device):
        """Name the slot of each token of a passing block, -1 where it is not this pool's."""
        own = dict(zip(self.tokens, self.slots.tolist(), strict=True))
        return torch.tensor([own.get(token, -1) for token in passing], dtype=torch.int64, device=device)

    def check(self, k, v):
        """The pool holds its tokens to the bit, and nothing else was written."""
        for cache, rows in ((self.k_cache.cpu(), k), (self.v_cache.cpu(), v)):
            assert torch.equal(cache[self.slots], rows[self.tokens])
            assert int(cache.isnan().all(dim=-1).sum()) == len(cache) - len(self.tokens)


def prefill(q, k, v, members, pools, device):
    """Run the ring; member m saves to ``pools[m]`` what passes by."""
    out = AttentionState.empty(len(q), 3, 64)
    for member, mine in enumerate(members):
        state = AttentionState.empty(len(mine), 3, 64, device)
        for step in range(len(members)):
            passing = members[(member - step) % len(members)]
            diagonal = 0 if passing and mine and passing[0] <= mine[0] else -1
            plan = plan_striped_attention([0, len(mine)], [0, len(passing)], [diagonal], **HEADS, device=device)
            pool = pools[member]
            save = KVSave(pool.slots_of(passing, device), pool.k_cache, pool.v_cache)
            block = (q[mine].to(device), k[passing].to(device), v[passing].to(device))
            striped_attention(plan, *block, state, scale=SCALE, save=save)
        out.out[mine], out.lse[mine] = state.out.cpu(), state.lse.cpu()
    return out


def attend_pools(q, pools, device):
    """Send queries to the holders and merge their states, as decode and later chunks do."""
    merged = AttentionState.empty(len(q), 3, 64, device)
    for pool in pools:
        plan = plan_paged_attention([0, len(q)], [pool.slots.to(device)], **HEADS, device=device)
        shard = AttentionState(*(torch.full_like(each, torch.nan) for each in (merged.out, merged.lse)))
        paged_attention(plan, q.to(device), pool.k_cache, pool.v_cache, shard, scale=SCALE)
        merge_states(merged, shard, merged)
    return merged


def test_any_striping_saves_to_any_placement(device, max_examples, assert_state_close):
    """At DoP 1 to 8, every token anywhere; EasyContext 47: also prompts shorter than the ring.

    The prefill equals one causal pass, each pool holds its tokens and no others, and queries over the pools equal one
    pass over one pool.
    """

    @settings(max_examples=max_examples)
    @given(st.integers(1, 8), st.integers(0, 7), st.lists(st.integers(0, 7), max_size=24), st.integers(1, 3))
    def check(dop, rotation, owners, num_queries):
        length = len(owners)
        q, k, v = make_rows(length, 3, seed=0), make_rows(length, 1, seed=1), make_rows(length, 1, seed=2)
        members = [[t for t in range(length) if (t + rotation) % dop == member] for member in range(dop)]
        # Members that own nothing have a pool all the same: scale-down leaves some of them.
        kept = [[t for t in range(length) if owners[t] % dop == member] for member in range(dop)]
        pools = [Pool(tokens, len(tokens) + 2, seed, device) for seed, tokens in enumerate(kept)]

        state = prefill(q, k, v, members, pools, device)
        causal = torch.ones(length, length, dtype=torch.bool).tril()
        assert_state_close(state, reference.attend(q, k, v, causal, SCALE, torch.float64))
        for pool in pools:
            pool.check(k, v)

        queries = make_rows(num_queries, 3, seed=3)
        everything = torch.ones(num_queries, length, dtype=torch.bool)
        expected = reference.attend(queries, k, v, everything, SCALE, torch.float64)
        assert_state_close(attend_pools(queries, pools, device), expected)
        assert (expected.lse == -math.inf).all() == (length == 0)

    check()
