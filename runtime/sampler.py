"""Choose the next token of each row of logits: greedy, or temperature, top-k and top-p with counter-based randomness.

A row's token is a function of its logits, its parameters and the position of the new token alone: batch neighbours,
the degree of parallelism and the history of the process have no part in it.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from loongserve.runtime.protocol import SamplingParams

# Top-p looks at this many of the largest logits before it sorts the whole vocabulary.
NUCLEUS_FIRST_LOOK = 1024

_Floats = npt.NDArray[np.float64]
_Ids = npt.NDArray[np.intp]


def sample(logits: torch.Tensor, params: Sequence[SamplingParams], positions: Sequence[int]) -> list[int]:
    """Choose one token a row.

    The order is temperature, then top-k, then top-p on the renormalised rest, where the first token whose cumulative
    probability reaches ``top_p`` is kept. At equal logits the lower id goes first, in greedy choice too.

    Args:
        logits: [rows, vocab] float32, on any device; -inf bans a token.
        params: one a row.
        positions: the position of the new token in its request, one a row.

    Returns:
        One token id a row.

    Raises:
        ValueError: ``logits`` has another shape or dtype, or a row's largest logit is not finite.
    """
    if logits.dim() != 2 or logits.dtype != torch.float32 or logits.shape[1] == 0:
        raise ValueError(f"logits must be [rows, vocab] float32, got {list(logits.shape)} {logits.dtype}")
    if not logits.shape[0] == len(params) == len(positions):
        raise ValueError(
            f"one SamplingParams and one position a row: {logits.shape[0]} rows, "
            f"{len(params)} params, {len(positions)} positions"
        )
    if not params:
        return []
    largest, greedy = logits.max(dim=1)
    if not bool(torch.isfinite(largest).all()):
        row = int((~torch.isfinite(largest)).nonzero()[0])
        raise ValueError(f"the largest logit of row {row} is {float(largest[row])}: the model's output is broken")
    tokens: list[int] = greedy.tolist()
    drawn = [row for row, row_params in enumerate(params) if row_params.temperature > 0.0 and row_params.top_k != 1]
    if drawn:
        rows = logits.numpy() if logits.device.type == "cpu" else logits[drawn].cpu().numpy()
        for index, row in enumerate(drawn):
            values = rows[row if logits.device.type == "cpu" else index].astype(np.float64)
            tokens[row] = _draw(values, params[row], uniform(params[row].seed, positions[row]))
    return tokens


def uniform(seed: int, position: int) -> float:
    """Draw from [0, 1) as a function of ``seed`` (0 to 2**64 - 1) and ``position`` alone (Philox 4x64)."""
    return float(np.random.Generator(np.random.Philox(key=seed, counter=position)).random())


def _draw(logits: _Floats, params: SamplingParams, point: float) -> int:
    """Choose a token of ``logits`` [vocab] by the inverse distribution function at ``point`` in [0, 1)."""
    # Differences that overflow at a tiny temperature become -inf, which is the right limit.
    with np.errstate(over="ignore"):
        weights: _Floats = np.exp((logits - logits.max()) / params.temperature)
    kept: _Ids | None = None
    if 0 < params.top_k < logits.size:
        kept = _largest(logits, params.top_k)[: params.top_k]
    if params.top_p < 1.0:
        kept = _nucleus(logits, weights, kept, params.top_p)
    if kept is None:
        return _invert(weights, point)
    # In the order of ids, a last-bit change of two nearly equal logits moves the bounds a little; in the order of
    # probability it would swap the two tokens.
    kept = np.sort(kept)
    return int(kept[_invert(weights[kept], point)])


def _largest(logits: _Floats, count: int) -> _Ids:
    """Ids of the ``count`` largest logits and all that equal the last of them, largest first, ties by id."""
    threshold = np.partition(logits, logits.size - count)[logits.size - count]
    ids = np.flatnonzero(logits >= threshold)
    return ids[np.argsort(-logits[ids], kind="stable")]


def _nucleus(logits: _Floats, weights: _Floats, kept: _Ids | None, top_p: float) -> _Ids:
    """The shortest run of the most probable ids (of ``kept``, in order of probability) whose mass reaches ``top_p``."""
    if kept is not None:
        ordered, total = kept, float(weights[kept].sum())
    else:
        ordered, total = _largest(logits, min(NUCLEUS_FIRST_LOOK, logits.size)), float(weights.sum())
    mass = np.cumsum(weights[ordered])
    if kept is None and mass[-1] < top_p * total:
        ordered = _largest(logits, logits.size)
        mass = np.cumsum(weights[ordered])
    return ordered[: int(np.searchsorted(mass, top_p * total, side="left")) + 1]


def _invert(weights: _Floats, point: float) -> int:
    """The first index whose cumulative weight exceeds ``point`` of the total; never one of weight 0."""
    mass = np.cumsum(weights)
    last = np.searchsorted(mass, mass[-1], side="left")
    return int(min(np.searchsorted(mass, point * mass[-1], side="right"), last))
