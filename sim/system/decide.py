"""The manager's view of a system: coefficients of its cost model from the resolved hardware."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from plora.hw.defs.errors import UserError
from plora.sim.manager.cost import AttentionCost, Composition, CostModel, GroupCost, Rates
from plora.sim.manager.select import Decision, Problem, select
from plora.sim.system.attention import CHAIN_DESCRIPTORS
from plora.sim.system.layers import Group, LayerKind
from plora.sim.system.machine import Machine
from plora.sim.system.spec import STRATEGIES
from plora.sim.system.tasks import Setting, tiles
from plora.sim.system.work import Batch, IntArray, Placement, Serving, serving

_PROBE = 64 * 256.0
"""Payload at which per-byte link costs are taken: whole lines, flits and packets."""


def _rates(machine: Machine) -> Rates:
    times = machine.times
    down_read, up_read = machine.wire.read(_PROBE)
    down_write, up_write = machine.wire.write(_PROBE)
    per_byte = machine.link_byte_ps / _PROBE
    return Rates(
        hbm_byte=times.hbm_ps,
        gpu_flop=times.flop_ps,
        dram_byte=machine.far_dram_ps,
        far_flop=machine.far_flop_ps,
        down_write=float(down_write) * per_byte,
        up_read=float(up_read) * per_byte,
        down_read=float(down_read) * per_byte,
        up_write=float(up_write) * per_byte,
        flag_bytes=machine.flag_bytes,
        round_trip=2.0 * machine.one_way_ps + machine.command_ps + machine.return_ps,
    )


def _group(kind: LayerKind, group: Group, machine: Machine, rank: int) -> GroupCost:
    count = len(group.output_dims)
    descriptors = count * tiles(rank, group.input_dim) + sum(tiles(rank, width) for width in group.output_dims)
    return GroupCost(
        count=kind.count,
        base=float(group.base_ps),
        input_dim=group.input_dim,
        a_width=group.a_columns,
        b_width=group.b_columns,
        matrices=count,
        descriptor_bytes=float(descriptors * machine.descriptor_bytes),
        experts=group.experts,
        used=group.used,
        inputs=group.inputs,
    )


def cost_model(setting: Setting, composition: Composition, typical_rank: int) -> CostModel:
    """Return the cost model of `setting`, in picoseconds. Descriptors are counted at `typical_rank`."""
    machine, work = setting.machine, setting.work
    groups = [_group(k, g, machine, typical_rank) for k in work.kinds for g in k.lora_groups]
    rest = float(work.head_ps)
    rest += sum(k.count * g.base_ps for k in work.kinds for g in k.groups if not g.output_dims)
    exposed = machine.layer_round_trips * 2.0 * machine.one_way_ps * work.layers if machine.has_far else 0.0
    rates, between = _rates(machine), None
    if machine.sharded_waves:
        between = rates.round_trip + machine.times.all_reduce_ps(_TYPICAL_MIDDLE * typical_rank)
    core, devices = machine.core, machine.far_devices

    def on_device(rows: int, rank: int) -> tuple[float, float]:
        assert core is not None
        products = (rank, _TYPICAL_WIDTH, False), (_TYPICAL_WIDTH, rank, True)
        first, second = (core.products_ps(rows, [product])[0] / _TYPICAL_WIDTH for product in products)
        return first, second

    return CostModel(
        groups,
        rates,
        devices,
        composition,
        rest=rest,
        exposed=exposed,
        between=between,
        on_device=on_device if core is not None else None,
    )


_TYPICAL_MIDDLE = 2 * 2 * 64
"""Bytes of the intermediates of a typical wave per unit of rank: 64 rows of two matrices."""


_TYPICAL_WIDTH = 4096
"""Width of the matrices from whose time on a device that of others is scaled."""


class AttentionModel:
    """Table V of the paper for one setting, as a function of the batch."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._rates = _rates(setting.machine)
        self._ports = len(set(setting.machine.up)) or 1

    def of(self, batch: Batch) -> AttentionCost:
        """Return the cost of `batch`; layers that differ only in a sliding window are averaged."""
        work = self._setting.work
        total = int(batch.contexts.sum())
        seen = total * work.layers
        for kind in work.kinds:
            if kind.window is not None:
                seen -= kind.count * (total - int(np.minimum(batch.contexts, kind.window).sum()))
        return self.cost(len(batch), total, seen / work.layers)

    def cost(self, rows: int, total: int, tokens: float) -> AttentionCost:
        """Return the cost of `rows` requests with `total` tokens, of which a mean layer attends to `tokens`."""
        machine, work, spec = self._setting.machine, self._setting.work, self._setting.spec
        times, layers, rates = machine.times, work.layers, self._rates
        kv_bytes = tokens * work.kv_token_bytes
        flops = tokens * work.attention_flops_per_token
        constant, floor, per_byte, sharpness = times.attention_curve(rows)
        stream = max(kv_bytes * per_byte, flops * times.flop_ps)
        if not machine.has_far or spec.kv.home == "hbm":
            return AttentionCost(layers, 0.0, 0.0, constant + max(floor, stream), 0.0, 0.0, 0.0, 0.0, 0.0, False)
        devices, ports = machine.far_devices, self._ports
        stored = rows * work.kv_token_bytes
        if spec.kv.attention == "gpu":
            per_device = (kv_bytes + stored) * machine.far_dram_ps / devices
            far_up, down, up = kv_bytes * rates.up_read / ports, stored * rates.down_write / ports, 0.0
            far_base = 2.0 * machine.one_way_ps
        else:
            started = 0.0
            if machine.attention is not None:
                per_device = tokens * machine.attention.token_ps / devices
                started = float(rows * machine.attention.request_ps)
            else:
                per_device = max(kv_bytes * machine.far_dram_ps, flops * machine.far_attention_flop_ps) / devices
            query = work.query_bytes + CHAIN_DESCRIPTORS * machine.descriptor_bytes
            sends = 1 if machine.multicast else devices / ports
            result = rows * (work.partial_bytes + machine.flag_bytes) * devices / ports
            down = (rows * query * sends + stored / ports) * rates.down_write + result * rates.down_read
            far_up, up = 0.0, result * rates.up_read
            chunks = max(1, min(rows, machine.return_chunks))
            # The first chunk's queries go down and the last chunk's results come up while devices wait.
            far_base = rates.round_trip + started + (down + up) / chunks + times.merge_ps(2 * rows * work.partial_bytes)
        return AttentionCost(
            layers=layers,
            near_base=constant,
            near_slope=stream,
            far_base=far_base,
            far_device=per_device,
            far_up=far_up,
            down=down,
            up=up,
            kv_bytes=float(total * work.kv_token_bytes * layers),
            copies=spec.kv.hbm_copies,
            near_floor=floor,
            sharpness=sharpness,
        )


@dataclass(frozen=True)
class Hbm:
    """What occupies HBM, in bytes over all GPUs.

    Attributes:
        budget: capacity less the reserve for activations and workspace.
        weights: resident base weights, all experts included.
        adapters: cached (or resident) adapter matrices of the batch.
        kv: KV cache or its copies.
    """

    budget: int
    weights: int
    adapters: int
    kv: int

    @property
    def needed(self) -> int:
        """Everything together."""
        return self.weights + self.adapters + self.kv

    @property
    def fits(self) -> bool:
        """Whether it fits."""
        return self.needed <= self.budget


def near_tokens(batch: Batch, share: float) -> IntArray:
    """Return the leading tokens of each request whose KV is copied, so that together they are `share`."""
    return np.asarray(np.floor(batch.contexts * share), dtype=np.int64)


def decide(
    setting: Setting,
    batch: Batch,
    ranks: IntArray,
    *,
    weights_bytes: int,
    model: CostModel,
    warm: IntArray | None = None,
) -> tuple[Serving, Placement, Decision, Hbm]:
    """Let the manager place `batch`: strategies of its adapters and HBM copies of its KV.

    `weights_bytes` are those of one GPU.

    Raises:
        UserError: the weights alone exceed HBM in a system that keeps far memory for the rest.
    """
    spec, machine, work = setting.spec, setting.machine, setting.work
    served = serving(batch, ranks, machine.far_devices)
    budget = machine.hbm_budget_bytes
    gpus = machine.gpus
    kv_total = int(batch.contexts.sum() * work.token_bytes)
    kv_home = kv_total if spec.kv.home == "hbm" else 0
    free = budget - weights_bytes - kv_home
    if free < 0 and spec.kv.home == "far":
        each = f" on each of {gpus} GPUs" if gpus > 1 else ""
        raise UserError(
            f"system {spec.name}: the weights take {weights_bytes / 1e9:.1f} GB{each}, HBM has {budget / 1e9:.1f} GB "
            "beside its reserve; use larger GPUs, or more by --tensor-parallel-size"
        )
    allowed = [STRATEGIES.index(s) for s in spec.adapters.strategies]
    attention = AttentionModel(setting).of(batch)
    problem = Problem(
        model=model,
        rows=served.rows,
        ranks=served.ranks,
        devices=served.devices,
        allowed=allowed,
        attention=attention,
        budget_bytes=float(max(free, 0)),
        caches_free=spec.adapters.assume_fits or spec.adapters.home == "hbm",
    )
    decision = select(problem, warm)
    placement = Placement(decision.strategies, near_tokens(batch, decision.kv_share))
    kept = np.array(model.cached_per_rank)[decision.strategies] * served.ranks if len(served) else np.zeros(0)
    cached = 0 if spec.adapters.assume_fits else int(kept.sum())
    copies = int(placement.near_tokens.sum() * work.token_bytes)
    hbm = Hbm(budget * gpus, weights_bytes * gpus, cached * gpus, (kv_home or copies) * gpus)
    return served, placement, decision, hbm
