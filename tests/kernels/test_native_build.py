"""Compiling the native kernels: once for many processes, for every instruction set, and what serves without them."""

import logging
import os
import stat
import subprocess
import sys

import pytest
import torch

from loongserve.kernels import cpu_native, native_build
from loongserve.kernels.linear import small_linear
from loongserve.kernels.native_build import build, choose_instruction_set, load_native
from loongserve.kernels.state import AttentionState
from loongserve.kernels.striped import plan_striped_attention, striped_attention
from loongserve.native_library import NativeBuildError, cache_folder

# A compiler that notes each run in $LOG and makes an empty library after a while.
SLOW_COMPILER = """#!/bin/sh
if [ "$1" = --version ]; then echo slow 1.0; exit; fi
echo compiled >> "$LOG"
sleep 1
while [ "$1" != -o ]; do shift; done
: > "$2"
"""


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    """Give the test a cache of its own, and nothing loaded before."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    native_build._load.cache_clear()
    yield tmp_path
    native_build._load.cache_clear()


def test_no_compiler_is_one_warning_and_torch(empty_cache, monkeypatch, caplog):
    monkeypatch.setenv("CXX", str(empty_cache / "no-such-compiler"))
    with caplog.at_level(logging.WARNING):
        plans = [
            plan_striped_attention(
                [0, 2], [0, 2], [0], num_q_heads=2, num_kv_heads=1, head_dim=64, dtype=torch.float32, device="cpu"
            )
            for _ in range(3)
        ]
        assert small_linear(torch.ones(1, 4), torch.ones(2, 4)).tolist() == [[4.0, 4.0]]
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [
        "no native CPU kernels, torch's serve instead"
    ]
    assert "no-such-compiler" in caplog.text
    rows, state = torch.ones(2, 2, 64), AttentionState.empty(2, 2, 64)
    assert not isinstance(plans[0].payload, cpu_native.NativePayload)
    striped_attention(plans[0], rows, rows[:, :1], rows[:, :1], state, scale=1.0)
    torch.testing.assert_close(state.out, rows)


def test_a_compiler_that_fails_says_why(empty_cache, monkeypatch):
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(NativeBuildError, match="false --version failed"):
        build("portable")
    assert load_native() is None


def test_nobody_else_may_write_to_the_cache(empty_cache):
    cache_folder().mkdir(parents=True)
    cache_folder().chmod(0o777)
    with pytest.raises(PermissionError, match="writable by nobody else"):
        build("portable")
    assert load_native() is None


def test_many_processes_compile_once(empty_cache):
    compiler, log = empty_cache / "slow-compiler", empty_cache / "log"
    compiler.write_text(SLOW_COMPILER)
    compiler.chmod(0o700)
    program = "from loongserve.kernels.native_build import build; print(build('portable'))"
    environment = {**os.environ, "CXX": str(compiler), "LOG": str(log), "PYTHONPATH": ":".join(sys.path)}
    processes = [
        subprocess.Popen([sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    outputs = {process.communicate(timeout=120)[0] for process in processes}
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert len(outputs) == 1
    assert log.read_text() == "compiled\n"
    assert stat.S_IMODE(cache_folder().stat().st_mode) == 0o700
    assert sorted(path.suffix for path in cache_folder().iterdir()) == ["", ".so"]


def test_a_plan_outlives_the_switch(monkeypatch):
    arguments = {"num_q_heads": 2, "num_kv_heads": 1, "head_dim": 64, "dtype": torch.float32, "device": "cpu"}
    plan = plan_striped_attention([0, 2], [0, 2], [0], **arguments)
    assert isinstance(plan.payload, cpu_native.NativePayload)
    monkeypatch.setenv(native_build.SWITCH, "0")
    assert load_native() is None
    state, rows = AttentionState.empty(2, 2, 64), torch.ones(2, 2, 64)
    striped_attention(plan, rows, rows[:, :1], rows[:, :1], state, scale=1.0)
    torch.testing.assert_close(state.out, rows)


def test_switches_are_checked(monkeypatch):
    monkeypatch.setenv(native_build.SWITCH, "no")
    with pytest.raises(ValueError, match="LOONG_CPU_NATIVE must be 0 or 1, got 'no'"):
        load_native()
    monkeypatch.setenv(native_build.SWITCH, "1")
    monkeypatch.setenv(native_build.ISA_VARIABLE, "sse9")
    with pytest.raises(ValueError, match=r"LOONG_CPU_ISA must be one of .*portable.* got 'sse9'"):
        load_native()


def test_the_best_proven_instruction_set_is_chosen(monkeypatch):
    monkeypatch.delenv(native_build.ISA_VARIABLE, raising=False)
    avx2 = {"avx2", "fma", "f16c"}
    avx512 = avx2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
    chosen = []
    for flags in (set(), avx2, avx512, avx512 | {"avx512_bf16"}):
        monkeypatch.setattr(native_build, "_cpu_flags", lambda flags=flags: frozenset(flags))
        chosen.append(choose_instruction_set())
    assert chosen == ["portable", "avx2", "avx2", "avx2"]
    monkeypatch.setenv(native_build.ISA_VARIABLE, "avx512_bf16")
    assert choose_instruction_set() == "avx512_bf16"


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="AVX is x86's")
@pytest.mark.parametrize("name", ["avx512", "avx512_bf16"])
def test_compiles_for_machines_that_are_not_this_one(name):
    """Compiled, not run: a machine without AVX-512 can do no more."""
    assert build(name).stat().st_size > 10_000
