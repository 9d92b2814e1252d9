"""From drained sums to lines in memory: collector, result writer, retirement."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plora.hw.defs.config import WORD_VALUES, NdpConfig
from plora.hw.defs.descriptor import FIELDS, Descriptor, Keep
from plora.hw.defs.packing import ceil_div, result_row_words
from plora.hw.defs.queue import ANCHOR_NAN, ANCHOR_NONE, Anchor
from plora.hw.defs.status import Status
from plora.hw.rtl.core.collector import ResultCollector
from plora.hw.rtl.core.job import Region, channel_bits, record_layout, result_tag_layout
from plora.hw.rtl.core.result_writer import ResultWriter, result_layout
from plora.hw.rtl.core.retirement import Retirement, executed_layout
from plora.hw.rtl.core.softmax_path import values_layout
from plora.hw.rtl.sfu.row_state import NO_ANCHOR
from tests.hw.rtl.core.bench import TINY, drain, feed, simulate

CONFIGS = pytest.mark.parametrize(
    "config", [replace(TINY, name=f"tiny-{c}", channels=c) for c in (1, 2, 8)], ids=lambda config: config.name
)
TAIL = 0x3C00


@CONFIGS
def test_the_collector_stores_each_value_of_a_job_once_and_nothing_beyond_n(config: NdpConfig) -> None:
    dut = ResultCollector(config)
    rng = random.Random(config.channels)
    channels = config.channels
    layout, tags = values_layout(config), result_tag_layout(config)

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


@CONFIGS
@pytest.mark.parametrize("end", [0, 1])
def test_the_word_after_a_row_of_a_token_wise_job_is_its_anchor(config: NdpConfig, end: int) -> None:
    dut = ResultCollector(config)
    rng = random.Random(config.channels)

    async def bench(ctx: Any) -> None:
        for anchor, none in ((5, False), (-7, False), (-32767, False), (NO_ANCHOR, True)):
            rows, second, state = rng.randint(1, 2 * config.channels), rng.getrandbits(1), rng.randrange(32)
            tag = {"region": Region.HALF_1, "word": 3, "lane": 0, "rows": rows, "state": state, "anchor": 1, "end": end}
            states = [{"anchor": anchor, "shift": 3, "nan": 1, "total": rng.getrandbits(40)} for _ in range(2)]
            for tap in range(2):
                numeric = [[2 * (q == 0 and tap == 0) for q in range(config.channels)] for _ in range(2)]
                ctx.set(
                    dut.results.payload,
                    values_layout(config).const(
                        {"tap_index": tap, "last_tap": tap, "second_row": second, "numeric": numeric,
                         "tag": result_tag_layout(config).const(tag).as_bits()}
                    ),
                )  # fmt: skip
                ctx.set(dut.results.valid, 1)
                if tap:
                    assert ctx.get(dut.state_enable)
                    assert ctx.get(dut.state_pair) == state
                await ctx.tick()
                ctx.set(dut.results.valid, 0)
                assert not ctx.get(dut.collected).valid
            ctx.set(dut.states, states)
            await ctx.tick()
            write, collected = ctx.get(dut.write), ctx.get(dut.collected)
            assert (write.valid, write.region, write.word) == (1, Region.HALF_1, 4)
            assert (write.second_row, write.lanes) == (second, (1 << WORD_VALUES) - 1)
            assert (collected.valid, collected.valid and collected.numeric) == (end, 2 * end)
            for row, known in enumerate(states):
                wanted = Anchor(ANCHOR_NONE if none else anchor, 3, ANCHOR_NAN, known["total"])
                assert Anchor.unpack(write.data[row].to_bytes(64, "little")) == wanted
            await ctx.tick()
            assert not ctx.get(dut.write).valid
            assert not ctx.get(dut.collected).valid

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
        self.held_accounts: set[int] = set()
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
        pending: list[tuple[int, int, int]] = []
        while True:
            ready = self.rng.random() >= self.line_stall
            ctx.set(port.line.ready, ready)
            due = [p for p in pending if p[0] <= self.cycle and p[2] not in self.held_accounts]
            ctx.set(port.ack, bool(due))
            if due:
                answered = self.rng.choice(due)  # acknowledgements overtake each other
                pending.remove(answered)
                ctx.set(port.ack_error, answered[1] in self.fail)
                ctx.set(port.ack_tag, answered[2])
            *_, valid, line = await ctx.tick().sample(port.line.valid, port.line.payload)
            self.cycle += 1
            if valid and ready:
                assert line.strobe == (1 << 64) - 1
                self.lines.append((line.address, line.data))
                pending.append((self.cycle + self.rng.randint(0, self.ack_latency), line.address, line.tag))

    async def send(self, ctx: Any, **result: int) -> tuple[int, int]:
        """Send one result and return its account and its lines."""
        dut = self.dut
        ctx.set(dut.result.payload, result_layout(TINY).const(result))
        ctx.set(dut.result.valid, 1)
        *_, account, lines = await ctx.tick().sample(dut.account, dut.lines).until(dut.result.ready)
        ctx.set(dut.result.valid, 0)
        return account, lines

    async def settle(self, ctx: Any, account: int) -> bool:
        """Wait until ``account`` is settled and return whether it failed."""
        while not ctx.get(self.dut.settled) >> account & 1:
            await ctx.tick()
        return bool(ctx.get(self.dut.failed) >> account & 1)


@settings(max_examples=12)
@given(st.sampled_from([0.0, 0.6]), st.sampled_from([0, 20]), st.integers(0, 999))
def test_rows_are_written_line_after_line_with_zero_tails(stall: float, ack_latency: int, seed: int) -> None:
    bench = WriterBench(seed, stall, ack_latency)
    rng = random.Random(seed)

    async def run(ctx: Any) -> None:
        for _ in range(4):
            rows, columns = rng.choice([1, 2, 3, 5]), rng.choice([1, 31, 32, 33, 64, 90])
            address, half, anchors = rng.randrange(1000), rng.getrandbits(1), rng.getrandbits(1)
            bench.lines.clear()
            result = {"address": address, "half": half, "rows": rows, "columns": columns, "anchors": anchors}
            account, lines = await bench.send(ctx, **result)
            failed = await bench.settle(ctx, account)
            words = result_row_words(columns, transpose=anchors)
            expected = []
            for row in range(rows):
                for word in range(words):
                    data = bench.stored(half, row % 2, row // 2 * words + word)
                    kept = min(WORD_VALUES, columns - word * WORD_VALUES)
                    if anchors and word == words - 1:
                        kept = WORD_VALUES
                    expected.append((address + row * words + word, data & (1 << 16 * kept) - 1))
            assert bench.lines == expected
            assert (failed, lines) == (False, len(expected))

    simulate(bench.dut, run, background=[bench.buffer, bench.memory])


@pytest.mark.parametrize("slow", [0, 1])
def test_an_account_is_settled_by_its_own_acknowledgements_alone(slow: int) -> None:
    bench = WriterBench(slow)

    async def run(ctx: Any) -> None:
        bench.held_accounts = {0, 1}
        assert (await bench.send(ctx, address=0, rows=3, columns=40))[0] == 0
        assert ctx.get(bench.dut.settled) == 0b10
        assert (await bench.send(ctx, address=100, rows=2, columns=90))[0] == 1
        await ctx.tick().repeat(20)
        assert ctx.get(bench.dut.settled) == 0
        bench.held_accounts = {slow}
        await ctx.tick().repeat(40)
        assert ctx.get(bench.dut.settled) == 0b11 & ~(1 << slow)
        bench.held_accounts = set()
        assert not await bench.settle(ctx, slow)
        assert ctx.get(bench.dut.settled) == 0b11

    simulate(bench.dut, run, background=[bench.buffer, bench.memory], deadline_cycles=1000)


@pytest.mark.parametrize("failing", [0, 3, 5, 100, 105])
def test_a_refused_line_fails_its_own_result_alone(failing: int) -> None:
    bench = WriterBench(failing)

    async def run(ctx: Any) -> None:
        bench.fail = {failing}
        bench.held_accounts = {0, 1}
        accounts = [(await bench.send(ctx, address=address, rows=2, columns=90))[0] for address in (0, 100)]
        bench.held_accounts = set()
        assert [await bench.settle(ctx, account) for account in accounts] == [failing < 100, failing >= 100]
        account, _ = await bench.send(ctx, address=200, rows=2, columns=90)
        assert account == accounts[0]
        assert not await bench.settle(ctx, account)

    simulate(bench.dut, run, background=[bench.buffer, bench.memory], deadline_cycles=1000)


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
        await bench.send(ctx, rows=4, columns=128)

    simulate(bench.dut, run, background=[bench.buffer, bench.memory, clock])
    assert cycles == list(range(cycles[0], cycles[0] + 16))


@dataclass(frozen=True)
class Retired:
    """A descriptor at retirement: what the decoder said, what became of its work, and the status it must get."""

    wanted: Status
    status: Status = Status.OK
    flags: dict[str, int] = field(default_factory=dict)
    first: int = 1
    verdict: int = 0
    read_error: int = 0
    write_error: int = 0
    half: int = 0

    @property
    def is_job(self) -> bool:
        return self.status is Status.OK

    @property
    def has_results(self) -> bool:
        return self.is_job and not self.flags.get("acc_out", 0)

    @property
    def written(self) -> bool:
        to_memory = self.has_results and not self.flags.get("keep", 0)
        return to_memory and not self.read_error and self.wanted is not Status.CHAIN_ABORTED


class RetirementBench:
    """Offers descriptors and what became of them, each stream at its own pace, and checks what is completed."""

    LINES, CYCLES, NUMERIC = 3, 11, 2

    def __init__(self, cases: list[Retired], seed: int) -> None:
        self.dut = Retirement(TINY)
        self.cases = cases
        self.rng = random.Random(seed)
        self.sent: list[int] = []
        self.freed: list[int] = []
        self.account = 0
        self.pending: dict[int, tuple[int, int]] = {}  # account: cycles until it is settled, failure

    def run(self) -> None:
        dut, cases = self.dut, self.cases
        records = [
            record_layout(TINY).const(
                {"descriptor": {f.name: int(getattr(self.descriptor(case), f.name)) for f in FIELDS},
                 "first": case.first, "verdict": case.verdict, "status": case.status, "queue": index,
                 "result_address": 70 + index}
            )
            for index, case in enumerate(cases)
        ]  # fmt: skip
        executed = [
            executed_layout.const({"half": case.half, "read_error": case.read_error, "cycles": self.CYCLES})
            for case in cases
            if case.is_job
        ]
        numeric = [self.NUMERIC for case in cases if case.has_results]

        def source(stream: Any, payloads: list[Any]) -> Any:
            async def process(ctx: Any) -> None:
                await feed(ctx, stream, payloads, self.rng, self.rng.choice([0.0, 0.7]))

            return process

        simulate(
            dut,
            source(dut.records, records),
            source(dut.executed, executed),
            source(dut.numeric, numeric),
            self.collect,
            background=[self.writer, self.watch],
            deadline_cycles=5000,
        )
        assert self.sent == [index for index, case in enumerate(cases) if case.written]
        to_memory = [case for case in cases if case.has_results and not case.flags.get("keep", 0)]
        assert self.freed == [case.half for case in to_memory], "a half is freed once for each job that was given it"

    @staticmethod
    def descriptor(case: Retired) -> Descriptor:
        return Descriptor(device_rows=5, gpu_rows=3, **case.flags)

    async def watch(self, ctx: Any) -> None:
        async for *_, freed in ctx.tick().sample(self.dut.half_freed):
            if freed:
                self.freed.append(freed.bit_length() - 1)

    async def writer(self, ctx: Any) -> None:
        dut, rng = self.dut, self.rng
        emptied = False
        while True:
            for account, (cycles, failure) in list(self.pending.items()):
                if cycles == 0:
                    del self.pending[account]
                    ctx.set(dut.settled, ctx.get(dut.settled) | 1 << account)
                    ctx.set(dut.failed, ctx.get(dut.failed) & ~(1 << account) | failure << account)
                else:
                    self.pending[account] = (cycles - 1, failure)
            ready = emptied and rng.random() < 0.3
            emptying = not emptied and bool(ctx.get(dut.result.valid)) and rng.random() < 0.5
            emptied |= emptying
            ctx.set(dut.emptied, emptying)
            ctx.set(dut.result.ready, ready)
            ctx.set(dut.account, self.account)
            ctx.set(dut.lines, self.LINES if ready else 0)
            *_, valid, result = await ctx.tick().sample(dut.result.valid, dut.result.payload)
            if valid and ready:
                index = result.address - 70
                case = self.cases[index]
                assert (result.half, result.rows, result.columns) == (case.half, 3, 5)
                assert self.account not in self.pending, "two results in one account"
                self.sent.append(index)
                self.pending[self.account] = (rng.choice([0, 1, 20]), case.write_error)
                ctx.set(dut.settled, ctx.get(dut.settled) & ~(1 << self.account))
                self.account ^= 1
                emptied = False

    async def collect(self, ctx: Any) -> None:
        ctx.set(self.dut.settled, 0b11)
        got: list[Any] = []
        await drain(ctx, self.dut.completed, got, len(self.cases), self.rng, 0.4)
        for index, (completed, case) in enumerate(zip(got, self.cases, strict=True)):
            where = f"descriptor {index}: {case}"
            assert completed.queue == index
            assert Descriptor(**{f.name: completed.descriptor[f.name] for f in FIELDS}) == self.descriptor(case), where
            ok = case.wanted is Status.OK
            assert (completed.status, completed.numeric, completed.result_bytes, completed.cycles) == (
                case.wanted,
                self.NUMERIC if ok and case.has_results else 0,
                64 * self.LINES if ok and case.written else 0,
                self.CYCLES if ok else 0,
            ), where
        assert not ctx.get(self.dut.busy)


ABORTED = Status.CHAIN_ABORTED
FAILED = Status.MEMORY_ERROR


@settings(max_examples=12)
@given(st.integers(0, 9999))
def test_outcomes_are_those_of_the_table(seed: int) -> None:
    RetirementBench(
        [
            Retired(Status.OK),
            Retired(Status.OK, half=1),
            Retired(Status.OK, flags={"chain": 1, "keep": Keep.NEW}),
            Retired(Status.OK, flags={"chain": 1, "acc_out": 1}, first=0),
            Retired(Status.OK, first=0),
            Retired(Status.BAD_OP, Status.BAD_OP),
            Retired(FAILED, read_error=1, half=1),
            Retired(Status.OK),
            Retired(FAILED, write_error=1, half=1),
            Retired(Status.OK),
            Retired(Status.OK, half=1),
        ],
        seed,
    ).run()


@pytest.mark.parametrize(
    "cause",
    [
        Retired(FAILED, read_error=1, flags={"chain": 1}),
        Retired(FAILED, write_error=1, flags={"chain": 1}),
        Retired(Status.BAD_FLAGS, Status.BAD_FLAGS, flags={"chain": 1}),
    ],
    ids=["read", "write", "refusal"],
)
@pytest.mark.parametrize("seed", range(4))
def test_a_failure_aborts_the_rest_of_its_chain_and_nothing_else(cause: Retired, seed: int) -> None:
    chain = {"chain": 1}
    RetirementBench(
        [
            Retired(Status.OK),
            cause,
            Retired(ABORTED, flags=chain, first=0, half=1),
            Retired(ABORTED, Status.CHAIN_BROKEN, flags=chain, first=0),
            # What the queue engine says stands.
            Retired(Status.CHAIN_BROKEN, Status.CHAIN_BROKEN, flags=chain, first=0, verdict=1),
            Retired(ABORTED, first=0),
            Retired(Status.OK, half=1),
            cause,
            Retired(Status.OK),
        ],
        seed,
    ).run()
