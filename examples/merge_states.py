"""Attention over keys in three places, merged: any cut gives the same, and a place without keys changes nothing."""

import torch

from loongserve.kernels.merge import finalize, merge_many, merge_states
from loongserve.kernels.state import AttentionState

torch.manual_seed(0)
scores, values = torch.randn(5, 4, 30), torch.randn(30, 4, 64)


def attend(begin: int, end: int) -> AttentionState:
    """Attend to keys begin..end-1: the normalised output and the log-sum-exp of the scores."""
    part = scores[:, :, begin:end]
    return AttentionState(torch.einsum("qhk,khd->qhd", part.softmax(-1), values[begin:end]), part.logsumexp(-1))


whole = attend(0, 30)
two = merge_states(attend(0, 11), attend(11, 30))
many = merge_many([attend(0, 3), AttentionState.empty(5, 4, 64), attend(3, 20), attend(20, 30)])
for merged in (two, many):
    torch.testing.assert_close(merged.out, whole.out)
    torch.testing.assert_close(merged.lse, whole.lse)
print("merged:", finalize(many, torch.bfloat16)[0, 0, :4])
