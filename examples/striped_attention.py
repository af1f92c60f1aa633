"""Four members of a ring attend to one sequence, sliding window and all; together they give what one pass gives."""

import torch

from loongserve.kernels.state import AttentionState
from loongserve.kernels.striped import plan_striped_attention, stripe_bounds, striped_attention

DOP, TOKENS, WINDOW = 4, 37, 16
SHAPE = {"num_q_heads": 6, "num_kv_heads": 2, "head_dim": 64, "dtype": torch.float32, "device": "cpu"}
torch.manual_seed(0)
q, k, v = torch.randn(TOKENS, 6, 64), torch.randn(TOKENS, 2, 64), torch.randn(TOKENS, 2, 64)

whole = AttentionState.empty(TOKENS, 6, 64)
plan = plan_striped_attention([0, TOKENS], [0, TOKENS], [0], lower_diagonals=[1 - WINDOW], **SHAPE)
striped_attention(plan, q, k, v, whole, scale=0.125)

for member in range(DOP):
    # Token t lies on member t % DOP: local index times DOP plus the member's number is its position.
    queries = q[member::DOP]
    state = AttentionState.empty(len(queries), 6, 64)
    for step in range(DOP):
        peer = (member - step) % DOP
        keys, values = k[peer::DOP], v[peer::DOP]
        upper, lower = stripe_bounds(member, peer, DOP, WINDOW)
        lengths = [0, len(queries)], [0, len(keys)]
        plan = plan_striped_attention(*lengths, [upper], lower_diagonals=[lower], **SHAPE)
        striped_attention(plan, queries, keys, values, state, scale=0.125)
    print(f"member {member}: largest difference {(state.out - whole.out[member::DOP]).abs().max():.1e}")
    torch.testing.assert_close(state.out, whole.out[member::DOP])
