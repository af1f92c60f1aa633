"""Plans by number, so that a compiled graph, whose inputs are tensors, can name one: see ``torch_ops``."""

from __future__ import annotations

from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

_plans: WeakValueDictionary[int, Any] = WeakValueDictionary()
_numbers = count()


def register_plan(plan: object) -> Tensor:
    """Answer a new handle of a plan: its number, [] int64 on the host. The plan is not kept alive by it."""
    number = next(_numbers)
    _plans[number] = plan
    return torch.tensor(number)


def find_plan(handle: Tensor) -> Any:
    """Answer the plan of a handle.

    Raises:
        ValueError: The plan is gone: keep it as long as what was compiled with it runs.
    """
    plan = _plans.get(int(handle))
    if plan is None:
        raise ValueError(f"no plan has handle {int(handle)}: keep the plan alive while compiled code uses it")
    return plan
