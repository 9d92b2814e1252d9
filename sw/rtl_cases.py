"""What `plora rtl bench` measures: one list of cases, for a device of any size.

A case is a *job*, one descriptor or a chain of them, that runs alone and then in a row of equal ones. Shapes are
those of LoRA: A (N = rank rows, K long) and B (N long, K = rank columns), with the operand as near to 1 MiB or
64 KiB as the descriptor's fields and the device's buffers allow.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from plora.hw.defs.config import DOT_LANES, KEPT_ROW_WORDS, PE_ROWS, WORD_VALUES, NdpConfig
from plora.hw.defs.descriptor import MAX_OPERAND_BYTES
from plora.hw.defs.legality import kept_column_limit
from plora.hw.defs.packing import ceil_div, pack_geometry
from plora.hw.defs.status import Status
from plora.sim.core.memory import MemoryTiming
from plora.sim.device.predict import statuses
from plora.sim.device.stream import Stream, lines_of, place

Row = Mapping[str, object]
"""Fields of a stream file's line."""

MIB, KIB_64 = MAX_OPERAND_BYTES, 1 << 16
"""A byte size of 20 bits ends one byte short of a mebibyte."""

SIZES = {"1m": MIB, "64k": KIB_64}
BEATS_REQUIRED = {"1m": 0.97, "64k": 0.95}
"""Share of the cycles from first to last beat that carry a beat, where memory is the bound. Where drain or result
port are, as much of that bound is reached in a row of jobs."""
ALIGNED_REQUIRED = 0.98
"""Share of multiply-adds used by a GEMM whose tiles fill the array."""
REMAINDER_REQUIRED = 0.95
"""The same with remainders, as a share of useful / padded."""
GAP_LIMIT_CYCLES = 4
"""Cycles a descriptor, in a row of equal jobs, in which neither memory nor array works though one of them is the
bound."""
STALL_MARGIN = 0.03
"""A memory that stalls with probability p may cost so much more than p."""

STALLS = (0.1, 0.3)
INTEGERS = ("int8", "int4")
HIDDEN_STALLS_REQUIRED = 0.95
"""Useful beats of integers where memory is ready in 70 % of the cycles: they need half of them at most, and the
stripes of scales cost the array a cycle each."""
BATCHES = (32, 128)


IDEAL = MemoryTiming()
"""A word a cycle and channel, after a latency."""


class Criterion(StrEnum):
    """By what a case is judged, besides the gap between jobs; `plora.sw.rtl_bench` defines the terms."""

    BEATS = "useful beat fraction"
    """Of a job alone: at least `BenchCase.required`."""
    UTILISATION = "multiply-add utilisation"
    """Of a job alone: at least ``required`` times the useful share of the beats (1 for aligned tiles)."""
    BOUND = "bound / period"
    """Of jobs in a row: at least ``required``."""


@dataclass(frozen=True)
class BenchCase:
    """One job, the memory it runs on, and what is expected of it."""

    name: str
    operation: str
    rows: tuple[Row, ...]
    """Descriptors of the job: one, or a chain."""
    criterion: Criterion
    required: float
    jobs: int = 1
    """How many are put in a row, after one has run alone; 1: none are."""
    timing: MemoryTiming = IDEAL
    in_turns: bool = False
    """Jobs in a row are heads of one chain: the last row of each comes after the others of the next."""

    def stream(self, config: NdpConfig, jobs: int) -> Stream:
        """So many jobs in one queue, all with the same operands."""
        rows: list[Row] = [{"seed": 1 + index, **row} for index, row in enumerate(self.rows)]
        return place(config, lines_of(_turns(rows, jobs) if self.in_turns else rows * jobs))

    @property
    def dtype(self) -> str:
        """Data type of the operands."""
        return str(self.rows[0].get("dtype", "fp16"))

    @property
    def shape(self) -> str:
        """``N x K`` of each descriptor and the batch, for a table."""
        sizes = " + ".join(f"{row['device_rows']} x {row['device_columns']}" for row in self.rows)
        return f"{sizes}, batch {self.rows[0].get('gpu_rows', 1)}"


def _row(n: int, k: int, batch: int, **flags: object) -> Row:
    return {"device_rows": n, "device_columns": k, "gpu_rows": batch, **flags}


def _turns(head: list[Row], heads: int) -> list[Row]:
    """So many heads in one chain, the values of each after the scores of the next."""
    *scores, values = head
    before = {**values, "chain": 1, "source": "previous"}
    return [*scores, *[*scores, before] * (heads - 1), values]


def _fits(config: NdpConfig, n: int, k: int, batch: int, limit_bytes: int) -> bool:
    if pack_geometry(config, n, k).packed_bytes > limit_bytes:
        return False
    return statuses(place(config, lines_of([_row(n, k, batch)]))) == [Status.OK]


def _most(limit: int, fits: Callable[[int], bool]) -> int:
    """The largest of 1 ... ``limit`` that fits, where whatever is smaller fits too."""
    return bisect_left(range(1, limit + 1), True, key=lambda count: not fits(count))


def wide(config: NdpConfig, rank: int, batch: int, limit_bytes: int, columns: int | None = None) -> tuple[int, int]:
    """N and K of a matrix A: ``rank`` rows, as many columns as fit (at most ``columns``), whole words.

    Where the device's buffers take only fewer rows, there are fewer; where they end the row early, there are more.
    """
    rows = rank
    while not _fits(config, rows, WORD_VALUES, batch, limit_bytes):
        rows //= 2
    words = min(limit_bytes // (2 * rows), columns or limit_bytes) // WORD_VALUES
    k = WORD_VALUES * _most(words, lambda words: _fits(config, rows, WORD_VALUES * words, batch, limit_bytes))
    while columns is None and 2 * pack_geometry(config, rows, k).packed_bytes <= limit_bytes:
        if not _fits(config, 2 * rows, k, batch, limit_bytes):
            break
        rows *= 2
    return rows, k


def tall(config: NdpConfig, rank: int, batch: int, limit_bytes: int) -> tuple[int, int]:
    """N and K of a matrix B: ``rank`` columns, as many rows as fit, whole row groups."""
    group = pack_geometry(config, 1, rank).group_rows
    groups = max(1, limit_bytes // pack_geometry(config, 1, rank).packed_bytes)
    return group * _most(groups, lambda groups: _fits(config, groups * group, rank, batch, limit_bytes)), rank


def largest_batch(config: NdpConfig, wanted: int) -> int:
    """``wanted`` GPU rows, or as many as the input buffer takes."""
    return min(wanted, PE_ROWS * config.input_half_stripes)


_ROW_OF_JOBS = 12
"""Long enough for a steady state where a DRAM buffer full is read ahead; see `plora.sw.rtl_bench.period`."""
_FEW_JOBS = 3
"""Enough where the array is the bound, so that what is read ahead changes nothing."""


def gemv_cases(config: NdpConfig) -> Iterator[BenchCase]:
    """One and two input rows: memory is the bound, or drain and result port where ranks are short."""
    for batch in (1, 2):
        for size, limit in SIZES.items():
            end, required = f"{size}-batch{batch}", BEATS_REQUIRED[size]
            shapes = {
                "a": wide(config, 128 if size == "1m" else 16, batch, limit),
                "a-rank8": wide(config, 8, batch, limit),
                "b": tall(config, 128 if size == "1m" else 64, batch, limit),
            }
            for kind, (n, k) in shapes.items():
                row = _row(n, k, batch)
                yield BenchCase(
                    f"gemv-{kind}-{end}", f"GEMV {kind[0].upper()}", (row,), Criterion.BEATS, required, _ROW_OF_JOBS
                )
            for rank in (8, 16):
                row = _row(*tall(config, rank, batch, limit), batch)
                yield BenchCase(f"gemv-b-rank{rank}-{end}", "GEMV B", (row,), Criterion.BOUND, required, _ROW_OF_JOBS)


def gemm_cases(config: NdpConfig) -> Iterator[BenchCase]:
    """Many input rows: the array is the bound."""
    for batch in sorted({largest_batch(config, wanted) for wanted in BATCHES}):
        shapes = {"a": wide(config, 128, batch, MIB, columns=2048), "b": tall(config, 64, batch, MIB)}
        for kind, (n, k) in shapes.items():
            operation = f"GEMM {kind.upper()}"
            yield BenchCase(
                f"gemm-{kind}-batch{batch}", operation, (_row(n, k, batch),),
                Criterion.UTILISATION, ALIGNED_REQUIRED, _FEW_JOBS,
            )  # fmt: skip
            # Less than a group of rows, less than a word of columns, a last pair of one row.
            tails = _row(n - config.channels // 2, k - 13, batch - 1)
            yield BenchCase(
                f"gemm-{kind}-tails-batch{batch - 1}", operation, (tails,),
                Criterion.UTILISATION, REMAINDER_REQUIRED, _FEW_JOBS,
            )  # fmt: skip
        row = _row(*tall(config, 16, batch, MIB), batch)
        yield BenchCase(
            f"gemm-b-rank16-batch{batch}", "GEMM B", (row,), Criterion.BOUND, BEATS_REQUIRED["1m"], _FEW_JOBS
        )


def chain_cases(config: NdpConfig) -> Iterator[BenchCase]:
    """x A B with x A kept on the device: the second product waits for the last sums of the first."""
    rank = 64
    for batch in (1, 2, min(32, PE_ROWS * config.kept_words // KEPT_ROW_WORDS)):
        n, k = wide(config, rank, batch, MIB, columns=4096)
        a = _row(rank, k, batch, chain=1, keep="new")
        b = _row(tall(config, rank, batch, 2 * n * k)[0], rank, batch, source="kept")
        yield BenchCase(f"lora-batch{batch}", "x A B", (a, b), Criterion.BOUND, BEATS_REQUIRED["1m"], _ROW_OF_JOBS)


def attention_cases(config: NdpConfig) -> Iterator[BenchCase]:
    """G query rows of one KV head over as many tokens as fit K and V of that size: scores to softmax terms, then V."""
    for dims in (64, 128):
        for rows in (1, 2, 4, 8):
            for size, limit in SIZES.items():
                job = _attention(rows, dims, _attention_tokens(config, rows, dims, limit))
                yield BenchCase(
                    f"attention-g{rows}-d{dims}-{size}", "attention", job,
                    *(Criterion.BEATS, BEATS_REQUIRED[size], _ROW_OF_JOBS)
                    if rows <= PE_ROWS
                    else (Criterion.UTILISATION, ALIGNED_REQUIRED, _FEW_JOBS + 1),
                    in_turns=True,
                )  # fmt: skip


def integer_cases(config: NdpConfig) -> Iterator[BenchCase]:
    """The same on keys and values of INT8 and INT4, as many tokens as of FP16; on a memory that stalls beside FP16."""
    for dims in (64, 128):
        for rows in (1, 2, 8):
            tokens = _attention_tokens(config, rows, dims, MIB)
            for dtype in INTEGERS:
                yield BenchCase(
                    f"attention-{dtype}-g{rows}-d{dims}", "attention", _attention(rows, dims, tokens, dtype),
                    Criterion.BOUND, BEATS_REQUIRED["1m"],
                    _ROW_OF_JOBS if rows <= PE_ROWS else _FEW_JOBS + 1, in_turns=True,
                )  # fmt: skip
    tokens, stall = _attention_tokens(config, 1, 128, MIB), STALLS[-1]
    for dtype, required in {
        "fp16": 1 - stall - STALL_MARGIN,
        **dict.fromkeys(INTEGERS, HIDDEN_STALLS_REQUIRED),
    }.items():
        yield BenchCase(
            f"attention-{dtype}-g1-d128-stall{stall:g}", "attention", _attention(1, 128, tokens, dtype),
            Criterion.BEATS, required, timing=MemoryTiming(stall=stall),
        )  # fmt: skip


def _attention(rows: int, dims: int, tokens: int, dtype: str = "fp16") -> tuple[Row, ...]:
    return (
        _row(tokens, dims, rows, op="softmax", chain=1, keep="new", dtype=dtype),
        _row(dims, tokens, rows, source="kept", transpose=1, dtype=dtype),
    )


def _attention_tokens(config: NdpConfig, rows: int, dims: int, limit_bytes: int) -> int:
    """As many tokens as K and V hold in ``limit_bytes`` each and the device keeps, in whole beats of both."""
    group = max(config.channels, DOT_LANES)
    most = min(limit_bytes // (2 * dims), kept_column_limit(config, ceil_div(rows, PE_ROWS), softmax=True))

    def fits(groups: int) -> bool:
        stream = place(config, lines_of(_attention(rows, dims, group * groups)))
        sizes = [entry.descriptor.device_bytes for entry in stream.entries]
        return max(sizes) <= limit_bytes and statuses(stream) == [Status.OK] * 2

    return group * _most(most // group, fits)


def stall_cases(config: NdpConfig) -> Iterator[BenchCase]:
    """GEMV on a memory that is not ready in every cycle."""
    for case in gemv_cases(config):
        if case.name in ("gemv-a-1m-batch1", "gemv-b-1m-batch1"):
            for stall in STALLS:
                yield replace(
                    case,
                    name=f"{case.name}-stall{stall:g}",
                    required=1 - stall - STALL_MARGIN,
                    jobs=1,
                    timing=MemoryTiming(stall=stall),
                )


BF16_CASES = (
    *("gemv-a-1m-batch1", "gemv-b-1m-batch2", "gemv-a-64k-batch2", "gemm-a-batch32", "lora-batch1"),
    *("attention-g1-d128-1m", "attention-g2-d128-64k", "attention-g8-d128-1m"),
)


def bf16_cases(config: NdpConfig) -> Iterator[BenchCase]:
    """Some of the others in BF16: the conversion lies on the words' way to the buffers and must cost no cycle."""
    for family in (gemv_cases, gemm_cases, chain_cases, attention_cases):
        for case in family(config):
            if case.name in BF16_CASES:
                rows = tuple({**row, "dtype": "bf16"} for row in case.rows)
                yield replace(case, name=f"{case.name}-bf16", rows=rows)


FAMILIES = (gemv_cases, gemm_cases, chain_cases, attention_cases, integer_cases, stall_cases, bf16_cases)
"""Every family of cases. A new operation is one function more."""


def bench_cases(config: NdpConfig) -> list[BenchCase]:
    """All cases for a device of that size, each name once."""
    return list({case.name: case for family in FAMILIES for case in family(config)}.values())
