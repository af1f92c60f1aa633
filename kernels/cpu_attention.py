"""Attention of one sequence on a CPU, in float32: the two ways that striped and paged attention share.

Torch's blocked kernel returns the log-sum-exp with the output, but has no grouped heads: KV heads go where it has the
batch, and each is broadcast to its group. A few queries (decode) are two matrix products instead, with the heads of a
group as rows, so that K and V are read once for the whole group. That is also how masks and capped scores are computed,
a few queries at a time, so that the scores stay small.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from loongserve.kernels.state import AttentionState

# Up to this many rows (queries times heads of a group), matrix products beat the blocked kernel.
MAX_PRODUCT_ROWS = 64
# Scores that ``attend_masked`` holds at a time: 4 MiB.
MAX_SCORES = 1 << 20


def attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float, *, causal: bool, soft_cap: float | None = None
) -> AttentionState:
    """Attend to all keys, or with ``causal`` to the keys up to the query's own index.

    Args:
        q: [m, q_heads, head_dim] float32, m at least 1.
        k: [n, kv_heads, head_dim] float32, n at least 1, more or less than m.
        v: as ``k``.
        scale: factor of the scores.
        causal: query a sees keys 0..a.
        soft_cap: bound of the scores; None: none.
    """
    if soft_cap is not None:
        return attend_masked(q, k, v, scale, soft_cap, lambda begin, end: _causal_mask(begin, end, len(k), causal))
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


def _causal_mask(begin: int, end: int, num_keys: int, causal: bool) -> tuple[int, int, Tensor | None]:
    if not causal:
        return 0, num_keys, None
    last = min(end, num_keys)
    return 0, last, torch.arange(last) <= torch.arange(begin, end)[:, None]


def attend_masked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    soft_cap: float | None,
    find_visible: Callable[[int, int], tuple[int, int, Tensor | None]],
) -> AttentionState:
    """Attend to the keys that a mask shows, some queries at a time.

    Args:
        q: [m, q_heads, head_dim] float32.
        k: [n, kv_heads, head_dim] float32.
        v: as ``k``.
        scale: factor of the scores.
        soft_cap: bound of the scores; None: none.
        find_visible: called with queries begin..end-1; answers the first key that one of them sees, the end of those,
            and [end - begin, keys between] bool, true where a query sees a key (None: everywhere).
    """
    tokens, q_heads, head_dim = q.shape
    kv_heads = k.shape[1]
    state = AttentionState.empty(tokens, q_heads, head_dim)
    step = max(16, MAX_SCORES // max(1, q_heads * len(k)))
    for begin in range(0, tokens, step):
        end = min(tokens, begin + step)
        first, last, visible = find_visible(begin, end)
        if last <= first:
            continue
        # [kv_heads, group * queries, head_dim]
        queries = q[begin:end].view(end - begin, kv_heads, -1, head_dim).permute(1, 2, 0, 3).flatten(1, 2)
        scores = torch.bmm(queries * scale, k[first:last].permute(1, 2, 0))
        if soft_cap is not None:
            scores.div_(soft_cap).tanh_().mul_(soft_cap)
        scores = scores.view(q_heads, end - begin, last - first)
        if visible is not None:
            scores.masked_fill_(~visible, -torch.inf)
        lse = scores.logsumexp(dim=-1)
        # A row that sees nothing has scores and a sum of -inf: the difference would be NaN.
        weights = scores.sub_(lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1)).exp_()
        out = torch.bmm(weights.view(kv_heads, -1, last - first), v[first:last].transpose(0, 1))
        state.out[begin:end] = out.view(q_heads, end - begin, head_dim).transpose(0, 1)
        state.lse[begin:end] = lse.transpose(0, 1)
    return state


def softmax_(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Turn scores [..., n] into weights in place, and answer them and their log-sum-exp [...].

    Every row needs a finite score.
    """
    top = scores.amax(dim=-1, keepdim=True)
    weights = scores.sub_(top).exp_()
    total = weights.sum(dim=-1, keepdim=True)
    weights.div_(total)
    return weights, top.add_(total.log_()).squeeze(-1)
