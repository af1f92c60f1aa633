"""What a cluster is started with. The options of ``loong-run`` are made from these fields and their help."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from loongserve.policies.registry import make_policy

if TYPE_CHECKING:
    from loongserve.runtime.model.config import ModelConfig

Device = Literal["auto", "cpu", "cuda"]
DType = Literal["auto", "float32", "bfloat16"]
TransportChoice = Literal["auto", "shm", "gloo"]
OptionValue = str | int | float | bool

# KV pools whose size nobody chose take at most this part of the memory that is free.
_KV_MEMORY_PART = 0.5


def _about(text: str, *, unit: str = "", choices: tuple[str, ...] = ()) -> dict[str, Any]:
    return {"help": text, "unit": unit, "choices": choices}


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """A cluster: its model, its instances, how they compute and what decides for them. All values are plain."""

    model: str | None = field(
        default=None,
        metadata=_about(
            "A Hugging Face folder of Llama architecture, or a GGUF file. The embedded model if not given."
        ),
    )
    instances: int = field(
        default=1, metadata=_about("Elastic instances: full replicas of the weights, each with a KV pool.")
    )
    tp: int = field(default=1, metadata=_about("Ranks an instance (tensor parallelism). Only 1 works today."))
    policy: str = field(
        default="elastic", metadata=_about("What decides which instances compute what: elastic, or static.")
    )
    policy_options: tuple[tuple[str, OptionValue], ...] = field(
        default=(), metadata=_about("A setting of the policy, as KEY=VALUE; may be given several times.")
    )
    kv_tokens: int | None = field(
        default=None,
        metadata=_about(
            "KV slots an instance; a request may lie on several. If not given: the model's length, or what half of the "
            "free memory holds where that is less.",
            unit="tokens",
        ),
    )
    max_model_len: int | None = field(
        default=None,
        metadata=_about(
            "The most tokens, prompt and output, of one request. The model's limit if not given.", unit="tokens"
        ),
    )
    device: Device = field(
        default="auto",
        metadata=_about("Where to compute. Only cpu works today, and auto is cpu.", choices=("auto", "cpu", "cuda")),
    )
    dtype: DType = field(
        default="auto",
        metadata=_about(
            "What to compute in; auto is float32, the fast one on most CPUs.", choices=("auto", "float32", "bfloat16")
        ),
    )
    transport: TransportChoice = field(
        default="auto",
        metadata=_about(
            "What carries tensors between instances: shm (memory that their processes share, far faster) or gloo "
            "(TCP within the machine). auto is shm where there is a C++ compiler to build it, else gloo.",
            choices=("auto", "shm", "gloo"),
        ),
    )
    control_interval_ms: int = field(
        default=50,
        metadata=_about(
            "How long several decode steps in one iteration may last, and so how late a change is seen.", unit="ms"
        ),
    )

    def validate(self) -> None:
        """Check all that can be told before the model is opened.

        Raises:
            ValueError: the message names the field, what it may be, what it is, and what to do.
        """
        _check(self.instances >= 1, "instances", "at least 1", self.instances)
        _check(self.tp >= 1, "tp", "at least 1", self.tp)
        _check(
            self.tp == 1,
            "tp",
            "1, as tensor parallelism does not work yet (use more instances: they share the weights of a machine)",
            self.tp,
        )
        try:
            make_policy(self.policy, **dict(self.policy_options))
        except ValueError as error:
            raise ValueError(f"policy: {error}") from error
        for name in ("kv_tokens", "max_model_len"):
            value = getattr(self, name)
            _check(value is None or value >= 1, name, "at least 1 token", value)
        _check(self.control_interval_ms >= 1, "control_interval_ms", "at least 1 ms", self.control_interval_ms)
        _check(self.device in ("auto", "cpu", "cuda"), "device", "auto, cpu or cuda", self.device)
        _check(
            self.device != "cuda",
            "device",
            "auto or cpu, as no transport between instances moves CUDA tensors yet (the kernels alone do run there)",
            self.device,
        )
        _check(self.dtype in ("auto", "float32", "bfloat16"), "dtype", "auto, float32 or bfloat16", self.dtype)
        _check(self.transport in ("auto", "shm", "gloo"), "transport", "auto, shm or gloo", self.transport)
        if self.model is not None and not Path(self.model).expanduser().exists():
            raise ValueError(f"model: expected a folder or a .gguf file, got {self.model!r}, which does not exist")

    @property
    def compute_device(self) -> Literal["cpu", "cuda"]:
        """``device`` with auto resolved."""
        return "cpu" if self.device == "auto" else self.device

    @property
    def compute_dtype(self) -> Literal["float32", "bfloat16"]:
        """``dtype`` with auto resolved."""
        return "float32" if self.dtype == "auto" else self.dtype

    def slots_an_instance(self, model: "ModelConfig") -> int:
        """KV slots of each instance for ``model``.

        Raises:
            ValueError: nobody chose a number, and the free memory does not hold a single token an instance.
        """
        if self.kv_tokens is not None:
            return self.kv_tokens
        length = min(self.max_model_len or model.max_positions, model.max_positions)
        element_bytes = 4 if self.compute_dtype == "float32" else 2
        token_bytes = 2 * model.num_layers * model.num_kv_heads * model.head_dim * element_bytes
        free_bytes = _free_memory_bytes() if self.compute_device == "cpu" else _free_device_bytes()
        fits = int(free_bytes * _KV_MEMORY_PART) // (token_bytes * self.instances)
        if fits < 1:
            raise ValueError(
                f"kv_tokens: half of the {free_bytes >> 20} MiB of free memory holds no token of {token_bytes} bytes "
                f"on each of {self.instances} instances: use fewer instances"
            )
        return min(length, fits)


def _check(holds: bool, name: str, expected: str, got: object) -> None:
    if not holds:
        raise ValueError(f"{name}: expected {expected}, got {got!r}")


def _free_memory_bytes() -> int:
    """What this process may still use: of the machine, and of its container where it is in one."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for line in _lines("/proc/meminfo"):
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    limit = _lines("/sys/fs/cgroup/memory.max")
    used = _lines("/sys/fs/cgroup/memory.current")
    if limit and used and limit[0].isdigit():
        free = min(free, max(0, int(limit[0]) - int(used[0])))
    return free


def _free_device_bytes() -> int:
    """What is free on the current CUDA device, of which all instances of this process take their part."""
    import torch

    return int(torch.cuda.mem_get_info()[0])


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
