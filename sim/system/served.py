"""Resources that serve in order of readiness, in closed form.

The end of the k-th job on a resource is

    end_k = c_k + max over j <= k of (ready_j - c_(j-1)),    c the running sum of the durations,

a running maximum. Times are whole picoseconds.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from plora.hw.defs.errors import UserError
from plora.sim.system.work import IntArray

Times = npt.NDArray[np.int64]


def served(ready: Times, duration: Times, free: Any = 0) -> Times:
    """Return when each job ends on one resource that serves them in the order of the last axis."""
    total = duration.cumsum(axis=-1)
    begin = np.maximum.accumulate(ready - (total - duration), axis=-1)
    return np.asarray(np.maximum(begin, free) + total)


APART = 1 << 48
"""Distance between resources on the time axis of `served_by_readiness`: 281 s."""


def _check_apart(ready: Times, total: Times) -> None:
    """Refuse jobs of several resources that last longer than those are apart; `total` is the running sum of all."""
    if int(np.maximum.reduce(ready, None, initial=0)) + int(np.maximum.reduce(total, None, initial=0)) >= APART:
        raise UserError(
            "the adapters of a layer take longer than 281 s, which many steps at once do not cover; give links or "
            "devices a higher rate, or the batch fewer requests"
        )


def served_by_readiness(ready: Times, duration: Times, resource: Any = 0, free: Any = 0) -> Times:
    """Return when each job (..., jobs) ends on its `resource` (jobs,), which serves in order of readiness.

    Ties go to the earlier position. Resources are laid one after another on one time axis, far
    apart, so that one running maximum serves them all. `free` is when they can start, at most.

    Raises:
        UserError: jobs of several resources that last longer than `APART`.
    """
    place = resource * APART
    order = (ready + place).argsort(axis=-1, kind="stable")
    begin = np.maximum(ready, free)
    key = begin + place
    if key.ndim == 2:
        order += np.arange(0, key.size, key.shape[1])[:, None]
    length = duration.reshape(-1)[order]
    total = length.cumsum(axis=-1)
    if not isinstance(resource, int):
        _check_apart(begin, total)
    ends = np.maximum.accumulate(key.reshape(-1)[order] - total + length, axis=-1)
    ends += total
    unsorted = np.empty(key.size, dtype=np.int64)
    unsorted[order] = ends
    return np.asarray(unsorted.reshape(key.shape) - place)


def served_in_turn(ready: Times, duration: Times, resource: IntArray) -> Times:
    """The same for jobs (groups, jobs) that become ready in the order of their positions on each resource.

    Raises:
        UserError: jobs that last longer than `APART`.
    """
    order = resource.argsort(kind="stable")
    place = resource[order] * APART
    length = duration[:, order]
    total = length.cumsum(axis=1)
    _check_apart(ready, total)
    ends = np.maximum.accumulate(ready[:, order] + (place - total + length), axis=1)
    ends += total - place
    unsorted = np.empty_like(ends)
    unsorted[:, order] = ends
    return unsorted


def last_served(ready: Times, duration: Times, free: Any = 0) -> Times:
    """Return when the last of the jobs (groups, jobs) of one resource ends that serves in order of readiness.

    It does not depend on the order of jobs that are ready at the same time.
    """
    order = ready.argsort(axis=1)
    if len(order) > 1:
        order += np.arange(0, ready.size, ready.shape[1])[:, None]
    length = duration.reshape(-1)[order]
    total = length.cumsum(axis=1)
    begin = np.maximum(ready, free).reshape(-1)[order] - total + length
    return np.asarray(np.maximum.reduce(begin, axis=1) + total[:, -1])
