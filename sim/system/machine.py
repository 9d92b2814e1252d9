"""The hardware of one run, resolved to picoseconds per byte and per operation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from plora.hw.defs.errors import UserError
from plora.sim.hardware.device import NdpDeviceSpec
from plora.sim.hardware.gpu import Gpu
from plora.sim.hardware.link import Link
from plora.sim.llm.config import ModelConfig
from plora.sim.system.clock import PS_PER_NS, PS_PER_US, ps_per_unit
from plora.sim.system.coretime import Attention, CoreTimes, core_times
from plora.sim.system.costs import Costs
from plora.sim.system.gputime import GpuTimes
from plora.sim.system.layers import AdapterWave
from plora.sim.system.spec import SystemSpec
from plora.sim.system.wire import Wire, wire_of

LinkSharing = Literal["one-port", "per-device"]
"""``one-port``: one port per GPU carries the traffic of all devices. ``per-device``: each device has
a port of its own at the full rate, which Figs. 9 and 11 of the paper need."""


def shown(size: float) -> str:
    """Return a number of bytes for a message."""
    return f"{size / 1e12:.2f} TB" if size >= 1e12 else f"{size / 1e9:.1f} GB"


@dataclass(frozen=True)
class Machine:
    """Rates and latencies of one system. ``*_ps`` values are picoseconds, per byte or operation for rates.

    Attributes:
        times: the GPU's kernels.
        sharded_waves: whether adapters are computed in two parts, with a sum over GPUs between them.
        hbm_budget_bytes: HBM of one GPU less its reserve.
        far_devices: memory devices behind the link of one GPU (1 for a host, 0 for none); every GPU has
            as many of its own.
        far_capacity_bytes: of one GPU's devices.
        down, up: names of the link resources by device; devices that share a port share a name.
        multicast: whether a query is sent once for all devices.
        far_dram_ps, far_flop_ps: of one device; `far_flop_ps` is 0 where nothing computes there.
        far_attention_flop_ps: the same for attention over the run's KV type.
        core: times of products on a device by the cycle model of its core, or None for stated rates.
        attention: times of attention on a device by that model, or None for stated rates.
        one_way_ps: link latency of one direction.
        command_ps: from arrival of a descriptor to the device's first DRAM beat.
        return_ps: from the end of a device's work to the departure of the result.
    """

    gpus: int
    times: GpuTimes
    launch_ps: int
    sharded_waves: bool
    hbm_budget_bytes: int
    far_devices: int
    far_dram_ps: float
    far_flop_ps: float
    far_attention_flop_ps: float
    far_capacity_bytes: int
    core: CoreTimes | None
    attention: Attention | None
    link_name: str
    link_sharing: str
    down: tuple[str, ...]
    up: tuple[str, ...]
    multicast: bool
    link_byte_ps: float
    one_way_ps: int
    command_ps: int
    return_ps: int
    wire: Wire
    descriptor_bytes: int
    flag_bytes: int
    layer_round_trips: float
    expose_transfers: bool
    return_chunks: int

    @property
    def has_far(self) -> bool:
        """Whether there is memory behind a link."""
        return self.far_devices > 0


def build_machine(
    spec: SystemSpec,
    *,
    model: ModelConfig,
    gpu: Gpu,
    fabric: Link,
    link: Link,
    device: NdpDeviceSpec,
    num_devices: int,
    link_sharing: LinkSharing,
    costs: Costs,
    kv_dtype: str,
    adapter_wave: AdapterWave = "sharded",
    expert_parallel: int = 1,
) -> Machine:
    """Resolve the hardware of `spec`.

    Raises:
        UserError: no devices, or devices that cannot compute where the system needs it.
    """
    far = spec.far
    if far.memory == "devices":
        if not 1 <= num_devices <= 4096:
            raise UserError(f"number of devices is {num_devices}; give 1 to 4096")
        if far.compute == "ndp" and not device.has_ndp:
            raise UserError(f"system {spec.name} computes near data, but device {device.name} has no ndp_tflops")
        count, rate, tflops = num_devices, device.dram_gb_per_s, device.ndp_tflops
        capacity = device.capacity_bytes * num_devices
    elif far.memory == "host":
        count, rate, tflops, capacity = 1, far.host_gb_per_s, far.host_tflops, far.host_capacity_bytes
    else:
        count, rate, tflops, capacity = 0, 1.0, 0.0, 0.0
    if far.memory == "devices":
        rate *= costs.number("device_dram_efficiency")
    per_device = link_sharing == "per-device" and far.memory == "devices"
    names = ("link.down", "link.up") if link.full_duplex else ("link", "link")
    ports = tuple(
        tuple(f"{name.replace('link', f'link{d}')}" if per_device else name for d in range(count)) for name in names
    )
    near_rate = {"int8": costs.number("near_int8_rate"), "int4": costs.number("near_int4_rate")}.get(kv_dtype, 1.0)
    flop_ps = ps_per_unit(tflops * 1e12, "ndp_tflops") if tflops > 0 else 0.0
    launch = spec.launch.time_us * PS_PER_US if spec.launch.time_us is not None else gpu.kernel_launch_ns * PS_PER_NS
    one_way = round(link.one_way_latency_ns * PS_PER_NS)
    sharded = spec.gpus.count > 1 and adapter_wave == "sharded"
    core, command = None, costs.number("command_ns") * PS_PER_NS
    if far.compute == "ndp" and costs.device_timing == "core":
        core = core_times(device, costs.number("device_dram_efficiency"))
    wait = costs.number("completion_one_ways") * one_way + costs.number("poll_interval_ns") / 2 * PS_PER_NS
    attention = None
    if core is not None:
        command = core.command_ps
        wait += core.completion_ps
        if kv_dtype == "fp16":
            heads = max(1, model.num_key_value_heads // spec.gpus.count)
            group = max(1, model.num_attention_heads // spec.gpus.count // heads)
            attention = core.attention(model.head_dim, group, heads)
    return Machine(
        gpus=spec.gpus.count,
        times=GpuTimes(gpu, model, costs.gpu_mode, spec.gpus.count, fabric, expert_parallel),
        launch_ps=round(launch),
        sharded_waves=sharded,
        hbm_budget_bytes=int(gpu.hbm_bytes - gpu.reserve_bytes),
        far_devices=count,
        far_dram_ps=ps_per_unit(rate * 1e9, "device dram_gb_per_s"),
        far_flop_ps=flop_ps,
        far_attention_flop_ps=flop_ps / near_rate,
        far_capacity_bytes=int(capacity),
        core=core,
        attention=attention,
        link_name=link.name,
        link_sharing="per-device" if per_device else "one-port",
        down=ports[0],
        up=ports[1],
        multicast=costs.q_transfer == "multicast" and not per_device,
        link_byte_ps=ps_per_unit(link.gb_per_s * 1e9, f"link {link.name} gb_per_s"),
        one_way_ps=one_way,
        command_ps=round(command),
        return_ps=round(wait),
        wire=wire_of(link, costs.protocol),
        descriptor_bytes=int(costs.number("descriptor_bytes")),
        flag_bytes=int(costs.number("flag_bytes") * (1 + costs.number("polls"))),
        layer_round_trips=costs.number("layer_round_trips") + sharded * costs.number("wave_round_trips"),
        expose_transfers=costs.expose_transfers,
        return_chunks=costs.return_chunks,
    )
