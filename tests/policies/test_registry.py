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


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("static", {"dop": "x"}, "dop must be of type int, got 'x'"),
        ("static", {"dop": 1.5}, "dop must be of type int, got 1.5"),
        ("static", {"dop": True}, "dop must be of type int, got True"),
        ("static", {"dop": print}, "dop must be of type int, got <built-in function print>"),
        ("elastic", {"max_batch_tokens": float("nan")}, "max_batch_tokens must be of type int, got nan"),
        ("elastic", {"dispatch": 3}, "dispatch must be of type Callable, got 3"),
    ],
    ids=["text", "float", "bool", "function", "nan", "no-function"],
)
def test_options_of_another_type_are_refused(name: str, options: dict[str, object], message: str) -> None:
    # A fraction was accepted, and made every plan fail; a text gave a TypeError.
    with pytest.raises(ValueError) as caught:
        make_policy(name, **options)
    assert str(caught.value) == message


def test_options_may_be_functions_or_none() -> None:
    make_policy("elastic", dispatch=lambda view: (), batch=None)
    make_policy("static", dop=None)


def test_policies_import_nothing_of_ours_and_no_torch() -> None:
    code = (
        "import sys, loongserve.policies.registry, loongserve.policies.safe\n"
        "ours = {m for m in sys.modules if m.startswith('loongserve.') and not m.startswith('loongserve.policies')}\n"
        "sys.exit(bool(ours) or 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
