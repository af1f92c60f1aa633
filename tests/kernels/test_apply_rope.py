"""apply_rope, against float64 and against transformers' Llama and GPT-J."""

import pytest
import torch
from transformers.models.gptj.modeling_gptj import apply_rotary_pos_emb as apply_gptj
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from loongserve.kernels.rope import apply_rope

# tokens, heads, head_dim
SHAPES = [
    pytest.param((1, 1, 64), id="one"),
    pytest.param((7, 9, 80), id="odd"),
    pytest.param((33, 3, 128), id="many"),
    pytest.param((2, 1, 256), id="wide_head"),
    pytest.param((0, 4, 64), id="no_tokens"),
]


def make_tables(max_positions, head_dim, device):
    frequencies = 10000.0 ** (-torch.arange(0, head_dim, 2).double() / head_dim)
    angles = torch.arange(max_positions).double()[:, None] * frequencies
    return angles.cos().float().to(device), angles.sin().float().to(device)


def make(shape, dtype, device, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator).to(dtype).to(device)
    return x, torch.randint(0, 500, shape[:1], generator=generator).to(device)


def expected_rope(x, cos, sin, positions):
    first, second = x.cpu().double().chunk(2, dim=-1)
    cos, sin = (table.cpu().double()[positions.cpu()][:, None] for table in (cos, sin))
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_agrees_with_float64(shape, dtype, device, assert_close):
    x, positions = make(shape, dtype, device)
    cos, sin = make_tables(500, shape[-1], device)
    expected = expected_rope(x, cos, sin, positions)
    assert apply_rope(x, cos, sin, positions) is None
    assert_close(x, expected)


def test_agrees_with_transformers(device):
    x, positions = make((17, 3, 64), torch.float32, device)
    cos, sin = make_tables(500, 64, device)
    batched = x.transpose(0, 1)[None]
    full_cos, full_sin = (torch.cat((table[positions],) * 2, dim=-1)[None] for table in (cos, sin))
    expected, _ = apply_rotary_pos_emb(batched, batched, full_cos, full_sin)
    apply_rope(x, cos, sin, positions)
    torch.testing.assert_close(x, expected[0].transpose(0, 1), rtol=0, atol=1e-6)


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize("rotary_dim", [2, 24, 80])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_part_of_a_head(rotary_dim, interleaved, dtype, device, assert_close):
    """The rest of each head stays as it is, to the bit."""
    x, positions = make((9, 3, 80), dtype, device)
    cos, sin = make_tables(500, rotary_dim, device)
    order = torch.arange(rotary_dim)
    if interleaved:
        order = order.view(-1, 2).T.flatten()
    expected, rest = x.cpu().double(), x[..., rotary_dim:].clone()
    expected[..., order] = expected_rope(expected[..., order], cos, sin, positions)
    apply_rope(x, cos, sin, positions, rotary_dim=rotary_dim, interleaved=interleaved)
    assert_close(x, expected)
    assert torch.equal(x[..., rotary_dim:], rest)


def test_interleaved_agrees_with_gptj(device):
    x, positions = make((17, 3, 64), torch.float32, device)
    cos, sin = make_tables(500, 64, device)
    expected = apply_gptj(x[None], sin[positions][None], cos[positions][None])
    apply_rope(x, cos, sin, positions, interleaved=True)
    torch.testing.assert_close(x, expected[0], rtol=0, atol=1e-6)


def test_strided_view(device, assert_close):
    """Q and K are views of one projection; V must stay as it is."""
    packed, positions = make((6, 7, 64), torch.float32, device)
    cos, sin = make_tables(500, 64, device)
    expected, rest = expected_rope(packed[:, 1:5], cos, sin, positions), packed[:, [0, 5, 6]].clone()
    apply_rope(packed[:, 1:5], cos, sin, positions)
    assert_close(packed[:, 1:5], expected)
    assert torch.equal(packed[:, [0, 5, 6]], rest)


def test_refuses_what_does_not_fit():
    x, positions = make((3, 2, 64), torch.float32, "cpu")
    cos, sin = make_tables(500, 64, "cpu")
    with pytest.raises(ValueError, match="even head_dim"):
        apply_rope(x[..., :63], cos, sin, positions)
    with pytest.raises(ValueError, match=r"cos must have shape \[500, 32\], got \[500, 16\]"):
        apply_rope(x, cos[:, :16], sin, positions)
    for rotary_dim in (0, 31, 66):
        with pytest.raises(
            ValueError, match=rf"rotary_dim must be even and in 2\.\.64, the head_dim, got {rotary_dim}"
        ):
            apply_rope(x, cos, sin, positions, rotary_dim=rotary_dim)
    with pytest.raises(ValueError, match="cos must be float32"):
        apply_rope(x, cos.bfloat16(), sin, positions)
    with pytest.raises(ValueError, match=r"positions must be torch\.int64"):
        apply_rope(x, cos, sin, positions.int())
    with pytest.raises(ValueError, match=r"positions must have shape \[3\]"):
        apply_rope(x, cos, sin, positions[:2])
