"""The device as one object: registers, rings and core over a sparse memory."""

from __future__ import annotations

from dataclasses import dataclass, field

from plora.hw.defs.config import PE_ROWS, NdpConfig
from plora.hw.defs.descriptor import Descriptor
from plora.hw.defs.errors import UserError
from plora.hw.defs.legality import RingSetup, ring_setup_allowed
from plora.hw.defs.queue import LINE_BYTES, VALID_OFFSET, Completion, exponents_of, softmax_scale_of, valid_word
from plora.hw.defs.registers import (
    GLOBAL,
    ID_VALUE,
    INTERFACE_VERSION,
    QUEUE,
    QUEUE_BASE,
    QUEUE_STRIDE,
    RESET_CHAIN_LIMIT,
    RESET_CHAIN_TIMEOUT,
    RESET_POLL_INTERVAL,
    RESET_SHARE,
    RESET_WATCHDOG,
    Access,
    global_offset,
)
from plora.hw.defs.status import Status
from plora.sim.functional.core import FunctionalCore, Outcome
from plora.sim.functional.memory import MemoryFault, SparseMemory
from plora.sim.functional.messages import MessageTable
from plora.sim.functional.posted import PostedWrites

_GLOBAL_BY_OFFSET = {register.offset: register for register in GLOBAL}
_QUEUE_BY_OFFSET = {register.offset: register for register in QUEUE}
_ENABLE, _INTERRUPT = 1, 2
_COUNT_MASK = 0xFFFF
_COUNTERS = ("BEATS", "SPAN", "WORDS_READ", "WORDS_WRITTEN", "DESCRIPTORS", "ERRORS")
_ANY_TIME = ("CTRL", "DOORBELL", "CQ_HEAD")


@dataclass
class _Queue:
    """One queue: its registers as written, and its state since it was enabled."""

    registers: dict[str, int] = field(
        default_factory=lambda: {r.name: 0 for r in QUEUE if r.access is Access.RW and r.name not in _ANY_TIME}
    )
    control: int = 0
    taken: int = 0
    """Completions that the host has taken since enabling (not reduced)."""
    done: int = 0
    """Descriptors fetched, executed and completed since enabling (not reduced)."""
    errors: int = 0
    gathered: int = 0
    """Completions that no interrupt was sent for yet."""
    gathered_since: int = 0
    """Cycle of the first of them."""
    fault: Status = Status.OK
    """Why the next descriptor is not to be executed: its chain was closed (CHAIN_BROKEN, then CHAIN_ABORTED)."""

    def wide(self, name: str) -> int:
        """A 64-bit value that is two registers."""
        return self.registers[f"{name}_HI"] << 32 | self.registers[f"{name}_LO"]

    @property
    def enabled(self) -> bool:
        return bool(self.control & _ENABLE)

    @property
    def setup(self) -> RingSetup:
        slots = self.registers["SLOTS"]
        return RingSetup(
            base=self.wide("BASE"),
            limit=self.wide("LIMIT"),
            depth=self.registers["DEPTH"],
            submission_base=self.wide("SQ_BASE"),
            submission_slot_log2=slots & 0x1F,
            result_base=self.wide("CQ_BASE"),
            result_slot_log2=slots >> 8 & 0x1F,
        )


class FunctionalDevice:
    """A `plora.hw.defs.port.DevicePort` that computes exactly and takes no time over it.

    Work is done inside `wait` and before every register read, until no queue can go on; an enabled
    queue whose next slot is not valid, or whose completion ring is full, waits. While a chain waits for
    its next descriptor all other queues wait too, at most CHAIN_TIMEOUT cycles, as on the device.

    Cycle figures are those of a perfect memory: ``cycles`` of a completion, BEATS and SPAN are one per
    stripe and pair of GPU rows, the STALL registers are zero, CYCLES counts the cycles waited.

    Parameters:
        config: sizes of the device.
        memory_bytes: size of its memory, a multiple of the stripe size (default: all addresses that
            ``config.dpa_bits`` can name). Memory is sparse: size costs nothing.
        reorder_seed: None, or the seed with which posted writes are delayed and shuffled until a fence.
        fill: value of memory bytes that were never written.
        memory: memory of ``memory_bytes`` to be used, whatever ``fill`` says.

    Raises:
        UserError: ``memory_bytes`` is not a multiple of the stripe size or more than can be addressed.
    """

    def __init__(
        self,
        config: NdpConfig,
        memory_bytes: int | None = None,
        *,
        reorder_seed: int | None = None,
        fill: int = 0,
        memory: SparseMemory | None = None,
    ) -> None:
        limit = 1 << config.dpa_bits
        size = limit if memory_bytes is None else memory_bytes
        if not 0 < size <= limit or size % config.stripe_bytes:
            raise UserError(
                f"device memory of {size} bytes: {config.name!r} takes a multiple of {config.stripe_bytes}, at most"
                f" {limit}"
            )
        self.config = config
        self.memory = SparseMemory(size, fill) if memory is None else memory
        self._messages = MessageTable(config.queues)
        self._core = FunctionalCore(config, self.memory)
        self._queues = [_Queue() for _ in range(config.queues)]
        self._globals = {
            "CHAIN_TIMEOUT": RESET_CHAIN_TIMEOUT,
            "POLL_INTERVAL": RESET_POLL_INTERVAL,
            "CHAIN_LIMIT": RESET_CHAIN_LIMIT,
            "WATCHDOG": RESET_WATCHDOG,
            "SHARE": RESET_SHARE,
        }
        self._counters = dict.fromkeys(_COUNTERS, 0)
        self._cycles = 0
        self._chain_queue: int | None = None
        self._chain_deadline = 0
        self._chain_length = 0
        self._next_queue = 0
        self._posted = PostedWrites(self._host_write, self._apply_mmio, reorder_seed)

    # --- the port ---------------------------------------------------------------------------

    def hdm_write(self, address: int, data: bytes) -> None:
        """Store ``data`` (posted). Raises UserError beyond memory."""
        if address < 0 or address + len(data) > self.memory.size_bytes:
            raise UserError(
                f"HDM write of {len(data)} bytes at {address:#x}: memory has {self.memory.size_bytes} bytes"
            )
        self._posted.hdm(address, bytes(data))

    def hdm_read(self, address: int, size_bytes: int) -> bytes:
        """Load ``size_bytes`` bytes. Raises UserError beyond memory."""
        try:
            return self._posted.overlay(address, self.memory.read(address, size_bytes))
        except MemoryFault as error:
            raise UserError(f"HDM read of {error}") from None

    def hdm_fence(self) -> None:
        """Let every earlier HDM write land."""
        self._posted.fence()

    def mmio_write(self, offset: int, value: int) -> None:
        """Write a 32-bit register (posted)."""
        self._posted.mmio(offset, value & 0xFFFF_FFFF)

    def mmio_read(self, offset: int) -> int:
        """Read a 32-bit register, after letting the device go on."""
        self._posted.drain_mmio()
        self._work()
        if self._messages.owns(offset):
            return self._messages.read(offset)
        if offset >= QUEUE_BASE:
            return self._read_queue(*divmod(offset - QUEUE_BASE, QUEUE_STRIDE))
        return self._read_global(offset)

    def wait(self, cycles: int) -> None:
        """Let ``cycles`` pass; work is done at once, chain timeouts count these cycles."""
        end = self._cycles + max(0, cycles)
        while True:
            self._work()
            while self._posted.land_some(cycles):
                self._work()
            if self._chain_queue is None or self._chain_deadline > end:
                break
            self._cycles = max(self._cycles, self._chain_deadline)
            self._queues[self._chain_queue].fault = Status.CHAIN_BROKEN
            self._chain_queue = None
        self._cycles = end
        self._expire()

    @property
    def messages(self) -> list[tuple[int, int]]:
        """Interrupts sent: address and data of each."""
        return self._messages.sent

    def take_interrupts(self) -> list[tuple[int, int]]:
        """Return address and data of every interrupt sent since the last call."""
        return self._messages.take()

    def _host_write(self, address: int, data: bytes) -> None:
        try:
            self.memory.write(address, data)
        except MemoryFault as error:
            raise UserError(f"HDM write of {error}") from None

    # --- registers --------------------------------------------------------------------------

    def _read_global(self, offset: int) -> int:
        register = _GLOBAL_BY_OFFSET.get(offset)
        if register is None:
            return 0
        config = self.config
        constants = {
            "ID": ID_VALUE,
            "INTERFACE": INTERFACE_VERSION,
            "CAPS": config.channels | PE_ROWS << 8 | config.queues << 16 | config.dpa_bits << 24,
            "BUFFERS": _log2(config.input_buffer_bytes)
            | _log2(config.dram_buffer_bytes) << 8
            | _log2(config.output_buffer_bytes) << 16,
            "STATUS": int(self._chain_queue is not None),
            "CYCLES_LO": self._cycles & 0xFFFF_FFFF,
            "CYCLES_HI": self._cycles >> 32 & 0xFFFF_FFFF,
        }
        values = constants | {"MSIX": self._messages.control} | self._globals | self._counters
        return values.get(register.name, 0) & 0xFFFF_FFFF

    def _read_queue(self, index: int, offset: int) -> int:
        register = _QUEUE_BY_OFFSET.get(offset)
        if register is None or index >= len(self._queues):
            return 0
        queue = self._queues[index]
        live = {
            "CTRL": queue.control,
            "QSTATUS": int(queue.enabled) | 2 * (self._chain_queue == index),
            "DOORBELL": 0,
            "CQ_HEAD": queue.taken & _COUNT_MASK,
            "SQ_HEAD": queue.done & _COUNT_MASK,
            "CQ_TAIL": queue.done & _COUNT_MASK,
            "QERRORS": queue.errors,
        }
        return (live | queue.registers).get(register.name, 0) & 0xFFFF_FFFF

    def _apply_mmio(self, offset: int, value: int) -> None:
        if self._messages.owns(offset):
            self._messages.write(offset, value)
        elif offset >= QUEUE_BASE:
            self._write_queue(*divmod(offset - QUEUE_BASE, QUEUE_STRIDE), value)
        elif offset == global_offset("CONTROL"):
            if value & 1:
                self._counters = dict.fromkeys(_COUNTERS, 0)
                self._shift_time()
        elif offset == global_offset("MSIX"):
            self._messages.control = value
        else:
            register = _GLOBAL_BY_OFFSET.get(offset)
            if register is not None and register.name in self._globals:
                self._globals[register.name] = value & _COUNT_MASK if register.name == "CHAIN_LIMIT" else value

    def _shift_time(self) -> None:
        self._chain_deadline -= self._cycles
        for queue in self._queues:
            queue.gathered_since -= self._cycles
        self._cycles = 0

    def _write_queue(self, index: int, offset: int, value: int) -> None:
        register = _QUEUE_BY_OFFSET.get(offset)
        if register is None or index >= len(self._queues):
            return
        queue = self._queues[index]
        if register.name == "CTRL":
            self._control(index, value)
        elif register.name == "CQ_HEAD":
            newly_taken = (value - queue.taken) & _COUNT_MASK
            if value <= _COUNT_MASK and newly_taken <= queue.done - queue.taken:
                queue.taken += newly_taken
                if queue.taken == queue.done:
                    queue.gathered = 0
            else:
                queue.errors += 1
        elif register.name in queue.registers and not queue.enabled:
            queue.registers[register.name] = value

    def _control(self, index: int, value: int) -> None:
        queue = self._queues[index]
        enable = bool(value & _ENABLE)
        if enable and not queue.enabled:
            if not ring_setup_allowed(self.config, queue.setup):
                queue.errors += 1
                enable = False
            queue.taken = queue.done = queue.gathered = 0
            queue.fault = Status.OK
        elif not enable and self._chain_queue == index:
            self._chain_queue = None
        queue.control = value & _INTERRUPT | int(enable)

    # --- work -------------------------------------------------------------------------------

    def _work(self) -> None:
        """Serve the queues in turn until none can go on."""
        idle = 0
        while idle < len(self._queues):
            index = self._next_queue if self._chain_queue is None else self._chain_queue
            if self._serve(index):
                idle = 0
            elif self._chain_queue is not None:
                return
            else:
                idle += 1
            self._next_queue = (index + 1) % len(self._queues)

    def _serve(self, index: int) -> bool:
        """Execute the next descriptor of a queue if there is one and its completion has room."""
        queue = self._queues[index]
        if not queue.enabled or queue.done - queue.taken >= queue.registers["DEPTH"]:
            return False
        setup = queue.setup
        ring_pass, slot = divmod(queue.done, setup.depth)
        valid = valid_word(queue.registers["PASS"] + ring_pass)
        submission_slot = setup.submission_base + (slot << setup.submission_slot_log2)
        result_slot = setup.result_base + (slot << setup.result_slot_log2)
        try:
            line = self.memory.read(submission_slot, LINE_BYTES)
        except MemoryFault:
            # Its words mean nothing, not even the valid word: the slot is used up and belongs to no chain.
            d, outcome = Descriptor.unpack(bytes(LINE_BYTES)), Outcome(Status.MEMORY_ERROR)
            self._follow_chain(index, d, faulty=False)
        else:
            if int.from_bytes(line[VALID_OFFSET:], "little") != valid:
                return False
            d, outcome = self._execute(index, line, submission_slot, result_slot)
        self._complete(index, d, outcome, result_slot, valid)
        return True

    def _execute(self, index: int, line: bytes, submission_slot: int, result_slot: int) -> tuple[Descriptor, Outcome]:
        """Judge and run the descriptor of a submission line; what a closed chain left behind only gets its status."""
        queue = self._queues[index]
        d = Descriptor.unpack(line)
        faulty = queue.fault is not Status.OK
        if faulty:
            outcome = Outcome(queue.fault)
        else:
            outcome = self._core.execute(
                d,
                queue.setup.window,
                submission_slot,
                result_slot,
                first=self._chain_queue is None,
                softmax_scale=softmax_scale_of(line),
                exponents=exponents_of(line),
            )
        self._follow_chain(index, d, faulty=faulty)
        return d, outcome

    def _follow_chain(self, index: int, d: Descriptor, *, faulty: bool) -> None:
        """An open chain keeps the core for its queue; a closed one is counted out to its end."""
        self._queues[index].fault = Status.CHAIN_ABORTED if faulty and d.chain else Status.OK
        self._chain_length = (self._chain_length if self._chain_queue == index else 0) + 1
        if d.chain and not faulty and 0 < self._globals["CHAIN_LIMIT"] <= self._chain_length:
            self._queues[index].fault = Status.CHAIN_BROKEN
            self._chain_queue = None
        elif d.chain and not faulty:
            self._chain_queue = index
            self._chain_deadline = self._cycles + self._globals["CHAIN_TIMEOUT"]
        else:
            self._chain_queue = None

    def _complete(self, index: int, d: Descriptor, outcome: Outcome, result_slot: int, valid: int) -> None:
        queue = self._queues[index]
        completion = Completion(outcome.status, outcome.numeric, outcome.result_bytes, outcome.cycles, d, valid)
        try:
            self.memory.write(result_slot, completion.pack())
        except MemoryFault:
            queue.errors += 1
        queue.done += 1
        if queue.control & _INTERRUPT:
            self._gather(queue)
        failed = outcome.status is not Status.OK
        queue.errors += failed
        for name, amount in (
            ("BEATS", outcome.cycles),
            ("SPAN", outcome.cycles),
            ("WORDS_READ", outcome.words_read),
            ("WORDS_WRITTEN", outcome.words_written),
            ("DESCRIPTORS", 1),
            ("ERRORS", int(failed)),
        ):
            self._counters[name] += amount

    # --- interrupts -------------------------------------------------------------------------

    def _gather(self, queue: _Queue) -> None:
        """A completion is there: send a message, or wait for more of them."""
        if not queue.gathered:
            queue.gathered_since = self._cycles
        queue.gathered += 1
        if queue.gathered >= queue.registers["COALESCE"] & _COUNT_MASK or not queue.registers["COALESCE_CYCLES"]:
            self._signal(queue)

    def _expire(self) -> None:
        for queue in self._queues:
            waited = self._cycles - queue.gathered_since
            if queue.enabled and queue.gathered and waited >= queue.registers["COALESCE_CYCLES"]:
                self._signal(queue)

    def _signal(self, queue: _Queue) -> None:
        queue.gathered = 0
        if queue.control & _INTERRUPT:
            self._messages.signal(queue.registers["VECTOR"] & 0xFF)


def _log2(size: int) -> int:
    return size.bit_length() - 1
