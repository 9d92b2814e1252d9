"""The whole core on a memory whose moods can be chosen, held to the functional core."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from plora.hw.defs.config import WORD_BYTES, NdpConfig
from plora.hw.defs.descriptor import Descriptor, DType, Keep, Op, Source
from plora.hw.defs.integers import INTEGER_BITS
from plora.hw.defs.legality import QueueWindow
from plora.hw.defs.packing import expansion_log2, pack_geometry_transposed
from plora.hw.defs.queue import NO_EXPONENTS, RESULT_OFFSET, Exponents, operand_offset, softmax_scale
from plora.hw.defs.status import Status
from plora.hw.rtl.core.core import NdpCore
from plora.hw.rtl.core.signature import counters_layout
from plora.hw.rtl.interfaces import completed_layout, fetched_layout
from plora.sim.functional.core import FunctionalCore, Outcome
from plora.sim.functional.layout import (
    gpu_operand_bytes,
    pack_integers,
    pack_operand,
    pack_transposed,
    pack_transposed_integers,
)
from plora.sim.functional.memory import MemoryFault, SparseMemory
from plora.sim.golden.bf16 import from_float
from plora.sim.golden.integers import Quantized, quantize
from tests.hw.rtl.core.bench import Case, describe, fetched_payload, fields, simulate

POISON = 0xFF
"""Fill of memory that was never written: every FP16 value in it is NaN."""


@dataclass(frozen=True)
class Mood:
    """How memory and host behave. Stalls are probabilities per cycle, latencies in cycles."""

    latency: int = 4
    request_stall: float = 0.0
    response_stall: float = 0.0
    line_stall: float = 0.0
    ack_latency: int = 3
    ack_shuffle: bool = False
    completed_stall: float = 0.0
    fetch_stall: float = 0.0


IDEAL = Mood()
GRUMPY = Mood(7, 0.4, 0.35, 0.4, 9, True, 0.5, 0.2)


@dataclass
class Step:
    """One descriptor with its data: ``x`` for its slot, ``w`` for its device operand, where it has them."""

    descriptor: Descriptor
    first: bool = True
    x: Any = None
    w: Any = None
    """Of a transposed descriptor tokens x dims, as V lies in a cache; integers with their scales (`Quantized`)."""
    verdict: int = 0
    name: str = ""
    scale: int = 0
    """Softmax scale, FP32 bits."""
    exponents: Exponents = NO_EXPONENTS
    """Of BF16, whose data are bit patterns."""


@dataclass
class Placed:
    """A step and where its slots lie."""

    step: Step
    descriptor: Descriptor
    submission_slot: int
    result_slot: int


@dataclass
class Run:
    """What a run gave: outcomes in order, cycles of beats, counters, idle at the end."""

    outcomes: list[Outcome] = field(default_factory=list)
    counters: dict[str, int] = field(default_factory=dict)
    first_beats: list[int] = field(default_factory=list)
    last_beats: list[int] = field(default_factory=list)
    cycles: int = 0
    idle: bool = False


def packed_with_poison(step: Step, config: NdpConfig) -> bytes:
    """The step's device operand as it lies in memory, with NaN for padding: the device must not depend on it."""
    d = step.descriptor
    if isinstance(step.w, Quantized):
        return packed_integers_with_poison(step.w, d, config)

    def pack(matrix: Any) -> Any:
        if not d.transpose:
            return np.frombuffer(pack_operand(matrix, config), np.uint16)
        stride = pack_geometry_transposed(config, d.device_rows, d.device_columns).stride(d.device_bytes)
        return np.frombuffer(pack_transposed(matrix, config, stride), np.uint16)

    data, used = pack(step.w), pack(np.ones(step.w.shape, np.uint16))
    return np.where(used, data, np.uint16(0x101 * POISON)).tobytes()


def packed_integers_with_poison(w: Quantized, d: Descriptor, config: NdpConfig) -> bytes:
    """The same for integers: padding scales are no numbers, and padding values are not zero."""

    def pack(values: Any, scales: Any) -> Any:
        quantized = Quantized(values, scales)
        if not d.transpose:
            return np.frombuffer(pack_integers(quantized, config, d.dtype), np.uint8)
        g = pack_geometry_transposed(config, d.device_rows, d.device_columns, d.dtype)
        return np.frombuffer(pack_transposed_integers(quantized, config, d.dtype, g.stride(d.device_bytes)), np.uint8)

    used = pack(np.full_like(w.values, -1), np.full_like(w.scales, 0xFF))
    return np.asarray(pack(*w) | ~used & np.uint8(POISON)).tobytes()


class System:
    """Places the data of steps in memory, runs them on the core, and compares with the functional core."""

    def __init__(self, config: NdpConfig, *, seed: int = 0, slot_bytes: int = 1 << 15) -> None:
        self.config = config
        self.seed = seed
        self.slot_bytes = slot_bytes
        self.memory = SparseMemory(1 << config.dpa_bits, fill=POISON)
        self.window = QueueWindow(0, 1 << config.dpa_bits, slot_bytes, slot_bytes)
        self.placed: list[Placed] = []
        # Starts off a page boundary, so that bursts have to be cut.
        self._next = 3 * config.stripe_bytes

    def allocate(self, size_bytes: int) -> int:
        """Return the address of free memory, a stripe or more after what was allocated before."""
        address = self._next
        stripe = self.config.stripe_bytes
        self._next = (address + size_bytes + 2 * stripe - 1) // stripe * stripe
        return address

    def add(self, step: Step) -> Placed:
        """Write the step's operands into memory and give it two slots."""
        d = step.descriptor
        slots = [self.allocate(self.slot_bytes) for _ in range(2)]
        if step.x is not None:
            self.memory.write(slots[0] + operand_offset(self.config), gpu_operand_bytes(step.x, self.config))
        if step.w is not None:
            data = packed_with_poison(step, self.config)
            address = self.allocate(len(data))
            self.memory.write(address, data)
            d = Descriptor(**{**d.__dict__, "device_address": address})
        placed = Placed(step, d, *slots)
        self.placed.append(placed)
        return placed

    def run(self, mood: Mood = IDEAL, *, deadline_cycles: int = 20_000, vcd: str | None = None) -> Run:
        """Run all steps, check outcomes and every byte of memory, and return what was measured."""
        expected_memory = SparseMemory(1 << self.config.dpa_bits, fill=POISON)
        expected_memory._pages = {page: bytearray(data) for page, data in self.memory._pages.items()}
        expected_memory._bad = list(self.memory._bad)
        expected = self._expected(expected_memory)
        dut = NdpCore(self.config)
        run = Run()
        bench = _Bench(self, dut, mood, run)
        simulate(dut, bench.collect, background=bench.processes(), deadline_cycles=deadline_cycles, vcd=vcd)
        for number, (placed, wanted, outcome) in enumerate(zip(self.placed, expected, run.outcomes, strict=True)):
            where = f"descriptor {number} {placed.step.name}: {placed.descriptor.describe()}"
            assert outcome.status == wanted.status, f"{where}: {outcome.status.name}, not {wanted.status.name}"
            assert outcome.numeric == wanted.numeric, f"{where}: numeric {outcome.numeric}, not {wanted.numeric}"
            assert outcome.result_bytes == wanted.result_bytes, f"{where}: {outcome.result_bytes} result bytes"
            if wanted.status is Status.OK:
                assert outcome.cycles >= wanted.cycles, f"{where}: {outcome.cycles} cycles for {wanted.cycles} beats"
        self._compare_memory(expected_memory)
        assert run.idle, "the core does not say that it is idle"
        return run

    def _expected(self, memory: SparseMemory) -> list[Outcome]:
        core = FunctionalCore(self.config, memory)
        outcomes: list[Outcome] = []
        failed = False
        for placed in self.placed:
            step = placed.step
            failed &= not step.first
            if step.verdict:
                outcome = Outcome(Status(step.verdict))
            elif failed:
                outcome = Outcome(Status.CHAIN_ABORTED)
            else:
                outcome = core.execute(
                    placed.descriptor, self.window, placed.submission_slot, placed.result_slot, first=step.first,
                    softmax_scale=step.scale, exponents=step.exponents,
                )  # fmt: skip
            failed = bool(placed.descriptor.chain) and outcome.status is not Status.OK
            outcomes.append(outcome)
        return outcomes

    def _compare_memory(self, expected: SparseMemory) -> None:
        pages = set(self.memory._pages) | set(expected._pages)
        for page in sorted(pages):
            is_bytes = np.frombuffer(bytes(self.memory._pages.get(page, self.memory._blank)), np.uint16)
            wanted = np.frombuffer(bytes(expected._pages.get(page, expected._blank)), np.uint16)
            different = np.flatnonzero(is_bytes != wanted)
            if len(different):
                address = page * len(self.memory._blank) + 2 * int(different[0])
                owner = next(
                    (
                        f"result slot of descriptor {i} ({p.descriptor.describe()}), value {offset // 2} of line"
                        f" {offset // WORD_BYTES}"
                        for i, p in enumerate(self.placed)
                        if 0 <= (offset := address - p.result_slot - RESULT_OFFSET) < self.slot_bytes
                    ),
                    "no result slot",
                )
                raise AssertionError(
                    f"{len(different)} values differ in memory page {page}; first at {address:#x} ({owner}):"
                    f" {is_bytes[different[0]]:#06x} instead of {wanted[different[0]]:#06x}"
                )


class _Bench:
    """Processes around the core: memory, feeder of descriptors, taker of completions."""

    def __init__(self, system: System, dut: NdpCore, mood: Mood, run: Run) -> None:
        self.system, self.dut, self.mood, self.result = system, dut, mood, run
        self.cycle = 0

    def processes(self) -> Sequence[Any]:
        return [self.feed, self.clock, self.write, *(self._reader(c) for c in range(self.system.config.channels))]

    def _rng(self, salt: int) -> random.Random:
        return random.Random(f"{self.system.seed}/{salt}")

    async def clock(self, ctx: Any) -> None:
        counters, cycles = self.dut.counters, self.result
        before = 0
        async for *_, beats in ctx.tick().sample(counters.beats):
            self.cycle += 1
            if beats != before:
                cycles.last_beats.append(self.cycle)
            before = beats

    async def feed(self, ctx: Any) -> None:
        dut, config, rng = self.dut, self.system.config, self._rng(1)
        layout = fetched_layout(config)
        for number, placed in enumerate(self.system.placed):
            while rng.random() < self.mood.fetch_stall:
                await ctx.tick().repeat(rng.randint(1, 20))
            payload = fetched_payload(
                Case(
                    placed.descriptor,
                    placed.step.first,
                    self.system.window,
                    placed.step.verdict,
                    placed.step.scale,
                    placed.step.exponents,
                ),
                queue=number % 64,
                operand_address=(placed.submission_slot + operand_offset(config)) // WORD_BYTES,
                result_address=(placed.result_slot + RESULT_OFFSET) // WORD_BYTES,
            )
            ctx.set(dut.fetched.payload, layout.const(payload))
            ctx.set(dut.fetched.valid, 1)
            await ctx.tick().until(dut.fetched.ready)
            ctx.set(dut.fetched.valid, 0)

    async def collect(self, ctx: Any) -> None:
        dut, rng = self.dut, self._rng(2)
        for number, placed in enumerate(self.system.placed):
            while rng.random() < self.mood.completed_stall:
                await ctx.tick().repeat(rng.randint(1, 10))
            ctx.set(dut.completed.ready, 1)
            (payload,) = await ctx.tick().sample(dut.completed.payload).until(dut.completed.valid)
            ctx.set(dut.completed.ready, 0)
            record = fields(payload, completed_layout())
            assert record["queue"] == number % 64
            assert Descriptor(**record["descriptor"]) == placed.descriptor
            self.result.outcomes.append(
                Outcome(Status(record["status"]), record["numeric"], record["result_bytes"], record["cycles"])
            )
        await ctx.tick().repeat(3)
        self.result.idle = bool(ctx.get(dut.idle))
        self.result.counters = fields(ctx.get(dut.counters), counters_layout)
        self.result.cycles = self.cycle

    def _reader(self, channel: int) -> Any:
        config, mood, rng = self.system.config, self.mood, self._rng(10 + channel)
        port, memory = self.dut.read[channel], self.system.memory

        async def process(ctx: Any) -> None:
            words: deque[tuple[int, int]] = deque()  # cycle at which it may leave, byte address
            cycle = 0
            while True:
                ready = rng.random() >= mood.request_stall
                valid = bool(words) and words[0][0] <= cycle and rng.random() >= mood.response_stall
                ctx.set(port.request.ready, ready)
                ctx.set(port.response.valid, valid)
                if valid:
                    try:
                        data, error = memory.read(words.popleft()[1], WORD_BYTES), 0
                    except MemoryFault:
                        data, error = b"\xa5" * WORD_BYTES, 1
                    ctx.set(port.response.payload.data, int.from_bytes(data, "little"))
                    ctx.set(port.response.payload.error, error)
                *_, asked, request = await ctx.tick().sample(port.request.valid, port.request.payload)
                cycle += 1
                if asked and ready:
                    address, length = request.address, request.length + 1
                    assert address % 64 + length <= 64, f"a burst of {length} words at {address} crosses 4 KiB"
                    for index in range(length):
                        byte_address = ((address + index) * config.channels + channel) * WORD_BYTES
                        words.append((cycle + mood.latency - 1 + index, byte_address))

        return process

    async def write(self, ctx: Any) -> None:
        mood, rng, port, memory = self.mood, self._rng(3), self.dut.write, self.system.memory
        acks: list[tuple[int, int, int]] = []  # earliest cycle, error, tag
        cycle = 0
        while True:
            ready = rng.random() >= mood.line_stall
            ctx.set(port.line.ready, ready)
            due = [ack for ack in acks if ack[0] <= cycle]
            ctx.set(port.ack, bool(due))
            if due:
                ack = rng.choice(due) if mood.ack_shuffle else due[0]
                acks.remove(ack)
                ctx.set(port.ack_error, ack[1])
                ctx.set(port.ack_tag, ack[2])
            *_, valid, line = await ctx.tick().sample(port.line.valid, port.line.payload)
            cycle += 1
            if valid and ready:
                assert line.strobe == (1 << WORD_BYTES) - 1
                latency = rng.randint(1, mood.ack_latency) if mood.ack_shuffle else mood.ack_latency
                try:
                    memory.write(line.address * WORD_BYTES, line.data.to_bytes(WORD_BYTES, "little"))
                    acks.append((cycle + latency, 0, line.tag))
                except MemoryFault:
                    acks.append((cycle + latency, 1, line.tag))


def random_values(rng: np.random.Generator, rows: int, columns: int, kind: str = "normal") -> Any:
    """FP16 values: ``normal``, small ``integers`` (sums are exact in any order), or any ``bits`` at all."""
    if kind == "integers":
        return rng.integers(-4, 5, (rows, columns)).astype(np.float16)
    if kind == "bits":
        return rng.integers(0, 1 << 16, (rows, columns), np.uint16).view(np.float16)
    return (rng.standard_normal((rows, columns)) * rng.choice([0.01, 1, 50])).astype(np.float16)


def random_integers(rng: np.random.Generator, rows: int, columns: int, dtype: int, kind: str = "normal") -> Quantized:
    """Integers with scales a token, of numbers such as `random_values`; ``bits``: any at all, scales no numbers too."""
    if kind != "bits":
        return quantize(random_values(rng, rows, columns, kind), dtype)
    reach = 1 << INTEGER_BITS[dtype] - 1
    scales = rng.integers(0, 256, rows) if rng.random() < 0.3 else rng.integers(0, 0xF0, rows)
    return Quantized(rng.integers(-reach, reach, (rows, columns)).astype(np.int8), scales.astype(np.uint8))


def as_bf16(values: Any) -> Any:
    """Patterns of the same values in BF16, for a step whose descriptor says so."""
    return from_float(values.astype(np.float32)).view(np.float16)


def in_bf16(step: Step, exponents: Exponents) -> Step:
    """The same step on the same values, in BF16."""
    return replace(
        step,
        descriptor=replace(step.descriptor, dtype=DType.BF16),
        x=None if step.x is None else as_bf16(step.x),
        w=as_bf16(step.w),
        exponents=exponents,
    )


def step(
    config: NdpConfig,
    rng: np.random.Generator,
    n: int,
    k: int,
    b: int,
    *,
    first: bool = True,
    kind: str = "normal",
    name: str = "",
    **flags: int,
) -> Step:
    """A step of those dimensions with random data; flags as fields of the descriptor."""
    x = random_values(rng, b, k, kind) if flags.get("source", Source.SLOT) == Source.SLOT else None
    return Step(describe(config, n, k, b, **flags), first, x, random_values(rng, n, k, kind), 0, name)


def attention_steps(
    config: NdpConfig,
    rng: np.random.Generator,
    *,
    dims: int,
    rows: int,
    tiles: Sequence[int],
    spread: float = 1.0,
    value_dims: int | None = None,
    v_tiles: Sequence[int] | None = None,
    spare_stripes: int = 0,
    q: Any = None,
    k: Any = None,
    v: Any = None,
    dtype: DType = DType.FP16,
) -> list[Step]:
    """The chain of one KV head: a SOFTMAX step for each of ``tiles`` of K, then V, in one or several steps.

    ``spread`` is about the standard deviation of the scores in base 2; V has ``value_dims`` dims (default:
    ``dims``) and ``spare_stripes`` more stripes a group than hold its tokens. ``q``, ``k`` and ``v`` are random
    unless they are given. They are rounded to integers if ``dtype`` says so.
    """
    tokens, value_dims = sum(tiles), value_dims or dims
    q = rng.standard_normal((rows, dims)).astype(np.float16) if q is None else q
    k = rng.standard_normal((tokens, dims)).astype(np.float16) if k is None else k
    v = random_values(rng, tokens, value_dims) if v is None else v
    scale = softmax_scale(spread / dims**0.5)

    def held(rows: Any) -> Any:
        return quantize(rows, dtype) if expansion_log2(dtype) else rows

    steps: list[Step] = []
    start = 0
    for tile in tiles:
        new = not steps
        source, keep = (Source.SLOT, Keep.NEW) if new else (Source.CHAIN, Keep.APPEND)
        d = describe(config, tile, dims, rows, op=Op.SOFTMAX, chain=1, source=source, keep=keep, dtype=dtype)
        steps.append(Step(d, new, q if new else None, held(k[start : start + tile]), scale=scale))
        start += tile
    start = 0
    v_tiles = [tokens] if v_tiles is None else v_tiles
    for index, tile in enumerate(v_tiles):
        more = int(index < len(v_tiles) - 1)
        g = pack_geometry_transposed(config, value_dims, tile, dtype)
        d = describe(
            config, value_dims, tile, rows, source=Source.KEPT, transpose=1, chain=more, acc_out=more,
            acc_in=int(index > 0), device_bytes=g.packed_bytes(g.group_stripes + spare_stripes), dtype=dtype,
        )  # fmt: skip
        steps.append(Step(d, False, None, held(v[start : start + tile])))
        start += tile
    return steps


def interleaved(heads: Sequence[Sequence[Step]]) -> list[Step]:
    """The chains of `attention_steps` as one chain: each head's values come after the scores of the next."""
    scores = [[one for one in head if one.descriptor.op == Op.SOFTMAX] for head in heads]
    values = [[one for one in head if one.descriptor.op != Op.SOFTMAX] for head in heads]
    order = list(scores[0])
    for head, following in enumerate([*scores[1:], []]):
        source = Source.PREVIOUS if following else Source.KEPT
        order += following
        order += [replace(one, descriptor=replace(one.descriptor, source=source)) for one in values[head]]
    linked = [
        replace(one, first=index == 0, descriptor=replace(one.descriptor, chain=1)) for index, one in enumerate(order)
    ]
    linked[-1] = replace(linked[-1], descriptor=replace(linked[-1].descriptor, chain=0))
    return linked
