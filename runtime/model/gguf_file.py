"""Read a GGUF file of Llama architecture: config values, and weights by their Hugging Face names.

Blocks are unpacked by ``gguf.quants``, the code that transformers uses too, so the weights are equal to the last bit.
"""

import dataclasses
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from loongserve.runtime.model.config import ModelConfig, make_config
from loongserve.runtime.model.gguf_header import TensorEntry, map_gguf, read_gguf_header

_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.weight")
# Divisors of the rotary frequencies, in files of Llama 3.1 and later.
_ROPE_FACTORS = "rope_freqs.weight"


@dataclass(frozen=True, slots=True)
class _Tensor:
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    # Bytes from the start of the file.
    offset: int
    num_bytes: int


class GGUFFile:
    """An open GGUF file. ``shapes`` and ``read`` go by Hugging Face parameter names.

    Raises:
        ValueError: not a GGUF file, cut short, not of Llama architecture, or with tensors of an unknown kind.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        header = read_gguf_header(path)
        self.metadata = header.metadata
        architecture = self.metadata.get("general.architecture")
        if architecture != "llama":
            raise ValueError(f"{path}: general.architecture is {architecture!r}; supported: 'llama'")
        if self.metadata.get("split.count", 1) > 1:
            raise ValueError(
                f"{path}: one of {self.metadata['split.count']} parts of a model; supported: a single file"
            )
        self._map = map_gguf(path)
        tensors = {name: self._locate(name, entry) for name, entry in header.tensors.items()}
        self._rope_factors = tensors.pop(_ROPE_FACTORS, None)
        self._stored = {_hugging_face_name(name): tensor for name, tensor in tensors.items()}
        self.config = self._read_config()
        self._permuted = {"q_proj": self.config.num_q_heads, "k_proj": self.config.num_kv_heads}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each parameter in the file."""
        return {name: tensor.shape for name, tensor in self._stored.items()}

    def read(self, name: str, begin: int, end: int) -> torch.Tensor:
        """Rows [begin, end) of a parameter, unpacked; a vector is one row. Float32 [rows, columns].

        Raises:
            ValueError: the gguf library cannot unpack this kind of tensor.
        """
        tensor = self._stored[name]
        num_rows = math.prod(tensor.shape[:-1])
        blocks = self._bytes(tensor).reshape(num_rows, -1)
        heads = self._permuted.get(name.split(".")[-2])
        blocks = blocks[begin:end] if heads is None else blocks[_half_split_rows(num_rows, heads)[begin:end]]
        return torch.from_numpy(self._unpack(name, blocks, tensor.kind))

    def _locate(self, name: str, entry: TensorEntry) -> _Tensor:
        if entry.kind not in GGML_QUANT_SIZES:
            raise ValueError(f"{self.path}: {name} is stored as GGML type {entry.kind}, unknown to the installed gguf")
        block_weights, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(entry.kind)]
        shape, end = entry.shape, entry.offset + math.prod(entry.shape) // block_weights * block_bytes
        if not shape or shape[-1] % block_weights or end > len(self._map):
            raise ValueError(
                f"{self.path}: {name} {list(shape)} is said to take bytes {entry.offset} to {end} of {len(self._map)}, "
                f"in blocks of {block_weights} weights: the file is cut short or damaged"
            )
        return _Tensor(shape, GGMLQuantizationType(entry.kind), entry.offset, end - entry.offset)

    def _bytes(self, tensor: _Tensor) -> "np.ndarray[Any, np.dtype[np.uint8]]":
        return np.frombuffer(self._map, dtype=np.uint8, count=tensor.num_bytes, offset=tensor.offset)

    def _unpack(self, name: str, blocks: "np.ndarray[Any, Any]", kind: GGMLQuantizationType) -> "np.ndarray[Any, Any]":
        # The library tells rows from their last dimension in bytes, and plain floats by their own dtype.
        plain = {GGMLQuantizationType.F32: np.float32, GGMLQuantizationType.F16: np.float16}
        if kind in plain:
            return blocks.view(plain[kind]).astype(np.float32)
        try:
            return np.ascontiguousarray(dequantize(blocks, kind), dtype=np.float32)
        except NotImplementedError as error:
            raise ValueError(f"{self.path}: {name} is stored as {kind.name}, which gguf cannot unpack") from error

    def _read_config(self) -> ModelConfig:
        data, path = self.metadata, self.path

        def need(key: str) -> Any:
            if f"llama.{key}" not in data:
                raise ValueError(f"{path}: the GGUF header has no llama.{key}")
            return data[f"llama.{key}"]

        if data.get("llama.expert_count"):
            raise ValueError(f"{path}: {data['llama.expert_count']} experts a layer; supported: dense Llama")
        embedding = self._stored.get("model.embed_tokens.weight")
        if embedding is None:
            raise ValueError(f"{path}: the file has no tensor token_embd.weight")
        num_heads, hidden = need("attention.head_count"), need("embedding_length")
        rotated = data.get("llama.rope.dimension_count", hidden // num_heads)
        head_dim = data.get("llama.attention.key_length", rotated)
        if rotated != head_dim or data.get("llama.attention.value_length", head_dim) != head_dim:
            raise ValueError(
                f"{path}: {rotated} rotated dimensions and values of {data.get('llama.attention.value_length')} for "
                f"keys of {head_dim}; supported: all three equal"
            )
        values = {
            "model_type": "llama",
            "num_hidden_layers": need("block_count"),
            "hidden_size": hidden,
            "intermediate_size": need("feed_forward_length"),
            "num_attention_heads": num_heads,
            "num_key_value_heads": data.get("llama.attention.head_count_kv", num_heads),
            "head_dim": head_dim,
            "vocab_size": embedding.shape[0],
            "max_position_embeddings": need("context_length"),
            "rms_norm_eps": need("attention.layer_norm_rms_epsilon"),
            "rope_parameters": self._rope_parameters(),
            "tie_word_embeddings": "lm_head.weight" not in self._stored,
            "eos_token_id": self._eos_token_ids(),
        }
        kinds = [tensor.kind.name for tensor in self._stored.values()]
        config = make_config(values, origin=path, stored_as=max(set(kinds), key=kinds.count))
        return self._with_rope_factors(config)

    def _rope_parameters(self) -> dict[str, Any]:
        """The rotary embedding in Hugging Face words."""
        data = self.metadata
        parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": data.get("llama.rope.freq_base", 10000.0)}
        scaling = data.get("llama.rope.scaling.type", "none")
        if scaling != "none":
            # An unknown type is refused with the supported ones by make_config.
            parameters |= {"rope_type": scaling, "factor": data.get("llama.rope.scaling.factor")}
        if scaling == "yarn" and "llama.rope.scaling.original_context_length" in data:
            parameters["original_max_position_embeddings"] = data["llama.rope.scaling.original_context_length"]
        return parameters

    def _eos_token_ids(self) -> list[int]:
        keys = ("eos_token_id", "eot_token_id", "eom_token_id")
        found = (self.metadata.get(f"tokenizer.ggml.{key}") for key in keys)
        return list(dict.fromkeys(token for token in found if token is not None))

    def _with_rope_factors(self, config: ModelConfig) -> ModelConfig:
        tensor = self._rope_factors
        if tensor is None:
            return config
        factors = self._unpack(_ROPE_FACTORS, self._bytes(tensor), tensor.kind)
        if factors.shape != (config.head_dim // 2,):
            raise ValueError(f"{self.path}: {_ROPE_FACTORS} is {factors.shape}, expected ({config.head_dim // 2},)")
        inv_freq = np.asarray(config.rope_inv_freq, dtype=np.float32) / factors
        return dataclasses.replace(config, rope_inv_freq=tuple(inv_freq.tolist()))


def _hugging_face_name(name: str) -> str:
    """The Hugging Face name; one without a counterpart is kept, and refused with the other unexpected names later."""
    match = _LAYER.fullmatch(name)
    if match and match[2] in _LAYER_NAMES:
        return f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.weight"
    return _NAMES.get(name, name)


def _half_split_rows(num_rows: int, heads: int) -> "np.ndarray[Any, np.dtype[np.int64]]":
    """For each row of a Q or K weight in Hugging Face order, its row in the file.

    Hugging Face rotates dimension i of a head with i + head_dim / 2, llama.cpp with its neighbour: its converter moved
    rows i and i + head_dim / 2 beside each other.
    """
    return np.arange(num_rows).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)
