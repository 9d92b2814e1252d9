"""Energy of descriptors: what they move over DRAM, link and buffers, and what they multiply."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from plora.hw.defs.config import PE_ROWS, NdpConfig
from plora.hw.defs.queue import LINE_BYTES
from plora.sim.core.demand import Demands, Ints
from plora.sim.hardware.energy import Energy, work_energy
from plora.sim.hardware.link import load_link, wire_bytes

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Amounts:
    """What descriptors move and compute, as arrays of equal length.

    ``dram_bytes``: read and written by the device, its queue engine's lines included, and by the host for its
    part; ``to_device_bytes`` and ``from_device_bytes``: payload over the link; ``sram_accesses``: of 64 bytes;
    ``multiply_adds``: units that work, lanes beyond N and K included, since they switch as the others do.
    """

    dram_bytes: Floats
    to_device_bytes: Floats
    from_device_bytes: Floats
    sram_accesses: Floats
    multiply_adds: Floats


def _floats(counts: Ints) -> Floats:
    return counts.astype(np.float64)


def amounts(config: NdpConfig, demands: Demands) -> Amounts:
    """What ``demands`` amount to.

    Over the link go a submission line, the operand's whole lines, the result and one look at the completion line.
    DRAM sees all of that, and what the core and the queue engine read and write. Buffers: every weight word is
    written once and read once a pass; every operand word is written once and read once a pass over its row by
    both rows of the array; a result line is written and read.
    """
    channels = config.channels
    operand_lines = demands.operand_stripes * channels
    lines = demands.lines
    host_lines = 1 + operand_lines + lines + 1
    device_lines = 1 + operand_lines + demands.stripes * channels + lines + 1
    passes = demands.groups * demands.pairs
    row_words = -(-demands.beats * (1 << demands.split_log2) // channels) * channels
    reads = demands.stripes * channels * demands.pairs + passes * row_words * PE_ROWS + lines
    writes = demands.stripes * channels + operand_lines + lines
    beats = demands.total_beats
    return Amounts(
        dram_bytes=_floats((host_lines + device_lines) * LINE_BYTES),
        to_device_bytes=_floats((1 + operand_lines) * LINE_BYTES),
        from_device_bytes=_floats((lines + 1) * LINE_BYTES),
        sram_accesses=_floats(reads + writes),
        multiply_adds=_floats(beats * config.multiply_adds),
    )


def energies(
    config: NdpConfig, demands: Demands, *, dram: str = "lpddr5x-8533", link: str = "cxl3.1-x16"
) -> tuple[Floats, Floats, Floats]:
    """Picojoules of every descriptor: lowest of the sources, best estimate, highest.

    Link bytes are those on the wire, protocol included; unknown names raise `UserError`.
    """
    moved = amounts(config, demands)
    format_ = load_link(link)
    write = wire_bytes(format_, write_bytes=1e6)
    read = wire_bytes(format_, read_bytes=1e6)
    on_the_wire = (
        moved.to_device_bytes * (write.down + write.up) / 1e6 + moved.from_device_bytes * (read.down + read.up) / 1e6
    )
    per: list[tuple[Floats, Energy]] = [
        (moved.dram_bytes, work_energy(dram_bytes=1.0, dram=dram, link=link)),
        (on_the_wire, work_energy(link_bytes=1.0, dram=dram, link=link)),
        (moved.sram_accesses, work_energy(sram_accesses=1.0, dram=dram, link=link)),
        (moved.multiply_adds, work_energy(multiply_adds=1.0, dram=dram, link=link)),
    ]
    low, best, high = (
        np.sum([amount * getattr(energy, name) for amount, energy in per], axis=0)
        for name in ("low_pj", "best_pj", "high_pj")
    )
    return low, best, high
