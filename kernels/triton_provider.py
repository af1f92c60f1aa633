"""The functions of ``kernels/`` on NVIDIA and AMD GPUs, and on CPU tensors in Triton's interpreter."""

from __future__ import annotations

from loongserve.kernels.triton_elementwise import (
    apply_rope,
    gather_kv,
    gelu_and_mul,
    rms_norm,
    save_kv,
    silu_and_mul,
)
from loongserve.kernels.triton_merge import finalize, merge_many, merge_rows, merge_states
from loongserve.kernels.triton_paged import paged_attention
from loongserve.kernels.triton_paged_plan import plan_paged_attention
from loongserve.kernels.triton_striped import striped_attention
from loongserve.kernels.triton_striped_plan import plan_positional_attention, plan_striped_attention

__all__ = [
    "apply_rope",
    "finalize",
    "gather_kv",
    "gelu_and_mul",
    "merge_many",
    "merge_rows",
    "merge_states",
    "paged_attention",
    "plan_paged_attention",
    "plan_positional_attention",
    "plan_striped_attention",
    "rms_norm",
    "save_kv",
    "silu_and_mul",
    "striped_attention",
]
