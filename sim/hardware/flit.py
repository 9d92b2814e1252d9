"""What a payload costs on a wire: flit and packet formats.

Three kinds of format, from most to least detailed: CXL flits counted slot by slot, packets with a
header per payload, and a plain efficiency where only a measured one is known. All counts are upper
bounds of what a link can deliver: no retry, no encryption trailers, no credit starvation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import msgspec

from plora.hw.defs.errors import UserError
from plora.sim.datafile import Number, Status, checked, convert, read_toml

LINE_BYTES = 64
"""A CXL.mem message moves one 64-byte line."""

DATA_SLOTS_PER_LINE = 4
"""A line fills four 16-byte slots."""


class Slots(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How many messages of each class fit in one slot.

    `req`: M2S read request; `rwd`: M2S write header; `ndr`: S2M completion without data; `drs`: S2M
    read-data header. `count` is the number of such slots in a flit.
    """

    count: int
    req: int
    rwd: int
    ndr: int
    drs: int


class CxlFlitData(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="cxl", tag_field="kind"):
    """A CXL flit: slots that take headers only, and generic slots that take headers or data."""

    flit_bytes: int
    header_slots: tuple[Slots, ...]
    generic_slots: Slots
    all_data_flits: bool
    encoding_efficiency: Number
    status: Status
    source: str


class PacketData(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="packet", tag_field="kind"):
    """Packets of up to `max_payload_bytes`, each with `header_bytes`.

    A read also sends `request_bytes` the other way for each packet, a write gets
    `response_bytes` back (0 for posted writes). `line_efficiency` is what the line code leaves.
    """

    max_payload_bytes: int
    header_bytes: Number
    request_bytes: Number
    response_bytes: Number
    line_efficiency: Number
    status: Status
    source: str


class PlainData(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="plain", tag_field="kind"):
    """A payload share of the raw rate, by direction of data, without further structure."""

    read_efficiency: Number
    write_efficiency: Number
    status: Status
    source: str


@dataclass(frozen=True)
class WireBytes:
    """Bytes on the wire towards the device (`down`) and from it (`up`)."""

    down: float
    up: float

    def __add__(self, other: WireBytes) -> WireBytes:
        return WireBytes(self.down + other.down, self.up + other.up)


def _packed(slots: CxlFlitData, message: str) -> float:
    """Messages without data per flit when nothing else shares it."""
    heads: int = sum(slot.count * getattr(slot, message) for slot in slots.header_slots)
    return float(heads + slots.generic_slots.count * getattr(slots.generic_slots, message))


def _lines(slots: CxlFlitData, message: str) -> float:
    """Lines with their headers per flit, in steady state.

    x lines need 4 x data slots; headers fill the header slots first and then generic slots. Either
    the header slots suffice (x = g/4) or 4 x + (x - heads) / per_slot = g.
    """
    generic = slots.generic_slots.count
    per_slot: int = getattr(slots.generic_slots, message)
    heads: int = sum(slot.count * getattr(slot, message) for slot in slots.header_slots)
    if slots.all_data_flits:
        # 68-byte format: data rolls over into flits whose four slots all hold data, so on average
        # a line costs four slots and its share of one header slot.
        total = generic + sum(slot.count for slot in slots.header_slots)
        return total / (DATA_SLOTS_PER_LINE + 1 / heads)
    enough = generic / DATA_SLOTS_PER_LINE
    if enough <= heads:
        return enough
    return (per_slot * generic + heads) / (DATA_SLOTS_PER_LINE * per_slot + 1)


@dataclass(frozen=True)
class CxlFlit:
    """CXL.mem traffic by the slot model of the 256-byte and 68-byte flit formats."""

    name: str
    data: CxlFlitData

    @cached_property
    def read_lines_per_flit(self) -> float:
        """Lines of read data with their headers in one S2M flit."""
        return float(_lines(self.data, "drs"))

    @cached_property
    def write_lines_per_flit(self) -> float:
        """Lines of write data with their headers in one M2S flit."""
        return float(_lines(self.data, "rwd"))

    @cached_property
    def requests_per_flit(self) -> float:
        """Read requests in one M2S flit."""
        return _packed(self.data, "req")

    @cached_property
    def completions_per_flit(self) -> float:
        """Write completions in one S2M flit."""
        return _packed(self.data, "ndr")

    @property
    def wire_bytes_per_flit(self) -> float:
        """Raw bytes that one flit takes on the wire, line code included."""
        return self.data.flit_bytes / checked(self.data.encoding_efficiency, "encoding_efficiency")

    @property
    def read_efficiency(self) -> float:
        """Payload share of the raw rate for reads."""
        return self.read_lines_per_flit * LINE_BYTES / self.wire_bytes_per_flit

    @property
    def write_efficiency(self) -> float:
        """Payload share of the raw rate for writes."""
        return self.write_lines_per_flit * LINE_BYTES / self.wire_bytes_per_flit

    def flits(self, read_lines: float, write_lines: float) -> WireBytes:
        """Flits (not bytes) down and up for whole lines read and written, before rounding."""
        return WireBytes(
            read_lines / self.requests_per_flit + write_lines / self.write_lines_per_flit,
            read_lines / self.read_lines_per_flit + write_lines / self.completions_per_flit,
        )

    def wire_bytes(self, read_bytes: float, write_bytes: float, *, burst: bool = False) -> WireBytes:
        """Bytes on the wire for payload read from and written to the device.

        Payloads round up to lines. `burst` rounds up to whole flits too, as a transfer that travels
        alone does; without it flits are shared with neighbouring traffic.
        """
        flits = self.flits(math.ceil(read_bytes / LINE_BYTES), math.ceil(write_bytes / LINE_BYTES))
        down, up = (math.ceil(flits.down), math.ceil(flits.up)) if burst else (flits.down, flits.up)
        return WireBytes(down * self.wire_bytes_per_flit, up * self.wire_bytes_per_flit)


@dataclass(frozen=True)
class Packet:
    """Packets with a header each (NVLink, PCIe)."""

    name: str
    data: PacketData

    @property
    def read_efficiency(self) -> float:
        """Payload share of the raw rate for reads of whole packets."""
        payload = self.data.max_payload_bytes
        return self._line * payload / (payload + checked(self.data.header_bytes, "header_bytes"))

    @property
    def write_efficiency(self) -> float:
        """Payload share of the raw rate for writes of whole packets."""
        return self.read_efficiency

    @property
    def _line(self) -> float:
        return checked(self.data.line_efficiency, "line_efficiency")

    def wire_bytes(self, read_bytes: float, write_bytes: float, *, burst: bool = False) -> WireBytes:
        """Bytes on the wire for payload read and written; `burst` has no effect on packets."""
        data = self.data
        header, request = checked(data.header_bytes, "header_bytes"), checked(data.request_bytes, "request_bytes")
        response = checked(data.response_bytes, "response_bytes")
        reads = math.ceil(read_bytes / data.max_payload_bytes)
        writes = math.ceil(write_bytes / data.max_payload_bytes)
        down = write_bytes + writes * header + reads * request
        up = read_bytes + reads * header + writes * response
        return WireBytes(down / self._line, up / self._line)


@dataclass(frozen=True)
class Plain:
    """A payload share by direction, for fabrics whose packing is not public."""

    name: str
    data: PlainData

    @property
    def read_efficiency(self) -> float:
        """Payload share of the raw rate for reads."""
        return checked(self.data.read_efficiency, "read_efficiency")

    @property
    def write_efficiency(self) -> float:
        """Payload share of the raw rate for writes."""
        return checked(self.data.write_efficiency, "write_efficiency")

    def wire_bytes(self, read_bytes: float, write_bytes: float, *, burst: bool = False) -> WireBytes:
        """Bytes on the wire for payload read and written; requests are part of the efficiency."""
        return WireBytes(write_bytes / self.write_efficiency, read_bytes / self.read_efficiency)


FlitFormat = CxlFlit | Packet | Plain


def parse_flit(name: str, raw: object, where: str) -> FlitFormat:
    """Build a format from its parsed table; raises :class:`UserError` naming the key that is wrong."""
    data = convert(raw, CxlFlitData | PacketData | PlainData, where)  # type: ignore[arg-type]
    if isinstance(data, CxlFlitData):
        if data.flit_bytes <= 0:
            raise UserError(f"{where}: flit_bytes is {data.flit_bytes}; give a positive number of bytes")
        checked(data.encoding_efficiency, f"{where}: encoding_efficiency", maximum=1.0, exclusive=True)
        for slot in (*data.header_slots, data.generic_slots):
            for key in ("count", "req", "rwd", "ndr", "drs"):
                if getattr(slot, key) < 0:
                    raise UserError(f"{where}: {key} is {getattr(slot, key)}; give a count of at least 0")
        generic = data.generic_slots
        if min(generic.count, generic.req, generic.rwd, generic.ndr, generic.drs) < 1:
            raise UserError(f"{where}: generic_slots needs a count and capacities of at least 1")
        return CxlFlit(name, data)
    if isinstance(data, PacketData):
        if data.max_payload_bytes <= 0:
            raise UserError(f"{where}: max_payload_bytes is {data.max_payload_bytes}; give a positive number")
        for key in ("header_bytes", "request_bytes", "response_bytes"):
            checked(getattr(data, key), f"{where}: {key}")
        checked(data.line_efficiency, f"{where}: line_efficiency", maximum=1.0, exclusive=True)
        return Packet(name, data)
    for key in ("read_efficiency", "write_efficiency"):
        checked(getattr(data, key), f"{where}: {key}", maximum=1.0, exclusive=True)
    return Plain(name, data)


_FORMATS = Path(__file__).parent / "data" / "flits.toml"


def load_flits(path: Path = _FORMATS) -> dict[str, FlitFormat]:
    """All formats of a file, by name."""
    return {name: parse_flit(name, raw, f"{path.name}: [{name}]") for name, raw in read_toml(path).items()}
