"""Other implementations of attention, as calls without arguments; each says why where it cannot be had."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from device.bench import Bench

Call = Callable[[], Tensor]
Qkv = tuple[Tensor, Tensor, Tensor]


class Unavailable(Exception):
    """A baseline cannot be had here, and why."""


def sdpa_flash(bench: Bench, qkv: Qkv) -> Call:
    """Torch's own FlashAttention-2, causal, over [tokens, heads, head_dim]; answers the same layout."""
    q, k, v = (x.transpose(0, 1)[None].contiguous() for x in qkv)

    def run() -> Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out[0].transpose(0, 1)

    return run


def flex(bench: Bench, qkv: Qkv) -> Call:
    """FlexAttention, compiled on a device, with a causal block mask."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    q, k, v = (x.transpose(0, 1)[None].contiguous() for x in qkv)
    tokens = q.shape[2]
    attend, make_mask = flex_attention, create_block_mask
    if not bench.tiny:
        # Not compiled, the mask alone would take tokens^2 bytes.
        attend = torch.compile(flex_attention, dynamic=False)
        make_mask = torch.compile(create_block_mask, dynamic=False)
    mask = make_mask(lambda b, h, q_index, k_index: q_index >= k_index, None, None, tokens, tokens, device=q.device)
    return lambda: attend(q, k, v, block_mask=mask, enable_gqa=True)[0].transpose(0, 1)


def flash_attn(bench: Bench, qkv: Qkv) -> Call:
    """The flash-attn library."""
    if find_spec("flash_attn") is None:
        raise Unavailable("flash-attn is not installed")
    from flash_attn import flash_attn_func

    q, k, v = (x[None] for x in qkv)
    return lambda: flash_attn_func(q, k, v, causal=True)[0]


def sdpa_decode(bench: Bench, q: Tensor, k: Tensor, v: Tensor) -> Call:
    """Torch's own FlashAttention-2 for one query a request, over K and V that were gathered beforehand.

    Args:
        bench: where it runs.
        q: [requests, q_heads, head_dim].
        k: [requests, tokens, kv_heads, head_dim].
        v: as ``k``.
    """
    requests, _, num_kv_heads, head_dim = k.shape
    # The heads of a group as so many queries: K and V are read once for all of them.
    grouped = q.view(requests, num_kv_heads, -1, head_dim)
    k, v = k.transpose(1, 2), v.transpose(1, 2)

    def run() -> Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            out = torch.nn.functional.scaled_dot_product_attention(grouped, k, v)
        return out.reshape(q.shape)

    return run


def flash_attn_decode(bench: Bench, q: Tensor, k: Tensor, v: Tensor) -> Call:
    """The flash-attn library's split-KV decode over gathered K and V."""
    if find_spec("flash_attn") is None:
        raise Unavailable("flash-attn is not installed")
    from flash_attn import flash_attn_with_kvcache

    return lambda: flash_attn_with_kvcache(q[:, None], k, v)[:, 0]


def collect(makers: dict[str, Callable[[], Call]]) -> tuple[dict[str, Call], dict[str, str]]:
    """Make and run each once; answer those that work, and why the others do not."""
    calls: dict[str, Call] = {}
    missing: dict[str, str] = {}
    for name, make in makers.items():
        try:
            call = make()
            call()
            calls[name] = call
        # Whatever another library raises is its own matter; the reason is recorded.
        except Exception as error:
            message = " ".join(str(error).split())
            missing[name] = message if isinstance(error, Unavailable) else f"{type(error).__name__}: {message[:300]}"
    return calls, missing
