"""The functions of ``kernels/`` on CPUs, made fast with what torch has."""

from __future__ import annotations

from loongserve.kernels.cpu_elementwise import (
    apply_rope,
    finalize,
    gather_kv,
    gelu_and_mul,
    merge_many,
    merge_rows,
    merge_states,
    rms_norm,
    save_kv,
    silu_and_mul,
)
from loongserve.kernels.cpu_paged import paged_attention, plan_paged_attention
from loongserve.kernels.cpu_striped import plan_positional_attention, plan_striped_attention, striped_attention

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
