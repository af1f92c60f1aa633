"""Attention of one sequence on a CPU, in float32: the two ways that striped and paged attention share.

Torch's blocked kernel returns the log-sum-exp with the output, but has no grouped heads: KV heads go where it has the
batch, and each is broadcast to its group. A few queries (decode) are two matrix products instead, with the heads of a
group as rows, so that K and V are read once for the whole group.
"""

from __future__ import annotations

import torch
from torch import Tensor

from loongserve.kernels.state import AttentionState

# Up to this many rows (queries times heads of a group), matrix products beat the blocked kernel.
MAX_PRODUCT_ROWS = 64


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, *, causal: bool) -> AttentionState:
    """Attend to all keys, or with ``causal`` to the keys up to the query's own index.

    Args:
        q: [m, q_heads, head_dim] float32, m at least 1.
        k: [n, kv_heads, head_dim] float32, n at least 1, more or less than m.
        v: as ``k``.
        scale: factor of the scores.
        causal: query a sees keys 0..a.
    """
    tokens, q_heads, head_dim = q.shape
    num_keys, kv_heads, _ = k.shape
    group = q_heads // kv_heads
    # [kv_heads, group, m, head_dim]
    queries = q.view(tokens, kv_heads, group, head_dim).permute(1, 2, 0, 3)
    if not causal and group * tokens <= MAX_PRODUCT_ROWS:
        scores = torch.bmm(queries.flatten(1, 2).mul(scale), k.permute(1, 2, 0))
        weights, lse = softmax_(scores)
        out = torch.bmm(weights, v.transpose(0, 1)).view(kv_heads, group, tokens, head_dim)
        lse = lse.view(kv_heads, group, tokens)
    else:
        keys, values = (rows.transpose(0, 1).unsqueeze(1).expand(-1, group, num_keys, head_dim) for rows in (k, v))
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            queries, keys, values, 0.0, causal, scale=scale
        )
    return AttentionState(out.permute(2, 0, 1, 3).flatten(1, 2), lse.permute(2, 0, 1).flatten(1, 2))


def softmax_(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Turn scores [..., n] into weights in place, and answer them and their log-sum-exp [...].

    Every row needs a finite score.
    """
    top = scores.amax(dim=-1, keepdim=True)
    weights = scores.sub_(top).exp_()
    total = weights.sum(dim=-1, keepdim=True)
    weights.div_(total)
    return weights, top.add_(total.log_()).squeeze(-1)
