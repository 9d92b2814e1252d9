"""A cycle-level model of one DRAM channel, to check the closed form of `plora.sim.hardware.dram`.

An open-page FR-FCFS controller with a read and a write queue, all-bank refresh, and the timing
constraints of `DramStandard`: activation window, column spacing by bank group, turnarounds, row
cycle. Time advances from command to command. About 20 thousand accesses a second: a reference, not
part of a run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

from plora.sim.hardware.dram import Controller, DramStandard

_FAR = 1 << 60


@dataclass
class _Bank:
    group: int
    row: int | None = None
    activate_at: int = 0
    precharge_at: int = 0
    column_at: int = 0


@dataclass
class _Channel:
    """Bank states and the earliest cycle at which each kind of command may follow."""

    standard: DramStandard
    access_bytes: int
    banks: list[_Bank] = field(default_factory=list)
    activations: list[int] = field(default_factory=list)
    read_at: int = 0
    write_at: int = 0
    group_at: dict[tuple[int, bool], int] = field(default_factory=dict)
    command_at: int = 0
    writing: bool = False

    def __post_init__(self) -> None:
        s = self.standard
        self.banks = [_Bank(group=index % s.bank_groups) for index in range(s.banks)]
        self.bursts = max(1, self.access_bytes // s.burst_bytes)
        self.data_cycles = round(self.bursts * s.burst_cycles)

    def ready_at(self, bank: _Bank, row: int, write: bool) -> tuple[int, str]:
        """Earliest cycle of the next command that this access needs, and its kind."""
        if bank.row == row:
            at = max(bank.column_at, self.write_at if write else self.read_at)
            return max(at, self.group_at.get((bank.group, write), 0)), "column"
        if bank.row is None:
            at = bank.activate_at
            if self.activations:
                at = max(at, self.activations[-1] + self.standard.rrd)
            if len(self.activations) >= 4:
                at = max(at, self.activations[-4] + self.standard.faw)
            return at, "activate"
        return bank.precharge_at, "precharge"

    def activate(self, bank: _Bank, row: int, at: int) -> None:
        s = self.standard
        bank.row = row
        bank.column_at = at + s.rcd
        bank.precharge_at = at + s.ras
        bank.activate_at = at + s.rc
        self.activations = [*self.activations[-3:], at]

    def precharge(self, bank: _Bank, at: int) -> None:
        bank.row = None
        bank.activate_at = max(bank.activate_at, at + self.standard.rp)

    def column(self, bank: _Bank, write: bool, at: int) -> int:
        """Issue a read or write; returns the cycle after its last data."""
        s, data = self.standard, self.data_cycles
        if write != self.writing:
            at += s.sync
            self.writing = write
        same_group = max(data, self.bursts * s.ccd_l if self.bursts == 1 else data)
        if write:
            end = at + s.cwl + data
            self.write_at = at + data
            self.read_at = end + s.wtr_s
            self.group_at[bank.group, True] = at + same_group
            self.group_at[bank.group, False] = end + s.wtr_l
            bank.precharge_at = max(bank.precharge_at, end + s.wr)
        else:
            end = at + s.cl + data
            self.read_at = at + data
            self.write_at = at + s.cl + data + s.bus_turn - s.cwl
            self.group_at[bank.group, False] = at + same_group
            bank.precharge_at = max(bank.precharge_at, at + data - round(s.burst_cycles) + s.rtp)
        return end

    def refresh(self, at: int) -> int:
        """Close every bank, refresh; returns the cycle at which rows may open again."""
        s = self.standard
        idle = max([at, *(bank.precharge_at for bank in self.banks if bank.row is not None)])
        done = idle + s.rp_all + round(s.rfc_ns / s.tck_ns)
        for bank in self.banks:
            bank.row = None
            bank.activate_at = max(bank.activate_at, done)
        return done


Access = tuple[int, int, bool]
"""Bank, row, and whether it is a write."""


def simulate(
    standard: DramStandard,
    accesses: Iterator[Access],
    count: int,
    *,
    controller: Controller,
    refresh: bool = True,
) -> float:
    """Rate (1e9 bytes/s) at which `count` accesses of `controller.access_bytes` are served.

    The source is never short: an access enters its queue, in order, as soon as there is room.
    """
    channel = _Channel(standard, controller.access_bytes)
    source = islice(accesses, count)
    reads: list[Access] = []
    writes: list[Access] = []
    pending: Access | None = next(source, None)
    interval = round(standard.refi_ns / standard.tck_ns)
    refresh_due = interval if refresh else _FAR
    now, end, draining = 0, 0, False
    high, low = controller.high * controller.queue, controller.low * controller.queue
    while True:
        while pending is not None:
            queue = writes if pending[2] else reads
            if len(queue) >= controller.queue:
                break
            queue.append(pending)
            pending = next(source, None)
        if not reads and not writes:
            break
        if draining:
            draining = bool(writes) and not (len(writes) < low and reads)
        if not draining:
            draining = len(writes) > high or not reads
        queue = writes if draining else reads
        if now >= refresh_due:
            now = max(now, channel.refresh(now) - standard.rp_all)
            refresh_due += interval
        best: tuple[int, int, int] | None = None
        best_kind = ""
        open_hits = {(bank, row) for bank, row, _ in queue if channel.banks[bank].row == row}
        seen: set[int] = set()
        for position, (index, row, write) in enumerate(queue):
            bank = channel.banks[index]
            at, kind = channel.ready_at(bank, row, write)
            if kind != "column":
                if index in seen:
                    continue
                # a row with pending hits stays open; the oldest waiting access owns the bank
                if kind == "precharge" and (index, bank.row) in open_hits:
                    continue
                seen.add(index)
            key = (max(at, now), 0 if kind == "column" else 1, position)
            if best is None or key < best:
                best, best_kind = key, kind
        assert best is not None  # some entry can always proceed: hits, or the oldest access of a bank
        at, _, position = best
        index, row, write = queue[position]
        bank = channel.banks[index]
        if best_kind == "column":
            end = max(end, channel.column(bank, write, at))
            queue.pop(position)
        elif best_kind == "activate":
            channel.activate(bank, row, at)
        else:
            channel.precharge(bank, at)
        now = at + 1
    return count * controller.access_bytes / (end * standard.tck_ns)


def stream(standard: DramStandard, access_bytes: int, write_every: int = 0) -> Iterator[Access]:
    """An endless sequential stream, consecutive accesses in different bank groups, rows in turn.

    `write_every` makes every n-th access a write (2: half and half) to the same stream.
    """
    per_row = standard.page_bytes // access_bytes
    number = 0
    while True:
        lane = number % standard.bank_groups
        column = number // standard.bank_groups
        row_number = column // per_row
        bank = lane + standard.bank_groups * (row_number % standard.banks_per_group)
        write = bool(write_every) and number % write_every == write_every - 1
        yield bank, row_number // standard.banks_per_group, write
        number += 1
