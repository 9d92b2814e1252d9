"""What DRAM delivers for streams: refresh, turnarounds, row misses, in closed form.

One channel with an open-page FR-FCFS controller. Traffic is described by how it meets the channel:
`run_bytes` contiguous bytes per visit to a random row (a long stream: infinity), and the share of
reads. The closed form is checked against the cycle-level model in `plora.sim.hardware.dram_cycles`
and against public cycle-level results (docs/models.md).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import msgspec

from plora.hw.defs.errors import UserError
from plora.sim.datafile import Status, checked, pick, read_table
from plora.sim.hardware.device import NdpDeviceSpec

_STANDARDS = Path(__file__).parent / "data" / "dram.toml"


class DramStandard(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One channel of a standard. Timings in cycles of `tck_ns`, names as in JEDEC's without the t.

    `rp_all` precharges all banks; `ccd_s`/`ccd_l` column to column in another / the same bank
    group; `bus_turn` idle cycles between read and write data; `sync` extra command cycles at each
    change of direction (LPDDR5's write-clock synchronisation).
    """

    tck_ns: float
    bus_bits: int
    rate_mt_per_s: float
    burst_length: int
    bank_groups: int
    banks_per_group: int
    page_bytes: int
    cl: int
    cwl: int
    rcd: int
    rp: int
    rp_all: int
    ras: int
    rc: int
    wr: int
    rtp: int
    ccd_s: int
    ccd_l: int
    rrd: int
    faw: int
    wtr_s: int
    wtr_l: int
    bus_turn: int
    sync: int
    rfc_ns: float
    refi_ns: float
    status: Status = "user"
    source: str = "given without a source"
    description: str = ""

    @property
    def burst_bytes(self) -> int:
        """Bytes of one column command."""
        return self.bus_bits * self.burst_length // 8

    @property
    def peak_gb_per_s(self) -> float:
        """Rate of the data bus (1e9 bytes/s)."""
        return self.bus_bits / 8 * self.rate_mt_per_s * 1e-3

    @property
    def banks(self) -> int:
        """Banks of the channel."""
        return self.bank_groups * self.banks_per_group

    @property
    def burst_cycles(self) -> float:
        """Cycles that one burst occupies the data bus."""
        return self.burst_bytes / (self.peak_gb_per_s * self.tck_ns)


@dataclass(frozen=True)
class Controller:
    """An FR-FCFS controller that collects writes and drains them together.

    Writes start when the write queue holds `high` of its `queue` entries and stop at `low`; an
    entry is `access_bytes`. Defaults are Ramulator 2.1's (32, 0.8, 0.2) with 64-byte entries, one
    AXI beat of the device.
    """

    queue: int = 32
    high: float = 0.8
    low: float = 0.2
    access_bytes: int = 64

    @property
    def write_batch(self) -> float:
        """Writes drained together once the queue has filled: from `high` down to below `low`."""
        return max(1.0, math.ceil(self.high * self.queue) - math.floor(self.low * self.queue))


DEFAULT_CONTROLLER = Controller()


def _validate(name: str, standard: DramStandard, where: str) -> DramStandard:
    for key in standard.__struct_fields__:
        value = getattr(standard, key)
        if isinstance(value, int | float) and not isinstance(value, bool):
            checked(value, f"{where}: {key}", exclusive=key not in ("sync", "bus_turn"))
    if standard.rfc_ns >= standard.refi_ns:
        raise UserError(f"{where}: rfc_ns {standard.rfc_ns:g} must be below refi_ns {standard.refi_ns:g}")
    return standard


@cache
def _bundled() -> dict[str, DramStandard]:
    table = read_table(_STANDARDS, DramStandard)
    return {name: _validate(name, entry, f"dram.toml: [{name}]") for name, entry in table.items()}


def load_standards(path: Path | None = None) -> dict[str, DramStandard]:
    """The bundled standards, and those of `path` over them; raises :class:`UserError` for bad data."""
    tables = dict(_bundled())
    if path is not None:
        tables |= {k: _validate(k, v, f"{path}: [{k}]") for k, v in read_table(path, DramStandard).items()}
    return tables


def load_standard(name: str, path: Path | None = None) -> DramStandard:
    """One standard by name; raises :class:`UserError` that lists the known names."""
    return pick(name, load_standards(path), "DRAM standard")


def refresh_share(standard: DramStandard, read_fraction: float = 1.0) -> float:
    """Share of time that all-bank refresh takes from the data bus.

    Every refresh interval the banks finish (read to precharge, or write recovery), precharge,
    refresh, and the first row opens again: (tRTP or CWL + burst + tWR) + tRPab + tRFC + tRCD.
    """
    closing = read_fraction * standard.rtp + (1 - read_fraction) * (standard.cwl + standard.burst_cycles + standard.wr)
    return (standard.rfc_ns + (closing + standard.rp_all + standard.rcd) * standard.tck_ns) / standard.refi_ns


def turnaround_ns(standard: DramStandard) -> float:
    """Data-bus time lost by one change from reads to writes and back.

    Read to write: CL + burst + bus_turn - CWL after the read command; write to read: CWL + burst +
    tWTR. Of each the burst itself is useful; each change also takes `sync` command cycles.
    """
    to_write = standard.cl + standard.bus_turn - standard.cwl
    to_read = standard.cwl + standard.wtr_s
    return (to_write + to_read + 2 * standard.sync) * standard.tck_ns


def access_ns(
    standard: DramStandard, run_bytes: float, *, write: bool = False, controller: Controller = DEFAULT_CONTROLLER
) -> float:
    """Mean time between accesses of one direction, each visit to a random row moving `run_bytes`.

    Three limits, smoothly combined: the data bus; the activation rate (tRRD, tFAW); and the banks,
    each held by a visit for its row cycle, of which the controller keeps as many busy as its queue
    shows it different ones. A stream (infinite run) is bound by the bus alone: its next rows are
    known and lie in other banks.
    """
    if not run_bytes > 0:
        raise UserError(f"run is {run_bytes!r} bytes; give a positive number")
    bus = controller.access_bytes / standard.peak_gb_per_s
    if math.isinf(run_bytes):
        return bus
    per_row = min(max(run_bytes, float(controller.access_bytes)), float(standard.page_bytes))
    visits = controller.access_bytes / per_row
    activate = visits * max(standard.rrd, standard.faw / 4) * standard.tck_ns
    opened = standard.rcd + per_row / (standard.peak_gb_per_s * standard.tck_ns)
    if write:
        held = opened + standard.cwl + standard.wr + standard.rp
    else:
        held = max(standard.rc, opened - standard.burst_cycles + standard.rtp + standard.rp)
    visible = 1 + (controller.queue - 1) * visits
    busy = standard.banks * (1 - (1 - 1 / standard.banks) ** visible)
    bank = visits * held * standard.tck_ns / busy
    return float((bus**_SHARPNESS + activate**_SHARPNESS + bank**_SHARPNESS) ** (1 / _SHARPNESS))


# Fitted to the cycle-level model on random visits of 64 to 2048 bytes (`python -m
# plora.sim.calibration.dram`): how abruptly the slowest limit takes over, and how the chance that a
# change of direction finds its row closed falls with the length of the visits.
_SHARPNESS = 10.0
_CLOSED_EXPONENT = 1 / 3


def achieved_gb_per_s(
    standard: DramStandard,
    run_bytes: float = math.inf,
    read_fraction: float = 1.0,
    *,
    write_run_bytes: float | None = None,
    refresh: bool = True,
    controller: Controller = DEFAULT_CONTROLLER,
) -> float:
    """Rate of one channel (1e9 bytes/s) for visits of `run_bytes` with this share of reads.

    `write_run_bytes` is the length of the write visits where it differs: KV appends of one head
    vector (256 bytes for 128 FP16 values) among long adapter or KV reads.

    Reads run until the write queue has filled, then `write_batch` writes are drained; each round
    pays both turnarounds, and where rows are random the opening of the first row after each, as
    far as the turnaround does not hide it and the row was closed.
    """
    if not 0 <= read_fraction <= 1:
        raise UserError(f"share of reads is {read_fraction!r}; give a number from 0 to 1")
    read = access_ns(standard, run_bytes, controller=controller)
    write_run = run_bytes if write_run_bytes is None else write_run_bytes
    write = access_ns(standard, write_run, write=True, controller=controller)
    if read_fraction in (0.0, 1.0):
        per_access = read if read_fraction else write
    else:
        # the source is in order: a visit once begun is finished, so longer visits make larger batches
        writes = controller.write_batch
        if not math.isinf(write_run):
            writes += max(1.0, write_run / controller.access_bytes) - 1
        reads = writes * read_fraction / (1 - read_fraction)
        lost = turnaround_ns(standard)
        to_write = standard.cl + standard.bus_turn + standard.burst_cycles - standard.cwl
        to_read = standard.cwl + standard.wtr_s + standard.burst_cycles
        for first, hidden in ((write_run, to_write), (run_bytes, to_read)):
            closed = min(1.0, controller.access_bytes / first) ** _CLOSED_EXPONENT
            lost += max(0.0, closed * (standard.rp + standard.rcd) - hidden) * standard.tck_ns
        per_access = (reads * read + writes * write + lost) / (reads + writes)
    rate = controller.access_bytes / per_access
    return rate * (1 - refresh_share(standard, read_fraction)) if refresh else rate


def idle_latency_ns(standard: DramStandard) -> float:
    """Command to last data of one access to a closed row, without queueing."""
    return (standard.rcd + standard.cl + standard.burst_cycles) * standard.tck_ns


def device_gb_per_s(
    device: NdpDeviceSpec,
    run_bytes: float = math.inf,
    read_fraction: float = 1.0,
    *,
    write_run_bytes: float | None = None,
    path: Path | None = None,
    controller: Controller = DEFAULT_CONTROLLER,
) -> float:
    """Achieved rate of all channels of a device, at most what the device states.

    `run_bytes` is the contiguous run that one *channel* sees: a stream of n bytes interleaved over
    C channels gives runs of n / C.
    """
    standard = load_standard(device.dram, path)
    total = device.channels * achieved_gb_per_s(
        standard, run_bytes, read_fraction, write_run_bytes=write_run_bytes, controller=controller
    )
    return min(device.dram_gb_per_s, total)
