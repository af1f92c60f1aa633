"""A lean Llama decoder over ``loongserve.kernels``; attention is the caller's.

Everything but attention works row by row, so any set of tokens of any requests can be one call: the rows of one member
of an ESP group, in whatever order the striping gives.

    hidden = embed(tokens)
    for each layer:  hidden += o(attention(rope(q), rope(k), v));  hidden += down(silu(gate) * up)
    logits = lm_head(norm(hidden))
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from loongserve.kernels.activation import silu_and_mul
from loongserve.kernels.norm import rms_norm
from loongserve.kernels.rope import apply_rope
from loongserve.runtime.model.config import ModelConfig
from loongserve.runtime.model.weights import FUSED

_QKV, _GATE_UP = FUSED


class Attention(Protocol):
    """Attention of one forward pass, called once a layer, in order."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend with the new rows of this member.

        Called with 0 rows too: a member that holds KV but has no rows still takes part in the exchange.

        Args:
            layer: Number of the layer, from 0.
            q: [rows, num_q_heads, head_dim], rotated. The last two dimensions are contiguous; rows may lie further
                apart, since q, k and v can be views of one product. ``contiguous`` where a transport needs it.
            k: [rows, num_kv_heads, head_dim], rotated; likewise.
            v: [rows, num_kv_heads, head_dim]; likewise.

        Returns:
            [rows, num_q_heads, head_dim] in the dtype of q.
        """


class LlamaModel:
    """A decoder with its weights. Holds no state between calls, so several threads may use one.

    What it returns are inference tensors of torch: read them anywhere, change them under ``torch.inference_mode`` only.

    Args:
        config: The decoder's shape.
        weights: By Hugging Face name, as ``attach_weights`` gives them; fused ones are used where they are there. On
            the CPU they are used as they lie, without a copy.
        dtype: float32 or bfloat16, the dtype of the weights and of all activations.
        device: Where to compute; weights elsewhere are copied to it.

    Raises:
        ValueError: a weight is missing, or of another dtype.
    """

    def __init__(
        self, config: ModelConfig, weights: Mapping[str, Tensor], *, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.device = torch.device(device)

        def take(name: str) -> Tensor:
            if name not in weights:
                raise ValueError(f"weight {name} is missing from {len(weights)} weights")
            if weights[name].dtype != dtype:
                raise ValueError(f"weight {name} is {weights[name].dtype}, expected {dtype}")
            return weights[name].to(self.device)

        def take_parts(prefix: str, fused: str) -> list[Tensor]:
            """One fused weight where there is one, else its parts."""
            names = (fused,) if prefix + fused in weights else FUSED[fused]
            return [take(prefix + name) for name in names]

        self._embedding = take("model.embed_tokens.weight")
        self._layers = [
            _Layer(
                input_norm=take(prefix + "input_layernorm.weight"),
                qkv=take_parts(prefix, _QKV),
                output=take(prefix + "self_attn.o_proj.weight"),
                post_norm=take(prefix + "post_attention_layernorm.weight"),
                gate_up=take_parts(prefix, _GATE_UP),
                down=take(prefix + "mlp.down_proj.weight"),
            )
            for prefix in (f"model.layers.{layer}." for layer in range(config.num_layers))
        ]
        self._norm = take("model.norm.weight")
        self._head = self._embedding if config.tie_word_embeddings else take("lm_head.weight")
        self._cos, self._sin = _rope_tables(config, self.device)

    @torch.inference_mode()
    def forward(self, tokens: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """Run all layers over some rows.

        Args:
            tokens: [rows] int64; rows may be 0.
            positions: [rows] int64, each token's position in its request, below ``config.max_positions``.
            attention: Called once a layer.

        Returns:
            [rows, hidden_size], before the final norm, which ``logits`` applies to the rows that it is given.
        """
        config = self.config
        eps, head_dim = config.rms_norm_eps, config.head_dim
        heads = (config.num_q_heads, config.num_kv_heads, config.num_kv_heads)
        hidden = functional.embedding(tokens, self._embedding)
        update: Tensor | None = None
        for index, layer in enumerate(self._layers):
            if update is None:
                x = rms_norm(hidden, layer.input_norm, eps)
            else:
                x = rms_norm(update, layer.input_norm, eps, residual=hidden, out=update)
            q, k, v = self._project_heads(x, layer.qkv, heads, positions)
            attended = attention(index, q, k, v)
            update = functional.linear(attended.reshape(-1, heads[0] * head_dim), layer.output)
            x = rms_norm(update, layer.post_norm, eps, residual=hidden, out=update)
            update = functional.linear(silu_and_mul(_linear_parts(x, layer.gate_up)), layer.down)
        return hidden if update is None else hidden.add_(update)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of rows of ``forward``'s result: [n, hidden_size] to float32 [n, vocab_size]."""
        x = rms_norm(hidden, self._norm, self.config.rms_norm_eps)
        return functional.linear(x, self._head).float()

    def _project_heads(
        self, x: Tensor, weights: Sequence[Tensor], heads: tuple[int, int, int], positions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The rows' q, k and v, q and k rotated."""
        head_dim, num_rotated = self.config.head_dim, heads[0] + heads[1]
        if len(weights) == 1:
            qkv = functional.linear(x, weights[0]).view(-1, sum(heads), head_dim)
            # Heads of q and k lie side by side: one call rotates both.
            apply_rope(qkv[:, :num_rotated], self._cos, self._sin, positions)
            return qkv[:, : heads[0]], qkv[:, heads[0] : num_rotated], qkv[:, num_rotated:]
        q, k, v = (
            functional.linear(x, weight).view(-1, num, head_dim) for weight, num in zip(weights, heads, strict=True)
        )
        apply_rope(q, self._cos, self._sin, positions)
        apply_rope(k, self._cos, self._sin, positions)
        return q, k, v


@dataclass(frozen=True, slots=True)
class _Layer:
    """The weights of one layer; linear ones are [out, in], ``qkv`` and ``gate_up`` one fused weight or its parts."""

    input_norm: Tensor
    qkv: list[Tensor]
    output: Tensor
    post_norm: Tensor
    gate_up: list[Tensor]
    down: Tensor


def _linear_parts(x: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """x times each weight, side by side: [rows, sum of out]."""
    if len(weights) == 1:
        return functional.linear(x, weights[0])
    out = torch.empty(x.shape[0], sum(len(weight) for weight in weights), dtype=x.dtype, device=x.device)
    begin = 0
    for weight in weights:
        torch.mm(x, weight.t(), out=out[:, begin : begin + len(weight)])
        begin += len(weight)
    return out


def _rope_tables(config: ModelConfig, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin [max_positions, head_dim // 2] float32, in transformers' order of operations."""
    inv_freq = torch.tensor(config.rope_inv_freq, dtype=torch.float32, device=device)
    angles = torch.arange(config.max_positions, device=device).float()[:, None] * inv_freq
    return angles.cos() * config.rope_scale, angles.sin() * config.rope_scale
