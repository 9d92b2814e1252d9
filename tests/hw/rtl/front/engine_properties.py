"""What is proved of the queue engine, as a module of assumptions and assertions around it.

The state memory is replaced by registers that act alike, so that invariants can speak of every word.
The host's registers are arbitrary but do not change while their queue is enabled or being enabled; memory and core are
arbitrary within the rules of their ports.
"""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

from amaranth.hdl import Array, Cat, Const, Elaboratable, Module, Mux, Signal, Value

from plora.hw.defs.config import preset
from plora.hw.defs.queue import MAX_DEPTH, MAX_SLOT_LOG2, MIN_DEPTH, MIN_SLOT_LOG2, VALID_TAG
from plora.hw.rtl.front.records import Command, queue_config_layout
from tests.hw.rtl.formal import Assert, Assume, free_inputs, hold

CONFIG = replace(preset("tiny"), name="proof", dpa_bits=16)
FLIGHTS = WRITES = 4
CORE_ROOM = 14


class RegisterMemory(Elaboratable):
    """Stands for `amaranth.lib.memory.Memory` as the engine uses it, with its words in registers."""

    def __init__(self, shape: Any, depth: int, init: list[int]) -> None:
        self._shape = shape
        self.words = [Signal(shape, name=f"word_{i}") for i in range(depth)]
        self._reads: list[Any] = []
        self._writes: list[Any] = []

    def _port(self) -> Any:
        address = Signal(range(len(self.words)))
        return SimpleNamespace(addr=address, data=Signal(self._shape), en=Signal())

    def read_port(self) -> Any:
        self._reads.append(self._port())
        return self._reads[-1]

    def write_port(self) -> Any:
        self._writes.append(self._port())
        return self._writes[-1]

    def elaborate(self, platform: object) -> Module:
        m = Module()
        words = Array(word.as_value() for word in self.words)
        for port in self._reads:
            m.d.sync += port.data.as_value().eq(words[port.addr])
        for port in self._writes:
            with m.If(port.en):
                m.d.sync += words[port.addr].eq(port.data.as_value())
        return m


def named(m: Module, width: int, value: Any, name: str) -> Signal:
    signal = Signal(width, name=name)
    m.d.comb += signal.eq(value)
    return signal


def count(bits: list[Any]) -> Value:
    return sum((Value.cast(bit) for bit in bits), Const(0, 1))


class Properties:
    """Builds the module; one method for each part."""

    def __init__(self, source: ModuleType, *, queues: int, small: bool) -> None:
        self.config = replace(CONFIG, queues=queues)
        self.small = small
        memories: list[RegisterMemory] = []

        def memory(**options: Any) -> RegisterMemory:
            memories.append(RegisterMemory(**options))
            return memories[-1]

        source.memory = SimpleNamespace(Memory=memory)  # type: ignore[attr-defined]
        self.m = Module()
        self.dut = source.QueueEngine(self.config)
        # Elaborated here and now, so that what it keeps can be spoken of.
        self.dut._MustUse__used = True
        self.m.submodules.dut = self.dut.elaborate(None)
        self.words = memories[0].words
        self.queues = range(self.config.queues)
        self.setups = [Signal(queue_config_layout, name=f"setup_{q}") for q in self.queues]
        self.chosen = [self._small_setup(setup) if small else Value.cast(setup) for setup in self.setups]
        self._environment()
        if small:
            self._jobs(source)
            self._flight_ring()
            self._write_ring()
            for queue in self.queues:
                self._queue(queue)
            self._streams()
        else:
            for queue in self.queues:
                with self.m.If(self.dut.control.enabled[queue]):
                    self.m.d.comb += Assert(self._legal(self.setups[queue]))

    def free(self) -> list[Any]:
        driven = {id(Value.cast(self.dut.control.config))}
        inputs = [value for value in free_inputs(self.dut) if id(value) not in driven]
        return inputs + self.chosen

    def _small_setup(self, setup: Any) -> Signal:
        """Make ``setup`` of few free bits, the rest constant, and return those; it is legal.

        That no other is ever enabled is proved by `enable_properties`.
        """
        depth, places = Signal(3), [Signal(CONFIG.dpa_bits + 1 - 7) for _ in range(4)]
        self.m.d.comb += [
            setup.depth.eq(depth),
            setup.slots.eq(MIN_SLOT_LOG2 | MIN_SLOT_LOG2 << 8),
            *(
                field.eq(place << 7)
                for field, place in zip((setup.base, setup.limit, setup.sq_base, setup.cq_base), places, strict=True)
            ),
            # Near the wrap of its 24 bits.
            setup["pass"].eq(0xFF_FFFE),
            Assume(depth <= 4),
            Assume(self._legal(setup)),
        ]
        chosen = Signal(len(depth) + 4 * len(places[0]))
        self.m.d.comb += Cat(depth, *places).eq(chosen)
        return chosen

    # ---- the environment ------------------------------------------------------------------------

    def _environment(self) -> None:
        m, dut = self.m, self.dut
        for chosen in self.chosen:
            last, started = Signal(len(chosen)), Signal()
            m.d.sync += [last.eq(chosen), started.eq(1)]
            m.d.comb += Assume(~started | (chosen == last))
        control = dut.control
        m.d.sync += Value.cast(control.config).eq(Array(Value.cast(s) for s in self.setups)[control.config_queue])
        command = control.command
        hold(m, Assume, command.valid, command.ready, Value.cast(command.payload))
        # Registers ask for what is not so yet.
        asked = Array(control.enabled)[command.payload.queue]
        m.d.comb += [
            Assume(~command.valid | (command.payload.kind != Command.ENABLE) | ~asked),
            Assume(~command.valid | (command.payload.kind <= Command.HEAD)),
            Assume(command.payload.queue < self.config.queues),
        ]

        # The slot reader answers what it was asked, in order.
        hold(m, Assume, dut.slot.valid, dut.slot.ready, Value.cast(dut.slot.payload))
        self.reading = reading = Signal(3)
        asks = dut.slot_request.valid & dut.slot_request.ready
        m.d.sync += reading.eq(reading + asks - (dut.slot.valid & dut.slot.ready))
        m.d.comb += Assume(~dut.slot.valid | (reading != 0))

        # Memory acknowledges what was written, once.
        self.written = written = Signal(WRITES)
        tag = dut.ack.payload.tag
        m.d.comb += Assume(~dut.ack.valid | written.bit_select(tag, 1))
        with m.If(dut.ack.valid):
            m.d.sync += written.bit_select(tag, 1).eq(0)
        with m.If(dut.line.valid & dut.line.ready):
            m.d.sync += written.bit_select(dut.line.payload.tag, 1).eq(1)

        # The core reports what it was given; how many of each queue it holds is all that matters.
        hold(m, Assume, dut.completed.valid, dut.completed.ready, Value.cast(dut.completed.payload))
        self.held = [Signal(4, name=f"held_{q}") for q in self.queues]
        for queue, held in enumerate(self.held):
            given = dut.fetched.valid & dut.fetched.ready & (dut.fetched.payload.queue == queue)
            back = dut.completed.valid & dut.completed.ready & (dut.completed.payload.queue == queue)
            m.d.sync += held.eq(held + given - back)
            m.d.comb += [
                Assume(~dut.completed.valid | (dut.completed.payload.queue != queue) | (held != 0)),
                Assume(~dut.fetched.ready | (held < CORE_ROOM)),
                Assert(held <= CORE_ROOM),
            ]
        m.d.comb += Assume(~dut.completed.valid | (dut.completed.payload.queue < self.config.queues))

    def _jobs(self, source: ModuleType) -> None:
        """What each job may rely on from the cycle after its choice to its end."""
        m, dut = self.m, self.dut
        state, here = dut._machine_state, dut._queue
        m.d.comb += Assert(here < self.config.queues)
        oldest_write = Array(dut._writes)[dut._write_head]
        oldest_flight = Array(flight.queue for flight in dut._flights)[dut._flight_head]
        promises: dict[str, list[Value]] = {
            "RETIRE": [Array(dut._acked)[dut._write_head], here == oldest_write],
            "COMPLETE": [
                dut.completed.valid,
                here == dut.completed.payload.queue,
                ~dut.line.valid,
                ~dut._in_write.all(),
            ],
            "COMMAND": [dut.control.command.valid, here == dut.control.command.payload.queue],
            "INSPECT": [dut.slot.valid, ~dut.fetched.valid, here == oldest_flight],
            "INTERRUPT": [~dut.msix.valid],
            "EXPIRE": [],
            "ISSUE": [~dut._in_flight.all(), ~dut.slot_request.valid, Array(dut.control.enabled)[here]],
        }
        words = Array(Value.cast(word) for word in self.words)
        setups = Array(Value.cast(setup) for setup in self.setups)
        for number, name in enumerate(source.JOBS):
            acting = state.ongoing(name)
            with m.If(acting | (state.ongoing("LOOK_UP") & (dut._job == number))):
                m.d.comb += [Assert(promise) for promise in promises[name]]
            with m.If(acting):
                m.d.comb += [
                    Assert(Value.cast(dut._now) == words[here]),
                    Assert(Value.cast(dut.control.config) == setups[here]),
                ]
        m.d.comb += Assert(~state.ongoing("LOOK_UP") | (dut._job < len(source.JOBS)))
        enabling = [state.ongoing(name) for name in ("ENABLE_RINGS", "ENABLE_RESULTS", "ENABLE")]
        with m.If(Cat(enabling).any()):
            m.d.comb += [
                Assert(~Array(dut.control.enabled)[here]),
                Assert(Value.cast(dut._now) == words[here]),
                Assert(Value.cast(dut.control.config) == setups[here]),
            ]
        # What the first check found stays so until the enable is decided.
        with m.If(Cat(enabling[1:]).any() & ~dut._refused):
            m.d.comb += [
                Assert(dut._now.under_way == 0),
                Assert(~dut._of_queue(here, alive=False).any()),
            ]
        with m.If(state.ongoing("WIPE")):
            nothing = [dut.control.enabled, dut._in_write, dut._in_flight, dut.fetched.valid, *self.held]
            m.d.comb += [Assert(value == 0) for value in nothing]

    # ---- rings inside the engine -----------------------------------------------------------------

    def _ring(self, used: Signal, head: Signal, tail: Signal) -> list[Signal]:
        """Assert that ``used`` is what lies from ``head`` to ``tail``; return it from the oldest on."""
        m, size = self.m, len(used)
        ordered = [named(m, 1, Array(used)[(head + age)[: len(head)]], f"aged_{age}") for age in range(size)]
        for younger, older in zip(ordered[1:], ordered, strict=False):
            m.d.comb += Assert(~younger | older)
        m.d.comb += Assert((tail - head)[: len(head)] == count(ordered)[: len(head)])
        return ordered

    def _flight_ring(self) -> None:
        m, dut = self.m, self.dut
        used = self._ring(dut._in_flight, dut._flight_head, dut._flight_tail)
        m.d.comb += Assert(count(used) == self.reading + dut.slot_request.valid)
        self.flights = []
        for age, valid in enumerate(used):
            flight = Signal(dut._flights[0].shape(), name=f"flight_of_age_{age}")
            m.d.comb += Value.cast(flight).eq(Array(Value.cast(f) for f in dut._flights)[(dut._flight_head + age)[:2]])
            self.flights.append((valid, flight))
            m.d.comb += Assert(~valid | (flight.queue < self.config.queues))
        # The request on offer is that of the youngest.
        youngest = Signal(dut._flights[0].shape(), name="youngest_flight")
        m.d.comb += Value.cast(youngest).eq(Array(Value.cast(f) for f in dut._flights)[(dut._flight_tail - 1)[:2]])
        with m.If(dut.slot_request.valid):
            m.d.comb += Assert(dut.slot_request.payload == youngest.slot)
            self._in_window(dut.slot_request.payload, youngest.queue)

    def _write_ring(self) -> None:
        m, dut = self.m, self.dut
        used = self._ring(dut._in_write, dut._write_head, dut._write_tail)
        for tag in range(WRITES):
            offered = dut.line.valid & (dut.line.payload.tag == tag)
            where = [self.written[tag], dut._acked[tag], offered]
            m.d.comb += Assert(count(where) == dut._in_write[tag])
            m.d.comb += Assert(~dut._in_write[tag] | (dut._writes[tag] < self.config.queues))
        self.writing = [
            count(
                [valid & (Array(dut._writes)[(dut._write_head + age)[:2]] == queue) for age, valid in enumerate(used)]
            )
            for queue in self.queues
        ]
        with m.If(dut.line.valid):
            self._in_window(dut.line.payload.address, Array(dut._writes)[dut.line.payload.tag])

    def _in_window(self, word: Value, queue: Value) -> None:
        """The line at ``word`` lies in the window of ``queue``."""
        for number, setup in enumerate(self.setups):
            with self.m.If(queue == number):
                self.m.d.comb += [
                    Assert((word << 6) >= setup.base),
                    Assert((word << 6) + 64 <= setup.limit),
                ]

    # ---- a queue ---------------------------------------------------------------------------------

    def _legal(self, setup: Any) -> Value:
        submission, result = setup.slots[:5], setup.slots[8:13]

        def fits(ring: Value, slot_log2: Value) -> Value:
            size = setup.depth[:13] << slot_log2
            return (setup.base <= ring) & (ring < setup.limit) & (ring + size <= setup.limit)

        return (
            (setup.depth >= MIN_DEPTH)
            & (setup.depth <= MAX_DEPTH)
            & (submission >= MIN_SLOT_LOG2)
            & (submission <= MAX_SLOT_LOG2)
            & (result >= MIN_SLOT_LOG2)
            & (result <= MAX_SLOT_LOG2)
            & (setup.sq_base % CONFIG.stripe_bytes == 0)
            & (setup.cq_base % 64 == 0)
            & (setup.limit <= 1 << CONFIG.dpa_bits)
            & fits(setup.sq_base, submission)
            & fits(setup.cq_base, result)
        )

    def _queue(self, queue: int) -> None:
        m, dut, setup, word = self.m, self.dut, self.setups[queue], self.words[queue]
        enabled = dut.control.enabled[queue]
        depth = named(m, 13, setup.depth, f"depth_{queue}")
        legal = named(m, 1, self._legal(setup), f"legal_{queue}")

        def slot(base: Value, index: Value, slot_log2: Value) -> Value:
            return ((base + (index << slot_log2)) >> 6)[:10]

        def submission_slot(index: Value) -> Value:
            return slot(setup.sq_base, index, setup.slots[:5])

        def result_slot(index: Value) -> Value:
            return slot(setup.cq_base, index, setup.slots[8:13])

        # The descriptor to be handed over next, counted by its own means: by what the core is given.
        index, pass_number = Signal(12, name=f"index_{queue}"), Signal(24, name=f"pass_{queue}")
        was_enabled, was_fetched = Signal(), Signal()
        m.d.sync += [was_enabled.eq(enabled), was_fetched.eq(dut.fetched.valid)]
        handed = named(m, 1, dut.fetched.valid & ~was_fetched & (dut.fetched.payload.queue == queue), f"handed_{queue}")
        last = index + 1 == depth
        this_index = named(m, 12, Mux(enabled & ~was_enabled, 0, index), f"this_index_{queue}")
        this_pass = named(m, 24, Mux(enabled & ~was_enabled, setup["pass"], pass_number), f"this_pass_{queue}")
        next_index = named(m, 12, Mux(handed, Mux(last, 0, index + 1), this_index), f"handed_index_{queue}")
        next_pass = named(m, 24, Mux(handed, pass_number + last, this_pass), f"handed_pass_{queue}")
        m.d.sync += [index.eq(next_index), pass_number.eq(next_pass)]

        # Handed over only if read as valid for exactly that pass, or if memory failed.
        fired, seen, error = Signal(), Signal(32), Signal()
        m.d.sync += [
            fired.eq(dut.slot.valid & dut.slot.ready),
            seen.eq(dut.slot.payload.valid),
            error.eq(dut.slot.payload.error),
        ]
        with m.If(handed & enabled):
            m.d.comb += [
                Assert(fired),
                Assert(error | (seen == Cat(this_pass, Const(VALID_TAG, 8)))),
                Assert(dut.fetched.payload.operand_address == submission_slot(this_index) + 2),
                Assert(dut.fetched.payload.result_address == result_slot(this_index) + 1),
            ]

        live = [named(m, 1, v & (f.queue == queue) & ~f.dead, f"live_{queue}") for v, f in self.flights]
        with m.If(enabled):
            m.d.comb += [
                Assert(legal),
                Assert(word.next_index < depth),
                Assert(word.next_slot == submission_slot(word.next_index)),
                Assert(next_index < depth),
                Assert(word.result_slot == result_slot(next_index)),
                Assert(word.done_index < depth),
                Assert(word.done_slot == result_slot(word.done_index)),
            ]
        # Reads on their way: where they go, and that those that matter follow each other without a gap.
        for age, (valid, flight) in enumerate(self.flights):
            with m.If(valid & (flight.queue == queue)):
                m.d.comb += [
                    Assert(legal),
                    Assert(flight.index < depth),
                    Assert(flight.slot == submission_slot(flight.index)),
                ]
            with m.If(live[age]):
                m.d.comb += Assert(enabled)
                first = ~Cat(live[:age]).any() if age else Const(1)
                with m.If(first):
                    m.d.comb += [
                        Assert(flight.index == next_index),
                        Assert(flight.pass_number == next_pass),
                        Assert(flight.count == word.fetched),
                    ]
                wraps = named(m, 1, flight.index + 1 == depth, f"wraps_{queue}_{age}")
                follower = named(m, 12, Mux(wraps, 0, flight.index + 1), f"follower_{queue}_{age}")
                followed = Const(0)
                for later in range(age + 1, FLIGHTS):
                    between = Cat(live[age + 1 : later]).any() if later > age + 1 else Const(0)
                    successor = self.flights[later][1]
                    with m.If(live[later] & ~between):
                        m.d.comb += [
                            Assert(successor.index == follower),
                            Assert(successor.pass_number == (flight.pass_number + wraps)[:24]),
                            Assert(successor.count == (flight.count + 1)[:16]),
                        ]
                    followed = followed | live[later]
                with m.If(~followed):
                    m.d.comb += [
                        Assert(word.next_index == follower),
                        Assert(word.next_pass == (flight.pass_number + wraps)[:24]),
                        Assert(word.next_count == (flight.count + 1)[:16]),
                    ]
        with m.If(enabled & ~Cat(live).any()):
            m.d.comb += [
                Assert(word.next_index == next_index),
                Assert(word.next_pass == next_pass),
                Assert(word.next_count == word.fetched),
            ]

        # Where descriptors are: offered to the core, in the core, being completed.
        offered = dut.fetched.valid & (dut.fetched.payload.queue == queue)
        inside = named(m, 5, self.held[queue] + offered, f"inside_{queue}")
        m.d.comb += Assert(word.under_way == inside + self.writing[queue])

        # Counts: what the host took, what is completed, what was handed over, what was asked for.
        taken, completed = word.head, word.tail
        asked_for = named(m, 16, word.next_count - taken, f"asked_for_{queue}")
        given = named(m, 16, word.fetched - taken, f"given_{queue}")
        done = named(m, 16, completed - taken, f"done_{queue}")
        with m.If(enabled):
            m.d.comb += [
                Assert(done <= given),
                Assert(given <= asked_for),
                Assert(asked_for <= depth),
                Assert((word.fetched - completed)[:16] == word.under_way),
                # The completion to be written next is that of the oldest descriptor inside: no slot is
                # written twice before the host has taken it.
                Assert(
                    ((word.done_index + inside == next_index) & (word.done_pass == next_pass))
                    | ((word.done_index + inside == next_index + depth) & (word.done_pass == (next_pass - 1)[:24]))
                ),
            ]

    def _streams(self) -> None:
        m, dut = self.m, self.dut
        for port in (dut.slot_request, dut.line, dut.fetched, dut.msix):
            hold(m, Assert, port.valid, port.ready, Value.cast(port.payload))


def engine_properties(source: ModuleType, queues: int = 2) -> tuple[Module, list[Any]]:
    """Windows, passes, room in the rings, and the rule of streams: rings of up to 4 slots of 2 KiB."""
    properties = Properties(source, queues=queues, small=True)
    return properties.m, properties.free()


def enable_properties(source: ModuleType) -> tuple[Module, list[Any]]:
    """A queue is enabled only with a set-up that is legal, for every value of every register."""
    properties = Properties(source, queues=2, small=False)
    return properties.m, properties.free()
