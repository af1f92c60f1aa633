"""EngineConfig: what is refused and how that is said; what auto becomes; the size of a pool."""

import dataclasses
from typing import Any

import pytest
import torch

from loongserve.runtime import config as config_module
from loongserve.runtime import wire
from loongserve.runtime.config import EngineConfig
from loongserve.runtime.model.config import ModelConfig

MODEL = ModelConfig(
    num_layers=4,
    hidden_size=64,
    intermediate_size=128,
    num_q_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=100,
    max_positions=2048,
    rms_norm_eps=1e-5,
    rope_inv_freq=(1.0,) * 8,
    rope_scale=1.0,
    tie_word_embeddings=True,
    eos_token_ids=(2,),
    stored_as="float32",
)
# K and V of 4 layers, 2 heads of 16, in float32.
TOKEN_BYTES = 2 * 4 * 2 * 16 * 4


@pytest.mark.parametrize(
    ("fields", "parts"),
    [
        ({"instances": 0}, ("instances", "at least 1", "0")),
        ({"tp": 0}, ("tp", "at least 1", "0")),
        ({"tp": 2}, ("tp", "does not work yet", "more instances", "2")),
        ({"policy": ""}, ("policy", "''", "elastic", "static")),
        ({"policy": "static", "policy_options": (("dops", 1),)}, ("policy", "dops", "dop")),
        ({"policy": "static", "policy_options": (("dop", "x"),)}, ("policy", "dop", "int", "'x'")),
        ({"policy": "static", "policy_options": (("dop", 0),)}, ("policy", "dop", "at least 1", "0")),
        ({"kv_tokens": 0}, ("kv_tokens", "at least 1", "0")),
        ({"max_model_len": -1}, ("max_model_len", "at least 1", "-1")),
        ({"control_interval_ms": 0}, ("control_interval_ms", "at least 1", "0")),
        ({"device": "cuda"}, ("device", "auto or cpu", "no transport", "cuda")),
        ({"device": "tpu"}, ("device", "auto, cpu or cuda", "tpu")),
        ({"dtype": "float64"}, ("dtype", "bfloat16", "float64")),
        ({"transport": "tcp"}, ("transport", "auto, shm or gloo", "tcp")),
        ({"model": "/no/such/model"}, ("model", "/no/such/model", "does not exist")),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_bad_values_are_named(fields: dict[str, Any], parts: tuple[str, ...]) -> None:
    with pytest.raises(ValueError) as caught:
        EngineConfig(**fields).validate()
    assert all(part in str(caught.value) for part in parts)


def test_auto_is_resolved() -> None:
    config = EngineConfig()
    config.validate()
    assert (config.compute_device, config.compute_dtype) == ("cpu", "float32")
    assert EngineConfig(dtype="bfloat16").compute_dtype == "bfloat16"


def test_slots_an_instance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_module, "_free_memory_bytes", lambda: 1 << 40)
    cpu = EngineConfig(device="cpu", instances=2)
    assert cpu.slots_an_instance(MODEL) == 2048
    assert dataclasses.replace(cpu, max_model_len=500).slots_an_instance(MODEL) == 500
    assert dataclasses.replace(cpu, max_model_len=5000).slots_an_instance(MODEL) == 2048
    assert dataclasses.replace(cpu, kv_tokens=77).slots_an_instance(MODEL) == 77
    # Half of what is free holds 100 tokens on each of 2 instances.
    monkeypatch.setattr(config_module, "_free_memory_bytes", lambda: 2 * 2 * 100 * TOKEN_BYTES)
    assert cpu.slots_an_instance(MODEL) == 100
    assert dataclasses.replace(cpu, dtype="bfloat16").slots_an_instance(MODEL) == 200
    monkeypatch.setattr(config_module, "_free_memory_bytes", lambda: 1000)
    with pytest.raises(ValueError, match="fewer instances"):
        cpu.slots_an_instance(MODEL)


def test_slots_of_instances_that_share_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of what the device has, not the host, in equal parts."""
    monkeypatch.setattr(config_module, "_free_memory_bytes", lambda: 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2 * 3 * 50 * TOKEN_BYTES, 1 << 40))
    assert EngineConfig(device="cuda", instances=3).slots_an_instance(MODEL) == 50


def test_free_memory_is_measured() -> None:
    assert (64 << 20) < config_module._free_memory_bytes() < (1 << 50)


def test_goes_over_the_wire() -> None:
    config = EngineConfig(model="m", policy_options=(("dop", 2), ("ratio", 0.5), ("on", True), ("kind", "x")))
    assert EngineConfig(**wire.decode(wire.encode(dataclasses.asdict(config)))) == config
