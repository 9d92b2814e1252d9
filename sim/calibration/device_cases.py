"""Random descriptors, chains and mixes of them for comparing the cycle model with the RTL; the same every time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import log

import numpy as np

from plora.hw.defs.config import KEPT_MAX_VALUES, KEPT_ROW_WORDS, PE_ROWS, WORD_VALUES, NdpConfig, preset
from plora.hw.defs.descriptor import MAX_OPERAND_BYTES, DType
from plora.hw.defs.legality import kept_column_limit
from plora.hw.defs.packing import (
    ceil_div,
    operand_row_stripes,
    pack_geometry,
    pack_geometry_transposed,
    result_row_words,
)
from plora.sim.core.memory import MemoryTiming

Row = dict[str, object]
"""Fields of a stream file's line."""

LATENCIES = ((20, 10), (40, 20), (120, 60))
"""Of reads and writes, cycles."""
STALLS = (0.0, 0.1, 0.3)


@dataclass(frozen=True)
class Case:
    """A descriptor stream and the memory it runs on."""

    number: int
    preset: str
    kind: str
    rows: tuple[Row, ...]
    timing: MemoryTiming

    @property
    def config(self) -> NdpConfig:
        """The device's sizes."""
        return preset(self.preset)


class _Maker:
    """Rows of one case. Shapes are log-uniform within what is legal and takes the RTL a few thousand beats."""

    def __init__(self, config: NdpConfig, rng: np.random.Generator, max_beats: int, dtype: DType) -> None:
        self._config = config
        self._dtype = dtype
        self._rng = rng
        self._max_beats = max_beats
        self._widest = min(config.input_half_stripes * config.stripe_values, config.accumulator.max_terms)

    def _spread(self, low: int, high: int) -> int:
        """Log-uniform integer of low ... high."""
        return int(np.clip(round(np.exp(self._rng.uniform(log(low), log(max(low, high) + 0.49)))), low, max(low, high)))

    def _fits(self, n: int, k: int, batch: int) -> bool:
        config, pairs = self._config, ceil_div(batch, PE_ROWS)
        geometry = pack_geometry(config, n, k)
        return (
            geometry.packed_bytes <= MAX_OPERAND_BYTES
            and geometry.stripes * pairs <= self._max_beats
            and pairs * operand_row_stripes(config, k) <= config.input_half_stripes
            and pairs * result_row_words(n) <= config.result_half_words
            and (pairs == 1 or geometry.beats <= config.dram_buffer_stripes)
        )

    def _shape(self, batch: int, *, rows: int = 1024, columns: tuple[int, int] | None = None) -> tuple[int, int]:
        low, high = columns or (1, self._widest)
        while True:
            n, k = self._spread(1, rows), self._spread(low, high)
            if self._fits(n, k, batch):
                return n, k

    def gemv(self) -> list[Row]:
        """One input row, any shape."""
        n, k = self._shape(1)
        return [{"device_rows": n, "device_columns": k}]

    def gemm(self) -> list[Row]:
        """Several input rows, any shape."""
        batch = self._spread(2, 32)
        n, k = self._shape(batch)
        return [{"device_rows": n, "device_columns": k, "gpu_rows": batch}]

    def short(self) -> list[Row]:
        """Rows so short that several lie in a word."""
        batch = self._spread(1, 8)
        n, k = self._shape(batch, rows=4096, columns=(1, WORD_VALUES // 2))
        return [{"device_rows": n, "device_columns": k, "gpu_rows": batch}]

    def lora(self) -> list[Row]:
        """x A B: the product with A stays on the device; where it is wide it is made in two parts."""
        config = self._config
        batch = int(self._rng.integers(1, 9))
        if ceil_div(batch, PE_ROWS) * KEPT_ROW_WORDS > config.kept_words:
            batch = PE_ROWS * (config.kept_words // KEPT_ROW_WORDS)
        while True:
            rank = int(self._rng.choice([4, 8, 16, 32, 64, 128]))
            parts = 2 if rank >= 2 * WORD_VALUES and self._rng.random() < 0.5 else 1
            k, n = self._spread(64, self._widest), self._spread(16, 2048)
            if self._fits(rank // parts, k, batch) and self._fits(n, rank, batch):
                break
        rows: list[Row] = [
            {
                "device_rows": rank // parts,
                "device_columns": k,
                "gpu_rows": batch,
                "chain": 1,
                "source": "chain" if part else "slot",
                "keep": "append" if part else "new",
            }
            for part in range(parts)
        ]
        return [*rows, {"device_rows": n, "device_columns": rank, "gpu_rows": batch, "source": "kept"}]

    def sums(self) -> list[Row]:
        """A long K in pieces: the accumulators carry on from one descriptor to the next."""
        batch, count = int(self._rng.integers(1, PE_ROWS + 1)), int(self._rng.integers(2, 6))
        n = int(self._rng.integers(1, self._config.channels + 1))
        rows: list[Row] = []
        while len(rows) < count:
            # Together they must not exceed what the accumulators take.
            k = self._spread(KEPT_MAX_VALUES + 1, min(self._widest, self._config.accumulator.max_terms // count))
            if self._fits(n, k, batch):
                first, last = not rows, len(rows) == count - 1
                rows.append(
                    {
                        "device_rows": n,
                        "device_columns": k,
                        "gpu_rows": batch,
                        "chain": int(not last),
                        "acc_in": int(not first),
                        "acc_out": int(not last),
                    }
                )
        return rows

    def shared(self) -> list[Row]:
        """Several matrices that share an input."""
        batch, count = int(self._rng.integers(1, 6)), int(self._rng.integers(2, 5))
        n, k = self._shape(batch, rows=256)
        return [
            {
                "device_rows": n,
                "device_columns": k,
                "gpu_rows": batch,
                "chain": int(part < count - 1),
                "source": "chain" if part else "slot",
            }
            for part in range(count)
        ]

    def attention(self) -> list[Row]:
        """One head: scores of one tile of tokens or more, then their values."""
        config, rng = self._config, self._rng
        rows, dims = int(rng.choice([1, 2, 3, 4, 8, 16])), int(rng.choice([64, 80, 96, 128, 256]))
        while ceil_div(rows, PE_ROWS) * operand_row_stripes(config, dims) > config.input_half_stripes:
            rows //= 2
        pairs = ceil_div(rows, PE_ROWS)
        # A stripe less than an operand may have: the last row group of keys may be padded, and dims of values are.
        geometry = pack_geometry_transposed(config, dims, 1)
        padded = geometry.groups * geometry.group_rows
        fit = (MAX_OPERAND_BYTES - config.stripe_bytes * ceil_div(padded, WORD_VALUES)) // (2 * padded)
        beats = self._max_beats * config.stripe_values // (2 * dims * pairs)
        most = min(kept_column_limit(config, pairs, softmax=True), fit, beats)
        parts = min(int(rng.integers(1, 4)), max(1, most // WORD_VALUES))
        # Tiles before the last are whole words.
        tiles = [WORD_VALUES * self._spread(1, most // (parts * WORD_VALUES)) for _ in range(parts - 1)]
        tiles.append(self._spread(1, max(1, most - sum(tiles))))
        scores: list[Row] = [
            {
                "op": "softmax",
                "device_rows": tokens,
                "device_columns": dims,
                "gpu_rows": rows,
                "chain": 1,
                "source": "chain" if part else "slot",
                "keep": "append" if part else "new",
            }
            for part, tokens in enumerate(tiles)
        ]
        tokens = sum(tiles)
        value: Row = {"device_rows": dims, "device_columns": tokens, "gpu_rows": rows, "source": "kept", "transpose": 1}
        if rng.random() < 0.5:
            # The tile has room for more tokens: its groups of dims lie apart.
            geometry = pack_geometry_transposed(config, dims, tokens, self._dtype)
            most = min(2 * geometry.group_stripes + 8, MAX_OPERAND_BYTES // geometry.packed_bytes(1))
            value["device_bytes"] = geometry.packed_bytes(self._spread(geometry.group_stripes, most))
        return [{**row, **_of_type(self._dtype)} for row in (*scores, value)]

    def turns(self) -> list[Row]:
        """Heads of one chain that take turns: the values of each come after the scores of the next."""
        *scores, values = self.attention()
        rows = scores
        for _ in range(int(self._rng.integers(1, 4))):
            *scores, following = self.attention()
            rows += [*scores, {**values, "chain": 1, "source": "previous"}]
            values = following
        return [*rows, values]

    def heads(self) -> list[Row]:
        """Several heads one after the other or in turns, adapters between them."""
        rows: list[Row] = []
        for _ in range(int(self._rng.integers(2, 6))):
            kind = self._rng.random()
            rows += self.attention() if kind < 0.4 else self.turns() if kind < 0.75 else self.lora()
        return rows

    def backlog(self) -> list[Row]:
        """Many descriptors and chains in one queue, some of them refused."""
        rows: list[Row] = []
        for _ in range(int(self._rng.integers(4, 12))):
            rows += self._any()()
            if self._rng.random() < 0.15:
                rows.append({"device_rows": 8, "device_columns": 8, "device_bytes": 1})
        return rows

    def queues(self) -> list[Row]:
        """Descriptors and chains of several queues, all there at once or arriving over time."""
        spread = int(self._rng.choice([0, 300, 3000]))
        rows: list[Row] = []
        arrivals: dict[int, int] = {}
        for _ in range(int(self._rng.integers(4, 10))):
            queue = int(self._rng.integers(self._config.queues))
            # A queue's descriptors arrive in its order.
            arrivals[queue] = arrivals.get(queue, 0) + int(self._rng.integers(spread + 1))
            rows += [{**row, "queue": queue, "arrival_cycle": arrivals[queue]} for row in self._any()()]
        return rows

    def _any(self) -> Callable[[], list[Row]]:
        kinds = (self.gemv, self.gemm, self.short, self.lora, self.sums, self.shared, self.attention)
        return kinds[int(self._rng.integers(len(kinds)))]


KINDS = ("gemv", "gemm", "short", "lora", "sums", "shared", "attention", "heads", "backlog", "queues")
TYPES = (DType.FP16, DType.FP16, DType.BF16, DType.BF16, DType.INT8, DType.INT4)
"""Of the cases, each as likely; integers are the keys and values of heads, all else is FP16 beside them."""


def _of_type(dtype: DType) -> Row:
    return {"dtype": dtype.name.lower()}


def cases(preset_name: str, count: int, *, first: int = 0, max_beats: int = 4000) -> Iterator[Case]:
    """Cases ``first`` ... ``first + count - 1`` of a preset: every kind, latency and stall in turn."""
    config = preset(preset_name)
    memories = [(latency, stall) for latency in LATENCIES for stall in STALLS]
    for number in range(first, first + count):
        # Nine memories and ten kinds have no common divisor: every combination comes up.
        (read, write), stall = memories[number % len(memories)]
        kind = KINDS[number % len(KINDS)]
        rng = np.random.default_rng((20_05, number, config.channels))
        dtype = DType(int(rng.choice(TYPES)))
        rows: list[Row] = getattr(_Maker(config, rng, max_beats, dtype), kind)()
        if dtype == DType.BF16:
            rows = [{**row, **_of_type(dtype)} for row in rows]
        yield Case(number, preset_name, kind, tuple(rows), MemoryTiming(read, write, stall))
