"""The running state of attention over a part of the keys: what partial results are exchanged and merged as.

For the scores s_j of one query and head over a set of keys, the state is

    lse = log(sum_j exp(s_j))            natural logarithm
    out = sum_j exp(s_j - lse) v_j       already normalised

No keys give lse = -inf and out = 0, which is the identity of ``loongserve.kernels.merge.merge_states``.

Source: online softmax (Milakov and Gimelshein 2018); the merge of partial results in LoongServe section 4.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionState:
    """Normalised output and log-sum-exp of attention of some queries over some of their keys.

    Both tensors are float32; the reference provider also takes float64.
    """

    # [tokens, heads, head_dim] float32; 0 where lse is -inf.
    out: Tensor
    # [tokens, heads] float32, natural logarithm; -inf where the query has seen no key.
    lse: Tensor

    @classmethod
    def empty(
        cls,
        tokens: int,
        heads: int,
        head_dim: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> AttentionState:
        """Make the identity of the merge: out 0, lse -inf.

        Args:
            tokens: number of queries, may be 0.
            heads: number of query heads.
            head_dim: size of a head.
            device: where both tensors lie.
            dtype: float32, or float64 for the reference provider.
        """
        return cls(
            out=torch.zeros(tokens, heads, head_dim, dtype=dtype, device=device),
            lse=torch.full((tokens, heads), -math.inf, dtype=dtype, device=device),
        )

    def rows(self, begin: int, end: int) -> AttentionState:
        """View queries begin..end-1; what is written to the view is written here."""
        return AttentionState(self.out[begin:end], self.lse[begin:end])

    @property
    def num_tokens(self) -> int:
        """Number of queries."""
        return self.lse.shape[0]
