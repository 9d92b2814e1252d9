"""How much memory a serving run has: KV blocks and room for adapters, or why it cannot run."""

from __future__ import annotations

from collections.abc import Sequence

from plora.hw.defs.errors import UserError
from plora.sim.serving.memory import AdapterCache, Blocks
from plora.sim.serving.options import ServeOptions
from plora.sim.system.layers import ModelWork
from plora.sim.system.machine import Machine, shown
from plora.sim.system.spec import SystemSpec
from plora.sim.system.work import IntArray


def kv_and_adapters(
    spec: SystemSpec,
    machine: Machine,
    work: ModelWork,
    options: ServeOptions,
    *,
    weight_bytes: int,
    ranks: IntArray,
) -> tuple[Blocks, AdapterCache | None]:
    """Return the KV blocks, and the adapters in HBM where they are fetched on demand.

    Every GPU holds its share and has its own pool, so this counts for one of them; `weight_bytes` are
    its resident weights.

    Raises:
        UserError: weights or adapters do not fit.
    """
    stored = float(ranks.sum()) * work.rank_bytes
    room = _kv_room(spec, machine, weight_bytes, stored)
    block_bytes = options.block_size * work.token_bytes
    unlimited = spec.kv.home == "hbm" and spec.overflow == "report"
    blocks = Blocks(options.block_size, None if unlimited else max(0, int(room / block_bytes)))
    if spec.adapters.load_link is not None:
        return blocks, AdapterCache(ranks * float(work.rank_bytes), blocks, block_bytes)
    if spec.adapters.home == "hbm" and not unlimited:
        blocks.reserved = -int(-stored // block_bytes)
    return blocks, None


def _kv_room(spec: SystemSpec, machine: Machine, weight_bytes: int, stored: float) -> float:
    """Return the bytes that are left for keys and values."""
    each = f" for each of {machine.gpus} GPUs" if machine.gpus > 1 else ""
    left = machine.hbm_budget_bytes - weight_bytes
    if left < 0 and (spec.overflow != "report" or spec.kv.home == "far"):
        raise UserError(
            f"system {spec.name}: the weights take {weight_bytes / 1e9:.1f} GB, HBM has "
            f"{machine.hbm_budget_bytes / 1e9:.1f} GB beside its reserve{each}; use larger GPUs, or more by "
            "--tensor-parallel-size"
        )
    if spec.kv.home == "hbm":
        return left
    in_far = stored if spec.adapters.home == "far" else 0.0
    if in_far > machine.far_capacity_bytes:
        raise UserError(
            f"system {spec.name}: the adapters take {shown(in_far)}, far memory has "
            f"{shown(machine.far_capacity_bytes)}{each}; use more devices or fewer adapters"
        )
    return machine.far_capacity_bytes - in_far


def check_sizes(
    spec: SystemSpec,
    blocks: Blocks,
    cache: AdapterCache | None,
    prompts: Sequence[int],
    outputs: Sequence[int],
    adapters: Sequence[int],
) -> None:
    """Refuse a request that could never run, before it blocks the queue for ever.

    Raises:
        UserError: there is one.
    """
    if blocks.capacity is None:
        return
    limit = blocks.capacity - (0 if cache is not None else blocks.reserved)
    for request, (prompt, output, adapter) in enumerate(zip(prompts, outputs, adapters, strict=True)):
        needed = blocks.of(prompt + output)
        if cache is not None and adapter >= 0:
            needed += -int(-float(cache.sizes[adapter]) // cache.block_bytes)
        if needed > limit:
            raise UserError(
                f"system {spec.name}: request {request} with {prompt} + {output} tokens needs {needed} "
                f"blocks of {blocks.size}, there are {max(0, limit)}; use more memory or shorter requests"
            )
