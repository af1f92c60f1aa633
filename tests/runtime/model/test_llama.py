"""The decoder's logits against transformers, at every position."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from loongserve.runtime.model.config import ModelConfig
from loongserve.runtime.model.llama import LlamaModel
from loongserve.runtime.model.source import Model, open_model
from loongserve.runtime.model.weights import attach_weights

# Of the largest logit: what float32 leaves between two orders of summation.
TOLERANCE = 3e-5

ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64},
}


def load(model: Model, dtype: torch.dtype = torch.float32) -> LlamaModel:
    """The decoder over attached weights; the parent's hold is let go of at once."""
    shared = model.share_weights(dtype)
    weights = attach_weights(shared.describe())
    shared.close()
    return LlamaModel(model.config, weights, dtype=dtype, device="cpu")


def reference_logits(reference: Any, tokens: Tensor, implementation: str = "eager") -> Tensor:
    """Logits of a transformers model for one sequence, float32 [tokens, vocab]."""
    reference.set_attn_implementation(implementation)
    with torch.inference_mode():
        logits: Tensor = reference(tokens[None]).logits[0].float()
    return logits


def open_reference(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """transformers' model of a folder."""
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def relative_error(got: Tensor, expected: Tensor) -> float:
    """Largest difference at any position, over that position's largest logit."""
    return ((got - expected).abs().amax(-1) / expected.abs().amax(-1)).max().item()


def some_tokens(count: int, config: ModelConfig) -> Tensor:
    """Random token ids, the same in every run."""
    return torch.randint(0, config.vocab_size, (count,), generator=torch.Generator().manual_seed(1))


@pytest.mark.timeout(240)
def test_embedded_model_agrees_with_transformers(embedded_reference: Any, causal_attention: Any) -> None:
    model = open_model()
    tokens = some_tokens(300, model.config)
    decoder = load(model)
    got = decoder.logits(decoder.forward(tokens, torch.arange(300), causal_attention))
    assert got.dtype == torch.float32
    for implementation in ("eager", "sdpa"):
        assert relative_error(got, reference_logits(embedded_reference, tokens, implementation)) < TOLERANCE


@pytest.mark.timeout(60)
@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=["mapped", "converted"])
def test_small_models_agree_with_transformers(
    rope: str, stored: torch.dtype, save_tiny: Callable[..., Path], causal_attention: Any
) -> None:
    folder = save_tiny(dtype=stored, rope_parameters=ROPES[rope])
    model = open_model(folder)
    tokens = some_tokens(200, model.config)
    decoder = load(model)
    got = decoder.logits(decoder.forward(tokens, torch.arange(200), causal_attention))
    expected = reference_logits(open_reference(folder), tokens)
    assert relative_error(got, expected) < TOLERANCE


@pytest.mark.timeout(60)
def test_pieces_equal_the_whole(save_tiny: Callable[..., Path], causal_attention: Any) -> None:
    """A prefill in two chunks, then decode, with an empty call between: the same logits, one call a layer each time."""
    folder = save_tiny(tie_word_embeddings=True)
    model = open_model(folder)
    tokens = some_tokens(40, model.config)
    decoder = load(model)
    got = []
    for begin, end in [(0, 17), (17, 17), (17, 38), (38, 39), (39, 40)]:
        hidden = decoder.forward(tokens[begin:end], torch.arange(begin, end), causal_attention)
        assert hidden.shape == (end - begin, model.config.hidden_size)
        got.append(decoder.logits(hidden))
    assert causal_attention.calls[3:6] == [(0, 0), (1, 0), (2, 0)]
    assert relative_error(torch.cat(got), reference_logits(open_reference(folder), tokens, "sdpa")) < TOLERANCE


@pytest.mark.timeout(60)
def test_bfloat16_is_as_near_to_float32_as_transformers(save_tiny: Callable[..., Path], causal_attention: Any) -> None:
    folder = save_tiny(dtype=torch.bfloat16)
    model = open_model(folder)
    tokens = some_tokens(100, model.config)
    decoder = load(model, torch.bfloat16)
    got = decoder.logits(decoder.forward(tokens, torch.arange(100), causal_attention))
    exact = reference_logits(open_reference(folder), tokens)
    theirs = reference_logits(open_reference(folder, torch.bfloat16), tokens)
    assert got.dtype == torch.float32
    assert (got - exact).norm() < 1.2 * (theirs - exact).norm()


def test_missing_weight_and_wrong_dtype_are_named(save_tiny: Callable[..., Path]) -> None:
    model = open_model(save_tiny())
    weights = attach_weights(model.share_weights(torch.float32).describe())
    name = "model.layers.2.mlp.down_proj.weight"
    with pytest.raises(ValueError, match="layers.2.mlp.down_proj.weight is missing from".replace(".", r"\.")):
        LlamaModel(
            model.config,
            {key: value for key, value in weights.items() if key != name},
            dtype=torch.float32,
            device="cpu",
        )
    with pytest.raises(ValueError, match=r"is torch\.float32, expected torch\.bfloat16"):
        LlamaModel(model.config, weights, dtype=torch.bfloat16, device="cpu")
