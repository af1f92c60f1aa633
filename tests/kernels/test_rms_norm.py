"""rms_norm, against float64 and against transformers' Llama."""

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from loongserve.kernels.norm import rms_norm

EPS = 1e-5
SHAPES = [
    pytest.param((1, 64), id="one_row"),
    pytest.param((7, 576), id="not_a_power_of_two"),
    pytest.param((3, 5, 80), id="heads"),
    pytest.param((2, 5000), id="wide"),
    pytest.param((0, 64), id="no_rows"),
]


def make(shape, dtype, device, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


def expected_norm(x, weight):
    x = x.cpu().double()
    return x / (x.square().mean(dim=-1, keepdim=True) + EPS).sqrt() * weight.cpu().double()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_agrees_with_float64(shape, dtype, device, assert_close):
    x, weight = make(shape, dtype, device), make(shape[-1], dtype, device, 1)
    before = x.clone()
    out = torch.full_like(x, torch.nan)
    assert rms_norm(x, weight, EPS, out=out) is out
    assert_close(out, expected_norm(x, weight))
    assert torch.equal(rms_norm(x, weight, EPS), out)
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_agrees_with_transformers(dtype, device):
    x, weight = make((9, 576), dtype, device), make(576, dtype, device, 1)
    norm = LlamaRMSNorm(576, EPS).to(dtype)
    norm.weight.data.copy_(weight)
    expected = norm.to(device)(x).detach()
    # A different order of the sum may round to the neighbouring value.
    torch.testing.assert_close(rms_norm(x, weight, EPS), expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-7)


def test_residual_is_updated_and_normalised(device, assert_close):
    x, residual, weight = make((6, 576), torch.float32, device), make((6, 576), torch.float32, device, 1), None
    weight = make(576, torch.float32, device, 2)
    expected = x + residual
    out = rms_norm(x, weight, EPS, residual=residual)
    assert torch.equal(residual, expected)
    assert_close(out, expected_norm(expected, weight))


def test_in_place_and_strided(device, assert_close):
    wide = make((6, 200), torch.float32, device)
    x, weight = wide[:, 60:160], make(100, torch.float32, device, 1)
    expected, rest = expected_norm(x, weight), wide[:, 160:].clone()
    rms_norm(x, weight, EPS, out=x)
    assert_close(x, expected)
    assert torch.equal(wide[:, 160:], rest)


def test_zero_row(device):
    out = rms_norm(torch.zeros(2, 64, device=device), torch.ones(64, device=device), EPS)
    assert not out.any()


def test_refuses_what_does_not_fit():
    x, weight = torch.zeros(2, 64), torch.ones(64)
    with pytest.raises(ValueError, match=r"weight must have shape \[64\], got \[32\]"):
        rms_norm(x, weight[:32], EPS)
    with pytest.raises(ValueError, match=r"residual must be torch\.float32, got torch\.bfloat16"):
        rms_norm(x, weight, EPS, residual=x.bfloat16())
    with pytest.raises(ValueError, match=r"out must have shape \[2, 64\], got \[1, 64\]"):
        rms_norm(x, weight, EPS, out=x[:1])
