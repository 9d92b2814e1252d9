"""The cost model: Tables IV and V of the paper as one matrix product over candidate decisions.

Every adapter under every strategy is a short vector of *features* (how many rows of x it sends,
how much rank it streams from HBM, from each device, over the link). Features of a decision add up,
and time on a resource is linear in the sums, so thousands of candidate decisions are judged by one
matrix product and a maximum. The link enters through its rate and its latencies only.

This is an estimate in closed form: it knows no queueing. The system model plays the decision.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from plora.sim.llm.moe import expected_distinct_experts

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

STRATEGIES = 4
E1, E2, E3, E4 = range(STRATEGIES)

# Features. GPU_* and DEV_* carry time per unit of width, the others carry amounts.
GPU_A, GPU_B, DOWN_X, DOWN_M, UP_Y, UP_M, UP_W, FAR = range(8)
FIXED_FEATURES = 8
"""Features of one class of groups: those whose matrices exist once, or once for each of so many experts."""


@dataclass(frozen=True)
class GroupCost:
    """One group of matrices, or of equal groups in `count` layers.

    Attributes:
        count: layers.
        base: time of the base model on the GPU (any unit of time; all times share it).
        input_dim, a_width, b_width, matrices: D1, the widths of all A and all B per unit of rank, and
            the number of matrices that share x.
        descriptor_bytes: descriptors and valid words of one adapter.
        experts, used: copies of each matrix, and how many of them a token uses.
        inputs: inputs of one token, as many as experts used or one for all.
    """

    count: int
    base: float
    input_dim: int
    a_width: int
    b_width: int
    matrices: int
    descriptor_bytes: float
    experts: int = 1
    used: int = 1
    inputs: int = 1


class AttentionCost(msgspec.Struct, frozen=True):
    """Attention of all layers for the batch (the paper, Table V).

    `near_*` is the GPU over HBM, `far_*` whatever happens with KV behind the link; P is the share of
    KV in HBM.

    Attributes:
        layers: their number.
        near_base, near_slope, near_floor, sharpness: GPU time of one layer at P > 0 is
            ``near_base + (near_floor**s + (P near_slope)**s)**(1/s)``, a smooth maximum.
        far_base: latencies and exposed transfers of one layer, at P < 1.
        far_device, far_up: device time and link time of one layer at P = 0, falling to 0 at P = 1.
        down, up: link time of one layer that does not depend on P (queries, partial results).
        kv_bytes: of all layers and requests, which P = 1 would put in HBM.
        copies: whether P may be above 0.
    """

    layers: int
    near_base: float
    near_slope: float
    far_base: float
    far_device: float
    far_up: float
    down: float
    up: float
    kv_bytes: float
    copies: bool
    near_floor: float = 0.0
    sharpness: float = 64.0

    def near(self, share: Any) -> Any:
        """Return the GPU's time for one layer at P = `share` > 0 (a number or an array)."""
        slope, power = self.near_slope * share, self.sharpness
        if self.near_floor <= 1e-4 * self.near_slope:
            return self.near_base + self.near_floor + slope
        # Scaled by the floor, so that large powers of large times do not overflow.
        ratio = slope / self.near_floor
        return self.near_base + self.near_floor * (1.0 + ratio**power) ** (1.0 / power)

    def far(self, share: float) -> float:
        """Return the far side's time for one layer at P = `share` < 1."""
        return self.far_base + max((1 - share) * self.far_device, (1 - share) * self.far_up + self.up, self.down)

    def time(self, share: float) -> float:
        """Return the time of all layers at P = `share`."""
        near = self.near(share) if share > 0 else 0.0
        return self.layers * max(near, self.far(share) if share < 1 else 0.0)

    def balance(self) -> tuple[float, float]:
        """Return the P at which the time is least, and that time."""
        # The GPU's time grows with P and the far side's falls: where they meet is the best of all
        # mixed shares, and only "no copies" and "nothing but copies" can be better.
        low, high = 0.0, 1.0
        under, over = self.near_base + self.near_floor - self.far(0.0), self.near(1.0) - self.far(1.0)
        if over > 0 > under:
            # Regula falsi: the gap is nearly linear, so a few lines find its zero. An end that stays
            # twice counts half (Illinois), or the other one would creep.
            side, near, far = 0, self.near, self.far
            for _ in range(SECANTS):
                middle = low - under * (high - low) / (over - under)
                gap = near(middle) - far(middle)
                if gap < 0:
                    low, under, over = middle, gap, over / 2 if side < 0 else over
                    side = -1
                else:
                    high, over, under = middle, gap, under / 2 if side > 0 else under
                    side = 1
        elif over <= 0:
            low = 1.0
        best = min((0.0, low, high, 1.0), key=self.time)
        return best, self.time(best)

    def best(self, share_cap: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Return the least time of all layers (candidates,) with P up to `share_cap`, and that P."""
        goal, least = self.balance()
        if len(share_cap) and share_cap.min() >= goal:
            return np.full(len(share_cap), least), np.full(len(share_cap), goal)
        none, rest = self.time(0.0), 1 - share_cap
        far = np.maximum(rest * self.far_device, rest * self.far_up + self.up)
        far += self.far_base
        partial = self.layers * np.maximum(far, self.near(share_cap))
        if len(share_cap) and share_cap.max() < goal:
            return np.minimum(partial, none), np.where(partial < none, share_cap, 0.0)
        time = np.where(share_cap >= goal, least, np.minimum(partial, none))
        share = np.where(share_cap >= goal, goal, np.where(partial < none, share_cap, 0.0))
        return time, share


@dataclass(frozen=True)
class Rates:
    """Times per unit on each resource, in one unit of time.

    Attributes:
        hbm_byte, gpu_flop: of the GPU.
        dram_byte, far_flop: of one device; `far_flop` 0 where nothing computes.
        down_write, up_read, down_read, up_write: link time per payload byte: data of writes and reads
            in their own direction, and the messages that each causes in the other.
        flag_bytes: read up for each completion.
        round_trip: latency of one exchange with the far side, polls and command included.
    """

    hbm_byte: float
    gpu_flop: float
    dram_byte: float
    far_flop: float
    down_write: float
    up_read: float
    down_read: float
    up_write: float
    flag_bytes: float
    round_trip: float


Composition = Literal["dependency", "overlap", "additive"]

PLATEAU = 1e-3
"""Weight of what does not bound the step: it breaks ties between decisions that are equally fast."""

SECANTS = 8
"""Lines by which the best share of KV in HBM is sought."""

MOST_VECTORS = 100_000
"""Feature vectors that are remembered at most."""


class CostModel:
    """Judges decisions for one model on one machine.

    `vector` gives the features of one adapter under every strategy, `times` the step time of sums of
    such vectors, with the best share P of KV in HBM that the free bytes allow. Candidates are the
    last axis of every array, so that reductions over resources run along memory.
    """

    def __init__(
        self,
        groups: Sequence[GroupCost],
        rates: Rates,
        devices: int,
        composition: Composition,
        *,
        rest: float = 0.0,
        exposed: float = 0.0,
        between: float | None = None,
        on_device: Callable[[int, int], tuple[float, float]] | None = None,
    ) -> None:
        """Prepare the coefficients.

        Args:
            groups: groups that adapters touch.
            rates: times per unit.
            devices: memory devices behind the link.
            composition: how parts of a step combine, as in `plora.sim.system.compose`.
            rest: time of a step that no decision changes (groups without adapters, the head).
            exposed: time that a step of `overlap` or `additive` exposes on the devices' side.
            between: time between x A and m B where GPUs sum m in between, or None where they do not.
            on_device: a device's time per unit of A's and of B's width, for rows and rank; by default the
                slower of its rates.
        """
        self.groups = tuple(groups)
        self.rates = rates
        self.devices = max(1, devices)
        self.composition = composition
        self.rest = rest
        self.exposed = exposed
        self._two_parts = between is not None
        self._on_device = on_device or self._by_rates
        self._far_wait = rates.round_trip + (between or 0.0)
        self._classes = tuple(dict.fromkeys((g.experts, g.used) for g in groups)) or ((1, 1),)
        block = FIXED_FEATURES + 2 * self.devices
        self.feature_count = block * len(self._classes)
        self._counts = np.array([g.count for g in groups], dtype=np.float64)
        self._base = np.array([[g.base] for g in groups], dtype=np.float64)
        self._all_base = float(sum(g.count * g.base for g in groups))
        resources = 3 + self.devices  # gpu, down, up, devices
        matrix = np.zeros((resources, len(groups), self.feature_count))
        for index, group in enumerate(groups):
            first = block * self._classes.index((group.experts, group.used))
            of = matrix[:, index, first : first + block]
            of[0, GPU_A] = group.a_width
            of[0, GPU_B] = group.b_width
            x, m = 2.0 * group.input_dim * group.inputs, 2.0 * group.matrices * group.used
            y, w = 2.0 * group.b_width * group.used, 2.0 * (group.a_width + group.b_width)
            for feature, size in ((DOWN_X, x), (DOWN_M, m)):
                of[1:3, feature] = size * rates.down_write, size * rates.up_write
            for feature, size in ((UP_Y, y), (UP_M, m), (UP_W, w)):
                of[1:3, feature] = size * rates.down_read, size * rates.up_read
            sent, flag = group.descriptor_bytes, rates.flag_bytes
            of[1, FAR] = sent * rates.down_write + flag * rates.down_read
            of[2, FAR] = sent * rates.up_write + flag * rates.up_read
            for device in range(self.devices):
                of[3 + device, FIXED_FEATURES + device] = group.a_width
                of[3 + device, FIXED_FEATURES + self.devices + device] = group.b_width
        self._shape = (resources, len(groups))
        self._matrix = np.ascontiguousarray(matrix.reshape(-1, self.feature_count))
        # Over the whole step, for compositions that do not look at groups.
        self._step_matrix = np.ascontiguousarray(np.einsum("rgf,g->rf", matrix, self._counts))
        self.cached_per_rank = (
            2.0 * sum(g.count * g.experts * (g.a_width + g.b_width) for g in groups),
            0.0,
            0.0,
            2.0 * sum(g.count * g.experts * g.b_width for g in groups),
        )
        """Bytes of HBM that each strategy keeps per unit of rank."""
        self._vectors: dict[tuple[int, int, int], FloatArray] = {}

    def vector(self, rows: int, rank: int, device: int) -> FloatArray:
        """Return the features (features, strategies) of an adapter with `rows` requests."""
        key = rows, rank, device
        found = self._vectors.get(key)
        if found is None:
            if len(self._vectors) > MOST_VECTORS:
                self._vectors.clear()
            found = self._vectors[key] = self._vector(rows, rank, device)
        return found

    def _vector(self, rows: int, rank: int, device: int) -> FloatArray:
        blocks = [self._block(rows, rank, device, experts, used) for experts, used in self._classes]
        return blocks[0] if len(blocks) == 1 else np.concatenate(blocks)

    def _block(self, rows: int, rank: int, device: int, experts: int, used: int) -> FloatArray:
        rates = self.rates
        touched = 1.0 if experts == 1 else expected_distinct_experts(experts, used, rows)
        found = np.zeros((FIXED_FEATURES + 2 * self.devices, STRATEGIES))
        computing = rank * 2 * rows * used * rates.gpu_flop
        on_gpu = max(rank * 2 * touched * rates.hbm_byte, computing)
        share = rows if experts == 1 else max(1, round(rows * used / touched))
        a_time, b_time = self._on_device(share, rank)
        dev_a, dev_b = FIXED_FEATURES + device, FIXED_FEATURES + self.devices + device
        found[(GPU_A, GPU_B), E1] = on_gpu
        found[(GPU_A, GPU_B), E2] = computing
        found[UP_W, E2] = rank * touched
        found[(dev_a, dev_b), E2] = rank * touched * 2 * rates.dram_byte
        found[DOWN_X, E3:] = rows
        found[FAR, E3:] = touched
        found[dev_a, E3:] = touched * a_time
        found[dev_b, E3] = touched * b_time
        found[UP_Y, E3] = rows
        found[UP_M, E4] = rows * rank
        if self._two_parts:
            found[(DOWN_M, UP_M), E3] = rows * rank
        found[GPU_B, E4] = on_gpu
        return found

    def _by_rates(self, rows: int, rank: int) -> tuple[float, float]:
        time = rank * max(2 * self.rates.dram_byte, 2 * rows * self.rates.far_flop)
        return time, time

    def features(self, rows: IntArray, ranks: IntArray, devices: IntArray) -> FloatArray:
        """Return the features (features, adapters, strategies) of several adapters."""
        keys = zip(rows.tolist(), ranks.tolist(), devices.tolist(), strict=True)
        vectors = [self.vector(*key) for key in keys]
        return np.stack(vectors, axis=1) if vectors else np.zeros((self.feature_count, 0, STRATEGIES))

    def times(
        self, sums: FloatArray, attention: AttentionCost, free_bytes: FloatArray
    ) -> tuple[FloatArray, FloatArray]:
        """Return step time and share P of KV in HBM (candidates,) for feature sums (features, candidates).

        `free_bytes` (candidates,) is what is left in HBM for copies of KV; a negative value makes the
        candidate infinitely slow.
        """
        if attention.copies and attention.kv_bytes > 0:
            share_cap = np.minimum(np.maximum(free_bytes / attention.kv_bytes, 0.0), 1.0)
        else:
            share_cap = np.zeros_like(free_bytes)
        if self.composition == "overlap":
            time, share = self._overlap(sums, attention, share_cap)
        else:
            time, share = attention.best(share_cap)
            time += self._dependency(sums) if self.composition == "dependency" else self._additive(sums)
        time += self.rest
        time[free_bytes < 0] = np.inf
        return time, share

    def _dependency(self, sums: FloatArray) -> FloatArray:
        """Each group takes the longer of GPU and far side; an exchange pays its round trip."""
        demand = (self._matrix @ sums).reshape(*self._shape, -1)
        gpu, far = demand[0], np.maximum.reduce(demand[1:])
        slope = np.minimum(gpu, far)
        gpu += self._base
        bound = np.maximum(gpu, far + self._far_wait * (far > 0))
        # A little of the shorter side, so that plateaus of the maximum still have a slope.
        slope *= PLATEAU
        bound += slope
        return np.asarray(self._counts @ bound)

    def _additive(self, sums: FloatArray) -> FloatArray:
        total = self._step_matrix @ sums
        return np.asarray(self._all_base + self.exposed + total.max(axis=0) + PLATEAU * total.sum(axis=0))

    def _overlap(
        self, sums: FloatArray, attention: AttentionCost, share_cap: FloatArray
    ) -> tuple[FloatArray, FloatArray]:
        """The slowest resource over the whole step; P balances HBM against the devices."""
        total = self._step_matrix @ sums
        layers = attention.layers
        gpu = self.rest + self._all_base + total[0]
        down, up = total[1] + layers * attention.down, total[2] + layers * attention.up
        devices = np.maximum.reduce(total[3:]) + self.exposed
        slope_gpu = layers * attention.near_slope
        slope_dev, slope_up = layers * attention.far_device, layers * attention.far_up
        # gpu + P slope_gpu meets the slower of devices and link, which fall with P.
        meet_dev = (devices + slope_dev - gpu) / max(slope_gpu + slope_dev, 1e-30)
        meet_up = (up + slope_up - gpu) / max(slope_gpu + slope_up, 1e-30)
        share = np.clip(np.maximum(meet_dev, meet_up), 0.0, share_cap)
        slowest = np.maximum(gpu + share * slope_gpu, devices + (1 - share) * slope_dev)
        slowest = np.maximum(slowest, np.maximum(up + (1 - share) * slope_up, down))
        return slowest + PLATEAU * total.sum(axis=0) - self.rest, share
