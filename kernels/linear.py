"""Products of a few rows with a weight matrix: the linear layers of decode on a CPU, which wait for the weights.

    out[r, o] = scale[o] * sum over i of x[r, i] weight[o, i]

with float32 sums and one rounding at the end. The native kernel reads each weight once, in bfloat16 or int8, and widens
it in registers; torch serves where it is not there. A call's fixed cost in Python shows on small matrices: one row
times 576x1536 is no faster than torch's own product.

Source: weight-only quantisation a row as in LLM.int8() (Dettmers et al. 2022), without its outliers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from loongserve.kernels.checks import check_device, check_last_contiguous, check_tensor
from loongserve.kernels.native_build import load_native

MAX_ROWS = 32
_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 3}
_X_DTYPES = (torch.float32, torch.bfloat16)


def small_linear(x: Tensor, weight: Tensor, scales: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """Multiply at most 32 rows with a weight matrix on a CPU.

    Args:
        x: [rows, inputs] float32 or bfloat16, contiguous last dim, 0 to 32 rows.
        weight: [outputs, inputs] float32, bfloat16 or int8, contiguous last dim.
        scales: [outputs] float32, factors of the outputs: with int8 weights what one step of them is worth.
        out: [rows, outputs] float32 or bfloat16, contiguous last dim. None: a new tensor of x's dtype.

    Returns:
        ``out`` or the new tensor.

    Raises:
        ValueError: shapes, dtypes or devices do not fit.
    """
    if out is None and x.dim() == 2 and weight.dim() == 2:
        out = torch.empty((x.shape[0], weight.shape[0]), dtype=x.dtype)
    # In one condition, for a call on a small matrix takes as long as a few checks.
    if not (
        out is not None
        and x.dtype in _X_DTYPES
        and weight.dtype in _DTYPES
        and out.dtype in _X_DTYPES
        and x.is_cpu
        and weight.is_cpu
        and out.is_cpu
        and x.dim() == weight.dim() == out.dim() == 2
        and x.stride(1) == weight.stride(1) == out.stride(1) == 1
        and x.shape[0] <= MAX_ROWS
        and x.shape[1] == weight.shape[1]
        and out.shape == (x.shape[0], weight.shape[0])
        and scales is None
    ):
        out = _check(x, weight, scales, out)
    library = load_native()
    if library is None:
        return _multiply(x, weight, scales, out)
    if scales is not None:
        scales = scales.contiguous()
    failed = library.loong_small_linear(
        x.data_ptr(),
        _DTYPES[x.dtype],
        x.stride(0),
        weight.data_ptr(),
        _DTYPES[weight.dtype],
        weight.stride(0),
        None if scales is None else scales.data_ptr(),
        out.data_ptr(),
        _DTYPES[out.dtype],
        out.stride(0),
        *x.shape,
        weight.shape[0],
        torch.get_num_threads(),
    )
    if failed:
        raise MemoryError("no memory for the rows of x in float32")
    return out


def _check(x: Tensor, weight: Tensor, scales: Tensor | None, out: Tensor | None) -> Tensor:
    """Name what does not fit, or answer the tensor for the result."""
    if x.dim() != 2 or x.shape[0] > MAX_ROWS:
        raise ValueError(f"x must be [rows, inputs] of at most {MAX_ROWS} rows, got {list(x.shape)}")
    if x.dtype not in _X_DTYPES:
        raise ValueError(f"x must be float32 or bfloat16, got {x.dtype}")
    if x.device.type != "cpu":
        raise ValueError(f"x must be on a cpu, got {x.device}")
    rows, inputs = x.shape
    if weight.dim() != 2 or weight.shape[1] != inputs:
        raise ValueError(f"weight must be [outputs, {inputs}], got {list(weight.shape)}")
    if weight.dtype not in _DTYPES:
        raise ValueError(f"weight must be float32, bfloat16 or int8, got {weight.dtype}")
    check_device("weight", weight, x.device)
    outputs = weight.shape[0]
    if scales is not None:
        check_tensor("scales", scales, (outputs,), torch.float32, x.device)
    out = torch.empty((rows, outputs), dtype=x.dtype) if out is None else out
    check_tensor("out", out, (rows, outputs), None, x.device)
    if out.dtype not in _X_DTYPES:
        raise ValueError(f"out must be float32 or bfloat16, got {out.dtype}")
    for name, tensor in (("x", x), ("weight", weight), ("out", out)):
        check_last_contiguous(name, tensor)
    return out


def _multiply(x: Tensor, weight: Tensor, scales: Tensor | None, out: Tensor) -> Tensor:
    """Multiply with what torch has."""
    product = torch.nn.functional.linear(x.float(), weight.float())
    if scales is not None:
        product.mul_(scales)
    return out.copy_(product)
