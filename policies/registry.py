"""Policies by name."""

import inspect
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from loongserve.policies.base import Policy
from loongserve.policies.loongserve import LoongServePolicy
from loongserve.policies.static import StaticPolicy

POLICIES: dict[str, type[LoongServePolicy] | type[StaticPolicy]] = {
    LoongServePolicy.name: LoongServePolicy,
    StaticPolicy.name: StaticPolicy,
}


def make_policy(name: str, **options: object) -> Policy:
    """Make a policy.

    Args:
        name: A key of ``POLICIES``.
        options: Keyword arguments of its constructor.

    Returns:
        The policy.

    Raises:
        ValueError: The name or an option is unknown, or an option's value is refused.
    """
    if name not in POLICIES:
        raise ValueError(f"unknown policy {name!r}: known are {sorted(POLICIES)}")
    policy = POLICIES[name]
    known = list(inspect.signature(policy).parameters)
    unknown = sorted(options.keys() - set(known))
    if unknown:
        raise ValueError(f"policy {name!r} has no options {unknown}: known are {known}")
    hints = get_type_hints(policy.__init__)
    for option, value in options.items():
        _check_type(option, value, hints[option])
    return policy(**options)  # type: ignore[arg-type]


def _check_type(option: str, value: object, hint: Any) -> None:
    """Refuse a value of another type here: a command line's text makes any, and a plan is too late to see it."""
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    plain = [kind for kind in kinds if get_origin(kind) is None]
    takes_functions = len(plain) < len(kinds)
    if type(value) not in plain and not (takes_functions and callable(value)):
        expected = " or ".join(kind.__name__ for kind in kinds if kind is not NoneType)
        raise ValueError(f"{option} must be of type {expected}, got {value!r}")
