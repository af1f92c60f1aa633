"""The flash-attn provider, with a stand-in for the library: its signature, its mask, its LSE."""

import math
import sys
from importlib.machinery import ModuleSpec
from itertools import pairwise
from types import ModuleType

import pytest
import torch

from loongserve.kernels import reference
from loongserve.kernels.flash_attn_provider import find_window
from loongserve.kernels.provider import ENVIRONMENT_VARIABLE
from loongserve.kernels.state import AttentionState
from loongserve.kernels.striped import KVSave, plan_striped_attention, striped_attention


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    block_table=None,
):
    """Do as flash-attn 2 does: order aligned at the ends, outputs in q's dtype, LSE [heads, tokens], +inf if empty."""
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    out, lse = torch.full_like(q, torch.nan), torch.full((q.shape[1], len(q)), math.inf)
    lengths = [pairwise(sums.tolist()) for sums in (cu_seqlens_q, cu_seqlens_k)]
    for (q_begin, q_end), (k_begin, k_end) in zip(*lengths, strict=True):
        num_q, num_k = q_end - q_begin, k_end - k_begin
        assert num_q <= max_seqlen_q
        assert num_k <= max_seqlen_k
        ahead = torch.arange(num_k) - torch.arange(num_q)[:, None] - (num_k - num_q)
        right = 0 if causal else window_size[1]
        visible = (ahead <= right) if right >= 0 else torch.ones_like(ahead, dtype=torch.bool)
        if window_size[0] >= 0:
            visible &= ahead >= -window_size[0]
        part = reference.attend(
            q[q_begin:q_end], k[k_begin:k_end], v[k_begin:k_end], visible, softmax_scale, torch.float64, softcap or None
        )
        out[q_begin:q_end] = part.out.to(q.dtype)
        lse[:, q_begin:q_end] = torch.where(part.lse == -math.inf, math.inf, part.lse).T.float()
    return (out, lse, None) if return_attn_probs else out


@pytest.fixture
def library(monkeypatch):
    """Install the stand-in; answer a list of the calls that it gets, as their options."""
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "flash-attn")
    calls = []

    def counted(*arguments, **options):
        calls.append(options)
        return flash_attn_varlen_func(*arguments, **options)

    counted.__wrapped__ = flash_attn_varlen_func
    module = ModuleType("flash_attn")
    module.__spec__, module.__version__ = ModuleSpec("flash_attn", None), "2.8.3"
    module.flash_attn_varlen_func = counted
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    return calls


# query counts, key counts, diagonals, lower diagonals, soft cap, dtype, whether the library has the case
CASES = [
    pytest.param(([5, 9], [5, 9], [0, 0], None), None, torch.float16, True, id="own_block"),
    pytest.param(([5, 0, 3], [9, 2, 3], [4, 0, 0], None), None, torch.float16, True, id="longer_keys"),
    pytest.param(([6], [4], [-2], None), None, torch.float16, True, id="empty_rows"),
    pytest.param(([9, 7], [9, 7], [0, 0], [-3, -3]), 5.0, torch.float16, True, id="window_and_cap"),
    pytest.param(([9, 7], [9, 7], [0, 0], [-3, None]), None, torch.float16, False, id="two_windows"),
    pytest.param(([5], [5], [-1], None), None, torch.float16, False, id="other_diagonal"),
    pytest.param(([5], [5], [0], None), None, torch.float32, False, id="float32"),
]


@pytest.mark.parametrize(("lengths", "soft_cap", "dtype", "dense"), CASES)
def test_agrees_with_float64(lengths, soft_cap, dtype, dense, library, assert_state_close):
    num_q, num_k, diagonals, lowers = lengths
    cu_q, cu_k = ([sum(counts[:i]) for i in range(len(counts) + 1)] for counts in (num_q, num_k))
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(cu_q[-1], 4, 64, generator=generator).to(dtype)
    k, v = torch.randn(2, cu_k[-1], 2, 64, generator=generator).to(dtype)
    shape = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 64, "dtype": dtype}
    plan = plan_striped_attention(cu_q, cu_k, diagonals, lower_diagonals=lowers, device="cpu", **shape)
    assert plan.provider == ("flash-attn" if dense else "triton")
    model = reference.plan_striped_attention(
        cu_q, cu_k, diagonals, lower_diagonals=lowers, device=torch.device("cpu"), **shape
    )
    state, expected = AttentionState.empty(len(q), 4, 64), AttentionState.empty(len(q), 4, 64, dtype=torch.float64)
    save = KVSave(torch.arange(len(k)).flip(0), torch.zeros_like(k), torch.zeros_like(v))
    # Twice, so that a state is merged with another.
    for _ in range(2):
        striped_attention(plan, q, k, v, state, scale=0.125, soft_cap=soft_cap, save=save)
        reference.striped_attention(model, q, k, v, expected, scale=0.125, soft_cap=soft_cap)
    assert_state_close(state, expected, dtype)
    assert torch.equal(save.v_cache.flip(0), v)
    assert len(library) == (2 if dense else 0)


def test_padded_lse_of_older_libraries(library, monkeypatch):
    """Before 2.6 the LSE came as [sequences, heads, longest sequence], with anything in the padding."""

    def padded(q, k, v, cu_seqlens_q, *arguments, **options):
        out, lse, _ = flash_attn_varlen_func(q, k, v, cu_seqlens_q, *arguments, **options)
        wide = torch.full((2, 4, 5), torch.nan)
        wide[0, :, :5], wide[1, :, :3] = lse[:, :5], lse[:, 5:]
        return out, wide, None

    shape = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 64, "dtype": torch.float16, "device": "cpu"}
    q, (k, v) = torch.randn(8, 4, 64).half(), torch.randn(2, 8, 2, 64).half()
    plan = plan_striped_attention([0, 5, 8], [0, 5, 8], [0, 0], **shape)
    new, old = AttentionState.empty(8, 4, 64), AttentionState.empty(8, 4, 64)
    striped_attention(plan, q, k, v, new, scale=0.125)
    monkeypatch.setattr(sys.modules["flash_attn"], "flash_attn_varlen_func", padded)
    striped_attention(plan, q, k, v, old, scale=0.125)
    assert torch.equal(old.lse, new.lse)
    assert torch.equal(old.out, new.out)


def test_which_windows_the_library_has():
    assert find_window([3, 0], [3, 4], [0, 9]) == -1
    assert find_window([3, 2], [5, 2], [2, 0], [-1, -3]) == 3
    assert find_window([3, 2], [5, 2], [2, 0], [-1, -1]) is None
    assert find_window([3], [3], [0], [1]) is None
    assert find_window([0], [3], [0]) is None


def test_a_missing_or_old_library_is_named(library, monkeypatch):
    shape = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 64, "dtype": torch.float16, "device": "cpu"}
    monkeypatch.setattr(sys.modules["flash_attn"], "__version__", "1.0.9")
    with pytest.raises(ValueError, match=r"needs flash-attn 2\.1 or newer, got 1\.0\.9"):
        plan_striped_attention([0, 1], [0, 1], [0], **shape)
    monkeypatch.delitem(sys.modules, "flash_attn")
    monkeypatch.setattr("loongserve.kernels.flash_attn_provider.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="needs the library: pip install"):
        plan_striped_attention([0, 1], [0, 1], [0], **shape)
