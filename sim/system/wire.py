"""What payloads cost on one link, as coefficients that work on numbers and on arrays alike.

`plora.sim.hardware.link.wire_bytes` is the definition; this is the same arithmetic with the flit
format resolved once, because a run asks for it thousands of times.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from plora.sim.hardware.flit import LINE_BYTES, CxlFlit, Packet, Plain
from plora.sim.hardware.link import Link, Protocol


@dataclass(frozen=True)
class Wire:
    """Bytes on the wire for payload read from or written to the far side.

    A payload of b bytes takes ``ceil(b / granule_bytes)`` granules; each direction then carries
    ``per_byte * b + per_granule * granules``.
    """

    granule_bytes: int
    read_up_per_byte: float
    read_up_per_granule: float
    read_down_per_granule: float
    write_down_per_byte: float
    write_down_per_granule: float
    write_up_per_granule: float

    def read(self, payload_bytes: Any) -> tuple[Any, Any]:
        """Return (down, up) bytes for reads: requests go down, data comes up."""
        granules = -(-payload_bytes // self.granule_bytes)
        return (
            self.read_down_per_granule * granules,
            self.read_up_per_byte * payload_bytes + self.read_up_per_granule * granules,
        )

    def write(self, payload_bytes: Any) -> tuple[Any, Any]:
        """Return (down, up) bytes for writes: data goes down, completions come up."""
        granules = -(-payload_bytes // self.granule_bytes)
        return (
            self.write_down_per_byte * payload_bytes + self.write_down_per_granule * granules,
            self.write_up_per_granule * granules,
        )


def wire_of(link: Link, protocol: Protocol) -> Wire:
    """Resolve the format of `link`; ``none`` counts payload only."""
    form = link.format
    if protocol == "none":
        return Wire(1, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0)
    if isinstance(form, CxlFlit):
        size = form.wire_bytes_per_flit
        return Wire(
            granule_bytes=LINE_BYTES,
            read_up_per_byte=0.0,
            read_up_per_granule=size / form.read_lines_per_flit,
            read_down_per_granule=size / form.requests_per_flit,
            write_down_per_byte=0.0,
            write_down_per_granule=size / form.write_lines_per_flit,
            write_up_per_granule=size / form.completions_per_flit,
        )
    if isinstance(form, Packet):
        one = form.wire_bytes(1, 0), form.wire_bytes(0, 1)
        line = 1.0 / (form.wire_bytes(2, 0).up - one[0].up)  # payload bytes per wire byte
        return Wire(
            granule_bytes=form.data.max_payload_bytes,
            read_up_per_byte=1.0 / line,
            read_up_per_granule=one[0].up - 1.0 / line,
            read_down_per_granule=one[0].down,
            write_down_per_byte=1.0 / line,
            write_down_per_granule=one[1].down - 1.0 / line,
            write_up_per_granule=one[1].up,
        )
    assert isinstance(form, Plain)
    return Wire(1, 1.0 / form.read_efficiency, 0.0, 0.0, 1.0 / form.write_efficiency, 0.0, 0.0)
