"""Decode steps of one batch on one system: the manager places it, the step model times it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from plora.hw.defs.errors import UserError
from plora.sim.hardware.link import load_link
from plora.sim.llm.shapes import resident_weight_bytes
from plora.sim.system.compose import Demand, Step, StepModel, split
from plora.sim.system.config import Resolved, RunOptions
from plora.sim.system.decide import Hbm, cost_model, decide
from plora.sim.system.fastforward import FastPhases, can_fast_forward
from plora.sim.system.fastwave import Wave
from plora.sim.system.gputime import GpuTimes
from plora.sim.system.layers import model_work
from plora.sim.system.machine import Machine, build_machine, shown
from plora.sim.system.spec import STRATEGIES, SystemSpec
from plora.sim.system.tasks import Load, Setting
from plora.sim.system.work import Batch, IntArray, Serving
from plora.sim.workload.requests import NO_ADAPTER

TYPICAL_RANK = 64
"""Rank at which the cost model counts descriptors."""

PLAYED_STEPS = 16
"""Steps that a long run plays as events, to attribute its time and to check the closed form."""

BLOCK_STEPS = 4096
"""Steps that are advanced in one piece."""


@dataclass(frozen=True)
class DecodeRun:
    """Decode steps of one system.

    Attributes:
        spec, setting: what ran.
        step_ps: (steps,) length of every step.
        played: steps played in full, by number, with their demands and what bounded them: all of them
            in a short run, evenly spaced ones in a long run that was advanced in closed form.
        requested, running: requests asked for, and those that fit.
        batch: the running requests at the first step.
        serving, strategies, kv_share: the manager's placement.
        loads: the sub-batches at the first step.
        hbm: what occupies HBM.
        far_bytes: what occupies the far memory of all GPUs: all adapters and the batch's KV at the last step.
    """

    spec: SystemSpec
    setting: Setting
    step_ps: IntArray
    played: Mapping[int, Step]
    requested: int
    running: int
    batch: Batch
    serving: Serving
    strategies: IntArray
    kv_share: float
    loads: tuple[Load, ...]
    hbm: Hbm
    far_bytes: int

    @property
    def demand(self) -> Demand:
        """Demands of all played steps together."""
        total = Demand()
        for step in self.played.values():
            total += step.demand
        return total

    @property
    def machine(self) -> Machine:
        """The hardware that ran."""
        return self.setting.machine

    def strategy_counts(self) -> dict[str, int]:
        """Return how many adapters each strategy serves."""
        counts = np.bincount(self.strategies, minlength=len(STRATEGIES)).tolist()
        return dict(zip(STRATEGIES, counts, strict=True))


def machine_of(resolved: Resolved, spec: SystemSpec, expert_parallel: int = 1) -> Machine:
    """Return the hardware of `spec` in this run; routed experts may be spread over several such machines."""
    link = resolved.link if spec.far.link is None else load_link(spec.far.link)
    return build_machine(
        spec,
        model=resolved.model,
        gpu=resolved.gpu,
        fabric=resolved.fabric,
        link=link,
        device=resolved.device,
        num_devices=resolved.options.num_devices,
        link_sharing=resolved.options.link_sharing,
        costs=resolved.costs,
        kv_dtype=resolved.options.kv_cache_dtype,
        adapter_wave=resolved.options.adapter_wave,
        expert_parallel=expert_parallel,
    )


def setting_of(resolved: Resolved, spec: SystemSpec, tokens: int) -> Setting:
    """Return the setting of `spec` for (sub-)batches of `tokens` tokens."""
    machine = machine_of(resolved, spec)
    times = GpuTimes(resolved.gpu, resolved.model, resolved.costs.gpu_mode, spec.gpus.count, resolved.fabric)
    return Setting(spec, machine, model_work(resolved.model, tokens, times, resolved.work))


def decode_batch(resolved: Resolved) -> Batch:
    """Return the batch in the middle of its decode: prompt and half of the output, less half of the steps."""
    options = resolved.options
    drawn = resolved.source.requests(resolved.batch_size, options.seed)
    if options.context_tokens is not None:
        middle = np.full(len(drawn), options.context_tokens, dtype=np.int64)
    else:
        middle = drawn.input_tokens.astype(np.int64) + drawn.output_tokens // 2
    return Batch(np.maximum(middle - options.steps // 2, 1), drawn.adapter.astype(np.int64))


def _running(setting: Setting, batch: Batch, weights: int, steps: int, ranks: IntArray) -> int:
    """Return how many of the first requests fit in HBM together with their adapters at the last step."""
    spec, machine, work = setting.spec, setting.machine, setting.work
    room = machine.hbm_budget_bytes - weights
    kv = (batch.contexts + steps - 1) * work.token_bytes
    fresh = np.zeros(len(batch))
    if spec.adapters.home == "hbm":
        ids, first = np.unique(batch.adapters, return_index=True)
        known = ids >= 0
        fresh[first[known]] = ranks[ids[known]] * work.rank_bytes
    held = np.cumsum((kv if spec.kv.home == "hbm" else 0) + fresh)
    return int(np.searchsorted(held, room, side="right"))


def _play(setting: Setting, loads: list[Load], options: RunOptions) -> tuple[IntArray, dict[int, Step]]:
    """Time every step, and play some or all of them in full."""
    model = StepModel(setting, loads, options.composition)
    closed = options.composition == "dependency" and len(loads) == 1
    if not (closed and can_fast_forward(setting.spec, setting.machine)) or options.steps <= PLAYED_STEPS:
        played = {k: model.step(k) for k in range(options.steps)}
        return np.array([step.time_ps for step in played.values()], dtype=np.int64), played
    numbers = np.unique(np.linspace(0, options.steps - 1, PLAYED_STEPS).astype(np.int64)).tolist()
    played = {k: model.step(k) for k in numbers}
    step_ps = fast_steps_ps(setting, loads[0], options.steps)
    for number, step in played.items():
        if step.time_ps != step_ps[number]:
            raise AssertionError(f"step {number}: {step_ps[number]} ps in closed form, {step.time_ps} ps as events")
    return step_ps, played


def fast_steps_ps(setting: Setting, load: Load, steps: int) -> IntArray:
    """Return the length (steps,) of every step of `load` as its contexts grow, without events."""
    work, served = setting.work, load.serving
    wave = Wave(served.rows, served.ranks, served.devices, load.placement.strategies)
    total = np.full(steps, work.head_ps, dtype=np.int64)
    for kind in work.kinds:
        fast = FastPhases(setting.spec, setting.machine, kind)
        message = 2 * len(load.batch) * work.hidden_size
        total += kind.count * fast.groups_ps([g.base_ps for g in kind.groups], message, wave)
        for first in range(0, steps, BLOCK_STEPS):
            here = slice(first, min(first + BLOCK_STEPS, steps))
            contexts = load.batch.contexts + first
            total[here] += kind.count * fast.attention_ps(
                work, contexts, load.placement.near_tokens, here.stop - here.start
            )
    return total


def decode_run(resolved: Resolved, spec: SystemSpec) -> DecodeRun:
    """Decode `resolved.options.steps` steps of the workload's batch on `spec`.

    Raises:
        UserError: not even one request fits, or far memory is too small.
    """
    options = resolved.options
    batch = decode_batch(resolved)
    requested = len(batch)
    ranks = spec.adapters.stored_ranks(resolved.source.adapter_ranks(options.seed))
    if spec.adapters.merge and (batch.adapters == batch.adapters[0]).all():
        # One adapter for all, merged: the steps are those of the base model.
        batch = Batch(batch.contexts, np.full(requested, NO_ADAPTER, dtype=np.int64))
    # Every GPU holds its share and has its own pool: what fits is a question of one of them.
    gpus = spec.gpus.count
    weights = round(resident_weight_bytes(resolved.model, resolved.work.weights) / gpus)
    setting = setting_of(resolved, spec, -(-requested // options.sub_batches))
    if spec.overflow == "limit-batch":
        running = _running(setting, batch, weights, options.steps, ranks)
        if running == 0:
            raise UserError(
                f"system {spec.name}: weights, one request's KV cache and its adapter exceed the "
                f"{setting.machine.hbm_budget_bytes / 1e9:.1f} GB of HBM{_each(gpus)}; use more or larger GPUs"
            )
        if running < requested:
            batch = Batch(batch.contexts[:running], batch.adapters[:running])
            setting = setting_of(resolved, spec, -(-running // options.sub_batches))
    machine = setting.machine
    far = float(setting.work.rank_bytes * int(ranks.sum())) if spec.adapters.home == "far" else 0.0
    if spec.kv.home == "far":
        far += int((batch.contexts + options.steps).sum()) * setting.work.token_bytes
    if far > machine.far_capacity_bytes > 0:
        raise UserError(
            f"system {spec.name}: adapters and KV cache take {shown(far)}, far memory has "
            f"{shown(machine.far_capacity_bytes)}{_each(gpus)}; use more devices, fewer adapters or a smaller "
            "batch"
        )
    model = cost_model(setting, options.composition, TYPICAL_RANK)
    served, placement, decision, hbm = decide(setting, batch, ranks, weights_bytes=weights, model=model)
    loads = split(setting, batch, placement, ranks, options.sub_batches)
    step_ps, played = _play(setting, loads, options)
    return DecodeRun(
        spec=spec,
        setting=setting,
        step_ps=step_ps,
        played=played,
        requested=requested,
        running=len(batch),
        batch=batch,
        serving=served,
        strategies=decision.strategies,
        kv_share=float(placement.near_tokens.sum() / batch.contexts.sum()) if spec.kv.home == "far" else 1.0,
        loads=tuple(loads),
        hbm=hbm,
        far_bytes=int(far) * gpus,
    )


def _each(gpus: int) -> str:
    return f" for each of {gpus} GPUs" if gpus > 1 else ""
