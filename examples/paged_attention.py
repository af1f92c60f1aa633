"""Two requests decode over KV that lies anywhere in a pool; one of them looks back 100 tokens only."""

import torch

from loongserve.kernels.paged import first_visible_slots, paged_attention, plan_paged_attention
from loongserve.kernels.state import AttentionState

SHAPE = {"num_q_heads": 8, "num_kv_heads": 2, "head_dim": 64, "dtype": torch.float32, "device": "cpu"}
torch.manual_seed(0)
k_cache, v_cache = torch.randn(2, 1000, 2, 64)
# The tokens of a request may lie in any slots, here 300 and 40 of the pool, listed in order of position.
slots = torch.randperm(1000)[:340].split([300, 40])
q = torch.randn(2, 8, 64)

first = torch.cat((first_visible_slots(torch.tensor([300]), torch.arange(300), window=100), torch.tensor([0])))
plan = plan_paged_attention([0, 1, 2], slots, first_visible=first, **SHAPE)
state = paged_attention(plan, q, k_cache, v_cache, AttentionState.empty(2, 8, 64), scale=0.125)
print("log-sum-exp of each head of each request:", state.lse, sep="\n")

# The same by hand, for query head 5 of the first request, which reads KV head 5 // 4.
scores = k_cache[slots[0][first[0] :], 1] @ q[0, 5] * 0.125
torch.testing.assert_close(state.out[0, 5], scores.softmax(0) @ v_cache[slots[0][first[0] :], 1])
torch.testing.assert_close(state.lse[0, 5], scores.logsumexp(0))
