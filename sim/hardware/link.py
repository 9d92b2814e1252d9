"""Links between a GPU and the memory pool: rate, latency, protocol cost, as pure functions.

Contention is not modelled here: the system model shares `gb_per_s` between transfers and asks
this module what a transfer puts on the wire.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Literal

import msgspec

from plora.hw.defs.errors import UserError
from plora.sim.datafile import Fact, Number, checked, convert, fact, pick, read_table, read_toml
from plora.sim.hardware.flit import FlitFormat, WireBytes, load_flits, parse_flit

Protocol = Literal["none", "flit"]
"""``none`` charges payload bytes only, as the paper does; ``flit`` charges what the wire carries."""

_LINKS = Path(__file__).parent / "data" / "links.toml"


class _LinkData(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One table of a link file."""

    gb_per_s: Number
    one_way_latency_ns: Number
    flit: str
    description: str = ""
    ports: int = 1
    switch_hop_ns: Number = 0.0
    duplex: Literal["full", "half"] = "full"
    memory_semantic: bool = True


@dataclass(frozen=True)
class Link:
    """One link between an accelerator and memory.

    `port_gb_per_s` is the raw rate of one port in one direction (1e9 bytes per second, which is
    bytes per nanosecond); `ports` of them work together. `memory_semantic` is whether the
    accelerator loads and stores over it without a host (F1 of the paper, section II-C). `facts`
    says where each number is from.
    """

    name: str
    description: str
    port_gb_per_s: float
    ports: int
    one_way_latency_ns: float
    switch_hop_ns: float
    format: FlitFormat
    full_duplex: bool
    memory_semantic: bool
    facts: Mapping[str, Fact] = field(default_factory=dict, compare=False)

    @property
    def gb_per_s(self) -> float:
        """Raw rate of all ports together, per direction."""
        return self.port_gb_per_s * self.ports

    def with_rate(self, gb_per_s: float) -> Link:
        """The same link at another total rate per direction, as a bandwidth sweep needs."""
        checked(gb_per_s, f"link {self.name}: gb_per_s", exclusive=True)
        return replace(self, port_gb_per_s=gb_per_s / self.ports)


def _build(name: str, data: _LinkData, formats: Mapping[str, FlitFormat], where: str) -> Link:
    if data.ports < 1:
        raise UserError(f"{where}: ports is {data.ports}; give at least 1")
    return Link(
        name=name,
        description=data.description,
        port_gb_per_s=checked(data.gb_per_s, f"{where}: gb_per_s", exclusive=True),
        ports=data.ports,
        one_way_latency_ns=checked(data.one_way_latency_ns, f"{where}: one_way_latency_ns"),
        switch_hop_ns=checked(data.switch_hop_ns, f"{where}: switch_hop_ns"),
        format=pick(data.flit, formats, f"flit format in {where}"),
        full_duplex=data.duplex == "full",
        memory_semantic=data.memory_semantic,
        facts={key: fact(getattr(data, key)) for key in ("gb_per_s", "one_way_latency_ns", "switch_hop_ns")},
    )


@cache
def _bundled() -> dict[str, Link]:
    formats, table = load_flits(), read_table(_LINKS, _LinkData)
    return {name: _build(name, data, formats, f"links.toml: [{name}]") for name, data in table.items()}


def load_links(path: Path | None = None) -> dict[str, Link]:
    """The bundled links, and those of `path` over them.

    A file may define formats of its own in tables ``[flit.NAME]``. Raises :class:`UserError` for
    unknown keys, wrong types and numbers out of range.
    """
    links = dict(_bundled())
    if path is None:
        return links
    raw = read_toml(path)
    formats, own = load_flits(), raw.pop("flit", {})
    if not isinstance(own, dict):
        raise UserError(f"{path}: flit must hold tables [flit.NAME]")
    formats |= {name: parse_flit(name, entry, f"{path}: [flit.{name}]") for name, entry in own.items()}
    for name, entry in raw.items():
        where = f"{path}: [{name}]"
        links[name] = _build(name, convert(entry, _LinkData, where), formats, where)
    return links


def load_link(name: str, path: Path | None = None) -> Link:
    """One link by name; raises :class:`UserError` that lists the known names."""
    return pick(name, load_links(path), "link")


def wire_bytes(
    link: Link, *, read_bytes: float = 0.0, write_bytes: float = 0.0, protocol: Protocol = "flit", burst: bool = False
) -> WireBytes:
    """Bytes on the wire towards and from the device for a payload read from and written to it.

    With ``flit`` reads cost request flits down and data with headers up, writes the reverse with
    completions. With ``none`` only payload counts.
    """
    if not (read_bytes >= 0 and write_bytes >= 0):
        raise UserError(f"link {link.name}: payload of {read_bytes} read and {write_bytes} written; give at least 0")
    if protocol == "none":
        return WireBytes(write_bytes, read_bytes)
    return link.format.wire_bytes(read_bytes, write_bytes, burst=burst)


def occupancy_ns(link: Link, wire: WireBytes) -> float:
    """Time for which `wire` keeps the link busy: the slower direction, or the sum if half duplex."""
    if link.full_duplex:
        return max(wire.down, wire.up) / link.gb_per_s
    return (wire.down + wire.up) / link.gb_per_s


def one_way_ns(link: Link, extra_switches: int = 0) -> float:
    """Latency of one direction, with switches beyond those the link's figure counts."""
    return link.one_way_latency_ns + extra_switches * link.switch_hop_ns


def read_ns(link: Link, payload_bytes: float, protocol: Protocol = "flit", extra_switches: int = 0) -> float:
    """Time to read `payload_bytes` alone: request, round trip, and data."""
    wire = wire_bytes(link, read_bytes=payload_bytes, protocol=protocol, burst=True)
    return 2 * one_way_ns(link, extra_switches) + occupancy_ns(link, wire)


def write_ns(link: Link, payload_bytes: float, protocol: Protocol = "flit", extra_switches: int = 0) -> float:
    """Time until `payload_bytes` written alone and posted have all arrived: data and one way."""
    wire = wire_bytes(link, write_bytes=payload_bytes, protocol=protocol, burst=True)
    return one_way_ns(link, extra_switches) + occupancy_ns(link, wire)
