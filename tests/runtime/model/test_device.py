"""Instances that share a device which is not the CPU, proven without one: tensors that say they lie elsewhere.

On a CPU, mixing tensors of two devices goes unnoticed. Here the tensors of "cuda" are CPU tensors of a class of their
own, and a torch function that gets some of them and some of the host's fails, as it would on a device.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from loongserve.policies.scripted import Script, ScriptedPolicy, all_on, histories
from loongserve.runtime.config import EngineConfig
from loongserve.runtime.engine import Engine, start_threads
from loongserve.runtime.instance import Instance

CUDA = torch.device("cuda", 0)


class DeviceTensor(Tensor):
    """A tensor on the pretended device."""


class PretendedDevice(TorchFunctionMode):
    """In this thread, device "cuda" is there: what is made on it or moved to it is a ``DeviceTensor``."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        on_device = [isinstance(tensor, DeviceTensor) for tensor in tensors]
        name = getattr(func, "__name__", "")
        if name == "__get__" and any(on_device) and getattr(func, "__self__", None) is Tensor.device:
            return CUDA
        target: torch.device | None = None
        if name == "to" and len(args) > 1 and isinstance(args[1], str | torch.device):
            target, args = torch.device(args[1]), (args[0], *args[2:])
            if not args[1:] and not kwargs:
                args = (*args, tensors[0].dtype)
        elif "device" in kwargs and kwargs["device"] is not None:
            target = torch.device(kwargs.pop("device"))
        elif name in ("cpu", "numpy", "tolist", "__bool__", "item", "__int__", "__float__"):
            if name == "numpy" and any(on_device):
                raise TypeError("can't convert a device tensor to numpy: use cpu() first")
            target = torch.device("cpu")
        # A copy may go from device to device; a scalar of the host may stand beside tensors of the device.
        mixed = {on for on, tensor in zip(on_device, tensors, strict=True) if tensor.dim()}
        if len(mixed) == 2 and name != "copy_":
            raise RuntimeError(f"{name}: expected all tensors to be on one device, but found cuda:0 and cpu")
        there = any(on_device[:1] if name == "copy_" else on_device) if target is None else target.type == "cuda"
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*tree_map(_host, args), **tree_map(_host, kwargs))
        return tree_map(_device, result) if there else result


def _host(value: Any) -> Any:
    return value.as_subclass(Tensor) if isinstance(value, DeviceTensor) else value


def _device(value: Any) -> Any:
    return value.as_subclass(DeviceTensor) if isinstance(value, Tensor) else value


@pytest.fixture
def start_on_device(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Start instances whose threads see the pretended device."""
    execute = Instance.execute

    def execute_there(self: Instance, *arguments: Any) -> None:
        with PretendedDevice():
            execute(self, *arguments)

    monkeypatch.setattr(Instance, "execute", execute_there)

    def start(*arguments: Any) -> Any:
        with PretendedDevice():
            return start_threads(*arguments)

    return start


def test_the_pretended_device_keeps_tensors_apart() -> None:
    with PretendedDevice():
        host, there = torch.arange(3), torch.ones(3, 2, device="cuda")
        assert (host.device.type, there.device, host.to("cuda").device) == ("cpu", CUDA, CUDA)
        assert there[host.to(CUDA)].device == CUDA
        assert (there + torch.tensor(1.0)).sum().tolist() == 12
        assert there.cpu().device.type == "cpu"
        assert host.copy_(there[:, 0]).device.type == "cpu"
        for mix in (lambda: there[host], lambda: torch.cat([there[:, 0], host]), lambda: there.add_(host[:2])):
            with pytest.raises(RuntimeError, match="one device"):
                mix()
        with pytest.raises(TypeError, match="cpu"):
            there.numpy()


def is_whole(engine: Engine) -> bool:
    """Whether all slots are free; they come back when the last iteration ends, shortly after its tokens."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        if all(i.free_slots == i.num_slots for i in engine.status().instances):
            return True
        time.sleep(0.01)
    return False


def as_floats(logits: bytes) -> Tensor:
    return torch.frombuffer(bytearray(logits), dtype=torch.float32)


def test_three_instances_on_one_device(
    save_tiny: Callable[..., Path], start_on_device: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same kernels on the same numbers: tokens and logits are those of the CPU.

    But for rounding: which requests share an iteration is a matter of time, and sums depend on it.
    """
    monkeypatch.setenv("LOONG_KERNELS", "reference")
    folder = str(save_tiny(num_hidden_layers=1))
    prompts = [tuple((7 * i + n) % 131 for i in range(n)) for n in (1, 5, 130)]
    scripts = {name: dict(histories(3))[name] for name in ("uneven", "scale-up", "chunks", "several-steps")}

    def run(device: Any, start: Any) -> dict[str, Any]:
        policy = ScriptedPolicy(Script(lambda chunk: (0,), all_on(0), master=lambda k: 0))
        config = EngineConfig(model=folder, instances=3, device=device, dtype="float32", kv_tokens=600)
        answers = {}
        with Engine(config, policy=policy, start=start) as engine:
            assert engine.info.device == device
            for name, script in scripts.items():
                policy.script = script
                streams = [engine.submit(p, max_new_tokens=9, return_logits=True) for p in prompts]
                answers[name] = [[(t.token, t.logits) for t in stream] for stream in streams]
                assert is_whole(engine)
        return answers

    there, here = run("cuda", start_on_device), run("cpu", start_threads)
    assert there.keys() == here.keys()
    for name, streams in here.items():
        for stream, expected in zip(there[name], streams, strict=True):
            assert [token for token, _ in stream] == [token for token, _ in expected]
            for (_, logits), (_, of_cpu) in zip(stream, expected, strict=True):
                torch.testing.assert_close(as_floats(logits), as_floats(of_cpu), rtol=1e-5, atol=1e-5)
