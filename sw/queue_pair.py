"""The host's end of a queue: one driver for the functional device, the timed model and the RTL.

A `QueuePair` is one submission and completion ring. What the host relies on:

* operands, then all descriptors of a submission but its first, then the first: each step after a fence.
  The device works through a ring in order, so nothing of a submission is seen before all of it is there;
* a completion counts only if its valid word carries the ring's pass and it echoes the descriptor that was
  submitted in that slot;
* a result is read before CQ_HEAD says that its slot may be used again;
* a queue that is enabled again starts at a pass number that its rings have never held.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy.typing as npt

from plora.hw.defs.config import VALUE_BYTES, WORD_BYTES
from plora.hw.defs.descriptor import Descriptor
from plora.hw.defs.errors import UserError
from plora.hw.defs.legality import RingSetup, ring_setup_allowed
from plora.hw.defs.packing import ceil_div, operand_row_stripes, result_row_words
from plora.hw.defs.queue import (
    LINE_BYTES,
    NO_EXPONENTS,
    PASS_BITS,
    RESULT_OFFSET,
    Anchor,
    Completion,
    Exponents,
    operand_offset,
    submission_line,
    valid_word,
)
from plora.hw.defs.registers import queue_offset
from plora.hw.defs.status import MEANING, Status
from plora.sim.functional.layout import Matrix, anchored_result_from_bytes, gpu_operand_bytes, result_from_bytes
from plora.sw.driver import DeviceError, Driver, line_bytes
from plora.sw.interrupts import Notice

COUNT_MASK = 0xFFFF
"""CQ_HEAD, SQ_HEAD and CQ_TAIL count modulo 2**16."""

_ENABLE = 1
_INTERRUPT = 2
_BUSY = 2
_FIRST_WAIT_CYCLES, _LONGEST_WAIT_CYCLES = 64, 4096


class DescriptorError(DeviceError):
    """The device refused or failed a descriptor.

    Attributes:
        ticket: the submission, with its completion.
    """

    def __init__(self, message: str, ticket: Ticket) -> None:
        super().__init__(message)
        self.ticket = ticket


@dataclass(frozen=True)
class Request:
    """One descriptor, and the GPU operand (B x K, FP16) that goes into its slot; None if it comes from the chain."""

    descriptor: Descriptor
    operand: npt.NDArray[Any] | None = None
    softmax_scale: int = 0
    """Of op SOFTMAX: FP32 bits (`plora.hw.defs.queue.softmax_scale`)."""
    exponents: Exponents = NO_EXPONENTS
    """Of BF16."""

    def line(self, ring_pass: int) -> bytes:
        """Line 0 of its slot. Raises UserError where a value does not fit its field."""
        return submission_line(self.descriptor, ring_pass, self.softmax_scale, self.exponents)


@dataclass
class Ticket:
    """A submitted request, and what became of it."""

    number: int
    """Place in the order of submission since the queue was opened, from 0."""
    request: Request
    completion: Completion | None = None
    result: Matrix | None = None
    """B x N, once completed; None if the descriptor wrote no result."""
    anchors: tuple[Anchor, ...] | None = None
    """One a row, of the result of a transposed descriptor."""

    @property
    def status(self) -> int | None:
        """The device's status code, or None while there is none. Codes that `Status` lacks stay numbers."""
        return None if self.completion is None else self.completion.status

    def check(self) -> None:
        """Raise what the device said of the descriptor.

        Raises:
            DescriptorError: it is not completed, or completed with a status other than OK. The message
                has the status by name, what it means, and the descriptor decoded.
        """
        where = f"descriptor {self.number}: {self.request.descriptor.describe()}"
        if self.completion is None:
            raise DescriptorError(f"not completed: {where}", self)
        try:
            status = Status(self.completion.status)
        except ValueError:
            raise DescriptorError(
                f"device answered with the unknown status {self.completion.status}: {where}", self
            ) from None
        if status is not Status.OK:
            raise DescriptorError(f"{status.name}: {MEANING[status]}: {where}", self)


@dataclass(frozen=True)
class RingPlace:
    """Where a queue's rings lie, and what the queue may touch. Addresses are DPA in bytes."""

    window_base: int
    window_limit: int
    submission_base: int
    result_base: int
    depth: int
    submission_slot_log2: int
    result_slot_log2: int

    @property
    def submission_slot_bytes(self) -> int:
        """Bytes of a submission slot."""
        return 1 << self.submission_slot_log2

    @property
    def result_slot_bytes(self) -> int:
        """Bytes of a result slot."""
        return 1 << self.result_slot_log2


@dataclass
class _Progress:
    """How a queue stands, in requests since it was enabled (not reduced by any modulus)."""

    submitted: int = 0
    completed: int = 0
    told: int = 0
    """Completions that CQ_HEAD last said were taken."""
    waited_cycles: int = 0
    """Cycles waited since the last completion."""
    next_wait_cycles: int = _FIRST_WAIT_CYCLES
    tickets: deque[Ticket] = field(default_factory=deque)
    """Submitted and not completed, oldest first."""


class QueuePair:
    """One submission and completion ring, used by one process.

    Parameters:
        driver: the device.
        index: number of the queue on the device.
        pasid: the process (20 bits).
        place: rings and window.
        first_pass: pass number of the first round.
        weight: descriptors of this queue that the device may serve in one turn, 1 ... 255.
        notice: how completions are told; None: the host polls.
        timeout_cycles: longest wait for one completion.

    Raises:
        UserError: the device has no queue of that number, or a value does not fit its register.
        DeviceError: the device refuses the set-up.
    """

    def __init__(
        self,
        driver: Driver,
        index: int,
        *,
        pasid: int,
        place: RingPlace,
        first_pass: int = 1,
        weight: int = 1,
        notice: Notice | None = None,
        timeout_cycles: int = 4_000_000,
    ) -> None:
        if not 0 <= index < driver.config.queues:
            raise UserError(f"queue {index}: {driver.config.name!r} has queues 0 ... {driver.config.queues - 1}")
        if not 0 <= pasid < 1 << 20:
            raise UserError(f"PASID {pasid}: choose 0 ... {(1 << 20) - 1}")
        if not 1 <= weight <= 255:
            raise UserError(f"weight {weight}: choose 1 ... 255")
        if timeout_cycles < 1:
            raise UserError(f"timeout of {timeout_cycles} cycles: choose at least 1")
        setup = RingSetup(
            base=place.window_base,
            limit=place.window_limit,
            depth=place.depth,
            submission_base=place.submission_base,
            submission_slot_log2=place.submission_slot_log2,
            result_base=place.result_base,
            result_slot_log2=place.result_slot_log2,
        )
        if not ring_setup_allowed(driver.config, setup):
            raise UserError(f"queue {index}: rings {place} do not fit their window or {driver.config.name!r}")
        self.driver = driver
        self.index = index
        self.pasid = pasid
        self.place = place
        self.weight = weight
        self.notice = notice
        self.timeout_cycles = timeout_cycles
        self._first_pass = first_pass
        self._numbers = 0
        self._messages = 0
        """Interrupts that were seen."""
        if notice is not None:
            notice.interrupts.open(notice.vector)
        self._progress = _Progress()
        self._head_of_cut_chain: list[Request] = []
        """Requests, completed, of the chain whose end is not."""
        self._clear_rings()
        self._enable()

    # --- set-up and recovery ----------------------------------------------------------------

    def _register(self, name: str, value: int) -> None:
        self.driver.write_register(queue_offset(self.index, name), value)

    def _wide_register(self, name: str, value: int) -> None:
        self._register(f"{name}_LO", value & 0xFFFF_FFFF)
        self._register(f"{name}_HI", value >> 32)

    def _read(self, name: str) -> int:
        return self.driver.read_register(queue_offset(self.index, name))

    def _clear_rings(self) -> None:
        """Remove what another process may have left with a pass number that this one will use."""
        port, place = self.driver.port, self.place
        for slot in range(place.depth):
            port.hdm_write(self._submission_slot(slot), bytes(LINE_BYTES))
            port.hdm_write(self._result_slot(slot), bytes(LINE_BYTES))
        port.hdm_fence()

    def _disable(self) -> None:
        self._register("CTRL", 0)
        waited = 0
        while self._read("QSTATUS") & (_ENABLE | _BUSY):
            if waited >= self.timeout_cycles:
                raise DeviceError(
                    f"queue {self.index} is still busy {waited} cycles after it was disabled: reset the device"
                )
            self.driver.port.wait(_FIRST_WAIT_CYCLES)
            waited += _FIRST_WAIT_CYCLES

    def _enable(self) -> None:
        place = self.place
        self._disable()
        self._register("PASID", self.pasid)
        self._register("DEPTH", place.depth)
        self._wide_register("BASE", place.window_base)
        self._wide_register("LIMIT", place.window_limit)
        self._wide_register("SQ_BASE", place.submission_base)
        self._wide_register("CQ_BASE", place.result_base)
        self._register("SLOTS", place.submission_slot_log2 | place.result_slot_log2 << 8)
        self._register("PASS", self._first_pass)
        self._register("WEIGHT", self.weight)
        if self.notice is not None:
            self._register("VECTOR", self.notice.vector)
            self._register("COALESCE", self.notice.completions)
            self._register("COALESCE_CYCLES", self.notice.wait_cycles)
        self._register("CTRL", _ENABLE | (_INTERRUPT if self.notice is not None else 0))
        if not self._read("QSTATUS") & _ENABLE:
            raise DeviceError(f"queue {self.index}: the device refuses to enable it with {place}")

    def close(self) -> None:
        """Disable the queue. What was not completed is dropped."""
        self._disable()

    def reset(self) -> list[Request]:
        """Disable and enable the queue; return the requests that were not completed, oldest first.

        Completions that had arrived are taken first (without raising what they say). The requests
        returned may have been executed or not; descriptors have no effect but on their own slots, so
        they can be submitted again. A chain cut in two must be submitted again from its start: the
        requests of it that did complete are returned as well.
        """
        self._disable()
        with contextlib.suppress(DeviceError):  # a false completion counts as none
            while self._take_one() is not None:
                pass
        progress = self._progress
        lost = [*self._head_of_cut_chain, *(ticket.request for ticket in progress.tickets)]
        passes = ceil_div(progress.submitted, self.place.depth) + 1
        self._first_pass = (self._first_pass + passes) % (1 << PASS_BITS)
        self._progress = _Progress()
        self._head_of_cut_chain = []
        self._enable()
        return lost

    # --- submission -------------------------------------------------------------------------

    @property
    def outstanding(self) -> int:
        """Requests submitted and not completed."""
        return len(self._progress.tickets)

    def _submission_slot(self, slot: int) -> int:
        return self.place.submission_base + (slot << self.place.submission_slot_log2)

    def _result_slot(self, slot: int) -> int:
        return self.place.result_base + (slot << self.place.result_slot_log2)

    def _position(self, count: int) -> tuple[int, int]:
        """Slot and pass number of request ``count`` since enabling."""
        ring_pass, slot = divmod(count, self.place.depth)
        return slot, (self._first_pass + ring_pass) % (1 << PASS_BITS)

    def submit(self, requests: Sequence[Request]) -> list[Ticket]:
        """Put ``requests`` into the ring and return a ticket for each.

        They must be whole chains (or no chains). The device sees each chain whole or not at all: it is
        published once the ring has room for it, its first descriptor last. Only of a chain longer than
        the ring are later descriptors added while it runs. Waits for completions where there is no room.

        Raises:
            UserError: nothing to submit, a last descriptor that says that its chain goes on, a value
                that does not fit its field, or an operand that does not fit its slot.
            DeviceError: the ring stays full for longer than the timeout.
        """
        if not requests:
            raise UserError("nothing to submit: give at least one descriptor")
        if requests[-1].descriptor.chain:
            raise UserError(f"the last descriptor submitted continues its chain: {requests[-1].descriptor.describe()}")
        # All that can be wrong is found before anything is written.
        for request in requests:
            request.line(0)
            self._check_operand(request)
        tickets: list[Ticket] = []
        start = 0
        while start < len(requests):
            count = self._publishable(requests, start)
            if count:
                tickets += self._publish(requests[start : start + count])
                start += count
            else:
                self._take_or_wait()
        return tickets

    def _publishable(self, requests: Sequence[Request], start: int) -> int:
        """How many requests from ``start`` on may be published now.

        Whole chains; but of a chain longer than the ring, as many as there is room for.
        """
        room = self.place.depth - self.outstanding
        count = 0
        for index in range(start, min(start + room, len(requests))):
            if not requests[index].descriptor.chain:
                count = index + 1 - start
        if count or not room:
            return count
        ends = (index for index in range(start, len(requests)) if not requests[index].descriptor.chain)
        return room if next(ends) + 1 - start > self.place.depth else 0

    def _check_operand(self, request: Request) -> None:
        operand, d = request.operand, request.descriptor
        if operand is None:
            return
        if operand.ndim != 2 or operand.dtype.itemsize != VALUE_BYTES:
            raise UserError(
                f"GPU operand is a {operand.dtype} array of shape {operand.shape}; give a matrix of FP16 values"
            )
        end = operand_offset(self.driver.config) + self._operand_stride(operand) * operand.shape[0]
        if end > self.place.submission_slot_bytes:
            raise UserError(
                f"GPU operand {operand.shape[0]} x {operand.shape[1]} needs a submission slot of {end} bytes, not"
                f" {self.place.submission_slot_bytes}; use larger slots or smaller tiles: {d.describe()}"
            )

    def _operand_stride(self, operand: npt.NDArray[Any]) -> int:
        config = self.driver.config
        return operand_row_stripes(config, operand.shape[1]) * config.stripe_bytes

    def _publish(self, batch: Sequence[Request]) -> list[Ticket]:
        port, traffic, progress = self.driver.port, self.driver.traffic, self._progress
        lines: list[tuple[int, bytes]] = []
        tickets: list[Ticket] = []
        for request in batch:
            slot, ring_pass = self._position(progress.submitted)
            address = self._submission_slot(slot)
            if request.operand is not None:
                self._write_operand(address + operand_offset(self.driver.config), request.operand)
            lines.append((address, request.line(ring_pass)))
            tickets.append(Ticket(self._numbers, request))
            progress.submitted += 1
            self._numbers += 1
        port.hdm_fence()
        if len(lines) > 1:
            for address, line in lines[1:]:
                port.hdm_write(address, line)
            port.hdm_fence()
        port.hdm_write(*lines[0])
        traffic.submission_bytes += LINE_BYTES * len(lines)
        progress.tickets += tickets
        progress.next_wait_cycles = _FIRST_WAIT_CYCLES
        self.ring_doorbell()
        return tickets

    def _write_operand(self, address: int, operand: npt.NDArray[Any]) -> None:
        """Write the rows of ``operand``, without the padding that fills whole lines."""
        port, traffic = self.driver.port, self.driver.traffic
        data = gpu_operand_bytes(operand, self.driver.config)
        stride = self._operand_stride(operand)
        used = line_bytes(operand.shape[1] * VALUE_BYTES)
        traffic.operand_bytes += used * operand.shape[0]
        if used == stride:
            port.hdm_write(address, data)
            return
        for start in range(0, len(data), stride):
            port.hdm_write(address + start, data[start : start + used])

    def ring_doorbell(self) -> None:
        """Tell the device to look at the next slot: a hint that only shortens the delay."""
        self._register("DOORBELL", 1)

    # --- completion -------------------------------------------------------------------------

    def poll(self) -> list[Ticket]:
        """Return the tickets whose completions have arrived since the last call, oldest first, without waiting.

        What a completion says is in the ticket (`Ticket.check`).

        Raises:
            DeviceError: the completion is not one of the descriptor that was submitted in its slot.
        """
        taken = []
        while (ticket := self._take_one()) is not None:
            taken.append(ticket)
        self._tell()
        return taken

    def run(self, chains: Iterable[Sequence[Request]]) -> Iterator[Ticket]:
        """Submit ``chains`` as the ring has room for them, and yield every ticket in order, completed and checked.

        Chains are drawn from the iterable as they are needed; as many are outstanding as fit the ring.

        Raises:
            DescriptorError: a descriptor failed. Later ones stay outstanding: `drain` or `reset`.
            DeviceError: no completion within the timeout, or a false one.
        """
        source = iter(chains)
        waiting: deque[Ticket] = deque()
        following = next(source, None)
        while waiting or following is not None:
            room = self.place.depth - self.outstanding
            if following is not None and (len(following) <= room or not waiting):
                waiting += self.submit(following)
                following = next(source, None)
                continue
            while waiting and waiting[0].completion is not None:
                ticket = waiting.popleft()
                ticket.check()
                yield ticket
            if waiting:
                self._take_or_wait()

    def wait_for(self, ticket: Ticket) -> Ticket:
        """Wait until ``ticket`` is completed, check it and return it.

        Raises:
            DescriptorError: the descriptor failed, or is no longer in the ring.
            DeviceError: no completion within the timeout, or a false one.
        """
        while ticket.completion is None:
            if not any(ticket is held for held in self._progress.tickets):
                ticket.check()
            self._take_or_wait()
        ticket.check()
        return ticket

    def drain(self) -> list[Ticket]:
        """Wait until nothing is outstanding; return what completed meanwhile, unchecked.

        Raises:
            DeviceError: no completion within the timeout, or a false one.
        """
        taken = []
        while self.outstanding:
            taken += self._take_or_wait()
        return taken

    def _take_or_wait(self) -> list[Ticket]:
        """Take what has arrived; if that is nothing, let some time pass."""
        if self._has_news() and (taken := self.poll()):
            return taken
        progress = self._progress
        if progress.waited_cycles >= self.timeout_cycles:
            raise self._timed_out()
        if progress.next_wait_cycles == _LONGEST_WAIT_CYCLES:
            self.ring_doorbell()  # the first one may have come before the descriptor
        cycles = min(progress.next_wait_cycles, self.timeout_cycles - progress.waited_cycles)
        self.driver.port.wait(cycles)
        progress.waited_cycles += cycles
        progress.next_wait_cycles = min(2 * cycles, _LONGEST_WAIT_CYCLES)
        return []

    def _has_news(self) -> bool:
        """Whether the ring is worth a read: after a message, if there are any, or after the longest wait."""
        if self.notice is None:
            return True
        messages = self.notice.interrupts.arrived(self.notice.vector)
        news = messages != self._messages or self._progress.next_wait_cycles == _LONGEST_WAIT_CYCLES
        self._messages = messages
        return news

    def _take_one(self) -> Ticket | None:
        progress, traffic = self._progress, self.driver.traffic
        if not progress.tickets:
            return None
        slot, ring_pass = self._position(progress.completed)
        address = self._result_slot(slot)
        completion = Completion.unpack(self.driver.port.hdm_read(address, LINE_BYTES))
        if completion.valid != valid_word(ring_pass):
            traffic.poll_bytes += LINE_BYTES
            return None
        traffic.completion_bytes += LINE_BYTES
        ticket = progress.tickets[0]
        self._read_result(ticket, completion, address)
        progress.tickets.popleft()
        ticket.completion = completion
        progress.completed += 1
        progress.waited_cycles, progress.next_wait_cycles = 0, _FIRST_WAIT_CYCLES
        self._head_of_cut_chain = [*self._head_of_cut_chain, ticket.request] if ticket.request.descriptor.chain else []
        return ticket

    def _read_result(self, ticket: Ticket, completion: Completion, address: int) -> None:
        d = ticket.request.descriptor
        if completion.descriptor != d and completion.descriptor.pack() != d.pack():
            raise self._lie(f"completed another descriptor ({completion.descriptor.describe()})", ticket)
        written = completion.status == Status.OK and not d.keep and not d.acc_out
        size = d.gpu_rows * result_row_words(d.device_rows, transpose=d.transpose) * WORD_BYTES if written else 0
        if completion.result_bytes != size:
            raise self._lie(f"says that it wrote {completion.result_bytes} result bytes, not {size}", ticket)
        if not written:
            return
        if RESULT_OFFSET + size > self.place.result_slot_bytes:
            raise self._lie(f"says that a result of {size} bytes fitted its slot", ticket)
        self.driver.traffic.result_bytes += size
        data = self.driver.port.hdm_read(address + RESULT_OFFSET, size)
        if d.transpose:
            ticket.result, ticket.anchors = anchored_result_from_bytes(data, d.gpu_rows, d.device_rows)
        else:
            ticket.result = result_from_bytes(data, d.gpu_rows, d.device_rows)

    def _lie(self, what: str, ticket: Ticket) -> DeviceError:
        d = ticket.request.descriptor
        return DeviceError(f"queue {self.index}: the device {what}: descriptor {ticket.number}: {d.describe()}")

    def _tell(self) -> None:
        progress = self._progress
        if progress.told != progress.completed:
            self._register("CQ_HEAD", progress.completed & COUNT_MASK)
            progress.told = progress.completed

    def _timed_out(self) -> DeviceError:
        progress = self._progress
        slot, ring_pass = self._position(progress.completed)
        line = self.driver.port.hdm_read(self._result_slot(slot), LINE_BYTES)
        seen = Completion.unpack(line).valid
        registers = ", ".join(f"{name} {self._read(name)}" for name in ("QSTATUS", "SQ_HEAD", "CQ_TAIL", "QERRORS"))
        ticket = progress.tickets[0]
        return DeviceError(
            f"queue {self.index}: no completion within {progress.waited_cycles} cycles: slot {slot} has valid word"
            f" {seen:#010x}, not {valid_word(ring_pass):#010x}; {registers}; {len(progress.tickets)} outstanding, the"
            f" first is descriptor {ticket.number}: {ticket.request.descriptor.describe()}"
        )
