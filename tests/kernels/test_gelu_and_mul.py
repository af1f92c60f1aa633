"""gelu_and_mul against float64."""

import pytest
import torch
from torch.nn.functional import gelu

from loongserve.kernels.activation import gelu_and_mul

SHAPES = [
    pytest.param((1, 2), id="one"),
    pytest.param((7, 3072), id="wide"),
    pytest.param((33, 130), id="odd"),
    pytest.param((0, 64), id="no_tokens"),
]


def make(shape, dtype, device):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 3
    if x.numel() > 2:
        # Both ends of the exponential.
        x[0, 0], x[-1, 0] = -120.0, 120.0
    return x.to(dtype).to(device)


def expected_product(x, approximate):
    gate, up = x.cpu().double().chunk(2, dim=-1)
    return gelu(gate, approximate=approximate) * up


# NumPy under Triton's interpreter says so where the exponential is infinite, which is right: gelu is 0 there.
@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")
@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_agrees_with_float64(shape, dtype, approximate, device, assert_close):
    x = make(shape, dtype, device)
    before = x.clone()
    out = torch.full((shape[0], shape[1] // 2), torch.nan, dtype=x.dtype, device=device)
    assert gelu_and_mul(x, out, approximate=approximate) is out
    assert_close(out, expected_product(x, approximate))
    assert torch.equal(gelu_and_mul(x, approximate=approximate), out)
    assert torch.equal(x, before)


def test_strided(device, assert_close):
    wide = make((6, 300), torch.float32, device)
    x, out = wide[:, 20:120], wide[:, 200:250]
    expected = expected_product(x, "none")
    gelu_and_mul(x, out)
    assert_close(out, expected)


def test_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match=r"x must be \[tokens, 2 n\], got \[3, 5\]"):
        gelu_and_mul(torch.zeros(3, 5))
    with pytest.raises(ValueError, match="approximate must be 'none' or 'tanh', got 'erf'"):
        gelu_and_mul(torch.zeros(3, 4), approximate="erf")
