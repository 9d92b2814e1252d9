"""Named overheads: what the paper leaves out, and what this project charges for it.

Two presets. ``paper`` charges what the paper charges: payload at the raw link rate, two round trips
a layer, kernels for free. ``priced`` (the honest default) charges flits, descriptors, flags, polls
and the round trips that reading a result over CXL.mem takes.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Literal

import msgspec

from plora.hw.defs.errors import UserError
from plora.sim.datafile import LONGEST_NS, Fact, Number, checked, convert, fact, pick, read_toml

_PRESETS = Path(__file__).parent / "data" / "presets.toml"

PresetName = Literal["paper", "priced"]


class Costs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Overheads of one run. Times in nanoseconds, sizes in bytes.

    Attributes:
        protocol: ``none`` charges payload bytes, ``flit`` what the wire carries for them.
        q_transfer: ``multicast`` sends a query once to all devices behind a shared port, ``unicast``
            once to each. With a port per device both are the same.
        descriptor_bytes: written down for each descriptor, besides its operand.
        flag_bytes: read up for each completion that the GPU waits for.
        polls: unsuccessful polls before each completion, each reading `flag_bytes`.
        completion_one_ways: one-way latencies between the end of a device's work and the departure
            of the result (the flag's way up and the read request's way down; 0 if results are pushed).
        poll_interval_ns: distance of two polls; half of it is lost on average.
        device_timing: ``stated`` takes the device's stated rates for products, ``core`` the cycle model of
            its core, with its latencies from arrival to first beat and from last beat to completion.
        command_ns: from a descriptor's arrival at the device to its first DRAM beat, with ``stated``.
        layer_round_trips: round trips charged for each layer by `overlap` and `additive`, which have
            no dependencies to take them from (the paper, section VIII, finding 4).
        wave_round_trips: those of them that adapters take; sharded waves over several GPUs take as many more.
        expose_transfers: whether those two charge the first operand's way down and the last result's
            way up in each layer, during which the devices have nothing to do.
        return_chunks: parts in which a device returns the partial results of a batch.
        gpu_mode: ``roofline`` takes stated rates and no kernel constants, ``calibrated`` the measured
            corrections of `plora.sim.hardware.kernels`.
        weights: ``nominal`` counts 2 bytes for each nominal parameter where a model states them (the
            paper's 14, 26 and 16 GB), ``exact`` counts the matrices.
        device_dram_efficiency: share of the stated rate that a stream achieves.
        near_int8_rate, near_int4_rate: speed of the NDP core on that KV type over its FP16 speed.
        kv_scales: whether integer KV carries a scale per token and head.
    """

    protocol: Literal["none", "flit"]
    q_transfer: Literal["multicast", "unicast"]
    descriptor_bytes: Number
    flag_bytes: Number
    polls: Number
    completion_one_ways: Number
    poll_interval_ns: Number
    device_timing: Literal["stated", "core"]
    command_ns: Number
    layer_round_trips: Number
    wave_round_trips: Number
    expose_transfers: bool
    return_chunks: int
    gpu_mode: Literal["roofline", "calibrated"]
    weights: Literal["nominal", "exact"]
    device_dram_efficiency: Number
    near_int8_rate: Number
    near_int4_rate: Number
    kv_scales: bool

    def number(self, name: str) -> float:
        """Return the value of the numeric field `name`."""
        value: Number = getattr(self, name)
        return float(value.value if isinstance(value, Fact) else value)

    def resolved(self) -> dict[str, object]:
        """Return plain values, as results state them."""
        plain: dict[str, object] = {}
        for name in self.__struct_fields__:
            value = getattr(self, name)
            plain[name] = value.value if isinstance(value, Fact) else value
        return plain

    def facts(self) -> dict[str, Fact]:
        """Return the origin of each number."""
        return {
            name: fact(getattr(self, name))
            for name in self.__struct_fields__
            if isinstance(getattr(self, name), (Fact, float)) and not isinstance(getattr(self, name), bool)
        }


_POSITIVE_SHARES = ("device_dram_efficiency",)
_POSITIVE = ("near_int8_rate", "near_int4_rate")
_NUMBERS = (
    "descriptor_bytes",
    "flag_bytes",
    "polls",
    "completion_one_ways",
    "poll_interval_ns",
    "command_ns",
    "layer_round_trips",
    "wave_round_trips",
)


def check_costs(costs: Costs, where: str) -> Costs:
    """Return `costs` if every number is finite and in range; raises `UserError` otherwise."""
    for name in _NUMBERS:
        checked(getattr(costs, name), f"{where}: {name}", maximum=LONGEST_NS)
    for name in _POSITIVE_SHARES:
        checked(getattr(costs, name), f"{where}: {name}", maximum=1.0, exclusive=True)
    for name in _POSITIVE:
        checked(getattr(costs, name), f"{where}: {name}", exclusive=True)
    if costs.gpu_mode == "calibrated" and costs.weights == "nominal":
        raise UserError(
            f"{where}: calibrated GPU kernels know exact matrices only; use weights exact or gpu_mode roofline"
        )
    if not 1 <= costs.return_chunks <= 64:
        raise UserError(f"{where}: return_chunks is {costs.return_chunks}; give 1 to 64")
    return costs


@cache
def presets() -> dict[str, Costs]:
    """Return the presets by name."""
    raw = read_toml(_PRESETS)
    return {name: check_costs(convert(table, Costs, f"presets.toml: [{name}]"), name) for name, table in raw.items()}


def load_costs(preset: str) -> Costs:
    """Return one preset; raises `UserError` that lists the known names."""
    return pick(preset, presets(), "cost preset")
