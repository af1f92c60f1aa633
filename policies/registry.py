"""Policies by name."""

import inspect

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
    return policy(**options)  # type: ignore[arg-type]
