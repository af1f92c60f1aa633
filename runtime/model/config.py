"""The numbers that define a Llama decoder, read from a Hugging Face ``config.json`` or a GGUF header.

transformers checks the config and computes the rotary frequencies; what a rank needs is then a few plain values, so
that rank processes start without transformers.
"""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Types whose frequencies do not change with the length of the sequence, so that one table serves every request.
ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A Llama decoder's shape. All values are plain, so ``to_dict`` can go over any wire."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    # Positions run from 0 to max_positions - 1.
    max_positions: int
    rms_norm_eps: float
    # [head_dim // 2] radians a position, exact float32 values; cos and sin are multiplied by rope_scale.
    rope_inv_freq: tuple[float, ...]
    rope_scale: float
    tie_word_embeddings: bool
    # Any of these ends an answer.
    eos_token_ids: tuple[int, ...]
    # What most weights in the file are stored as, for people: "bfloat16", "Q4_1".
    stored_as: str

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain values; ``from_dict`` takes them back, also after tuples became lists."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "ModelConfig":
        """Build the config that ``to_dict`` gave."""
        fields: dict[str, Any] = dict(values)
        for name in ("rope_inv_freq", "eos_token_ids"):
            fields[name] = tuple(fields[name])
        return cls(**fields)

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every parameter by its Hugging Face name, with its shape; linear weights are [out, in]."""
        q_size, kv_size = self.num_q_heads * self.head_dim, self.num_kv_heads * self.head_dim
        hidden, inner = self.hidden_size, self.intermediate_size
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab_size, hidden)}
        for layer in range(self.num_layers):
            prefix = f"model.layers.{layer}."
            shapes[prefix + "input_layernorm.weight"] = (hidden,)
            shapes[prefix + "self_attn.q_proj.weight"] = (q_size, hidden)
            shapes[prefix + "self_attn.k_proj.weight"] = (kv_size, hidden)
            shapes[prefix + "self_attn.v_proj.weight"] = (kv_size, hidden)
            shapes[prefix + "self_attn.o_proj.weight"] = (hidden, q_size)
            shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
            shapes[prefix + "mlp.gate_proj.weight"] = (inner, hidden)
            shapes[prefix + "mlp.up_proj.weight"] = (inner, hidden)
            shapes[prefix + "mlp.down_proj.weight"] = (hidden, inner)
        shapes["model.norm.weight"] = (hidden,)
        if not self.tie_word_embeddings:
            shapes["lm_head.weight"] = (self.vocab_size, hidden)
        return shapes


def make_config(values: Mapping[str, Any], *, origin: Path, stored_as: str) -> ModelConfig:
    """Check the values of a ``config.json`` of Llama architecture and turn them into a ``ModelConfig``.

    Args:
        values: Keys as in a Hugging Face ``config.json``.
        origin: The file they are from, for messages.
        stored_as: Dtype of the weights in the file.

    Raises:
        ValueError: not a Llama decoder, or one that uses what is not supported here.
    """
    # Here, not at the top: transformers takes a second to import and rank processes need only ModelConfig.
    from transformers import LlamaConfig

    if values.get("model_type") != "llama":
        raise ValueError(f"{origin}: model_type is {values.get('model_type')!r}; supported: 'llama' (LlamaForCausalLM)")
    architectures = values.get("architectures") or ["LlamaForCausalLM"]
    if "LlamaForCausalLM" not in architectures:
        raise ValueError(f"{origin}: architectures are {architectures}; supported: LlamaForCausalLM")
    if values.get("quantization_config"):
        method = values["quantization_config"].get("quant_method")
        raise ValueError(f"{origin}: weights are quantised by {method!r}; supported: plain safetensors, or a GGUF file")
    for switch in ("attention_bias", "mlp_bias"):
        if values.get(switch):
            raise ValueError(f"{origin}: {switch} is true; supported: Llama without biases")
    rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type not in ROPE_TYPES:
        raise ValueError(f"{origin}: rope_type is {rope_type!r}; supported: {', '.join(ROPE_TYPES)}")
    try:
        config: Any = LlamaConfig(**values)
    # transformers raises errors of huggingface_hub's validation that are no ValueError.
    except Exception as error:
        raise ValueError(f"{origin}: transformers refuses this config: {error}") from error
    if config.hidden_act != "silu":
        raise ValueError(f"{origin}: hidden_act is {config.hidden_act!r}; supported: 'silu'")
    if config.num_attention_heads % config.num_key_value_heads:
        raise ValueError(
            f"{origin}: num_attention_heads is {config.num_attention_heads}, expected a multiple of "
            f"num_key_value_heads, which is {config.num_key_value_heads}"
        )
    inv_freq, scale = _rope_frequencies(config, origin)
    eos = config.eos_token_id
    return ModelConfig(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_q_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        max_positions=config.max_position_embeddings,
        rms_norm_eps=config.rms_norm_eps,
        rope_inv_freq=inv_freq,
        rope_scale=scale,
        tie_word_embeddings=config.tie_word_embeddings,
        eos_token_ids=() if eos is None else (eos,) if isinstance(eos, int) else tuple(eos),
        stored_as=stored_as,
    )


def read_config_json(folder: Path) -> dict[str, Any]:
    """Read ``config.json``; where ``generation_config.json`` names end-of-sequence tokens, those stand.

    Raises:
        FileNotFoundError: no ``config.json``.
        ValueError: a file is not a JSON object.
    """
    values = read_json_object(folder / "config.json")
    generation = folder / "generation_config.json"
    if generation.exists():
        eos = read_json_object(generation).get("eos_token_id")
        if eos is not None:
            values["eos_token_id"] = eos
    return values


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file; a ValueError names the file."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: expected JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(values).__name__}")
    return values


def _rope_frequencies(config: Any, origin: Path) -> tuple[tuple[float, ...], float]:
    """Inverse frequencies [head_dim // 2] and the factor on cos and sin, as transformers computes them."""
    import torch
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope_type = config.rope_parameters["rope_type"]
    try:
        if rope_type == "default":
            base, dim = config.rope_parameters["rope_theta"], config.head_dim
            # Source: LlamaRotaryEmbedding.compute_default_rope_parameters, in the same order of operations.
            inv_freq = 1.0 / (base ** (torch.arange(0, dim, 2, dtype=torch.float) / dim))
            scale = 1.0
        else:
            inv_freq, scale = ROPE_INIT_FUNCTIONS[rope_type](config)
    except (KeyError, TypeError) as error:
        raise ValueError(f"{origin}: rope parameters {config.rope_parameters} are incomplete: {error!r}") from error
    if len(inv_freq) * 2 != config.head_dim:
        raise ValueError(
            f"{origin}: {len(inv_freq)} rotary frequencies for a head of {config.head_dim}, expected "
            f"{config.head_dim // 2}: rotation of a part of the head is not supported"
        )
    return tuple(inv_freq.float().tolist()), float(scale)
