"""What a step is about: the requests of the batch, and where their adapters and KV are."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]

E1, E2, E3, E4 = 0, 1, 2, 3
"""Strategies by number, in the order of `plora.sim.system.spec.STRATEGIES`."""


@dataclass(frozen=True)
class Batch:
    """Requests that decode together.

    Attributes:
        contexts: (B,) tokens that each attends to, its newest included.
        adapters: (B,) adapter of each, or `plora.sim.workload.NO_ADAPTER`.
    """

    contexts: IntArray
    adapters: IntArray

    def __len__(self) -> int:
        return len(self.contexts)

    def grown(self, steps: int) -> Batch:
        """Return the batch `steps` tokens later."""
        return Batch(self.contexts + steps, self.adapters)

    def part(self, number: int, of: int) -> Batch:
        """Return every `of`-th request from `number` on: one of `of` sub-batches."""
        return Batch(self.contexts[number::of], self.adapters[number::of])


@dataclass(frozen=True)
class Serving:
    """The distinct adapters of a batch, ascending by number, one array element each.

    Attributes:
        ids: adapter numbers.
        rows: requests of each (B_i).
        ranks: rank of each.
        devices: device on which each lives.
    """

    ids: IntArray
    rows: IntArray
    ranks: IntArray
    devices: IntArray

    def __len__(self) -> int:
        return len(self.ids)


def serving(batch: Batch, ranks: IntArray, far_devices: int) -> Serving:
    """Return the distinct adapters of `batch`; adapter i lives on device i mod `far_devices`."""
    used = batch.adapters[batch.adapters >= 0]
    ids, rows = np.unique(used, return_counts=True)
    ids = ids.astype(np.int64)
    return Serving(ids, rows.astype(np.int64), ranks[ids].astype(np.int64), ids % max(1, far_devices))


@dataclass(frozen=True)
class Placement:
    """The manager's decision for a batch.

    Attributes:
        strategies: (adapters of `Serving`,) strategy number of each.
        near_tokens: (B,) leading tokens of each request whose KV the GPU reads from HBM.
    """

    strategies: IntArray
    near_tokens: IntArray


def tokens_on_device(tokens: IntArray, device: int, devices: int) -> IntArray:
    """Return how many of the first `tokens` tokens lie on `device`: token i is on i mod `devices`."""
    return np.asarray((tokens + (devices - 1 - device)) // devices)


def attended(contexts: IntArray, near: IntArray, window: int | None, devices: int) -> tuple[IntArray, IntArray]:
    """Split attended tokens into those read from HBM (B,) and those read on each device (B, devices).

    A layer with a sliding window attends to the last `window` tokens only.
    """
    first = np.maximum(contexts - window, 0) if window is not None else np.zeros_like(contexts)
    near = np.minimum(near, contexts)
    read_near = np.maximum(near - first, 0)
    far_from = np.maximum(near, first)
    far = [tokens_on_device(contexts, d, devices) - tokens_on_device(far_from, d, devices) for d in range(devices)]
    return read_near, np.stack(far, axis=1) if far else np.zeros((len(contexts), 0), dtype=np.int64)
