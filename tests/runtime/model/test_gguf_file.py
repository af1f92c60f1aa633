"""GGUF files as llama.cpp's converter writes them: the permuted Q and K, kinds of blocks, rotary scaling."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from loongserve.runtime.model.source import open_model
from loongserve.runtime.model.weights import attach_weights

HIDDEN, INNER, VOCAB, HEADS, KV_HEADS, HEAD_DIM = 96, 64, 50, 6, 2, 32
Array = np.ndarray[Any, np.dtype[np.float32]]


def make_weights() -> dict[str, Array]:
    """A random one-layer model by Hugging Face names."""
    shapes = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "model.layers.0.input_layernorm.weight": (HIDDEN,),
        "model.layers.0.self_attn.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
        "model.layers.0.self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
        "model.layers.0.self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
        "model.layers.0.self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
        "model.layers.0.post_attention_layernorm.weight": (HIDDEN,),
        "model.layers.0.mlp.gate_proj.weight": (INNER, HIDDEN),
        "model.layers.0.mlp.up_proj.weight": (INNER, HIDDEN),
        "model.layers.0.mlp.down_proj.weight": (HIDDEN, INNER),
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (VOCAB, HIDDEN),
    }
    generator = np.random.default_rng(0)
    return {name: generator.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}


GGUF_NAMES = {
    "embed_tokens": "token_embd",
    "input_layernorm": "blk.0.attn_norm",
    "q_proj": "blk.0.attn_q",
    "k_proj": "blk.0.attn_k",
    "v_proj": "blk.0.attn_v",
    "o_proj": "blk.0.attn_output",
    "post_attention_layernorm": "blk.0.ffn_norm",
    "gate_proj": "blk.0.ffn_gate",
    "up_proj": "blk.0.ffn_up",
    "down_proj": "blk.0.ffn_down",
    "norm": "output_norm",
    "lm_head": "output",
}


def permute(weight: Array, heads: int) -> Array:
    """What llama.cpp's converter does to Q and K (``LlamaModel.permute``)."""
    return weight.reshape(heads, 2, -1, HIDDEN).swapaxes(1, 2).reshape(weight.shape)


@pytest.fixture
def write_gguf(tmp_path: Path) -> Callable[..., Path]:
    """``write_gguf(weights, kind, extra={name: array}, **metadata)`` writes a Llama."""

    def write(
        weights: dict[str, Array],
        kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
        extra: dict[str, Array] | None = None,
        **metadata: Any,
    ) -> Path:
        path = tmp_path / "model.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_block_count(1)
        writer.add_context_length(256)
        writer.add_embedding_length(HIDDEN)
        writer.add_feed_forward_length(INNER)
        writer.add_head_count(HEADS)
        writer.add_head_count_kv(KV_HEADS)
        writer.add_rope_dimension_count(HEAD_DIM)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_eos_token_id(3)
        for name, value in metadata.items():
            getattr(writer, f"add_{name}")(value)
        for name, weight in weights.items():
            stem = name.split(".")[-2]
            if stem in ("q_proj", "k_proj"):
                weight = permute(weight, HEADS if stem == "q_proj" else KV_HEADS)
            stored = kind if weight.ndim == 2 else gguf.GGMLQuantizationType.F32
            writer.add_tensor(f"{GGUF_NAMES[stem]}.weight", gguf.quantize(weight, stored), raw_dtype=stored)
        for name, weight in (extra or {}).items():
            writer.add_tensor(name, weight)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q5_1", "Q4_0"])
def test_weights_come_back_in_hugging_face_layout(kind: str, write_gguf: Callable[..., Path]) -> None:
    """As the blocks say: to the bit what ``gguf`` itself makes of the unpermuted weight."""
    weights, stored = make_weights(), gguf.GGMLQuantizationType[kind]
    model = open_model(write_gguf(weights, stored))
    assert (model.config.stored_as, model.config.tie_word_embeddings) == (kind, False)
    shared = model.share_weights(torch.float32)
    attached = attach_weights(shared.describe())
    shared.close()
    for name, weight in weights.items():
        expected = weight if weight.ndim == 1 else gguf.dequantize(gguf.quantize(weight, stored), stored)
        assert np.array_equal(attached[name].numpy(), expected.reshape(weight.shape)), name


def test_without_an_output_matrix_embeddings_are_tied(write_gguf: Callable[..., Path]) -> None:
    weights = make_weights()
    del weights["lm_head.weight"]
    model = open_model(write_gguf(weights))
    assert model.config.tie_word_embeddings
    assert "lm_head.weight" not in model.share_weights(torch.float32).describe()["tensors"]


def test_rope_factors_divide_the_frequencies(write_gguf: Callable[..., Path]) -> None:
    """The form that Llama 3.1's scaling takes in a GGUF file."""
    factors = np.linspace(1, 8, HEAD_DIM // 2, dtype=np.float32)
    config = open_model(write_gguf(make_weights(), extra={"rope_freqs.weight": factors}, rope_freq_base=5e5)).config
    expected = 5e5 ** (-np.arange(0, HEAD_DIM, 2) / HEAD_DIM) / factors
    assert np.allclose(config.rope_inv_freq, expected, rtol=1e-6)


def test_linear_rope_scaling(write_gguf: Callable[..., Path]) -> None:
    metadata = {"rope_scaling_type": gguf.RopeScalingType.LINEAR, "rope_scaling_factor": 4.0}
    config = open_model(write_gguf(make_weights(), **metadata)).config
    expected = 10000.0 ** (-np.arange(0, HEAD_DIM, 2) / HEAD_DIM) / 4
    assert np.allclose(config.rope_inv_freq, expected, rtol=1e-6)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "experts": ({"expert_count": 8}, "8 experts a layer; supported: dense Llama"),
    "partial rope": ({"key_length": 64}, "32 rotated dimensions"),
    "longrope": ({"rope_scaling_type": gguf.RopeScalingType.LONGROPE}, "rope_type is 'longrope'; supported: default"),
    "unknown tensor": ({"extra": {"blk.0.attn_q.bias": np.ones(4, np.float32)}}, "among them blk.0.attn_q.bias"),
    "rope factors": ({"extra": {"rope_freqs.weight": np.ones(4, np.float32)}}, r"rope_freqs.weight is \(4,\)"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_unsupported_files_are_refused(case: str, write_gguf: Callable[..., Path]) -> None:
    options, message = REFUSED[case]
    path = write_gguf(make_weights(), **options)
    with pytest.raises(ValueError, match=message) as raised:
        open_model(path).share_weights(torch.float32)
    assert str(path) in str(raised.value)
