"""One memory channel shared by several requesters: answers reach their askers, nobody starves, AXI's rules hold."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from amaranth.hdl import Module

from plora.hw.defs.config import preset
from plora.hw.rtl.front.channel_port import ChannelPort
from plora.hw.rtl.front.links import CORE, HOST, QUEUES, READ_DEBTS, REQUESTERS, WRITE_DEBTS
from tests.hw.rtl.front.bench import LINE, AxiMemory, AxiTaps, Bench, Driver, Testbench

CONFIG = replace(preset("tiny"), channels=1, dpa_bits=16)
SIZE = 1 << 16


class PortBench(Bench):
    """A channel port with a memory; requesters are driven by the test."""

    def __init__(self) -> None:
        self.port = ChannelPort(CONFIG)
        m = Module()
        m.submodules.port = self.port
        self.taps = AxiTaps(m, self.port.axi)
        super().__init__(m)

    def start(self, **options: Any) -> AxiMemory:
        return AxiMemory(self.port.axi, self.taps, SIZE, **options)


@pytest.fixture(scope="module")
def bench() -> PortBench:
    return PortBench()


def word_at(memory: AxiMemory, word: int) -> int:
    return int.from_bytes(memory.data[word * LINE : (word + 1) * LINE], "little")


def reader(
    port: Any, requests: Iterator[tuple[int, int, int]], answers: list[tuple[int, int, int]], rng: random.Random
) -> Testbench:
    """Makes ``requests`` (word, length, tag) with random pauses and collects (data, error, tag)."""

    async def run(ctx: Any) -> None:
        drive = Driver(ctx)
        request, response = port.request, port.response
        fields = request.payload.address, request.payload.length, request.payload.tag
        asking, expected, ready = False, 0, False
        todo: deque[tuple[int, int, int]] = deque(requests)
        sample = ctx.tick().sample(
            request.ready, response.valid, response.payload.data, response.payload.error, response.payload.tag
        )
        while todo or asking or expected:
            if not asking and todo and rng.random() < 0.7:
                word, length, tag = todo.popleft()
                for signal, value in zip(fields, (word, length - 1, tag), strict=True):
                    drive(signal, value)
                asking, expected = True, expected + length
            drive(request.valid, asking)
            ready = rng.random() < 0.7
            drive(response.ready, ready)
            _, _, taken, valid, data, error, tag = await sample
            if asking and taken:
                asking = False
            if valid and ready:
                answers.append((data, error, tag))
                expected -= 1
        for signal in (request.valid, *fields):
            drive(signal, 0)
        drive(response.ready, True)

    return run


def writer(
    port: Any, lines: list[tuple[int, int, int, int]], acks: list[tuple[int, int]], rng: random.Random
) -> Testbench:
    """Sends ``lines`` (word, data, strobe, tag) with random pauses and collects (error, tag)."""

    async def run(ctx: Any) -> None:
        drive = Driver(ctx)
        line, ack = port.line, port.ack
        fields = [line.payload[name] for name in ("address", "data", "strobe", "tag")]
        todo = deque(lines)
        sending, owed = False, 0
        sample = ctx.tick().sample(line.ready, ack.valid, ack.payload.error, ack.payload.tag)
        while todo or sending or owed:
            if not sending and todo and rng.random() < 0.7:
                for signal, value in zip(fields, todo.popleft(), strict=True):
                    drive(signal, value)
                sending, owed = True, owed + 1
            drive(line.valid, sending)
            ready = rng.random() < 0.7
            drive(ack.ready, ready)
            _, _, taken, valid, error, tag = await sample
            if sending and taken:
                sending = False
            if valid and ready:
                acks.append((error, tag))
                owed -= 1
        for signal in (line.valid, *fields):
            drive(signal, 0)

    return run


@pytest.mark.parametrize("seed", range(4))
def test_every_word_and_acknowledgement_comes_back_to_who_asked(bench: PortBench, seed: int) -> None:
    rng = random.Random(seed)
    memory = bench.start(
        seed=seed,
        stall=[0.0, 0.2, 0.5, 0.7][seed],
        latency=(1, 20),
        data_first=seed == 1,
        address_first=seed == 2,
    )
    memory.data[:] = rng.randbytes(SIZE)
    memory.read_errors.add(5 * LINE)
    before = bytes(memory.data)
    # Reads in the lower half; each writer has its own part of the upper half.
    half = SIZE // LINE // 2
    reads: list[list[tuple[int, int, int]]] = [[] for _ in range(REQUESTERS)]
    for requester in range(REQUESTERS):
        for _ in range(20):
            length = min(rng.choice([1, 1, 2, 7, 64]), READ_DEBTS[requester].most)
            page = rng.randrange(half // 64)
            # Bursts that end, start and lie at a 4 KiB boundary.
            start = page * 64 + rng.choice([0, 64 - length, rng.randint(0, 64 - length)])
            reads[requester].append((start, length, rng.randrange(READ_DEBTS[requester].tags)))
    reads[CORE].append((5, 1, 0))
    lines = [
        [
            (half + 100 * requester + rng.randrange(40), rng.getrandbits(512), rng.getrandbits(64), rng.randrange(4))
            for _ in range(30)
        ]
        for requester in range(REQUESTERS)
    ]
    for requester, debt in enumerate(WRITE_DEBTS):
        # Equal tags are answered in order, so a line may be written again only with the same tag.
        lines[requester] = [(word, data, strobe, word % debt.tags) for word, data, strobe, _ in lines[requester]]
    answers: list[list[tuple[int, int, int]]] = [[] for _ in range(REQUESTERS)]
    acks: list[list[tuple[int, int]]] = [[] for _ in range(REQUESTERS)]
    bench.run(
        *(reader(bench.port.reads[r], iter(reads[r]), answers[r], random.Random(r)) for r in range(REQUESTERS)),
        *(writer(bench.port.writes[r], lines[r], acks[r], random.Random(r)) for r in range(REQUESTERS)),
        background=[memory.run],
        max_cycles=20_000,
    )
    expected = bytearray(before)
    for requester in range(REQUESTERS):
        for tag in range(4):
            words = [w + i for w, n, t in reads[requester] if t == tag for i in range(n)]
            got = [(data, error) for data, error, t in answers[requester] if t == tag]
            assert got == [(word_at(memory, word), int(word == 5)) for word in words], f"{requester=} {tag=}"
            assert [t for _, t in acks[requester]].count(tag) == sum(1 for *_, t in lines[requester] if t == tag)
        for word, data, strobe, _ in lines[requester]:
            for lane in range(LINE):
                if strobe >> lane & 1:
                    expected[word * LINE + lane] = data >> 8 * lane & 255
    assert memory.data == expected


@pytest.mark.parametrize("greedy", [CORE, HOST, QUEUES])
def test_nobody_starves_while_another_asks_without_pause(bench: PortBench, greedy: int) -> None:
    memory = bench.start(latency=(3, 3))
    patient = (greedy + 1) % REQUESTERS
    grants: list[int] = []

    async def flood(ctx: Any) -> None:
        port = bench.port.reads[greedy]
        ctx.set(port.response.ready, 1)
        ctx.set(port.request.valid, 1)
        ctx.set(port.request.payload.length, min(4, READ_DEBTS[greedy].most) - 1)
        for signal in (bench.port.writes[greedy].line.valid, bench.port.writes[greedy].ack.ready):
            ctx.set(signal, 1)
        while True:
            await ctx.tick()

    async def ask(ctx: Any) -> None:
        read, write = bench.port.reads[patient], bench.port.writes[patient]
        ctx.set(read.response.ready, 1)
        ctx.set(write.ack.ready, 1)
        for number in range(20):
            await ctx.tick().repeat(7)
            ctx.set(read.request.payload.tag, number % READ_DEBTS[patient].tags)
            ctx.set(write.line.payload.tag, number % WRITE_DEBTS[patient].tags)
            ctx.set(read.request.valid, 1)
            waited = 0
            while True:
                _, _, ready = await ctx.tick().sample(read.request.ready)
                waited += 1
                if ready:
                    break
            ctx.set(read.request.valid, 0)
            grants.append(waited)
            ctx.set(write.line.valid, 1)
            waited = 0
            while True:
                _, _, ready = await ctx.tick().sample(write.line.ready)
                waited += 1
                if ready:
                    break
            ctx.set(write.line.valid, 0)
            grants.append(waited)

    bench.run(ask, background=[flood, memory.run], max_cycles=2000)
    assert len(grants) == 40
    assert max(grants) <= 2, "the next grant but one, at the latest"


def test_reads_and_writes_pass_one_a_cycle(bench: PortBench) -> None:
    memory = bench.start(latency=(1, 1))
    answers: list[tuple[int, int, int]] = []
    acks: list[tuple[int, int]] = []

    class Eager(random.Random):
        def random(self) -> float:
            return 0.0

    cycles = bench.run(
        reader(bench.port.reads[CORE], iter([(64 * i, 64, 0) for i in range(4)]), answers, Eager()),
        writer(bench.port.writes[HOST], [(i, i, 1, 0) for i in range(256)], acks, Eager()),
        background=[memory.run],
    )
    assert len(answers) == len(acks) == 256
    assert cycles < 256 + 12


async def ticks(ctx: Any, bench: PortBench, period: int) -> None:
    cycle = 0
    while True:
        cycle += 1
        ctx.set(bench.port.tick, cycle % period == 0)
        await ctx.tick()


PERIOD = 40


@pytest.mark.parametrize("late", [True, False], ids=["late", "lost"])
@pytest.mark.parametrize("requester", [CORE, HOST, QUEUES])
def test_a_silent_memory_is_answered_for_and_its_late_answers_are_swallowed(
    bench: PortBench, requester: int, late: bool
) -> None:
    """Errors for exactly what is owed, within two periods; then the channel works on as if nothing had been."""
    memory = bench.start(latency=(1, 5))
    rng = random.Random(requester)
    memory.data[:] = rng.randbytes(SIZE)
    read_debt, write_debt = READ_DEBTS[requester], WRITE_DEBTS[requester]
    length = min(3, read_debt.most)
    rounds: list[tuple[list[tuple[int, int, int]], list[tuple[int, int]]]] = []
    tripped: list[int] = []

    async def watch(ctx: Any) -> None:
        while True:
            _, _, trip = await ctx.tick().sample(bench.port.tripped)
            if trip:
                tripped.append(memory.cycle)

    async def play(ctx: Any) -> None:
        for number in range(4):
            memory.silent = number in (1, 2)
            answers: list[tuple[int, int, int]] = []
            acks: list[tuple[int, int]] = []
            before = memory.cycle
            requests = [(8 * number + i, length, i % read_debt.tags) for i in range(2)]
            lines = [(700 + 8 * number + i, i, 0, i % write_debt.tags) for i in range(2)]
            await reader(bench.port.reads[requester], iter(requests), answers, rng)(ctx)
            await writer(bench.port.writes[requester], lines, acks, rng)(ctx)
            # Reads, then writes; a silence that falls between two of them makes two.
            assert memory.cycle - before < 9 * PERIOD
            rounds.append((answers, acks))
            if not late:
                memory.forget = True
                await ctx.tick().repeat(2)

    bench.run(play, background=[memory.run, watch, lambda ctx: ticks(ctx, bench, PERIOD)], max_cycles=3000)
    for number, (answers, acks) in enumerate(rounds):
        failed = int(number in (1, 2))
        assert len(answers) == 2 * length and len(acks) == 2
        assert {error for _, error, _ in answers} == {failed}, number
        assert {error for error, _ in acks} == {failed}
        if not failed:
            words = [8 * number + i + w for i in range(2) for w in range(length)]
            by_tag = sorted(((t, data) for data, _, t in answers), key=lambda pair: pair[0])
            expected = sorted(
                (
                    (i % read_debt.tags, word_at(memory, w))
                    for i in range(2)
                    for w in words[i * length : (i + 1) * length]
                ),
                key=lambda pair: pair[0],
            )
            assert by_tag == expected
    assert 4 <= len(tripped) <= 8


def test_a_memory_that_is_slow_but_answers_is_left_alone(bench: PortBench) -> None:
    """A period longer than its latency never ends in an error, however long the queue."""
    memory = bench.start(latency=(PERIOD - 3, PERIOD - 3))
    answers: list[tuple[int, int, int]] = []

    async def tripped(ctx: Any) -> None:
        while True:
            _, _, trip = await ctx.tick().sample(bench.port.tripped)
            assert not trip

    bench.run(
        reader(bench.port.reads[CORE], iter([(64 * i, 64, 0) for i in range(6)]), answers, random.Random(1)),
        background=[memory.run, tripped, lambda ctx: ticks(ctx, bench, PERIOD)],
        max_cycles=3000,
    )
    assert len(answers) == 6 * 64 and not any(error for _, error, _ in answers)


@pytest.mark.parametrize(("core", "host"), [(8, 0), (16, 3), (1, 1), (0, 0)])
def test_no_more_is_on_its_way_than_the_share_allows(bench: PortBench, core: int, host: int) -> None:
    memory = bench.start(latency=(30, 30))
    most = {"core": 0, "host": 0, "stores": 0}

    async def watch(ctx: Any) -> None:
        reads, writes = bench.port._read_watches, bench.port._write_watches
        while True:
            sampled = await ctx.tick().sample(reads[CORE].owed, reads[HOST].owed, writes[HOST].owed)
            for name, owed in zip(most, sampled[2:], strict=True):
                most[name] = max(most[name], owed)

    async def settings(ctx: Any) -> None:
        ctx.set(bench.port.share, {"core": core, "host": host})
        await ctx.tick()

    answers: list[tuple[int, int, int]] = []
    host_answers: list[tuple[int, int, int]] = []
    acks: list[tuple[int, int]] = []
    bench.run(
        reader(bench.port.reads[CORE], iter([(4 * i, 4, 0) for i in range(30)]), answers, random.Random(1)),
        reader(bench.port.reads[HOST], iter([(i, 1, 0) for i in range(40)]), host_answers, random.Random(2)),
        writer(bench.port.writes[HOST], [(i, i, 1, 0) for i in range(40)], acks, random.Random(3)),
        background=[memory.run, watch, settings],
        max_cycles=6000,
    )
    assert len(answers) == 120 and len(host_answers) == len(acks) == 40
    # One burst is always let through, or nothing would be.
    assert most["core"] <= max(core, 4) if core else most["core"] > 16
    for name in ("host", "stores"):
        assert most[name] == host if host else most[name] > 8
