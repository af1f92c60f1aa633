"""small_linear: a few rows times a weight matrix, native and with torch."""

import pytest
import torch

from loongserve.kernels.linear import small_linear
from loongserve.kernels.native_build import ISA_VARIABLE, SWITCH

FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16

# rows, inputs, outputs
SHAPES = [
    pytest.param((1, 64, 5), id="one_row"),
    pytest.param((2, 96, 130), id="two_rows"),
    pytest.param((7, 37, 11), id="odd"),
    pytest.param((16, 576, 100), id="many"),
    pytest.param((32, 8, 1), id="one_output"),
    pytest.param((0, 64, 4), id="no_rows"),
    pytest.param((3, 64, 0), id="no_outputs"),
    pytest.param((2, 0, 3), id="no_inputs"),
]


@pytest.fixture(params=["native", "torch", "portable"], autouse=True)
def implementation(request, monkeypatch):
    if request.param == "torch":
        monkeypatch.setenv(SWITCH, "0")
    elif request.param == "portable":
        monkeypatch.setenv(ISA_VARIABLE, "portable")


def make(shape, x_dtype, weight_dtype):
    rows, inputs, outputs = shape
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, inputs, generator=generator).to(x_dtype)
    if weight_dtype == torch.int8:
        weight = torch.randint(-128, 128, (outputs, inputs), generator=generator, dtype=torch.int8)
        return x, weight, torch.rand(outputs, generator=generator) / 100
    return x, torch.randn(outputs, inputs, generator=generator).to(weight_dtype), None


def expected_product(x, weight, scales):
    product = x.double() @ weight.double().t()
    return product if scales is None else product * scales.double()


@pytest.mark.parametrize("weight_dtype", [FLOAT32, BFLOAT16, torch.int8], ids=str)
@pytest.mark.parametrize("x_dtype", [FLOAT32, BFLOAT16], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_agrees_with_float64(shape, x_dtype, weight_dtype, assert_close):
    x, weight, scales = make(shape, x_dtype, weight_dtype)
    expected = expected_product(x, weight, scales)
    assert_close(small_linear(x, weight, scales), expected, x_dtype)
    out = torch.full(expected.shape, torch.nan)
    assert small_linear(x, weight, scales, out) is out
    assert_close(out, expected, FLOAT32)


def test_every_number_of_rows(assert_close):
    for rows in range(33):
        x, weight, _ = make((rows, 80, 23), BFLOAT16, BFLOAT16)
        assert_close(small_linear(x, weight), expected_product(x, weight, None))


@pytest.mark.parametrize("weight_dtype", [FLOAT32, BFLOAT16, torch.int8], ids=str)
def test_strided_views(weight_dtype, assert_close):
    """Rows further apart than they are long, from odd addresses; what lies between is NaN or left as it is."""
    x, weight, scales = make((5, 72, 10), BFLOAT16, weight_dtype)
    wide_x = torch.full((5, 101), torch.nan, dtype=BFLOAT16)
    wide_weight = torch.full((10, 101), 99, dtype=weight_dtype)
    out = torch.full((5, 13), torch.nan)
    wide_x[:, 1:73], wide_weight[:, 3:75] = x, weight
    small_linear(wide_x[:, 1:73], wide_weight[:, 3:75], scales, out[:, 1:11])
    assert_close(out[:, 1:11], expected_product(x, weight, scales))
    assert out[:, [0, 11, 12]].isnan().all()


def test_threads_give_the_same():
    x, weight, _ = make((4, 128, 400), FLOAT32, BFLOAT16)
    threads, results = torch.get_num_threads(), []
    try:
        for number in (1, 3):
            torch.set_num_threads(number)
            results.append(small_linear(x, weight))
    finally:
        torch.set_num_threads(threads)
    torch.testing.assert_close(results[1], results[0], rtol=1e-6, atol=1e-5)


def test_refuses_what_does_not_fit():
    x, weight = torch.zeros(2, 8), torch.zeros(3, 8)
    with pytest.raises(ValueError, match=r"at most 32 rows, got \[33, 8\]"):
        small_linear(torch.zeros(33, 8), weight)
    with pytest.raises(ValueError, match=r"x must be float32 or bfloat16, got torch\.float16"):
        small_linear(x.half(), weight)
    with pytest.raises(ValueError, match=r"weight must be \[outputs, 8\], got \[3, 7\]"):
        small_linear(x, weight[:, :7])
    with pytest.raises(ValueError, match="weight must be float32, bfloat16 or int8"):
        small_linear(x, weight.double())
    with pytest.raises(ValueError, match="weight must be contiguous in its last dimension"):
        small_linear(x, torch.zeros(8, 3).t())
    with pytest.raises(ValueError, match=r"scales must have shape \[3\], got \[1\]"):
        small_linear(x, weight, torch.ones(1))
    with pytest.raises(ValueError, match=r"out must have shape \[2, 3\], got \[3, 3\]"):
        small_linear(x, weight, out=torch.zeros(3, 3))
    with pytest.raises(ValueError, match=r"out must be float32 or bfloat16, got torch\.float16"):
        small_linear(x, weight, out=torch.zeros(2, 3, dtype=torch.float16))
