"""What the core promises at its ports, proved by induction for all inputs, and seeded bugs that the proofs notice.

With what `tests.hw.rtl.front.test_proofs` proves of the front end this makes the chain from a queue's window to the
memory ports: the decoder lets only operands inside the window pass; bursts cover exactly the run of
stripes that they were cut from, within 4 KiB; result lines go from the result's address on, one after the other; and
no completion leaves before the last of them was acknowledged.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from amaranth.hdl import Array, Cat, Elaboratable, Module, Mux, Signal, Value
from amaranth.lib import data
from amaranth.lib.wiring import connect

from plora.hw.defs.config import preset
from plora.hw.defs.descriptor import DType, Op, Type
from plora.hw.defs.status import Status
from plora.hw.rtl.core import bursts, decoder, result_writer, retirement
from plora.hw.rtl.core.multiplier import multiply_steps
from tests.hw.rtl.formal import Assert, Assume, Elaborated, Proof, free_inputs, hold

CONFIG = replace(
    preset("tiny"), name="proof", channels=1, dpa_bits=16, output_buffer_bytes=2048, input_buffer_bytes=2048
)


def stream_of(m: Module, check: Any, port: Any) -> None:
    hold(m, check, port.valid, port.ready, Value.cast(port.payload))


# ---- bursts -------------------------------------------------------------------------------------------


def cutter_properties(source: ModuleType) -> tuple[Module, list[Any]]:
    """Bursts of a run follow each other as it says, without a gap or an overlap but for what is left out after
    each group, end with it, and stay within 4 KiB."""
    count_bits, longest = 8, 16
    m = Module()
    dut = source.BurstCutter(CONFIG, count_bits=count_bits, max_words=longest, operand=False)
    m.submodules.dut = made = Elaborated(dut)
    run, burst = dut.run.payload, dut.bursts.payload
    stream_of(m, Assume, dut.run)
    room = Signal(count_bits)
    taken = dut.bursts.valid & dut.bursts.ready
    asked = Mux(taken, burst.length + 1, 0)
    m.d.sync += room.eq(dut.room - asked)
    started = Signal()
    m.d.sync += started.eq(1)
    m.d.comb += [
        Assume(~dut.run.valid | (run.words != 0)),
        Assume(~dut.run.valid | (run.group != 0) | (run.skip == 0)),
        Assume(~started | (dut.room >= room)),
    ]
    place, words, done, busy = Signal(len(run.address)), Signal(count_bits), Signal(count_bits), Signal()
    group, skip, of_group = Signal(count_bits), Signal(count_bits), Signal(count_bits)
    with m.If(dut.run.valid & dut.run.ready):
        m.d.sync += [
            place.eq(run.address),
            words.eq(run.words),
            done.eq(0),
            busy.eq(1),
            group.eq(run.group),
            skip.eq(run.skip),
            of_group.eq(0),
        ]
    with m.If(taken):
        m.d.sync += [
            done.eq(done + burst.length + 1),
            of_group.eq(of_group + burst.length + 1),
            place.eq(place + burst.length + 1),
        ]
        with m.If((group != 0) & (of_group + burst.length + 1 == group)):
            m.d.sync += [of_group.eq(0), place.eq(place + burst.length + 1 + skip)]
        with m.If(done + burst.length + 1 == words):
            m.d.sync += busy.eq(0)
    inner = made.inner
    m.d.comb += Assert(busy == ~dut.run.ready)
    with m.If(busy):
        m.d.comb += [
            Assert(words != 0),
            Assert(done < words),
            Assert((inner["address"] + Mux(made.state("SKIP"), skip, 0))[: len(place)] == place),
            Assert(inner["left"] == words - done),
            Assert((inner["group"] == group) & (inner["skip"] == skip)),
            Assert((group != 0) | (skip == 0)),
            Assert((group == 0) | ((of_group < group) & (inner["group_left"] == group - of_group))),
        ]
    with m.If(made.state("OFFER")):
        m.d.comb += [
            Assert((inner["words"] != 0) & (inner["words"] <= words - done)),
            Assert(inner["words"] <= longest),
            Assert((inner["words"] <= inner["group_left"]) | (inner["group"] == 0)),
            Assert(inner["address"][:6] + inner["words"] <= 64),
        ]
    m.d.comb += Assert(Cat(made.state(name) for name in ("IDLE", "CUT", "OFFER", "SKIP")).any())
    with m.If(dut.bursts.valid):
        m.d.comb += [
            Assert(busy),
            Assert(burst.address == place),
            Assert((group == 0) | (of_group + burst.length + 1 <= group)),
            Assert(burst.address[:6] + burst.length + 1 <= 64),
            Assert(done + burst.length + 1 <= words),
            Assert(burst.length + 1 <= dut.room),
            Assert(burst.end == (done + burst.length + 1 == words)),
        ]
    stream_of(m, Assert, dut.bursts)
    return m, free_inputs(dut)


def broadcast_properties(source: ModuleType) -> tuple[Module, list[Any]]:
    """Each channel is given every burst once, in order, and what it is offered stands until taken."""
    config = replace(CONFIG, channels=2)
    m = Module()
    m.submodules.dut = dut = source.BurstBroadcast(config)
    for port in (dut.operands, dut.weights):
        stream_of(m, Assume, port)
    accepted = (dut.operands.valid & dut.operands.ready) | (dut.weights.valid & dut.weights.ready)
    number = Signal(4)
    last = Signal(data.StructLayout(dict(bursts.burst_layout(config).members)), name="accepted_burst")
    m.d.sync += number.eq(number + accepted)
    with m.If(accepted):
        m.d.sync += last.eq(Mux(dut.operands.valid, dut.operands.payload.as_value(), dut.weights.payload.as_value()))
    for index, channel in enumerate(dut.channels):
        stream_of(m, Assert, channel)
        given = Signal(4, name=f"given_{index}")
        m.d.sync += given.eq(given + (channel.valid & channel.ready))
        m.d.comb += [
            Assert((number - given)[:4] == channel.valid),
            Assert(~channel.valid | (Value.cast(channel.payload) == last.as_value())),
        ]
    return m, free_inputs(dut)


# ---- decoder ------------------------------------------------------------------------------------------


class AnyProduct(Elaboratable):
    """Stands for the multiplier: the product is anything, and there in its time."""

    def __init__(self, width: int) -> None:
        self.a, self.b, self.start = Signal(width), Signal(width), Signal()
        self.product, self.done = Signal(2 * width), Signal()
        self.left = Signal(range(multiply_steps(width) + 1))

    def elaborate(self, platform: object) -> Module:
        m = Module()
        m.d.comb += self.done.eq(self.left == 0)
        with m.If(self.start):
            m.d.sync += self.left.eq(multiply_steps(len(self.a)))
        with m.Elif(self.left != 0):
            m.d.sync += self.left.eq(self.left - 1)
        return m


class AnyQuotient(Elaboratable):
    """Stands for the divider likewise."""

    def __init__(self, width: int, divisor_width: int) -> None:
        self.dividend, self.divisor, self.start = Signal(width), Signal(divisor_width), Signal()
        self.quotient, self.remainder, self.done = Signal(width), Signal(divisor_width), Signal()
        self.left = Signal(range(width + 1))

    def elaborate(self, platform: object) -> Module:
        m = Module()
        m.d.comb += self.done.eq(self.left == 0)
        with m.If(self.start):
            m.d.sync += self.left.eq(len(self.dividend))
        with m.Elif(self.left != 0):
            m.d.sync += self.left.eq(self.left - 1)
        return m


def decoder_properties(source: ModuleType) -> tuple[Module, list[Any]]:
    """Every encoding gets a status, in bounded time, and what passes lies in its queue's window."""
    made: list[AnyProduct] = []

    def multiplier(width: int) -> AnyProduct:
        made.append(AnyProduct(width))
        return made[-1]

    dividers: list[AnyQuotient] = []

    def divider(width: int, divisor_width: int) -> AnyQuotient:
        dividers.append(AnyQuotient(width, divisor_width))
        return dividers[-1]

    source.SequentialMultiplier = multiplier  # type: ignore[attr-defined]
    source.SequentialDivider = divider  # type: ignore[attr-defined]
    m = Module()
    dut = source.Decoder(CONFIG)
    m.submodules.dut = built = Elaborated(dut)
    stream_of(m, Assume, dut.input)
    fetched, record = dut.input.payload, dut.output.payload.record
    d = fetched.descriptor
    engine_verdicts = (Status.OK, Status.CHAIN_BROKEN, Status.CHAIN_ABORTED, Status.MEMORY_ERROR)
    m.d.comb += Assume(Cat(fetched.verdict == verdict for verdict in engine_verdicts).any())

    inner = built.inner
    names = ("GEOMETRY", "MULTIPLY", "WAIT", "SAY", "GIVE")
    state = {name: built.state(name) for name in names}
    geometry = inner["found"]
    end = Signal(66)
    m.d.comb += end.eq(d.device_address + d.device_bytes)
    inside = Signal()
    m.d.comb += inside.eq((d.device_address >= fetched.base) & (end <= fetched.limit) & (fetched.limit <= 1 << 16))

    # Time: no descriptor waits longer for its status than the decoder says.
    age = Signal(8)
    with m.If(dut.input.valid & ~dut.output.valid):
        m.d.sync += age.eq(age + 1)
    with m.Else():
        m.d.sync += age.eq(0)
    (quotient,) = dividers
    steps, more_steps = multiply_steps(len(d.device_rows)), len(quotient.dividend)
    most = max(steps, more_steps)
    m.d.comb += [
        Assert(Cat(state.values()).any()),
        Assert(state["GEOMETRY"] | dut.input.valid),
        Assert(~state["GEOMETRY"] | (age == 0)),
        Assert(~state["MULTIPLY"] | (age == 1)),
        Assert(~state["WAIT"] | (made[0].left == 0) | (age + made[0].left == 2 + steps)),
        Assert(~state["WAIT"] | (quotient.left == 0) | (age + quotient.left == 2 + more_steps)),
        Assert(~state["WAIT"] | (age <= 2 + most)),
        Assert(~state["SAY"] | (age <= 3 + most)),
        Assert(age <= dut.transposed_cycles),
        *(Assert(one.left == made[0].left) for one in made),
    ]
    for name in ("MULTIPLY", "WAIT"):
        with m.If(state[name]):
            m.d.comb += [
                Assert(geometry.room == (fetched.limit - d.device_address)[:65]),
                Assert(geometry.above_base == (d.device_address >= fetched.base)),
                Assert(geometry.limit_exists == (fetched.limit <= 1 << 16)),
            ]
    illegal = {
        Status.BAD_TYPE: d.type != Type.READ_COMPUTE,
        Status.BAD_OP: (d.op == Op.NONE) | (d.op > Op.SOFTMAX),
        Status.BAD_DTYPE: (d.dtype > DType.INT4) | ((d.dtype > DType.BF16) & (d.op != Op.SOFTMAX) & ~d.transpose),
        Status.ZERO_DIMENSION: (d.device_rows == 0) | (d.device_columns == 0) | (d.gpu_rows == 0),
        Status.OUT_OF_WINDOW: ~inside,
    }
    with m.If(state["SAY"]):
        for code, wrong in illegal.items():
            m.d.comb += Assert(~wrong | inner["faults"][int(code)])
    with m.If(state["GIVE"]):
        m.d.comb += [
            Assert(dut.output.valid),
            Assert(Cat(inner["status"] == code for code in Status).any()),
            *(Assert(~wrong | (inner["status"] != Status.OK)) for wrong in illegal.values()),
        ]
    m.d.comb += Assert(~dut.output.valid | (record.status == inner["status"]))
    # What it offers stands until it is taken.
    hold(m, Assert, dut.output.valid, dut.output.ready, record.status, record.descriptor.as_value())
    products = [one.product for one in made]
    return m, [*free_inputs(dut), *products, quotient.quotient, quotient.remainder]


# ---- results ------------------------------------------------------------------------------------------


def result_properties(source: ModuleType, *, other: ModuleType | None = None) -> tuple[Module, list[Any]]:
    """Result lines are as many as the result has, one after the other from its address; nothing completes before
    the last of them is acknowledged. ``source`` and ``other`` are retirement and result writer, in any order."""
    modules = {
        module.__name__.removesuffix("_mutant").rsplit(".", 1)[1]: module for module in (source, other) if module
    }
    retire = modules.get("retirement", retirement).Retirement(CONFIG)
    write = modules.get("result_writer", result_writer).ResultWriter(CONFIG)
    m = Module()
    m.submodules.retirement = first = Elaborated(retire)
    m.submodules.writer = second = Elaborated(write)
    connect(m, retire.result, write.result)
    m.d.comb += [
        retire.emptied.eq(write.emptied),
        retire.account.eq(write.account),
        retire.settled.eq(write.settled),
        retire.failed.eq(write.failed),
        retire.lines.eq(write.lines),
    ]
    for port in (retire.records, retire.executed, retire.numeric):
        stream_of(m, Assume, port)
    record = retire.records.payload
    result, line = write.result.payload, write.write.line
    row_words = Signal(4)
    m.d.comb += [
        row_words.eq(((result.columns + 31) >> 5) + result.anchors),
        # What the decoder lets pass: it fits its half.
        Assume(~retire.records.valid | (record.descriptor.gpu_rows <= 4) & (record.descriptor.gpu_rows != 0)),
        Assume(~retire.records.valid | (record.descriptor.device_rows <= 64) & (record.descriptor.device_rows != 0)),
    ]
    total = Signal(5)
    m.d.comb += total.eq(sum(Mux(result.rows > row, row_words, 0) for row in range(4)))

    # By account: lines that memory has taken and not acknowledged.
    open_ = [Signal(5, name=f"open_{account}") for account in range(2)]
    sent = line.valid & line.ready
    ack = write.write.ack
    unanswered = [signal for signal in second.signals() if signal.name.startswith("unanswered_")]
    for account, count in enumerate(open_):
        mine = sent & (line.payload.tag == account)
        answered = ack & (write.write.ack_tag == account)
        m.d.sync += count.eq(count + mine - answered)
        m.d.comb += [Assume(~answered | (count != 0)), Assert(unanswered[account] == count), Assert(count <= 12)]

    inner = second.inner
    reading, shown, last = inner["reading"], inner["shown"], inner["shown_last"]
    read = Signal(5)
    rows_done, word = inner["rows_done"], inner["word"]
    m.d.comb += read.eq(sum(Mux(rows_done > row, row_words, 0) for row in range(4)) + word)
    m.d.comb += Assert(reading | ((word == 0) & (rows_done == 0) & (inner["pair_address"] == 0)))
    with m.If(reading | shown):
        m.d.comb += [
            Assert(write.result.valid),
            Assert(inner["line_address"] == (result.address + inner["lines_sent"])[: len(result.address)]),
            Assert(~reading | (rows_done < result.rows)),
            Assert(~reading | (word < row_words)),
            Assert(~reading | (inner["lines_sent"] + shown == read)),
            Assert(reading | (shown & last & (inner["lines_sent"] + 1 == total))),
            Assert(~reading | ~(shown & last)),
        ]
    # A half is free once its last word is read: none is read after that, and each job frees its own once.
    freed, frees = Signal(), retire.half_freed.any()
    m.d.sync += freed.eq((freed | frees) & ~retire.job_completed)
    m.d.comb += [
        Assert(freed == ((shown & ~reading) | first.inner["sent"])),
        Assert(~first.inner["sent"] | first.inner["to_memory"]),
        Assert(~frees | ~freed),
        Assert(~frees | (retire.half_freed == 1 << retire.executed.payload.half)),
        Assert(~(freed & write.enable)),
        Assert(~(retire.job_completed & first.inner["to_memory"]) | freed | frees),
    ]
    with m.If(line.valid):
        m.d.comb += [
            Assert(inner["lines_sent"] < total),
            Assert(line.payload.address == (result.address + inner["lines_sent"])[: len(result.address)]),
        ]
    with m.If(write.result.valid & write.result.ready):
        m.d.comb += Assert(write.lines == total)
    hold(m, Assert, line.valid, line.ready, line.payload.address, line.payload.tag)
    stream_of(m, Assert, retire.completed)

    # A result whose last line is sent waits for its acknowledgements under its account, and no line of
    # another is sent under that before it is completed.
    settling = first.inner["settling"]
    waiting, was_sent, account = first.inner["waiting"], first.inner["sent"], first.inner["account"]
    writes = waiting & settling.written
    m.d.comb += [
        Assert(~was_sent | (write.account == ~account[0])),
        Assert(~(was_sent & writes) | (settling.account == ~account[0])),
        Assert(~(writes & ~was_sent) | (write.account == ~settling.account[0])),
        Assert(~was_sent | ~(reading | shown)),
        Assert(~was_sent | retire.records.valid),
    ]
    with m.If(retire.completed.valid & settling.written):
        m.d.comb += Assert(Array(open_)[settling.account] == 0)
    # Lines of the result on its way belong to the account that is not waited for.
    with m.If(~(reading | shown) & ~was_sent):
        m.d.comb += Assert(Array(open_)[write.account] == 0)
    with m.If(reading | shown):
        m.d.comb += Assert(Array(open_)[write.account] <= inner["lines_sent"])
    # Nothing is owed under an account that nobody waits for.
    idle_account = Mux(was_sent, ~account[0], ~write.account[0])
    with m.If(~writes):
        m.d.comb += Assert(Array(open_)[idle_account] == 0)
    return m, [*free_inputs(retire, write)]


PROOFS = {
    "burst cutter": Proof(
        cutter_properties,
        bursts,
        {
            "pages not minded": ("PAGE_WORDS - address[:LENGTH_BITS], left,", "PAGE_WORDS, left,"),
            "beyond the run": ("with m.If(words == left):", "with m.If(words > left):"),
            "room not minded": ("self.bursts.valid.eq(words <= self.room)", "self.bursts.valid.eq(self.room != 0)"),
        },
        search=8,
    ),
    "burst broadcast": Proof(
        broadcast_properties,
        bursts,
        {"the next too soon": ("with m.If(left == 0):", "with m.If(left != 3):")},
        search=6,
    ),
    "decoder": Proof(
        decoder_properties,
        decoder,
        {
            "end of the operand not checked": ("| (g.room[:ADDRESS_BITS] < d.device_bytes)", ""),
            "start not checked": ("~g.above_base\n", "g.above_base & 0\n"),
            "sum that wraps": ("| g.room[ADDRESS_BITS]\n", "| 0\n"),
        },
    ),
    "results": Proof(
        result_properties,
        retirement,
        {
            "completion before the acknowledgements": (
                "self.completed.valid.eq(waiting & (~settling.written | self.settled.bit_select(settling.account, 1)))",
                "self.completed.valid.eq(waiting)",
            ),
        },
    ),
    "result lines": Proof(
        result_properties,
        result_writer,
        {
            "acknowledgements of both accounts together": (
                "acknowledged = self.write.ack & (self.write.ack_tag == account)",
                "acknowledged = self.write.ack",
            ),
            "a half free before its last word is read": (
                "self.emptied.eq(read & end_result)",
                "self.emptied.eq(start)",
            ),
            "one line too few": ("(rows_done + 1 == result.rows)", "(rows_done + 1 >= result.rows - 1)"),
        },
    ),
}


@pytest.mark.parametrize("name", [name for name in PROOFS if name != "result lines"])
def test_proved(name: str, tmp_path: Path) -> None:
    PROOFS[name].prove(tmp_path)


@pytest.mark.parametrize(("name", "bug"), [(name, bug) for name, proof in PROOFS.items() for bug in proof.bugs])
def test_a_seeded_bug_is_found(name: str, bug: str, tmp_path: Path) -> None:
    PROOFS[name].notices(bug, tmp_path)
