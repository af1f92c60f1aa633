"""Policies by name, and what policies may import."""

import subprocess
import sys

import pytest

from loongserve.policies.loongserve import LoongServePolicy
from loongserve.policies.registry import make_policy
from loongserve.policies.static import StaticPolicy


def test_policies_are_made_by_name() -> None:
    assert isinstance(make_policy("elastic", min_tokens_per_instance=64), LoongServePolicy)
    assert isinstance(make_policy("static", dop=2), StaticPolicy)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match=r"unknown policy 'elastc': known are \['elastic', 'static'\]"):
        make_policy("elastc")


def test_unknown_options_are_refused() -> None:
    with pytest.raises(ValueError, match=r"policy 'static' has no options \['dops'\]: known are \['dop'\]"):
        make_policy("static", dops=2)


def test_policies_import_nothing_of_ours_and_no_torch() -> None:
    code = (
        "import sys, loongserve.policies.registry, loongserve.policies.safe\n"
        "ours = {m for m in sys.modules if m.startswith('loongserve.') and not m.startswith('loongserve.policies')}\n"
        "sys.exit(bool(ours) or 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
