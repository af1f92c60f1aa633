"""Which provider is chosen, and that all have the same functions."""

import inspect
import subprocess
import sys

import pytest
import torch

from loongserve.kernels.paged import plan_paged_attention
from loongserve.kernels.provider import ENVIRONMENT_VARIABLE, KernelProvider, get_provider, load_provider, provider_name
from loongserve.kernels.striped import plan_striped_attention

PUBLIC_MODULES = ["state", "merge", "striped", "paged", "kv", "norm", "rope", "activation", "positional", "provider"]
ATTENTION = {"num_q_heads": 2, "num_kv_heads": 1, "head_dim": 64, "dtype": torch.float32, "device": "cpu"}


@pytest.fixture(autouse=True)
def no_choice(monkeypatch):
    monkeypatch.delenv(ENVIRONMENT_VARIABLE, raising=False)


@pytest.mark.parametrize(("device", "name"), [("cpu", "cpu"), ("cuda:1", "triton")])
def test_device_decides(device, name):
    assert provider_name(torch.device(device)) == name


def test_environment_decides_at_call_time(monkeypatch):
    for name in ("reference", "cpu", "triton"):
        monkeypatch.setenv(ENVIRONMENT_VARIABLE, name)
        assert provider_name(torch.device("cpu")) == name
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "reference")
    assert get_provider(torch.device("cpu")).__name__ == "loongserve.kernels.reference"


def test_unknown_names_and_devices(monkeypatch):
    with pytest.raises(ValueError, match="no kernel provider for device meta"):
        provider_name(torch.device("meta"))
    with pytest.raises(ValueError, match="must be one of triton, cpu, reference, flash-attn, got 'cuda'"):
        load_provider("cuda")
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "cuda")
    with pytest.raises(ValueError, match="LOONG_KERNELS must be one of triton, cpu, reference, flash-attn, got 'cuda'"):
        provider_name(torch.device("cpu"))
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "cpu")
    with pytest.raises(ValueError, match="cpu provider needs tensors on cpu, got cuda"):
        provider_name(torch.device("cuda"))


@pytest.mark.parametrize("name", ["reference", "cpu", "triton"])
def test_plan_remembers_its_provider(name, monkeypatch):
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, name)
    assert plan_striped_attention([0, 1], [0, 1], [0], **ATTENTION).provider == name
    assert plan_paged_attention([0, 1], [torch.arange(1)], **ATTENTION).provider == name


@pytest.mark.parametrize("name", ["reference", "cpu", "triton", "flash-attn"])
def test_provider_has_the_functions_of_the_protocol(name):
    provider = load_provider(name)
    functions = {name: member for name, member in vars(KernelProvider).items() if inspect.isfunction(member)}
    for function, declared in functions.items():
        if function.startswith("_"):
            continue
        expected = list(inspect.signature(declared).parameters.values())[1:]
        actual = list(inspect.signature(getattr(provider, function)).parameters.values())
        # A provider may have options of its own after these.
        assert [(p.name, p.kind) for p in actual[: len(expected)]] == [(p.name, p.kind) for p in expected], function
        assert all(p.default is not p.empty for p in actual[len(expected) :]), function


def test_import_chooses_and_queries_nothing():
    """Importing the public modules imports no provider and no triton and starts no GPU, whatever the environment."""
    program = "\n".join(
        [
            "import sys",
            *(f"import loongserve.kernels.{module}" for module in PUBLIC_MODULES),
            "import torch",
            "assert not torch.cuda.is_initialized()",
            "providers = ('triton_provider', 'cpu', 'reference')",
            "loaded = [name for name in providers if f'loongserve.kernels.{name}' in sys.modules]",
            "assert not loaded, loaded",
            "assert 'triton' not in sys.modules",
            "assert 'loongserve.kernels.torch_ops' not in sys.modules",
        ]
    )
    environment = {ENVIRONMENT_VARIABLE: "nonsense", "PYTHONPATH": ":".join(sys.path)}
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120, env=environment)
