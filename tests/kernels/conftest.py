"""Providers, inputs and comparisons that all kernel tests share: one test body serves every provider."""

import os
from collections.abc import Callable

import pytest
import torch
from hypothesis import settings

from loongserve.kernels.native_build import ISA_VARIABLE, SWITCH
from loongserve.kernels.provider import ENVIRONMENT_VARIABLE
from loongserve.kernels.state import AttentionState

HAS_GPU = torch.cuda.is_available()
# Without a GPU, Triton kernels run in Triton's interpreter. It must be asked for before triton is first imported, and a
# process can't go back: tests that compile kernels do so in a process of their own.
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"

settings.register_profile("kernels", deadline=None, derandomize=True)
settings.load_profile("kernels")

# Largest absolute error and largest error ratio (norm of the error by norm of the expected) of an output, against
# float64, for inputs of this dtype and values near 1. The cpu provider widens to float32 first.
TOLERANCES = {
    torch.float64: (1e-12, 1e-12),
    torch.float32: (1e-5, 2e-6),
    torch.float16: (4e-3, 1e-3),
    torch.bfloat16: (3e-2, 8e-3),
}


@pytest.fixture(params=["reference", "cpu", "cpu-torch", "cpu-portable", "cpu-bf16-pairs", "triton"])
def provider(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a provider, chosen for everything in the test.

    The cpu provider comes as it is on this machine, without its native kernels, and with what they are on machines
    with other instructions.
    """
    name, _, variant = request.param.partition("-")
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, name)
    if variant == "torch":
        monkeypatch.setenv(SWITCH, "0")
    elif variant:
        monkeypatch.setenv(ISA_VARIABLE, {"portable": "portable", "bf16-pairs": "portable_bf16"}[variant])
    return name


@pytest.fixture
def device(provider: str) -> torch.device:
    """Where the provider's tensors lie."""
    return torch.device("cuda" if provider == "triton" and HAS_GPU else "cpu")


@pytest.fixture
def max_examples(provider: str) -> int:
    """How many examples of a property a provider is shown; the interpreter is slow."""
    return 8 if provider == "triton" and not HAS_GPU else 60


@pytest.fixture
def nan_state(device: torch.device) -> Callable[[int, int, int], AttentionState]:
    """Make a state full of NaN, for results that must overwrite all of it."""

    def make(tokens: int, heads: int, head_dim: int) -> AttentionState:
        state = AttentionState.empty(tokens, heads, head_dim, device)
        state.out.fill_(torch.nan)
        state.lse.fill_(torch.nan)
        return state

    return make


@pytest.fixture
def assert_close() -> Callable[..., None]:
    """Compare a tensor with its float64 expectation by maximum and by error ratio."""

    def check(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype | None = None) -> None:
        max_error, max_ratio = TOLERANCES[dtype or actual.dtype]
        actual, expected = actual.detach().cpu().double(), expected.detach().cpu().double()
        assert actual.shape == expected.shape
        assert torch.isfinite(actual).all(), "not finite"
        error = (actual - expected).abs()
        scale = max(1.0, expected.abs().max().item()) if expected.numel() else 1.0
        worst = error.max().item() if error.numel() else 0.0
        assert worst <= max_error * scale, f"largest error {worst:.3g}, allowed {max_error * scale:.3g}"
        # An error below a small fraction of 1 is no fault where the expected values are all but 0.
        ratio = error.norm().item() / max(expected.norm().item(), 1e-3 * max(1, expected.numel()) ** 0.5)
        assert ratio <= max_ratio, f"error ratio {ratio:.3g}, allowed {max_ratio:.3g}"

    return check


@pytest.fixture
def assert_state_close(assert_close: Callable[..., None]) -> Callable[..., None]:
    """Compare a state with its float64 expectation; ``dtype`` is that of the inputs. Empty rows must be (0, -inf)."""

    def check(actual: AttentionState, expected: AttentionState, dtype: torch.dtype = torch.float32) -> None:
        lse, expected_lse = actual.lse.cpu(), expected.lse.cpu()
        empty = expected_lse == -torch.inf
        assert torch.equal(lse == -torch.inf, empty), "other rows are empty than expected"
        assert not actual.out.cpu()[empty].any(), "an empty row has output"
        assert_close(actual.out, expected.out, dtype)
        assert_close(lse[~empty], expected_lse[~empty], dtype)

    return check
