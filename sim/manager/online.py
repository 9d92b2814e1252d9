"""The manager as the online part of a serving system: requests come and go, decisions follow.

At every change of the batch, Algorithm 1 of the paper (section VI-A) runs for the adapters whose
number of requests changed; from time to time all serving adapters are ranked again. What is cached
of adapters outside the batch stays until its room is needed and goes coldest first, so that cold
adapters go before hot ones; adapters in use are never evicted: they may only change their strategy, between steps,
and what the new strategy does not read then becomes evictable like any other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from plora.hw.defs.errors import UserError
from plora.sim.manager.cost import MOST_VECTORS, AttentionCost, CostModel, FloatArray, IntArray
from plora.sim.manager.select import Problem, Search, improve
from plora.sim.manager.temperature import HOT_ADAPTERS, Temperature

GAIN = 0.005
"""Share of the step that a change must save: below it, decisions would follow noise (hysteresis)."""

HORIZON_STEPS = 32
"""Steps over which the transfer of a matrix into HBM must pay for itself."""

RERANK_EVERY = 32
"""Steps, at least, after which all serving adapters are ranked again, as contexts and neighbours have
changed. With more adapters than that in the batch, as many steps as adapters: a ranking costs in
proportion to them."""

DECISION_SHARE = 0.01
"""Share of the steps' time that decisions may take: below it, changes wait for one another and are decided together."""

RERANK_CHANGES = 8
"""Strategies that one ranking of all adapters changes at most; the next one goes on."""


@dataclass(frozen=True)
class Change:
    """What one decision amounts to.

    Attributes:
        kv_share: P, the share of the batch's KV whose copies fit and help.
        time: step time by the cost model.
        loaded_bytes: matrices that have to come over the link into HBM for the batch.
        ahead_bytes: matrices of hot adapters that are fetched ahead of their requests.
        switched: adapters whose strategy changed.
    """

    kv_share: float
    time: float
    loaded_bytes: float
    ahead_bytes: float
    switched: int


@dataclass(frozen=True)
class _Found:
    """The best candidate: `adapter` is -1 if it is to change nothing."""

    adapter: int
    strategy: int
    victims: list[int]
    time: float
    kv_share: float


class Manager:
    """Strategies, caches and temperatures of all adapters.

    Attributes:
        rows: (adapters,) requests of each in the batch.
        strategies: (adapters,) strategy of each; meaningful where `rows` is above 0.
        cached: (adapters,) which matrices are in HBM: 0 none, 1 B, 2 A and B.
    """

    def __init__(
        self,
        model: CostModel,
        ranks: IntArray,
        devices: IntArray,
        allowed: Sequence[int],
        budget_bytes: float,
        *,
        caches_free: bool = False,
        hot_adapters: int = HOT_ADAPTERS,
        gain: float = GAIN,
        rerank_every: int = RERANK_EVERY,
        decision_time: float = 0.0,
    ) -> None:
        """Start with an empty batch and nothing cached.

        `decision_time` is what a decision takes, in the cost model's unit of time.

        Raises:
            UserError: no strategy, or a negative budget.
        """
        if not allowed:
            raise UserError("the manager has no strategy to choose from; allow at least one of E1 ... E4")
        if budget_bytes < 0:
            raise UserError(f"the HBM budget for adapters and KV copies is {budget_bytes:g} bytes; give at least 0")
        count = len(ranks)
        self.model = model
        self.ranks, self.devices = ranks, devices
        # Plain numbers: an element of an array costs several times as much.
        self._rank_of: list[int] = ranks.tolist()
        self._device_of: list[int] = devices.tolist()
        self.rows = np.zeros(count, dtype=np.int64)
        self.strategies = np.zeros(count, dtype=np.int64)
        self.cached = np.zeros(count, dtype=np.int8)
        self.temperature = Temperature(count)
        self.budget = budget_bytes
        self._allowed = sorted(allowed)
        self._options = np.array(self._allowed, dtype=np.int64)
        self._per_rank = tuple(0.0 if caches_free else size for size in model.cached_per_rank)
        self._option_bytes = np.array([self._per_rank[s] for s in self._allowed])
        self._moves: dict[tuple[int, int, int, int], FloatArray] = {}
        self._load_share = model.rates.up_read / HORIZON_STEPS
        without = [s for s in self._allowed if not self._per_rank[s]]
        # E3 before E2: the link is the scarcer resource.
        self._fallback = max(without) if without else None
        self._caches_free = caches_free
        self._hot = hot_adapters
        self._gain = gain
        self._rerank_every = rerank_every
        self._since_rerank = rerank_every
        self._not_relaxed = 0
        self._decision_time = decision_time
        self._saved = 0.0  # time that decisions may take by now
        self._pending: dict[int, None] = {}  # adapters whose number of requests changed since the last decision
        self._serving = 0
        self._last = Change(0.0, 0.0, 0.0, 0.0, 0)
        self._sums = np.zeros(model.feature_count)
        self._stay = np.zeros((model.feature_count, 1))
        self._used = 0.0
        self._kept = 0.0
        self._victims: list[int] = []

    def serving(self) -> IntArray:
        """Return the adapters of the batch, ascending."""
        return np.flatnonzero(self.rows)

    @property
    def used_bytes(self) -> float:
        """HBM of the matrices that the batch's strategies read."""
        return self._used

    @property
    def kept_bytes(self) -> float:
        """HBM of cached matrices that nothing in the batch reads."""
        return self._kept

    @property
    def due_in(self) -> int:
        """Steps until all serving adapters are ranked again; a driver need not call `step` before."""
        return max(self._rerank_every, self._serving) - self._since_rerank

    def step(self, arrived: Iterable[int], left: Iterable[int], attention: AttentionCost, *, steps: int = 1) -> Change:
        """Take note of requests that came and went (by adapter), let `steps` steps pass, and decide.

        Raises:
            UserError: a request left that was not there.
        """
        came, gone = list(arrived), list(left)
        self._since_rerank += steps
        self._not_relaxed += steps
        due = self.due_in <= 0
        if not (came or gone or due):
            return Change(self._last.kv_share, self._last.time, 0.0, 0.0, 0)
        self.temperature.relax(self._not_relaxed)
        self._not_relaxed = 0
        for adapter in came:
            self.temperature.request(adapter)
        changed = dict.fromkeys([*came, *gone])
        for adapter in changed:
            self._set_rows(adapter, came.count(adapter) - gone.count(adapter))
        self._pending |= changed
        self._saved += steps * self._last.time * DECISION_SHARE
        if not due and self._last.time and self._saved < self._decision_time:
            return self._as_before(attention)
        self._saved = 0.0
        if due:
            self._last = self._rerank(attention)
        else:
            self._last = self._place([a for a in self._pending if self.rows[a]], attention)
        self._pending.clear()
        return self._last

    def _as_before(self, attention: AttentionCost) -> Change:
        """Keep strategies and the share of KV, as far as there is room for it, until a decision is worth its time."""
        room = self.budget - self._used - self._kept
        share = min(self._last.kv_share, max(room, 0.0) / attention.kv_bytes) if attention.kv_bytes else 0.0
        return Change(share, self._last.time, 0.0, 0.0, 0)

    def _vector(self, adapter: int) -> FloatArray:
        return self.model.vector(int(self.rows[adapter]), self._rank_of[adapter], self._device_of[adapter])

    def _held(self, adapter: int) -> float:
        return self._per_rank[int(self.strategies[adapter])] * self._rank_of[adapter]

    def _cached_bytes(self, level: int, adapter: int) -> float:
        return self._per_rank[(1, 3, 0)[level]] * self._rank_of[adapter]

    def _set_rows(self, adapter: int, change: int) -> None:
        """Change how many requests an adapter has; a new one starts without HBM, one that leaves keeps its cache."""
        before = int(self.rows[adapter])
        if change == 0:
            return
        if before + change < 0:
            raise UserError(f"{-change} requests of adapter {adapter} left, but only {before} were there")
        if before:
            self._sums -= self._vector(adapter)[:, self.strategies[adapter]]
            self._used -= self._held(adapter)
            self._kept -= self._unread(adapter)
        else:
            self._kept -= self._cached_bytes(int(self.cached[adapter]), adapter)
        self.rows[adapter] = before + change
        self._serving += (before + change > 0) - (before > 0)
        if before + change:
            if not before:
                first = self._fallback if self._fallback is not None else self._allowed[0]
                self._take(adapter, first)
            self._sums += self._vector(adapter)[:, self.strategies[adapter]]
            self._used += self._held(adapter)
            self._kept += self._unread(adapter)
        else:
            self._kept += self._cached_bytes(int(self.cached[adapter]), adapter)

    def _unread(self, adapter: int) -> float:
        """Return cached bytes of a serving adapter that its strategy does not read."""
        return max(0.0, self._cached_bytes(int(self.cached[adapter]), adapter) - self._held(adapter))

    def _take(self, adapter: int, strategy: int) -> None:
        """Set the strategy and make sure that what it reads counts as cached."""
        self.strategies[adapter] = strategy
        needed = (2, 0, 0, 1)[strategy]
        if needed > self.cached[adapter]:
            self.cached[adapter] = needed

    def _missing(self, adapter: int, strategy: int) -> float:
        """Return the bytes that `strategy` reads and that are not in HBM yet."""
        have = self._cached_bytes(int(self.cached[adapter]), adapter)
        return max(0.0, self._per_rank[strategy] * self._rank_of[adapter] - have)

    def _switch(self, adapter: int, strategy: int) -> float:
        """Change a serving adapter's strategy and return the bytes that have to be loaded."""
        vector, old = self._vector(adapter), int(self.strategies[adapter])
        loaded = self._missing(adapter, strategy)
        self._kept -= self._unread(adapter)
        self._sums += vector[:, strategy] - vector[:, old]
        self._used -= self._held(adapter)
        self._take(adapter, strategy)
        self._used += self._held(adapter)
        self._kept += self._unread(adapter)
        return loaded

    def _place(self, adapters: list[int], attention: AttentionCost) -> Change:
        """Run Algorithm 1 for `adapters`, the best change of any of them first."""
        loaded, switched = 0.0, 0
        while True:
            found = self._best_change(adapters, attention)
            if found.adapter < 0:
                return self._settle(attention, Change(found.kv_share, found.time, loaded, 0.0, switched))
            for victim in found.victims:
                assert self._fallback is not None
                self._switch(victim, self._fallback)
            loaded += self._switch(found.adapter, found.strategy)
            switched += 1 + len(found.victims)
            adapters = [a for a in adapters if a != found.adapter]
            if not adapters:
                return self._settle(attention, Change(found.kv_share, found.time, loaded, 0.0, switched))

    def _best_change(self, adapters: list[int], attention: AttentionCost) -> _Found:
        """Judge every strategy of every adapter in one evaluation; the last candidate is to change nothing."""
        options = len(self._allowed)
        moves: list[FloatArray] = []
        after, load = [], []
        for adapter in adapters:
            now, rank = int(self.strategies[adapter]), self._rank_of[adapter]
            moves.append(self._moves_of(adapter, now))
            held, have = self._per_rank[now] * rank, self._cached_bytes(int(self.cached[adapter]), adapter)
            for strategy in self._allowed:
                size = self._per_rank[strategy] * rank
                after.append(size - held)
                load.append(max(size - have, 0.0))
        moves.append(self._stay)
        columns = np.concatenate(moves, axis=1)
        columns += self._sums[:, None]
        bytes_after = np.array([*after, 0.0])
        bytes_after += self._used
        victims: dict[int, list[int]] = {}
        if self._fallback is not None and self._used + max(after, default=0.0) > self.budget:
            for column in np.flatnonzero(bytes_after[:-1] > self.budget).tolist():
                chosen = self._make_room(adapters[column // options], float(bytes_after[column]) - self.budget)
                victims[column] = chosen
                for victim in chosen:
                    theirs = self._vector(victim)
                    columns[:, column] += theirs[:, self._fallback] - theirs[:, self.strategies[victim]]
                    bytes_after[column] -= self._held(victim)
        times, shares = self.model.times(columns, attention, self.budget - bytes_after)
        judged = times + np.array([*load, 0.0]) * self._load_share
        best = int(judged[:-1].argmin()) if adapters else -1
        if best < 0 or not judged[best] < judged[-1] * (1 - self._gain):
            return _Found(-1, 0, [], float(times[-1]), float(shares[-1]))
        strategy = self._allowed[best % options]
        return _Found(
            adapters[best // options], strategy, victims.get(best, []), float(times[best]), float(shares[best])
        )

    def _moves_of(self, adapter: int, now: int) -> FloatArray:
        """Return how the sums change if `adapter` goes from `now` to each strategy there is (features, strategies)."""
        key = int(self.rows[adapter]), self._rank_of[adapter], self._device_of[adapter], now
        found = self._moves.get(key)
        if found is None:
            if len(self._moves) > MOST_VECTORS:
                self._moves.clear()
            vector = self.model.vector(*key[:3])
            found = self._moves[key] = vector[:, self._options] - vector[:, now, None]
        return found

    def _make_room(self, adapter: int, excess: float) -> list[int]:
        """Return serving adapters, least gain first, whose cached matrices together cover `excess`."""
        chosen: list[int] = []
        for victim in self._victims:
            if excess <= 0:
                break
            held = self._held(victim) if self.rows[victim] and victim != adapter else 0.0
            if held > 0:
                chosen.append(victim)
                excess -= held
        return chosen if excess <= 0 else []

    def _rerank(self, attention: AttentionCost) -> Change:
        """Rank all serving adapters again and refresh what the quick decisions rely on."""
        self._since_rerank = 0
        ids = self.serving()
        loaded, switched = 0.0, 0
        if len(ids):
            problem = Problem(
                self.model,
                self.rows[ids],
                self.ranks[ids],
                self.devices[ids],
                self._allowed,
                attention,
                self.budget,
                self._caches_free,
            )
            search = Search(problem)
            found, time, share, _ = improve(search, self.strategies[ids], search.index, self._gain, RERANK_CHANGES)
            for position in np.flatnonzero(found != self.strategies[ids]).tolist():
                loaded += self._switch(int(ids[position]), int(found[position]))
                switched += 1
            # Sums were kept up to date by additions; taking them anew keeps rounding from piling up.
            self._sums, self._used = search.sums(self.strategies[ids])
            held = search.bytes[search.index, self.strategies[ids]]
            order = np.lexsort((ids, self.rows[ids] / np.maximum(held, 1.0)))
            self._victims = [int(ids[p]) for p in order.tolist() if held[p] > 0]
        else:
            self._sums, self._used, self._victims = np.zeros_like(self._sums), 0.0, []
            nothing = self._best_change([], attention)
            time, share = nothing.time, nothing.kv_share
        change = self._settle(attention, Change(share, time, loaded, 0.0, switched))
        return Change(share, time, loaded, self._cache_hot(attention, change), switched)

    def _settle(self, attention: AttentionCost, change: Change) -> Change:
        """Evict caches that the batch's matrices and copies of KV need room from."""
        self._evict(self._used + change.kv_share * attention.kv_bytes + self._kept - self.budget)
        return change

    def _evict(self, excess: float) -> None:
        """Drop cached matrices that nothing reads, coldest adapter first, until `excess` bytes are free."""
        if excess <= 0:
            return
        held = np.flatnonzero(self.cached)
        order = held[np.argsort(self.temperature.values[held], kind="stable")]
        for adapter in order.tolist():
            if excess <= 0:
                return
            needed = (2, 0, 0, 1)[int(self.strategies[adapter])] if self.rows[adapter] else 0
            before = self._cached_bytes(int(self.cached[adapter]), adapter)
            after = self._cached_bytes(needed, adapter)
            if after < before:
                self.cached[adapter] = needed
                self._kept -= before - after
                excess -= before - after

    def _cache_hot(self, attention: AttentionCost, change: Change) -> float:
        """Cache the hottest adapters outside the batch in whatever room is left; return the bytes loaded."""
        if not self._hot or self._per_rank[0] == 0 or 0 not in self._allowed:
            return 0.0
        room = self.budget - self._used - self._kept - change.kv_share * attention.kv_bytes
        loaded = 0.0
        for adapter in self.temperature.hottest(self._hot, self.serving()).tolist():
            size = self._cached_bytes(2, adapter) - self._cached_bytes(int(self.cached[adapter]), adapter)
            if self.temperature.values[adapter] <= 0 or size > room:
                break
            room -= size
            loaded += size
            self._kept += size
            self.cached[adapter] = 2
        return loaded
