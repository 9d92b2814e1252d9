"""From drained sums to lines in memory: collector, result writer, retirement."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plora.hw.defs.config import WORD_VALUES, NdpConfig
from plora.hw.defs.descriptor import FIELDS, Descriptor, Keep
from plora.hw.defs.packing import ceil_div, result_row_words
from plora.hw.defs.status import Status
from plora.hw.rtl.core.collector import ResultCollector
from plora.hw.rtl.core.job import Region, channel_bits, record_layout, result_tag_bits, result_tag_layout
from plora.hw.rtl.core.result_writer import ResultWriter, result_layout
from plora.hw.rtl.core.retirement import Retirement, executed_layout
from plora.hw.rtl.pe.array import results_layout
from tests.hw.rtl.core.bench import TINY, simulate

CONFIGS = pytest.mark.parametrize(
    "config", [replace(TINY, name=f"tiny-{c}", channels=c) for c in (1, 2, 8)], ids=lambda config: config.name
)
TAIL = 0x3C00


@CONFIGS
def test_the_collector_stores_each_value_of_a_job_once_and_nothing_beyond_n(config: NdpConfig) -> None:
    dut = ResultCollector(config)
    rng = random.Random(config.channels)
    channels = config.channels
    layout, tags = results_layout(config, result_tag_bits(config)), result_tag_layout(config)

    async def bench(ctx: Any) -> None:
        for _ in range(25):
            n = rng.choice([1, 2, 3, 7, 31, 33, 70])
            tap = rng.choice([0, 1, 2])
            split = 0 if tap else rng.randint(0, channel_bits(config))
            taps, part_channels = 1 << tap, channels >> split
            group_rows = part_channels * taps
            region, second = rng.choice(list(Region)), rng.getrandbits(1)
            stored: list[dict[int, int]] = [{}, {}]
            flags, collected = 0, []
            groups = ceil_div(n, group_rows)
            for group in range(groups):
                rows = min(group_rows, n - group * group_rows)
                for j in range(taps):
                    values = [[rng.getrandbits(16) for _ in range(channels)] for _ in range(2)]
                    numeric = [[rng.choice([0, 0, 0, 1, 2]) for _ in range(channels)] for _ in range(2)]
                    first = group * group_rows
                    tag = {"region": region, "word": 3 + first // WORD_VALUES, "lane": first % WORD_VALUES,
                           "rows": rows, "split_log2": split, "end": group == groups - 1}  # fmt: skip
                    ctx.set(
                        dut.results.payload,
                        layout.const({"values": values, "numeric": numeric, "tap_index": j, "second_row": second,
                                      "last_tap": j == taps - 1, "tag": tags.const(tag).as_bits()}),
                    )  # fmt: skip
                    ctx.set(dut.results.valid, 1)
                    await ctx.tick()
                    ctx.set(dut.results.valid, 0)
                    for row in range(1 + second):
                        for q in range(part_channels):
                            if j * part_channels + q < rows:
                                flags |= numeric[row][q]
                    write = ctx.get(dut.write)
                    end = ctx.get(dut.collected)
                    assert end.valid == (group == groups - 1 and j == taps - 1)
                    if end.valid:
                        collected.append(end.numeric)
                    if write.valid:
                        assert (write.region, write.second_row) == (region, second)
                        for row in range(2):
                            for lane in range(WORD_VALUES):
                                if write.lanes >> lane & 1:
                                    place = (write.word - 3) * WORD_VALUES + lane
                                    assert place not in stored[row], f"value {place} is stored twice"
                                    stored[row][place] = write.data[row] >> 16 * lane & 0xFFFF
                                    assert stored[row][place] == values[row][place % group_rows - j * part_channels]
                    if rng.random() < 0.3:
                        await ctx.tick()
                        assert not ctx.get(dut.write).valid
                        assert not ctx.get(dut.collected).valid
            assert set(stored[0]) == set(stored[1]) == set(range(n))
            assert collected == [flags]

    simulate(dut, bench)


class WriterBench:
    """A result writer between an output buffer that answers and a memory that acknowledges when it likes."""

    def __init__(self, seed: int, line_stall: float = 0.0, ack_latency: int = 3) -> None:
        self.dut = ResultWriter(TINY)
        self.rng = random.Random(seed)
        self.line_stall, self.ack_latency = line_stall, ack_latency
        self.lines: list[tuple[int, int]] = []
        self.acks: list[int] = []
        self.fail: set[int] = set()
        self.hold_acks = False
        self.cycle = 0

    @staticmethod
    def stored(half: int, row: int, word: int) -> int:
        """A word whose every lane tells where it comes from; never zero."""
        return sum((half << 14 | row << 13 | word << 5 | lane | 0x8000) << 16 * lane for lane in range(WORD_VALUES))

    async def buffer(self, ctx: Any) -> None:
        dut = self.dut
        async for *_, enable, half, row, address in ctx.tick().sample(dut.enable, dut.half, dut.row, dut.address):
            if enable:
                ctx.set(dut.word, self.stored(half, row, address))

    async def memory(self, ctx: Any) -> None:
        port = self.dut.write
        pending: list[tuple[int, int]] = []
        while True:
            ready = self.rng.random() >= self.line_stall
            ctx.set(port.line.ready, ready)
            due = [p for p in pending if p[0] <= self.cycle and not self.hold_acks]
            ctx.set(port.ack, bool(due))
            if due:
                answered = self.rng.choice(due)  # acknowledgements overtake each other
                pending.remove(answered)
                ctx.set(port.ack_error, answered[1] in self.fail)
            *_, valid, line = await ctx.tick().sample(port.line.valid, port.line.payload)
            self.cycle += 1
            if valid and ready:
                assert line.strobe == (1 << 64) - 1
                self.lines.append((line.address, line.data))
                pending.append((self.cycle + self.rng.randint(0, self.ack_latency), line.address))

    async def write(self, ctx: Any, **result: int) -> tuple[bool, int]:
        """Write one result and return whether it failed, and its lines."""
        dut = self.dut
        ctx.set(dut.result.payload, result_layout(TINY).const(result))
        ctx.set(dut.result.valid, 1)
        *_, failed, lines = await ctx.tick().sample(dut.failed, dut.lines).until(dut.result.ready)
        ctx.set(dut.result.valid, 0)
        return bool(failed), lines


@settings(max_examples=12)
@given(st.sampled_from([0.0, 0.6]), st.sampled_from([0, 20]), st.integers(0, 999))
def test_rows_are_written_line_after_line_with_zero_tails(stall: float, ack_latency: int, seed: int) -> None:
    bench = WriterBench(seed, stall, ack_latency)
    rng = random.Random(seed)

    async def run(ctx: Any) -> None:
        for _ in range(4):
            rows, columns = rng.choice([1, 2, 3, 5]), rng.choice([1, 31, 32, 33, 64, 90])
            address, half = rng.randrange(1000), rng.getrandbits(1)
            bench.lines.clear()
            failed, lines = await bench.write(ctx, address=address, half=half, rows=rows, columns=columns)
            words = result_row_words(columns)
            expected = []
            for row in range(rows):
                for word in range(words):
                    data = bench.stored(half, row % 2, row // 2 * words + word)
                    kept = min(WORD_VALUES, columns - word * WORD_VALUES)
                    expected.append((address + row * words + word, data & (1 << 16 * kept) - 1))
            assert bench.lines == expected
            assert (failed, lines) == (False, len(expected))

    simulate(bench.dut, run, background=[bench.buffer, bench.memory])


def test_a_result_is_done_only_after_its_last_acknowledgement_but_its_half_is_free_before() -> None:
    bench = WriterBench(1)
    emptied: list[int] = []

    async def run(ctx: Any) -> None:
        bench.hold_acks = True
        ctx.set(bench.dut.result.payload, result_layout(TINY).const({"rows": 3, "columns": 40}))
        ctx.set(bench.dut.result.valid, 1)
        for _ in range(40):
            *_, ready, empty = await ctx.tick().sample(bench.dut.result.ready, bench.dut.emptied)
            assert not ready
            if empty:
                emptied.append(len(bench.lines))
        assert len(emptied) == 1
        assert len(bench.lines) == 6
        bench.hold_acks = False
        await ctx.tick().until(bench.dut.result.ready)

    simulate(bench.dut, run, background=[bench.buffer, bench.memory])


@pytest.mark.parametrize("failing", [0, 3, 5])
def test_one_refused_line_fails_its_result_and_not_the_next(failing: int) -> None:
    bench = WriterBench(failing)

    async def run(ctx: Any) -> None:
        bench.fail = {failing}
        failed, _ = await bench.write(ctx, address=0, rows=2, columns=90)
        assert failed
        failed, _ = await bench.write(ctx, address=100, rows=2, columns=90)
        assert not failed

    simulate(bench.dut, run, background=[bench.buffer, bench.memory])


def test_a_line_leaves_in_every_cycle_while_memory_takes_them() -> None:
    bench = WriterBench(1)
    cycles: list[int] = []

    async def clock(ctx: Any) -> None:
        cycle = 0
        async for *_, valid in ctx.tick().sample(bench.dut.write.line.valid):
            cycle += 1
            if valid:
                cycles.append(cycle)

    async def run(ctx: Any) -> None:
        await bench.write(ctx, rows=4, columns=128)

    simulate(bench.dut, run, background=[bench.buffer, bench.memory, clock])
    assert cycles == list(range(cycles[0], cycles[0] + 16))


class RetirementBench:
    """Retires a list of descriptors, each with what became of its work."""

    def __init__(self) -> None:
        self.dut = Retirement(TINY)
        self.written: list[int] = []
        self.freed = 0

    async def retire(
        self, ctx: Any, status: Status, *, first: int = 1, verdict: int = 0, read_error: int = 0, write_error: int = 0,
        numeric: int = 0, half: int = 0, **flags: int,
    ) -> dict[str, int]:  # fmt: skip
        dut = self.dut
        d = Descriptor(device_rows=5, gpu_rows=3, **flags)
        ctx.set(
            dut.records.payload,
            record_layout(TINY).const(
                {"descriptor": {f.name: int(getattr(d, f.name)) for f in FIELDS}, "first": first, "verdict": verdict,
                 "status": status, "result_address": 77, "queue": 9}
            ),
        )  # fmt: skip
        ctx.set(dut.records.valid, 1)
        await ctx.tick().repeat(3)
        if status is Status.OK:
            assert not ctx.get(dut.completed.valid)
            ctx.set(dut.executed.payload, executed_layout.const({"half": half, "read_error": read_error, "cycles": 11}))
            ctx.set(dut.executed.valid, 1)
            if not flags.get("acc_out"):
                await ctx.tick().repeat(3)
                assert not ctx.get(dut.completed.valid)
                assert not ctx.get(dut.result.valid)
                ctx.set(dut.numeric.payload, numeric)
                ctx.set(dut.numeric.valid, 1)
        while not ctx.get(dut.completed.valid):
            self.freed |= ctx.get(dut.half_freed)
            if ctx.get(dut.result.valid):
                result = ctx.get(dut.result.payload)
                assert (result.address, result.half, result.rows, result.columns) == (77, half, 3, 5)
                self.written.append(half)
                ctx.set(dut.write_failed, write_error)
                ctx.set(dut.written_lines, 3)
                ctx.set(dut.result.ready, 1)
                await ctx.tick()
                ctx.set(dut.result.ready, 0)
            else:
                await ctx.tick()
        completed = ctx.get(dut.completed.payload)
        assert completed.queue == 9
        assert Descriptor(**{f.name: completed.descriptor[f.name] for f in FIELDS}) == d
        ctx.set(dut.completed.ready, 1)
        assert ctx.get(dut.job_completed) == (status is Status.OK)
        assert ctx.get(dut.numeric.ready) == (status is Status.OK and not flags.get("acc_out", 0))
        await ctx.tick()
        for stream in (dut.records, dut.executed, dut.numeric):
            ctx.set(stream.valid, 0)
        ctx.set(dut.completed.ready, 0)
        return {name: completed[name] for name in ("status", "numeric", "result_bytes", "cycles")}


OK = {"status": Status.OK, "numeric": 2, "result_bytes": 0, "cycles": 11}


def failed(status: Status) -> dict[str, int]:
    return {"status": status, "numeric": 0, "result_bytes": 0, "cycles": 0}


def test_outcomes_are_those_of_the_table() -> None:
    bench = RetirementBench()

    async def run(ctx: Any) -> None:
        assert await bench.retire(ctx, Status.OK, numeric=2, half=1) == {**OK, "result_bytes": 3 * 64}
        assert bench.written == [1]
        assert await bench.retire(ctx, Status.OK, numeric=2, keep=Keep.NEW) == OK
        assert await bench.retire(ctx, Status.OK, numeric=2, acc_out=1) == {**OK, "numeric": 0}
        assert await bench.retire(ctx, Status.BAD_OP) == failed(Status.BAD_OP)
        assert bench.freed == 0
        assert await bench.retire(ctx, Status.OK, read_error=1, half=1) == failed(Status.MEMORY_ERROR)
        assert bench.freed == 0b10
        assert bench.written == [1], "a result was written although a read had failed"
        assert await bench.retire(ctx, Status.OK, write_error=1) == failed(Status.MEMORY_ERROR)

    simulate(bench.dut, run)


@pytest.mark.parametrize("cause", [{"read_error": 1}, {"write_error": 1}, {"status": Status.BAD_FLAGS}])
def test_a_failure_aborts_the_rest_of_its_chain_and_nothing_else(cause: dict[str, Any]) -> None:
    bench = RetirementBench()

    async def run(ctx: Any) -> None:
        cause_of = dict(cause)
        status = cause_of.pop("status", Status.OK)
        assert (await bench.retire(ctx, status, chain=1, **cause_of))["status"] not in (Status.OK, Status.CHAIN_ABORTED)
        bench.written.clear()
        assert await bench.retire(ctx, Status.OK, first=0, chain=1) == failed(Status.CHAIN_ABORTED)
        assert await bench.retire(ctx, Status.CHAIN_BROKEN, first=0, chain=1) == failed(Status.CHAIN_ABORTED)
        # What the queue engine says stands.
        broken = await bench.retire(ctx, Status.CHAIN_BROKEN, first=0, verdict=1, chain=1)
        assert broken == failed(Status.CHAIN_BROKEN)
        assert await bench.retire(ctx, Status.OK, first=0, chain=0) == failed(Status.CHAIN_ABORTED)
        assert bench.written == [], "an aborted result was written"
        assert (await bench.retire(ctx, Status.OK, first=1))["status"] == Status.OK

    simulate(bench.dut, run)
