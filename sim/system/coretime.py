"""Times of a device's products by the cycle model of its core (`plora.sim.core`), instead of stated rates.

The core is the full configuration. A device of other `ndp_tflops` is the same core at another clock; one
of other `dram_gb_per_s` has words that come as much more slowly. An operation that the cycle model
describes (`plora.sim.core.demand.OPERATIONS`) can be timed here: products, and attention over FP16 keys and
values; integer ones go by stated rates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from plora.hw.defs.config import KEPT_MAX_VALUES, PE_ROWS, VALUE_BYTES, NdpConfig, preset
from plora.hw.defs.descriptor import MAX_OPERAND_BYTES, Keep, Op, Source
from plora.sim.core.closed import BOUNDS, alone, interval
from plora.sim.core.constants import load_constants
from plora.sim.core.demand import Shapes, demands
from plora.sim.core.memory import MemoryTiming
from plora.sim.device.dram import CONTROLLER_NS
from plora.sim.hardware.device import NdpDeviceSpec
from plora.sim.hardware.dram import idle_latency_ns, load_standard

Product = tuple[int, int, bool]
"""A device operand of N rows and K columns, and whether it multiplies what the one before has left on the device."""

_TYPICAL = ((32, 512, False), (32, 32, True))
"""A chain from whose times alone the latencies are taken: operand and result are as small as can be."""


_FEW_TOKENS, _MANY_TOKENS = 512, 4096
"""Tokens of a device between which its time is taken as a straight line."""


class Attention(NamedTuple):
    """Times of one layer's attention on one device, in picoseconds.

    Attributes:
        token_ps, request_ps: for every token, and for every request besides.
        memory: whether memory bounds it, or the core.
    """

    token_ps: float
    request_ps: int
    memory: bool


class CoreTimes:
    """Times of one device.

    Attributes:
        command_ps: from a submission's arrival to the array's first beat, in an idle device.
        completion_ps: from the last beat to the completion line in memory.
    """

    def __init__(self, device: NdpDeviceSpec, efficiency: float) -> None:
        """Set the clock by the device's arithmetic and its memory by the share `efficiency` of its stated rate."""
        self._config: NdpConfig = preset("full")
        self._cycle_ps = 1000.0 * self._config.peak_gflops / (device.ndp_tflops * 1e3)
        clock_ghz = 1000.0 / self._cycle_ps
        stripe_ns = self._config.stripe_bytes / (device.dram_gb_per_s * efficiency)
        latency = idle_latency_ns(load_standard(device.dram)) + CONTROLLER_NS
        self._timing = MemoryTiming(
            read_latency_cycles=latency * clock_ghz,
            write_latency_cycles=CONTROLLER_NS * clock_ghz,
            beat_cycles=max(1.0, stripe_ns * clock_ghz),
        )
        self._known: dict[tuple[int, tuple[Product, ...]], tuple[int, bool]] = {}
        c, timing = load_constants(), self._timing
        times = alone(self._config, demands(self._config, self._shapes(_TYPICAL, [1, 1])), timing)
        fetched = c.doorbell + c.engine_job + timing.read_latency_cycles + c.read_return + c.slot_arrived + c.engine_job
        completed = float((times.completed - times.last_beat)[1]) + c.engine_job + c.line_queue
        completed += timing.write_latency_cycles
        self.command_ps = round((fetched + float(times.first_beat[0])) * self._cycle_ps)
        self.completion_ps = round(completed * self._cycle_ps)

    def products_ps(self, rows: int, products: Sequence[Product]) -> tuple[int, bool]:
        """Return the time of `products` with `rows` input rows among others like them, and whether memory bounds it.

        Operands beyond a descriptor's bytes are cut by their rows, inputs by what the buffer holds; each cut of
        the inputs streams the operands again.
        """
        key = rows, tuple(products)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._work_out(*key)
        return found

    def attention(self, head_dim: int, group: int, heads: int) -> Attention:
        """Return the times of attention of one layer: `heads` KV heads, each for `group` query rows.

        A chain of a head is scores through the softmax unit, then values token by token. Its time is a straight
        line over the tokens but for the shortest, whose descriptors the decoder holds up.
        """
        low, high = _FEW_TOKENS, _MANY_TOKENS
        few, many = (heads * self._chain(head_dim, group, tokens) for tokens in (low, high))
        slope = (many.max(axis=0) - few.max(axis=0)) / (high - low)
        each = float(slope.sum())
        start = max(float(few.max(axis=0).sum()) - each * low, 0.0)
        memory = bool((many.argmax(axis=0) == BOUNDS.index("memory")).all())
        return Attention(each * self._cycle_ps, round(start * self._cycle_ps), memory)

    def _chain(self, head_dim: int, group: int, tokens: int) -> npt.NDArray[np.float64]:
        """Return what bounds scores and values of one head over `tokens` tokens (bounds, 2), in cycles."""
        shapes = self._shapes([(tokens, head_dim, False), (head_dim, tokens, False)], [group, group])
        kept, slot = int(Source.KEPT), int(Source.SLOT)
        shapes = replace(
            shapes,
            op=np.array([int(Op.SOFTMAX), int(Op.GEMM)]),
            source=np.array([slot, kept]),
            keep=np.array([int(Keep.NEW), int(Keep.NONE)]),
            transpose=np.array([0, 1]),
        )
        return interval(self._config, demands(self._config, shapes), self._timing).by

    def _work_out(self, rows: int, products: Sequence[Product]) -> tuple[int, bool]:
        config = self._config
        widest = max((k for _, k, kept in products if not kept), default=1)
        held = PE_ROWS * config.input_half_stripes // -(-widest // config.stripe_values)
        most = max(1, min(held, MAX_OPERAND_BYTES // (VALUE_BYTES * widest)))
        pieces: list[Product] = []
        inputs, counts = [], []
        for size, times in _cut(rows, most):
            for n, k, kept in products:
                for height, number in _cut(n, self._tile_rows(k)):
                    pieces.append((height, k, kept))
                    inputs.append(size)
                    counts.append(times * number)
        found = interval(config, demands(config, self._shapes(pieces, inputs)), self._timing)
        by = found.by @ np.array(counts, dtype=np.float64)
        cycles = float((found.cycles * counts).sum())
        return round(cycles * self._cycle_ps), BOUNDS[int(by.argmax())] == "memory"

    def _tile_rows(self, columns: int) -> int:
        """Return the operand rows of a descriptor: whole groups of one row a channel, where that many fit."""
        most = max(1, MAX_OPERAND_BYTES // (VALUE_BYTES * columns))
        return max(most // self._config.channels * self._config.channels, min(most, self._config.channels))

    def _shapes(self, pieces: Sequence[Product], inputs: Sequence[int]) -> Shapes:
        rows, columns, chained = (np.array(column, dtype=np.int64) for column in zip(*pieces, strict=True))
        kept = (chained > 0) & (columns <= KEPT_MAX_VALUES)
        zero = np.zeros_like(rows)
        return Shapes(
            op=zero + int(Op.GEMM),
            device_rows=rows,
            device_columns=columns,
            gpu_rows=np.array(inputs, dtype=np.int64),
            source=np.where(kept, int(Source.KEPT), int(Source.SLOT)),
            # The first product of a chain leaves its result where the second finds it.
            keep=np.where(~kept & (rows <= KEPT_MAX_VALUES), int(Keep.NEW), int(Keep.NONE)),
            acc_in=zero,
            acc_out=zero,
            transpose=zero,
            dtype=zero,
            device_bytes=zero,
            device_stripe=zero,
            operand_stripe=zero,
            result_line=zero,
        )


def _cut(size: int, most: int) -> list[tuple[int, int]]:
    """Return sizes and numbers of the pieces of at most `most` that make up `size`."""
    whole, rest = divmod(size, most)
    return [piece for piece in ((most, whole), (rest, 1)) if piece[0] and piece[1]]


def core_times(device: NdpDeviceSpec, efficiency: float) -> CoreTimes | None:
    """Return the times of `device`'s core, or None if it has none."""
    return CoreTimes(device, efficiency) if device.has_ndp else None
