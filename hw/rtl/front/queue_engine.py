"""The queue engine: finds descriptors in the hosts' rings, hands them to the core, and completes them."""

from __future__ import annotations

from amaranth.hdl import Array, Cat, Const, Module, Mux, Signal, Value
from amaranth.lib import data, memory, stream, wiring
from amaranth.lib.wiring import In, Out

from plora.hw.defs.config import NdpConfig
from plora.hw.defs.queue import (
    COMPLETION_FIELDS,
    LINE_BYTES,
    MAX_DEPTH,
    MAX_SLOT_LOG2,
    MIN_DEPTH,
    MIN_SLOT_LOG2,
    PASS_BITS,
    RESULT_OFFSET,
    VALID_TAG,
    operand_offset,
)
from plora.hw.defs.registers import COALESCE_TICK, MAX_BACKOFF_LOG2
from plora.hw.defs.status import Status
from plora.hw.rtl.front.axi import msix_layout
from plora.hw.rtl.front.line_writer import tagged_line_layout
from plora.hw.rtl.front.links import LOG2_WORD_BYTES, TAG_BITS, ack_layout
from plora.hw.rtl.front.records import (
    COUNT_BITS,
    INDEX_BITS,
    REGISTER_BITS,
    Command,
    Fault,
    QueueControl,
    queue_index_bits,
    queue_memory_depth,
    queue_state_layout,
)
from plora.hw.rtl.front.round_robin import RoundRobin
from plora.hw.rtl.front.slot_reader import READERS, slot_layout
from plora.hw.rtl.interfaces import completed_layout, fetched_layout, word_address_bits

WRITERS = 1 << TAG_BITS
"""Completion lines on their way to memory at a time."""

JOBS = ("RETIRE", "COMPLETE", "COMMAND", "INSPECT", "INTERRUPT", "EXPIRE", "ISSUE")
"""In the order of preference."""

SLOT_LOG2_BITS = 5
WEIGHT_BITS = 8
VECTOR_BITS = 8
_DEPTH_BITS = MAX_DEPTH.bit_length()
_BACKOFF_BITS = MAX_BACKOFF_LOG2.bit_length()


def flight_layout(config: NdpConfig) -> data.StructLayout:
    """A read of a submission slot on its way.

    ``queue``, ``index``, ``pass_number``, ``slot`` (DPA word) and ``count`` (slots read before it) say which
    slot; they are also where the queue goes back to if the read comes to nothing. ``probe``: made
    after the time of an open chain had run out. ``dead``: its answer no longer matters.
    """
    return data.StructLayout(
        {
            "queue": queue_index_bits(config),
            "index": INDEX_BITS,
            "pass_number": PASS_BITS,
            "slot": word_address_bits(config),
            "count": COUNT_BITS,
            "probe": 1,
            "dead": 1,
        }
    )


class QueueEngine(wiring.Component):
    """Serves every queue from doorbell to interrupt, one small job at a time.

    What a queue is and where it stands rests in two memories, configuration (owned by the
    registers) and state (owned here). A *job* reads both for one queue, acts, and writes the state
    back, so no two activities ever see a queue half changed. Jobs, in the order of preference:

    ===========  =====================================================================================
    retire       memory has acknowledged a completion line: count it, note the interrupt
    complete     the core is done with a descriptor: write its completion line (or drop it, where
                 the queue was disabled meanwhile)
    command      a register write: enable, disable, new CQ_HEAD
    inspect      line 0 of a slot has come: hand the descriptor to the core, or go back
    interrupt    send one
    expire       completions were gathered for an interrupt: look whether the first waited long enough
    issue        ask for line 0 of the next slot of a queue
    ===========  =====================================================================================

    A job starts only if it can finish, so none ever waits for the core, for memory or for the host.

    **Looking.** A queue that handed over a descriptor *runs*: its next slots are read ahead, several at
    a time, until one holds no valid word. Then it stops, goes back to that slot, and looks again
    after a doorbell, after CQ_HEAD moved, and in any case whenever its turn of the poll clock comes:
    every POLL_INTERVAL cycles at first, every ``2**MAX_BACKOFF_LOG2`` times that in the end. A doorbell is
    a note to look again that only a look begun later erases, so one that comes in the very cycle in
    which a look fails is kept. A slot's descriptor is used only if the valid word read with it is that of
    the current pass.

    **Turns.** Queues that want to be looked at take turns. A turn is WEIGHT slots long, less where the queue
    stops sooner.

    **Interrupts.** A queue whose completions are to be gathered notes when the first came. Every
    COALESCE_TICK cycles such a queue is looked at; it is also done with when the host has taken all of them.
    What is pending is kept by vector, not by queue, and is sent once the vector's mask allows it.

    **Room.** Slot i of the next pass is read only when the host has taken completion i of this pass
    (``next_count - head < depth``): a completion is never overwritten.

    **Chains.** While a descriptor with the chain bit has no successor yet, only its queue is looked
    at. If the successor is not there CHAIN_TIMEOUT cycles after the core could take it, one more look is
    made; if that fails, or cannot be made because the ring has no room, the chain is closed. It is closed as well
    when it has CHAIN_LIMIT descriptors, or an endless chain would keep others waiting for ever. The
    members that still come are handed over as not to be executed, the first with CHAIN_BROKEN, the others
    with CHAIN_ABORTED, and other queues are served in between.

    **Errors of memory.** A slot that memory answers with an error is handed over as a zero descriptor
    with MEMORY_ERROR (its words mean nothing, not even the valid word), ends its chain, and uses up the
    slot. A completion line that is answered with an error is counted in QERRORS.

    **Disabling.** Reads on their way are disowned, descriptors in the core run to their end, their
    completions are dropped. Until then QSTATUS says so and enabling is refused.

    Parameters:
        config: device configuration.

    Ports:
        control: to and from `RegisterFile`.
        slot_request, slot: to and from `SlotReader`.
        line, ack: to and from `LineWriter`; completion lines.
        fetched, completed: to and from the core.
        msix: interrupts.

    Cycle behaviour: a job takes three cycles (choose, look up, act), an enable five. With an idle engine
    a read request follows four cycles after a doorbell, a descriptor three cycles after its line, a
    completion line three cycles after the core's report. For one cycle a queue after reset the state is
    cleared.
    """

    def __init__(self, config: NdpConfig) -> None:
        self._config = config
        super().__init__(
            {
                "control": In(QueueControl(config)),
                "slot_request": Out(stream.Signature(word_address_bits(config))),
                "slot": In(stream.Signature(slot_layout)),
                "line": Out(stream.Signature(tagged_line_layout(config))),
                "ack": In(stream.Signature(ack_layout, always_ready=True)),
                "fetched": Out(stream.Signature(fetched_layout(config))),
                "completed": In(stream.Signature(completed_layout())),
                "msix": Out(stream.Signature(msix_layout)),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """Build the engine, one method for each part."""
        m = Module()
        self._declare(m)
        self._poll_clock(m)
        self._gather_clock(m)
        self._chain_clock(m)
        self._acknowledgements(m)
        self._status(m)
        self._machine(m)
        return m

    # ---- what is kept -------------------------------------------------------------------------

    def _declare(self, m: Module) -> None:
        config = self._config
        queues, index = config.queues, queue_index_bits(config)
        m.submodules.states = states = memory.Memory(
            shape=queue_state_layout(config), depth=queue_memory_depth(config), init=[]
        )
        self._state_write, self._state_read, self._status_read = (
            states.write_port(),
            states.read_port(),
            states.read_port(),
        )
        # The current job and its queue.
        self._job, self._queue = Signal(range(len(JOBS))), Signal(index)
        m.d.comb += self.control.config_queue.eq(self._queue)
        self._now = Signal(queue_state_layout(config))
        self._after = Signal(queue_state_layout(config))
        m.d.comb += [
            self._state_read.addr.eq(self._queue),
            self._now.eq(self._state_read.data),
            self._after.eq(self._now),
            self._state_write.addr.eq(self._queue),
            self._state_write.data.eq(self._after),
        ]
        # By queue: runs; is to be looked at; gathers completions for an interrupt; is to be looked at for that.
        self._runs, self._look = Signal(queues), Signal(queues)
        self._gathers, self._expires = Signal(queues), Signal(queues)
        # By vector: a message is to be sent.
        self._pending = Signal(queues)
        m.d.comb += self.control.pending.eq(self._pending)
        self._clock = Signal(REGISTER_BITS)
        m.d.sync += self._clock.eq(self._clock + 1)
        # Whose turn it is to issue, and how many slots more it may; the issue under way goes on with it.
        self._turn, self._turn_left, self._turn_goes_on = Signal(index), Signal(WEIGHT_BITS), Signal()
        self._backoff = Array(Signal(_BACKOFF_BITS, name=f"backoff_{q}") for q in range(queues))
        # Reads of slots on their way, oldest at the head: the same order as in the slot reader.
        self._flights = Array(
            Signal(flight_layout(config), name=f"flight_{i}", reset_less=True) for i in range(READERS)
        )
        self._in_flight = Signal(READERS)
        self._flight_head, self._flight_tail = Signal(range(READERS)), Signal(range(READERS))
        # Completion lines on their way, oldest at the head.
        self._writes = Array(Signal(index, name=f"write_{i}", reset_less=True) for i in range(WRITERS))
        self._in_write = Signal(WRITERS)
        self._acked, self._ack_errors = Signal(WRITERS), Signal(WRITERS)
        self._write_head, self._write_tail = Signal(range(WRITERS)), Signal(range(WRITERS))
        # The open chain, and how many descriptors it has so far.
        self._chain_open, self._chain_queue = Signal(), Signal(index)
        self._chain_length = Signal(COUNT_BITS)
        # Expired implies open: it asks for the last look at the chain's queue.
        self._chain_age, self._chain_expired = Signal(REGISTER_BITS), Signal()
        self._work = Signal(COUNT_BITS)
        m.d.comb += self.control.busy.eq(self._work != 0)

    def _of_queue(self, queue: Value | int, *, alive: bool) -> Value:
        """Flights of ``queue``, one bit each; only those whose answer still matters if ``alive``."""
        return Cat(
            self._in_flight[i] & (flight.queue == queue) & ~(flight.dead if alive else Const(0))
            for i, flight in enumerate(self._flights)
        )

    def _poll_clock(self, m: Module) -> None:
        elapsed, turn = Signal(REGISTER_BITS), Signal(MAX_BACKOFF_LOG2)
        m.d.sync += elapsed.eq(elapsed + 1)
        with m.If(elapsed + 1 >= self.control.poll_interval):
            m.d.sync += [elapsed.eq(0), turn.eq(turn + 1)]
            for queue in range(self._config.queues):
                # Queues of equal back-off take different turns.
                own_turn = (turn + queue)[:MAX_BACKOFF_LOG2]
                mask = Signal(MAX_BACKOFF_LOG2, name=f"turn_mask_{queue}")
                m.d.comb += mask.eq((1 << self._backoff[queue]) - 1)
                with m.If((own_turn & mask) == 0):
                    m.d.sync += self._look[queue].eq(1)

    def _gather_clock(self, m: Module) -> None:
        with m.If(self._clock % COALESCE_TICK == 0):
            m.d.sync += self._expires.eq(self._gathers)

    def _chain_clock(self, m: Module) -> None:
        # Only the host's delay counts, not that of a core that has no room.
        with m.If(self._chain_open & ~self._chain_expired & ~self.fetched.valid):
            m.d.sync += self._chain_age.eq(self._chain_age + 1)
            with m.If(self._chain_age >= self.control.chain_timeout):
                m.d.sync += self._chain_expired.eq(1)

    def _acknowledgements(self, m: Module) -> None:
        with m.If(self.ack.valid):
            m.d.sync += [
                self._acked.bit_select(self.ack.payload.tag, 1).eq(1),
                self._ack_errors.bit_select(self.ack.payload.tag, 1).eq(self.ack.payload.error),
            ]

    def _status(self, m: Module) -> None:
        state = Signal(queue_state_layout(self._config), name="shown_state")
        shown_queue = Signal.like(self.control.status_queue)
        m.d.sync += shown_queue.eq(self.control.status_queue)
        m.d.comb += [
            self._status_read.addr.eq(self.control.status_queue),
            state.eq(self._status_read.data),
            self.control.status.fetched.eq(state.fetched),
            self.control.status.tail.eq(state.tail),
            self.control.status.head.eq(state.head),
            self.control.status.errors.eq(state.errors),
            # Looks of an enabled queue come and go; of a disabled one they are work to be waited for.
            self.control.status.busy.eq(
                (state.under_way != 0)
                | (~self.control.enabled.bit_select(shown_queue, 1) & self._of_queue(shown_queue, alive=False).any())
            ),
        ]

    # ---- jobs ---------------------------------------------------------------------------------

    def _machine(self, m: Module) -> None:
        config = self._config
        report_queue = self.completed.payload.queue
        flight = Signal(flight_layout(config), name="oldest_flight")
        m.d.comb += flight.eq(self._flights[self._flight_head])

        m.submodules.issue_turn = issue_turn = RoundRobin(config.queues)
        m.submodules.interrupt_turn = interrupt_turn = RoundRobin(config.queues)
        m.submodules.expire_turn = expire_turn = RoundRobin(config.queues)
        m.d.comb += [
            issue_turn.requests.eq(
                Cat(
                    self.control.enabled[q]
                    & (self._runs[q] | ((self._look[q] | self._chain_expired) & ~self._of_queue(q, alive=True).any()))
                    & (~self._chain_open | (self._chain_queue == q))
                    for q in range(config.queues)
                )
            ),
            interrupt_turn.requests.eq(self._pending & self.control.deliver),
            expire_turn.requests.eq(self._expires),
        ]
        same_turn = (self._turn_left != 0) & issue_turn.requests.bit_select(self._turn, 1)
        ready_to_issue = issue_turn.any & ~self._in_flight.all() & ~self.slot_request.valid
        wipe = Signal(range(queue_memory_depth(config)))

        # A doorbell outlives anything that the job of the same cycle decides: it is noted last, see below.
        with m.If(self.slot_request.ready):
            m.d.sync += self.slot_request.valid.eq(0)
        with m.If(self.line.ready):
            m.d.sync += self.line.valid.eq(0)
        with m.If(self.fetched.ready):
            m.d.sync += self.fetched.valid.eq(0)
        with m.If(self.msix.ready):
            m.d.sync += self.msix.valid.eq(0)

        job, names = self._job, JOBS
        with m.FSM(name="job") as self._machine_state:
            with m.State("WIPE"):
                m.d.comb += [
                    self._state_write.addr.eq(wipe),
                    self._state_write.data.eq(0),
                    self._state_write.en.eq(1),
                ]
                m.d.sync += wipe.eq(wipe + 1)
                with m.If(wipe == queue_memory_depth(config) - 1):
                    m.next = "CHOOSE"
            with m.State("CHOOSE"):
                m.next = "LOOK_UP"
                with m.If(self._acked.bit_select(self._write_head, 1)):
                    m.d.sync += [job.eq(names.index("RETIRE")), self._queue.eq(self._writes[self._write_head])]
                with m.Elif(self.completed.valid & ~self.line.valid & ~self._in_write.all()):
                    m.d.sync += [job.eq(names.index("COMPLETE")), self._queue.eq(report_queue)]
                with m.Elif(self.control.command.valid):
                    m.d.sync += [job.eq(names.index("COMMAND")), self._queue.eq(self.control.command.payload.queue)]
                with m.Elif(self.slot.valid & ~self.fetched.valid):
                    m.d.sync += [job.eq(names.index("INSPECT")), self._queue.eq(flight.queue)]
                with m.Elif(interrupt_turn.any & ~self.msix.valid):
                    m.d.comb += interrupt_turn.taken.eq(1)
                    m.d.sync += [job.eq(names.index("INTERRUPT")), self._queue.eq(interrupt_turn.grant)]
                with m.Elif(expire_turn.any):
                    m.d.comb += expire_turn.taken.eq(1)
                    m.d.sync += [job.eq(names.index("EXPIRE")), self._queue.eq(expire_turn.grant)]
                with m.Elif(ready_to_issue):
                    m.d.comb += issue_turn.taken.eq(~same_turn)
                    m.d.sync += [
                        job.eq(names.index("ISSUE")),
                        self._queue.eq(Mux(same_turn, self._turn, issue_turn.grant)),
                        self._turn_goes_on.eq(same_turn),
                    ]
                with m.Else():
                    m.next = "CHOOSE"
            with m.State("LOOK_UP"):
                with m.Switch(job):
                    for number, name in enumerate(names):
                        with m.Case(number):
                            m.next = name
            with m.State("RETIRE"):
                self._retire(m)
                m.next = "CHOOSE"
            with m.State("COMPLETE"):
                self._complete(m)
                m.next = "CHOOSE"
            with m.State("COMMAND"):
                m.next = "CHOOSE"
                self._command(m)
            with m.State("INSPECT"):
                self._inspect(m, flight)
                m.next = "CHOOSE"
            with m.State("INTERRUPT"):
                self._send_interrupt(m)
                m.next = "CHOOSE"
            with m.State("EXPIRE"):
                self._expire(m)
                m.next = "CHOOSE"
            with m.State("ISSUE"):
                self._issue(m)
                m.next = "CHOOSE"
            self._enable_states(m)

        with m.If(self.control.doorbell):
            m.d.sync += [
                self._look.bit_select(self.control.doorbell_queue, 1).eq(1),
                self._backoff[self.control.doorbell_queue].eq(0),
            ]

    def _enabled_here(self) -> Value:
        return self.control.enabled.bit_select(self._queue, 1)

    def _slot_words(self, slot_log2: Value) -> Value:
        """Words of a slot of ``2**slot_log2`` bytes."""
        return (1 << slot_log2) >> LOG2_WORD_BYTES

    def _submission_log2(self) -> Value:
        return self.control.config.slots[:SLOT_LOG2_BITS]

    def _result_log2(self) -> Value:
        return self.control.config.slots[8 : 8 + SLOT_LOG2_BITS]

    def _is_last(self, index: Value) -> Value:
        """True for the last slot of the ring."""
        return index + 1 == self.control.config.depth[:_DEPTH_BITS]

    def _word(self, address_bytes: Value) -> Value:
        return address_bytes[LOG2_WORD_BYTES:][: word_address_bits(self._config)]

    def _issue(self, m: Module) -> None:
        now, after, here = self._now, self._after, self._queue
        last = Signal(name="issue_last")
        m.d.comb += last.eq(self._is_last(now.next_index))
        of_chain = self._chain_open & (self._chain_queue == here)
        weight = self.control.config.weight[:WEIGHT_BITS]
        m.d.sync += [
            self._turn.eq(here),
            self._turn_left.eq(Mux(self._turn_goes_on, self._turn_left - 1, Mux(weight == 0, 0, weight - 1))),
        ]
        # While reads of this queue are on their way, a later doorbell still asks for a look of its own.
        with m.If(~self._of_queue(here, alive=True).any()):
            m.d.sync += self._look.bit_select(here, 1).eq(0)
        with m.If((now.next_count - now.head)[:COUNT_BITS] >= self.control.config.depth[:_DEPTH_BITS]):
            # No room. CQ_HEAD wakes the queue.
            m.d.sync += self._runs.bit_select(here, 1).eq(0)
            with m.If(of_chain & self._chain_expired):
                self._close_chain(m)
        with m.Else():
            m.d.sync += [
                self.slot_request.valid.eq(1),
                self.slot_request.payload.eq(now.next_slot),
                self._in_flight.bit_select(self._flight_tail, 1).eq(1),
                self._flights[self._flight_tail].eq(
                    Cat(
                        here,
                        now.next_index,
                        now.next_pass,
                        now.next_slot,
                        now.next_count,
                        of_chain & self._chain_expired,
                        Const(0, 1),
                    )
                ),
                self._flight_tail.eq(self._flight_tail + 1),
            ]
            m.d.comb += [
                self._state_write.en.eq(1),
                after.next_count.eq(now.next_count + 1),
                after.next_index.eq(Mux(last, 0, now.next_index + 1)),
                after.next_pass.eq(now.next_pass + last),
                after.next_slot.eq(
                    Mux(
                        last,
                        self._word(self.control.config.sq_base),
                        now.next_slot + self._slot_words(self._submission_log2()),
                    )
                ),
            ]

    def _go_back(self, m: Module, flight: data.View) -> None:
        """Let the queue's next slot be that of ``flight`` again and disown its later reads."""
        after = self._after
        m.d.comb += [
            self._state_write.en.eq(1),
            after.next_index.eq(flight.index),
            after.next_pass.eq(flight.pass_number),
            after.next_slot.eq(flight.slot),
            after.next_count.eq(flight.count),
        ]
        self._disown(m)

    def _disown(self, m: Module) -> None:
        for flight in self._flights:
            with m.If(flight.queue == self._queue):
                m.d.sync += flight.dead.eq(1)

    def _close_chain(self, m: Module) -> None:
        """The successor did not come: what still comes of the chain is not to be executed."""
        m.d.sync += [self._chain_open.eq(0), self._chain_expired.eq(0)]
        m.d.comb += [self._state_write.en.eq(1), self._after.fault.eq(Fault.BROKEN)]

    def _inspect(self, m: Module, flight: data.View) -> None:
        now, after, here, slot = self._now, self._after, self._queue, self.slot.payload
        m.d.comb += self.slot.ready.eq(1)
        m.d.sync += [
            self._in_flight.bit_select(self._flight_head, 1).eq(0),
            self._flight_head.eq(self._flight_head + 1),
        ]
        of_chain = self._chain_open & (self._chain_queue == here)
        valid = slot.valid == Cat(flight.pass_number, Const(VALID_TAG, 8))
        with m.If(flight.dead):
            pass
        with m.Elif(self._chain_open & (self._chain_queue != here)):
            # Another queue's chain came first; this queue runs again when that is over.
            self._go_back(m, flight)
            m.d.sync += self._look.bit_select(here, 1).eq(1)
        with m.Elif(~valid & ~slot.error):
            self._go_back(m, flight)
            m.d.sync += self._runs.bit_select(here, 1).eq(0)
            with m.If(of_chain):
                with m.If(flight.probe):
                    self._close_chain(m)
            with m.Elif(self._backoff[here] != MAX_BACKOFF_LOG2):
                m.d.sync += self._backoff[here].eq(self._backoff[here] + 1)
        with m.Else():
            chained = Signal(name="chained")
            faulty = Signal(name="faulty")
            length, too_long = Signal(COUNT_BITS, name="length"), Signal(name="too_long")
            limit = self.control.chain_limit
            verdict = Signal(Status, name="verdict")
            m.d.comb += [
                chained.eq(slot.descriptor.chain & ~slot.error),
                faulty.eq((now.fault != Fault.NONE) & ~slot.error),
                # Stays at its end: a chain without a bound is not closed by a wrap, and a bound set later still holds.
                length.eq(Mux(self._chain_open, self._chain_length + ~self._chain_length.all(), 1)),
                too_long.eq(chained & ~faulty & (limit != 0) & (length >= limit)),
                verdict.eq(
                    Mux(
                        slot.error,
                        Status.MEMORY_ERROR,
                        Mux(
                            now.fault == Fault.BROKEN,
                            Status.CHAIN_BROKEN,
                            Mux(now.fault == Fault.ABORTED, Status.CHAIN_ABORTED, Status.OK),
                        ),
                    )
                ),
                self._state_write.en.eq(1),
                after.fetched.eq(now.fetched + 1),
                after.under_way.eq(now.under_way + 1),
                after.fault.eq(
                    Mux(too_long, Fault.BROKEN, Mux(faulty & chained, Fault.ABORTED, Fault.NONE)),
                ),
                after.result_slot.eq(
                    Mux(
                        self._is_last(flight.index),
                        self._word(self.control.config.cq_base),
                        now.result_slot + self._slot_words(self._result_log2()),
                    )
                ),
            ]
            record = self.fetched.payload
            m.d.sync += [
                self._work.eq(self._work + 1),
                self._runs.bit_select(here, 1).eq(1),
                self._backoff[here].eq(0),
                self._chain_open.eq(chained & ~faulty & ~too_long),
                self._chain_length.eq(length),
                self._chain_queue.eq(here),
                self._chain_age.eq(0),
                self._chain_expired.eq(0),
                self.fetched.valid.eq(1),
                record.descriptor.eq(Mux(slot.error, 0, slot.descriptor.as_value())),
                record.scale.eq(slot.scale),
                record.exponents.eq(slot.exponents),
                record.queue.eq(here),
                record.first.eq(~self._chain_open),
                record.verdict.eq(verdict),
                record.operand_address.eq(flight.slot + operand_offset(self._config) // LINE_BYTES),
                record.result_address.eq(now.result_slot + RESULT_OFFSET // LINE_BYTES),
                record.base.eq(self.control.config.base),
                record.limit.eq(self.control.config.limit),
                record.submission_slot_log2.eq(self._submission_log2()),
                record.result_slot_log2.eq(self._result_log2()),
            ]

    def _complete(self, m: Module) -> None:
        now, after, report = self._now, self._after, self.completed.payload
        last, failed = Signal(name="done_last"), Signal(name="failed")
        m.d.comb += [
            self.completed.ready.eq(1),
            self._state_write.en.eq(1),
            last.eq(self._is_last(now.done_index)),
            failed.eq(report.status != Status.OK),
        ]
        with m.If(self._enabled_here()):
            m.d.comb += [
                after.errors.eq(now.errors + failed),
                after.done_index.eq(Mux(last, 0, now.done_index + 1)),
                after.done_pass.eq(now.done_pass + last),
                after.done_slot.eq(
                    Mux(
                        last,
                        self._word(self.control.config.cq_base),
                        now.done_slot + self._slot_words(self._result_log2()),
                    )
                ),
                self.control.descriptor_done.eq(1),
                self.control.descriptor_failed.eq(failed),
            ]
            m.d.sync += [
                self.line.valid.eq(1),
                self.line.payload.address.eq(now.done_slot),
                self.line.payload.strobe.eq((1 << LINE_BYTES) - 1),
                self.line.payload.tag.eq(self._write_tail),
                self._writes[self._write_tail].eq(self._queue),
                self._in_write.bit_select(self._write_tail, 1).eq(1),
                self._acked.bit_select(self._write_tail, 1).eq(0),
                self._write_tail.eq(self._write_tail + 1),
                *self._fill_line(report, now.done_pass),
            ]
        with m.Else():
            m.d.comb += after.under_way.eq(now.under_way - 1)
            m.d.sync += self._work.eq(self._work - 1)

    def _fill_line(self, report: data.View, pass_number: Value) -> list[object]:
        """Statements that put a completion line together; bytes that belong to no field stay zero."""
        values: dict[str, Value] = {
            "status": report.status,
            "numeric": report.numeric,
            "result_bytes": report.result_bytes,
            "cycles": report.cycles,
            "descriptor": report.descriptor.as_value(),
            "valid": Cat(pass_number, Const(VALID_TAG, 8)),
        }
        assert set(values) == {f.name for f in COMPLETION_FIELDS}
        line = self.line.payload.data
        return [line[8 * f.offset :][: 8 * f.size].eq(values[f.name]) for f in COMPLETION_FIELDS]

    def _retire(self, m: Module) -> None:
        now, after = self._now, self._after
        m.d.comb += [
            self._state_write.en.eq(1),
            after.tail.eq(now.tail + 1),
            after.under_way.eq(now.under_way - 1),
            after.errors.eq(now.errors + self._ack_errors.bit_select(self._write_head, 1)),
        ]
        m.d.sync += [
            self._work.eq(self._work - 1),
            self._acked.bit_select(self._write_head, 1).eq(0),
            self._in_write.bit_select(self._write_head, 1).eq(0),
            self._write_head.eq(self._write_head + 1),
            # A host that gets an answer is likely to ask again.
            self._backoff[self._queue].eq(0),
        ]
        with m.If(self._enabled_here() & self.control.interrupt_enable.bit_select(self._queue, 1)):
            gathered = Signal(COUNT_BITS + 1)
            m.d.comb += gathered.eq(now.gathered + 1)
            with m.If(
                (self.control.config.coalesce_cycles == 0) | (gathered >= self.control.config.coalesce[:COUNT_BITS])
            ):
                self._signal(m)
            with m.Else():
                m.d.comb += [
                    after.gathered.eq(gathered),
                    after.since.eq(Mux(now.gathered == 0, self._clock, now.since)),
                ]
                m.d.sync += self._gathers.bit_select(self._queue, 1).eq(1)

    def _signal(self, m: Module) -> None:
        """Let the queue's vector send a message; nothing is gathered any more."""
        vector = self.control.config.vector[:VECTOR_BITS]
        wanted = self.control.interrupt_enable.bit_select(self._queue, 1)
        with m.If(wanted & (vector < self._config.queues)):
            m.d.sync += self._pending.bit_select(vector[: len(self._queue)], 1).eq(1)
        self._gather_nothing(m)

    def _gather_nothing(self, m: Module) -> None:
        m.d.comb += self._after.gathered.eq(0)
        m.d.sync += [
            self._gathers.bit_select(self._queue, 1).eq(0),
            self._expires.bit_select(self._queue, 1).eq(0),
        ]

    def _expire(self, m: Module) -> None:
        m.d.sync += self._expires.bit_select(self._queue, 1).eq(0)
        with m.If((self._clock - self._now.since)[:REGISTER_BITS] >= self.control.config.coalesce_cycles):
            m.d.comb += self._state_write.en.eq(1)
            self._signal(m)

    def _send_interrupt(self, m: Module) -> None:
        # The vector may have been masked since it was chosen.
        with m.If(self.control.deliver.bit_select(self._queue, 1)):
            m.d.sync += [
                self._pending.bit_select(self._queue, 1).eq(0),
                self.msix.valid.eq(1),
                self.msix.payload.eq(self.control.vector),
            ]

    def _command(self, m: Module) -> None:
        now, after, here, command = self._now, self._after, self._queue, self.control.command.payload
        m.d.comb += self.control.command.ready.eq(1)
        with m.Switch(command.kind):
            with m.Case(Command.HEAD):
                m.d.comb += [self._state_write.en.eq(1), self.control.command_done.eq(1)]
                # A head may move forward, and not beyond what has been completed.
                moved = (command.value - now.head)[:COUNT_BITS]
                waiting = (now.tail - now.head)[:COUNT_BITS]
                with m.If((command.value[COUNT_BITS:] == 0) & (moved <= waiting)):
                    m.d.comb += after.head.eq(command.value)
                    m.d.sync += self._look.bit_select(here, 1).eq(1)
                    with m.If(moved == waiting):
                        self._gather_nothing(m)
                with m.Else():
                    m.d.comb += after.errors.eq(now.errors + 1)
            with m.Case(Command.DISABLE):
                m.d.comb += self.control.command_done.eq(1)
                m.d.sync += [
                    self.control.enabled.bit_select(here, 1).eq(0),
                    self._runs.bit_select(here, 1).eq(0),
                ]
                self._gather_nothing(m)
                self._disown(m)
                with m.If(self._chain_queue == here):
                    m.d.sync += [self._chain_open.eq(0), self._chain_expired.eq(0)]
            with m.Case(Command.ENABLE):
                m.next = "ENABLE_RINGS"

    def _enable_states(self, m: Module) -> None:
        """An enable takes its checks one after the other: they are wide, and it is rare."""
        config, now, after, here, setup = self._config, self._now, self._after, self._queue, self.control.config
        self._refused = refused = Signal()
        below, room, needed = Signal(), Signal(64), Signal(_DEPTH_BITS + MAX_SLOT_LOG2)

        def measure(ring_base: Value, slot_log2: Value) -> list[object]:
            depth = setup.depth[:_DEPTH_BITS]
            return [
                below.eq((ring_base < setup.base) | (ring_base >= setup.limit)),
                room.eq(setup.limit - ring_base),
                needed.eq((depth << slot_log2)[: len(needed)]),
            ]

        def slot_illegal(slot_log2: Value) -> Value:
            return (slot_log2 < MIN_SLOT_LOG2) | (slot_log2 > MAX_SLOT_LOG2)

        misfit = below | (needed > room)
        stripe_log2 = operand_offset(config).bit_length() - 1
        with m.State("ENABLE_RINGS"):
            m.d.sync += [
                refused.eq(
                    (now.under_way != 0)
                    | self._of_queue(here, alive=False).any()
                    | (setup.depth < MIN_DEPTH)
                    | (setup.depth > MAX_DEPTH)
                    | slot_illegal(self._submission_log2())
                    | slot_illegal(self._result_log2())
                    | setup.sq_base[:stripe_log2].any()
                    | setup.cq_base[:LOG2_WORD_BYTES].any()
                    | (setup.limit > 1 << config.dpa_bits)
                ),
                *measure(setup.sq_base, self._submission_log2()),
            ]
            m.next = "ENABLE_RESULTS"
        with m.State("ENABLE_RESULTS"):
            m.d.sync += [refused.eq(refused | misfit), *measure(setup.cq_base, self._result_log2())]
            m.next = "ENABLE"
        with m.State("ENABLE"):
            m.d.comb += [self._state_write.en.eq(1), self.control.command_done.eq(1)]
            with m.If(refused | misfit):
                m.d.comb += after.errors.eq(now.errors + 1)
            with m.Else():
                m.d.comb += [
                    after.eq(0),
                    after.errors.eq(now.errors),
                    after.next_pass.eq(setup["pass"]),
                    after.done_pass.eq(setup["pass"]),
                    after.next_slot.eq(self._word(setup.sq_base)),
                    after.result_slot.eq(self._word(setup.cq_base)),
                    after.done_slot.eq(self._word(setup.cq_base)),
                ]
                m.d.sync += [
                    self.control.enabled.bit_select(here, 1).eq(1),
                    self._runs.bit_select(here, 1).eq(0),
                    self._look.bit_select(here, 1).eq(1),
                    self._backoff[here].eq(0),
                ]
            m.next = "CHOOSE"
