"""One copy of the weights, equal to the file's, for any number of processes."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from loongserve.runtime.model.source import open_model
from loongserve.runtime.model.weights import FUSED, attach_weights

# Attaches by a description on stdin, and says what it sees.
CHILD = """
import json, sys
from loongserve.runtime.model.weights import attach_weights
weights = attach_weights(json.load(sys.stdin))
print(json.dumps({name: weight.double().sum().item() for name, weight in weights.items()}))
"""


def mapping_sizes_kb(address: int) -> dict[str, int]:
    """The kernel's account of this process's mapping around an address: Rss, Anonymous and so on."""
    sizes: dict[str, int] = {}
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        key, *values = line.split()
        if not key.endswith(":"):
            begin, end = (int(number, 16) for number in key.split("-"))
            inside = begin <= address < end
        elif inside and values[-1] == "kB":
            sizes[key[:-1]] = int(values[0])
    return sizes


@pytest.mark.timeout(240)
def test_embedded_weights_equal_transformers_to_the_bit(embedded_reference: Any) -> None:
    shared = open_model().share_weights(torch.float32)
    weights = attach_weights(shared.describe())
    shared.close()
    for name, expected in embedded_reference.named_parameters():
        assert torch.equal(weights[name], expected), name
    for layer in (0, 29):
        for fused, parts in FUSED.items():
            prefix = f"model.layers.{layer}."
            assert torch.equal(weights[prefix + fused], torch.cat([weights[prefix + part] for part in parts]))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16], ids=["f32", "bf16", "f16"])
def test_folder_weights_equal_the_checkpoint(
    stored: torch.dtype, dtype: torch.dtype, save_tiny: Callable[..., Path]
) -> None:
    """In shards; mapped where the dtype is the same, converted once where it is not."""
    folder = save_tiny(dtype=stored, max_shard_size="60KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    shared = open_model(folder).share_weights(dtype)
    assert len(shared.fds) == (0 if stored == dtype else 1)
    weights = attach_weights(shared.describe())
    shared.close()
    from transformers import LlamaForCausalLM

    for name, expected in LlamaForCausalLM.from_pretrained(folder, dtype=stored).named_parameters():
        assert torch.equal(weights[name], expected.to(dtype)), name


@pytest.mark.timeout(120)
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=["mapped", "converted"])
def test_other_processes_attach(stored: torch.dtype, save_tiny: Callable[..., Path]) -> None:
    shared = open_model(save_tiny(dtype=stored)).share_weights(torch.float32)
    # JSON stands for any wire: lists come back where tuples went in.
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", CHILD],
        input=json.dumps(shared.describe()),
        pass_fds=shared.fds,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    )
    mine = attach_weights(shared.describe())
    shared.close()
    assert json.loads(result.stdout) == {name: weight.double().sum().item() for name, weight in mine.items()}


def test_a_writer_changes_no_one_else(save_tiny: Callable[..., Path]) -> None:
    """The memory is sealed: neither a write to an attached tensor nor one to the descriptor reaches the others."""
    shared = open_model(save_tiny()).share_weights(torch.bfloat16)
    first, second = attach_weights(shared.describe()), attach_weights(shared.describe())
    before = second["model.norm.weight"].clone()
    first["model.norm.weight"].zero_()
    assert torch.equal(second["model.norm.weight"], before)
    with pytest.raises(PermissionError):
        os.pwrite(shared.fds[0], b"0", 0)
    shared.close()
    shared.close()
    assert torch.equal(second["model.norm.weight"], before)


def test_attached_memory_is_shared(save_tiny: Callable[..., Path]) -> None:
    """Reading all weights copies no page: none of the mapping is memory of the process's own."""
    shared = open_model(save_tiny(hidden_size=256, intermediate_size=2048)).share_weights(torch.bfloat16)
    weights = attach_weights(shared.describe())
    num_bytes = sum(weight.nbytes for name, weight in weights.items() if "qkv" not in name and "gate_up" not in name)
    assert all(weight.isfinite().all() for weight in weights.values())
    sizes = mapping_sizes_kb(weights["model.norm.weight"].data_ptr())
    shared.close()
    assert sizes["Rss"] * 1024 >= num_bytes
    assert sizes["Anonymous"] == 0


def test_a_changed_file_is_named(save_tiny: Callable[..., Path]) -> None:
    folder = save_tiny()
    shared = open_model(folder).share_weights(torch.float32)
    os.truncate(folder / "model.safetensors", 1000)
    with pytest.raises(ValueError, match=r"model\.safetensors: .* the file has changed"):
        attach_weights(shared.describe())


def test_a_dtype_that_is_not_computed_in_is_refused(save_tiny: Callable[..., Path]) -> None:
    with pytest.raises(ValueError, match=r"float32 or bfloat16, got torch\.float16"):
        open_model(save_tiny()).share_weights(torch.float16)
