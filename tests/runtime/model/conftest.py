"""Small Llama checkpoints, made by transformers, and a plain causal attention for one sequence."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from loongserve.runtime.model.embedded import find_embedded_model

# Grouped heads, head_dim that is not hidden / heads, untied embeddings, sizes that are no powers of two.
TINY: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 88,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
    "rope_theta": 10000.0,
}


@pytest.fixture(scope="session")
def save_tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``save_tiny(dtype=..., max_shard_size=..., **config changes)``: a folder with a random Llama."""
    from transformers import LlamaConfig, LlamaForCausalLM

    def save(dtype: torch.dtype = torch.float32, max_shard_size: str = "5GB", **changes: Any) -> Path:
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**(TINY | changes), initializer_range=0.2)).to(dtype)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if "norm" in name:
                    weight.uniform_(0.5, 1.5)
        folder = tmp_path_factory.mktemp("tiny")
        model.save_pretrained(folder, max_shard_size=max_shard_size)
        return folder

    return save


@pytest.fixture(scope="session")
def embedded_reference() -> Any:
    """The embedded model as transformers reads it, in float32; takes half a minute to load."""
    from transformers import GgufConfig, LlamaForCausalLM

    path = find_embedded_model()
    model = LlamaForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    return model.eval()


class CausalAttention:
    """Causal attention over one sequence given in pieces; keeps the K and V that it has seen, a layer each."""

    def __init__(self) -> None:
        self.seen: dict[int, tuple[Tensor, Tensor]] = {}
        self.calls: list[tuple[int, int]] = []

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.calls.append((layer, len(q)))
        if layer in self.seen:
            k, v = torch.cat([self.seen[layer][0], k]), torch.cat([self.seen[layer][1], v])
        self.seen[layer] = (k, v)
        begin = len(k) - len(q)
        mask = torch.arange(len(k)) <= torch.arange(begin, len(k))[:, None]
        heads_first = (tensor.transpose(0, 1)[None] for tensor in (q, k, v))
        out = functional.scaled_dot_product_attention(*heads_first, attn_mask=mask, enable_gqa=True)
        return out[0].transpose(0, 1)


@pytest.fixture
def causal_attention() -> CausalAttention:
    """A fresh attention without history."""
    return CausalAttention()
