"""The operators of torch: compiled code with one graph gives what the functions give, and torch's own checks pass."""

import pytest
import torch

import loongserve.kernels.torch_ops  # noqa: F401 (registers the operators)
from loongserve.kernels.activation import gelu_and_mul, silu_and_mul
from loongserve.kernels.kv import gather_kv, save_kv
from loongserve.kernels.merge import finalize, merge_many, merge_rows, merge_states
from loongserve.kernels.norm import rms_norm
from loongserve.kernels.paged import paged_attention, plan_paged_attention
from loongserve.kernels.rope import apply_rope
from loongserve.kernels.state import AttentionState
from loongserve.kernels.striped import KVSave, plan_striped_attention, striped_attention

SHAPE = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 64, "dtype": torch.float32, "device": "cpu"}
OPS = torch.ops.loongserve


def layer(striped_plan, paged_plan, x, weight, caches, slots, positions, cos, sin):
    """Call every public function once, as a decoder layer might."""
    residual = x.clone()
    x = rms_norm(x, weight, 1e-5, residual=residual)
    q, k, v = (part.contiguous() for part in x.view(-1, 8, 64).split([4, 2, 2], dim=1))
    apply_rope(q, cos, sin, positions)
    apply_rope(k, cos[:, :16].contiguous(), sin[:, :16].contiguous(), positions, rotary_dim=32, interleaved=True)
    local, resident = AttentionState.empty(len(q), 4, 64), AttentionState.empty(len(q), 4, 64)
    striped_attention(striped_plan, q, k, v, local, scale=0.125, save=KVSave(slots, *caches), soft_cap=20.0)
    paged_attention(paged_plan, q, *caches, resident, scale=0.125)
    merged = merge_many([local, resident, merge_states(local, resident)])
    merge_rows(merged, positions[:2], AttentionState(local.out[:2], local.lse[:2]))
    gathered, _ = gather_kv(*caches, slots)
    save_kv(gathered, gathered, slots, *caches)
    out = finalize(merged, torch.float32).flatten(1)
    return silu_and_mul(out) + gelu_and_mul(out, approximate="tanh"), residual, merged.lse


def make_arguments(tokens, seed):
    generator = torch.Generator().manual_seed(seed)
    slots = torch.randperm(20, generator=generator)[:tokens]
    striped_plan = plan_striped_attention([0, tokens], [0, tokens], [0], **SHAPE)
    paged_plan = plan_paged_attention([0, tokens], [slots], **SHAPE)
    angles = torch.randn(20, 32, generator=generator)
    x = torch.randn(tokens, 512, generator=generator)
    caches = torch.randn(2, 20, 2, 64, generator=generator).unbind()
    return striped_plan, paged_plan, x, torch.ones(512), caches, slots, torch.arange(tokens), angles.cos(), angles.sin()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_whole_layer_is_one_graph(backend):
    """Plans and lengths change from call to call; the plan alone must not cost a compilation."""
    torch.compiler.reset()
    compiled = torch.compile(layer, backend=backend, fullgraph=True)
    for seed, tokens in enumerate((5, 5, 7)):
        plain, traced = make_arguments(tokens, seed), make_arguments(tokens, seed)
        expected = layer(*plain)
        with torch.compiler.set_stance("default" if seed != 1 else "fail_on_recompile"):
            actual = compiled(*traced)
        for one, other in zip((*actual, *traced[4]), (*expected, *plain[4]), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)


def state(tokens=5):
    return torch.randn(tokens, 4, 64), torch.randn(tokens, 4)


@pytest.mark.parametrize(
    ("operator", "make"),
    [
        pytest.param(OPS.merge_states, lambda: (*state(), *state(), *state()), id="merge_states"),
        pytest.param(OPS.merge_many, lambda: (*state(), *zip(state(), state(), strict=True)), id="merge_many"),
        pytest.param(OPS.merge_rows, lambda: (*state(), torch.tensor([3, 0]), *state(2)), id="merge_rows"),
        pytest.param(OPS.finalize, lambda: (torch.empty(5, 4, 64), *state()), id="finalize"),
        pytest.param(
            OPS.save_kv, lambda: (*torch.randn(2, 9, 2, 64), *torch.randn(2, 3, 2, 64), torch.arange(3)), id="save_kv"
        ),
        pytest.param(
            OPS.gather_kv,
            lambda: (*torch.randn(2, 3, 2, 64), *torch.randn(2, 9, 2, 64), torch.arange(3)),
            id="gather_kv",
        ),
        pytest.param(OPS.rms_norm, lambda: (*torch.randn(3, 2, 64), torch.ones(64), 1e-5), id="rms_norm"),
        pytest.param(
            OPS.apply_rope,
            lambda: (torch.randn(3, 2, 64), *torch.randn(2, 9, 32), torch.arange(3), None, False),
            id="apply_rope",
        ),
        pytest.param(OPS.silu_and_mul, lambda: (torch.empty(3, 4), torch.randn(3, 8)), id="silu_and_mul"),
        pytest.param(OPS.gelu_and_mul, lambda: (torch.empty(3, 4), torch.randn(3, 8), "none"), id="gelu_and_mul"),
    ],
)
def test_opcheck(operator, make):
    torch.manual_seed(0)
    torch.library.opcheck(operator, make())


def test_opcheck_of_attention():
    """Their handles name plans, which torch's check must not lose."""
    torch.manual_seed(0)
    striped_plan, paged_plan, *_ = make_arguments(5, 0)
    q, (k, v), (k_cache, v_cache) = torch.randn(5, 4, 64), torch.randn(2, 5, 2, 64), torch.randn(2, 20, 2, 64)
    torch.library.opcheck(
        OPS.striped_attention,
        (*state(), k_cache, v_cache, striped_plan.handle, q, k, v, torch.arange(5), 0.125, None),
    )
    torch.library.opcheck(OPS.paged_attention, (*state(), paged_plan.handle, q, k_cache, v_cache, 0.125, 3.0))


def test_a_plan_that_is_gone_is_named():
    plan = plan_striped_attention([0, 1], [0, 1], [0], **SHAPE)
    handle = plan.handle
    del plan
    rows = torch.zeros(1, 4, 64)
    with pytest.raises(ValueError, match=f"no plan has handle {int(handle)}: keep the plan alive"):
        OPS.striped_attention(*state(1), None, None, handle, rows, rows, rows, None, 1.0, None)
