"""Strategy selection: Algorithm 1 of the paper, judged for all serving adapters at once.

For one adapter the algorithm ranks E1 ... E4 by the cost model, takes the fastest that fits, evicts
cold adapters if none does, and otherwise also considers taking HBM from KV copies, hot adapters and
serving adapters; it ranks all these candidates again and takes the best. Here each round does that
for every serving adapter in one evaluation and applies the best candidate, until none gains enough.

- Cold and hot adapters are caches that nothing in the running batch reads: taking their bytes costs
  the step nothing, so they count as free here and `plora.sim.manager.residency` evicts them, cold first.
- Taking from KV copies is part of the cost model, which gives KV what adapters leave and balances
  the share P between HBM and the devices.
- Taking from serving adapters is a candidate of its own: those with the least gain per byte fall
  back to their best strategy without HBM until the room suffices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from plora.sim.manager.cost import STRATEGIES, AttentionCost, CostModel, FloatArray, IntArray

SINGLE_CHANGES = 16
"""Fewer than twice as many adapters change one by one; of more, one in so many at once, while that gains more."""

BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Problem:
    """One decision to make.

    Attributes:
        model: the cost model.
        rows, ranks, devices: (adapters,) of the serving adapters.
        allowed: strategy numbers that the system has.
        attention: of the batch.
        budget_bytes: HBM for cached adapters and KV copies together.
        caches_free: whether cached matrices cost no HBM (the paper's idealised ND(E4)).
    """

    model: CostModel
    rows: IntArray
    ranks: IntArray
    devices: IntArray
    allowed: Sequence[int]
    attention: AttentionCost
    budget_bytes: float
    caches_free: bool = False


@dataclass(frozen=True)
class Decision:
    """What the manager decided.

    Attributes:
        strategies: (adapters,) strategy numbers.
        kv_share: P, the share of KV whose copies are in HBM.
        time: step time by the cost model, in its unit.
        cached_bytes: HBM of cached matrices.
        rounds: times that candidates were applied.
        fits: whether `cached_bytes` are within the budget; False only if no strategy without HBM exists.
    """

    strategies: IntArray
    kv_share: float
    time: float
    cached_bytes: float
    rounds: int
    fits: bool


class Search:
    """A current decision with its feature sums and bytes, and the evaluation of its neighbours."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.model = problem.model
        self.count = len(problem.rows)
        self.index = np.arange(self.count)
        self.features = self.model.features(problem.rows, problem.ranks, problem.devices)
        per_rank = np.array(self.model.cached_per_rank) * (0.0 if problem.caches_free else 1.0)
        self.bytes = problem.ranks[:, None] * per_rank
        self.allowed = np.array(sorted(problem.allowed), dtype=np.int64)
        self.fallback = self._best_without_hbm(per_rank)

    def sums(self, strategies: IntArray) -> tuple[FloatArray, float]:
        """Return the feature sums (features,) and cached bytes of a decision."""
        return (
            self.features[:, self.index, strategies].sum(axis=1),
            float(self.bytes[self.index, strategies].sum()),
        )

    def judge(self, sums: FloatArray, used: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Return time and KV share of candidates (features, candidates) that cache `used` bytes."""
        return self.model.times(sums, self.problem.attention, self.problem.budget_bytes - used)

    def alone(self) -> FloatArray:
        """Return the step time (adapters, strategies) if each adapter were the only one."""
        flat = self.features.reshape(len(self.features), -1)
        return self.judge(flat, self.bytes.reshape(-1))[0].reshape(self.count, STRATEGIES)

    def _best_without_hbm(self, per_rank: FloatArray) -> IntArray | None:
        """Return each adapter's fastest strategy that caches nothing, or None if there is none."""
        free = [s for s in self.allowed.tolist() if not per_rank[s]]
        if not free:
            return None
        if len(free) == 1:
            return np.full(self.count, free[0], dtype=np.int64)
        return np.asarray(np.array(free, dtype=np.int64)[self.alone()[:, free].argmin(axis=1)])


def _starts(search: Search, warm: IntArray | None) -> list[IntArray]:
    """Decisions to start from: the previous one, or one strategy for all, and each adapter's own best."""
    if warm is not None:
        return [warm]
    own = search.alone()[:, search.allowed].argmin(axis=1)
    return [*(np.full(search.count, s, dtype=np.int64) for s in search.allowed.tolist()), search.allowed[own]]


def _fit(search: Search, strategies: IntArray) -> IntArray:
    """Let the adapters with the least gain per byte fall back until the budget holds."""
    fallback = search.fallback
    used = search.bytes[search.index, strategies]
    excess = float(used.sum()) - search.problem.budget_bytes
    if excess <= 0 or fallback is None:
        return strategies
    # Small batches of high rank lose least: their exchange is short and their matrices are large.
    density = search.problem.rows / np.maximum(used, 1.0)
    order = np.lexsort((search.index, np.where(used > 0, density, np.inf)))
    freed = np.cumsum(used[order])
    last = int(np.searchsorted(freed, excess)) + 1
    fitted = strategies.copy()
    fitted[order[:last]] = fallback[order[:last]]
    return fitted


def _evictions(
    search: Search, strategies: IntArray, sums: FloatArray, used: float
) -> tuple[IntArray, FloatArray, FloatArray]:
    """Serving adapters in the order in which they would give up HBM, with running sums and freed bytes.

    Column k of the sums describes the change if the first k of them have fallen back.
    """
    assert search.fallback is not None
    held = search.bytes[search.index, strategies]
    holders = search.index[held > 0]
    change = search.features[:, holders, search.fallback[holders]] - search.features[:, holders, strategies[holders]]
    after, _ = search.judge(sums[:, None] + change, used - held[holders])
    order = np.argsort(after, kind="stable")
    holders = holders[order]
    running = np.concatenate([np.zeros((len(sums), 1)), np.cumsum(change[:, order], axis=1)], axis=1)
    freed = np.concatenate([[0.0], np.cumsum(held[holders])])
    return holders, running, freed


def _together(
    search: Search, strategies: IntArray, movable: IntArray, times: FloatArray, over: BoolArray, now: float
) -> IntArray | None:
    """Return a decision in which the adapters that gain most by themselves change at once, or None for few adapters.

    Only changes that take HBM from nobody are among them; `times` (movable, options) are those of single changes.
    """
    most = len(movable) // SINGLE_CHANGES
    if most < 2:
        return None
    alone = np.where(over, np.inf, times)
    option = alone.argmin(axis=1)
    reached = alone[np.arange(len(movable)), option]
    order = np.argsort(reached, kind="stable")[:most]
    order = order[reached[order] < now]
    if len(order) < 2:
        return None
    found = strategies.copy()
    found[movable[order]] = search.allowed[option[order]]
    return found


def improve(
    search: Search, strategies: IntArray, movable: IntArray, gain: float, rounds: int, *, many: bool = False
) -> tuple[IntArray, float, float, int]:
    """Apply the best candidate until none saves more than the share `gain` of the step.

    Only the adapters `movable` are candidates; others change only as victims. With `many`, several
    change in one round where that gains more. Returns the decision, its time, P, and the number of rounds.
    """
    sums, used = search.sums(strategies)
    time_, share_ = search.judge(sums[:, None], np.array([used]))
    time, share = float(time_[0]), float(share_[0])
    applied = 0
    allowed, budget, fallback = search.allowed, search.problem.budget_bytes, search.fallback
    options = search.features[:, movable][:, :, allowed]
    option_bytes = search.bytes[movable][:, allowed]
    while applied < rounds:
        now = strategies[movable]
        candidate = options - search.features[:, movable, now][:, :, None] + sums[:, None, None]
        bytes_after = option_bytes - search.bytes[movable, now][:, None] + used
        over = bytes_after > budget
        victims = need = None
        if over.any() and fallback is not None:
            victims, running, freed = _evictions(search, strategies, sums, used)
            # The first `need` victims free enough; the adapter itself among them would undo its own change.
            need = np.searchsorted(freed, np.maximum(bytes_after - budget, 0.0))
            position = np.full(search.count, len(freed))
            position[victims] = np.arange(1, len(victims) + 1)
            possible = over & (need < len(freed)) & (position[movable][:, None] > need)
            need = np.where(possible, need, 0)
            candidate += running[:, need]
            bytes_after = bytes_after - freed[need]
        times, shares = search.judge(candidate.reshape(len(sums), -1), bytes_after.reshape(-1))
        best = int(times.argmin())
        if not times[best] < time * (1 - gain):
            break
        together = None
        if many:
            together = _together(search, strategies, movable, times.reshape(-1, len(allowed)), over, time)
        if together is not None:
            sums_, used_ = search.sums(together)
            time_, share_ = search.judge(sums_[:, None], np.array([used_]))
            if float(time_[0]) < float(times[best]):
                strategies, sums, used, time, share = together, sums_, used_, float(time_[0]), float(share_[0])
                applied += 1
                continue
        which, option = divmod(best, len(allowed))
        strategies = strategies.copy()
        if victims is not None and need is not None and fallback is not None:
            fallen = victims[: int(need[which, option])]
            strategies[fallen] = fallback[fallen]
        strategies[movable[which]] = allowed[option]
        sums, used = search.sums(strategies)
        time, share = float(times[best]), float(shares[best])
        applied += 1
    return strategies, time, share, applied


def select(problem: Problem, warm: IntArray | None = None, *, gain: float = 0.0, rounds: int | None = None) -> Decision:
    """Choose a strategy for every serving adapter, and the share of KV in HBM.

    Args:
        problem: what to decide.
        warm: the previous strategies of these adapters, from which an online manager goes on.
        gain: share of the step time that a change must save (hysteresis).
        rounds: changes at most; the default lets every adapter change twice.
    """
    if not len(problem.rows):
        nothing = np.zeros((problem.model.feature_count, 1))
        time, share = problem.model.times(nothing, problem.attention, np.array([problem.budget_bytes]))
        return Decision(np.zeros(0, dtype=np.int64), float(share[0]), float(time[0]), 0.0, 0, True)
    search = Search(problem)
    limit = 2 * search.count + 2 if rounds is None else rounds
    tried = [
        improve(search, _fit(search, start), search.index, gain, limit, many=True) for start in _starts(search, warm)
    ]
    strategies, best_time, best_share, applied = min(tried, key=lambda found: found[1])
    _, used = search.sums(strategies)
    return Decision(strategies, best_share, best_time, used, applied, used <= problem.budget_bytes)


def exhaustive(problem: Problem) -> Decision:
    """Judge every combination of allowed strategies: the optimum of the cost model, for small cases.

    Raises:
        ValueError: more than a million combinations.
    """
    search = Search(problem)
    allowed = search.allowed
    total = len(allowed) ** search.count
    if total > 1_000_000:
        raise ValueError(f"{total} combinations of {search.count} adapters are too many")
    codes = np.arange(total)
    sums = np.zeros((len(search.features), total))
    used = np.zeros(total)
    digits = []
    for adapter in range(search.count):
        codes, digit = np.divmod(codes, len(allowed))
        digits.append(allowed[digit])
        sums += search.features[:, adapter, allowed[digit]]
        used += search.bytes[adapter, allowed[digit]]
    times, shares = search.judge(sums, used)
    best = int(times.argmin())
    strategies = np.array([digit[best] for digit in digits], dtype=np.int64)
    return Decision(strategies, float(shares[best]), float(times[best]), float(used[best]), 0, True)
