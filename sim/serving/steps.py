"""The time of one step of a serving system: decoding requests, prompts, or both."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from plora.hw.defs.errors import UserError
from plora.sim.hardware import kernels
from plora.sim.hardware.link import load_link
from plora.sim.system.clock import PS_PER_NS, duration_ps, ps_per_unit
from plora.sim.system.config import Resolved
from plora.sim.system.decode import machine_of
from plora.sim.system.fastforward import FastPhases, can_fast_forward
from plora.sim.system.fastwave import Wave
from plora.sim.system.layers import LayerKind, base_times, model_work
from plora.sim.system.spec import SystemSpec
from plora.sim.system.tasks import Setting
from plora.sim.system.work import IntArray


class Chunk(msgspec.Struct, frozen=True):
    """Part of a prompt that is computed in one step.

    Attributes:
        new, past: tokens computed now, and before.
        last: whether it ends the prompt, and so yields the first token.
        rank: rank of its adapter, 0 without one.
        cached: whether both matrices of the adapter are in HBM.
        coming_ps: time until its adapter is in HBM, where the CPU computes the adapter's part so long.
        fetched: tokens before it whose keys and values come from where the KV cache lives.
    """

    new: int
    past: int
    last: bool
    rank: int
    cached: bool
    coming_ps: int = 0
    fetched: int = 0


EMPTY = Wave(*(np.zeros(0, dtype=np.int64) for _ in range(4)))
"""No adapters."""


def load_byte_ps(spec: SystemSpec) -> float:
    """Return the time of a byte on the link over which adapters are fetched, or 0 without one."""
    if spec.adapters.load_link is None:
        return 0.0
    link = load_link(spec.adapters.load_link)
    return ps_per_unit(link.gb_per_s * 1e9 * link.format.read_efficiency)


class StepTimer:
    """Times steps of `spec`; what repeats is remembered."""

    def __init__(self, resolved: Resolved, spec: SystemSpec, expert_parallel: int = 1) -> None:
        """Resolve the hardware; routed experts are shared out over `expert_parallel` replicas.

        Raises:
            UserError: a system whose steps have no closed form, or experts that cannot be shared out.
        """
        self._resolved, self.spec = resolved, spec
        self.machine = machine_of(resolved, spec, expert_parallel)
        if expert_parallel > 1:
            self._check_experts(expert_parallel)
        if not can_fast_forward(spec, self.machine):
            raise UserError(f"system {spec.name}: launches over a half-duplex link are not covered by serving runs")
        self.work = model_work(resolved.model, 1, self.machine.times, resolved.work)
        self._bases: dict[tuple[int, int | None], list[list[int]]] = {}
        self._heads: dict[int, int] = {}
        self._phases = [FastPhases(spec, self.machine, kind) for kind in self.work.kinds]
        self._groups_of: tuple[int, Wave | None, int | None] = (-1, None, None)
        self._groups_ps: list[int] = []
        self._cold_flop_ps = self._cold_byte_ps = 0.0
        if spec.adapters.cold_start_tflops:
            self._cold_flop_ps = ps_per_unit(spec.adapters.cold_start_tflops * 1e12, "cold_start_tflops")
            self._cold_byte_ps = load_byte_ps(spec)

    def _check_experts(self, shares: int) -> None:
        model, gpus = self._resolved.model, self.machine.gpus
        if model.moe is None or model.moe.num_experts % shares:
            count = model.moe.num_experts if model.moe else 0
            raise UserError(
                f"{model.name} has {count} routed experts, which do not divide over {shares} replicas; choose another "
                "data_parallel_size, or leave expert parallelism out"
            )
        if gpus > 1 or self.machine.times.mode != "calibrated":
            raise UserError(
                "expert parallelism is covered for replicas of one GPU with calibrated kernels (--preset priced); "
                "leave tensor parallelism or --preset paper out"
            )

    def setting(self, tokens: int) -> Setting:
        """Return the setting of a step of `tokens` tokens."""
        work = model_work(self._resolved.model, tokens, self.machine.times, self._resolved.work)
        return Setting(self.spec, self.machine, work)

    def _base_ps(self, tokens: int, everyone: int | None) -> list[list[int]]:
        found = self._bases.get((tokens, everyone))
        if found is None:
            resolved = self._resolved
            found = base_times(self.work, resolved.model, tokens, self.machine.times, resolved.work, everyone)
            self._bases[tokens, everyone] = found
        return found

    def _head_ps(self, outputs: int) -> int:
        found = self._heads.get(outputs)
        if found is None:
            work = self.work
            found = self.machine.times.base_ps("head", outputs, work.head_bytes, work.head_flops_per_token * outputs)
            self._heads[outputs] = found
        return found

    def decode_ps(
        self, contexts: IntArray, near: IntArray, wave: Wave, steps: int, everyone: int | None = None
    ) -> IntArray:
        """Return the length (steps,) of steps of decoding requests whose contexts grow by a token each.

        `everyone` counts the tokens of all replicas that share the experts.
        """
        rows, work = len(contexts), self.work
        before = self._groups_of
        if before[0] != rows or before[1] is not wave or before[2] != everyone:
            message = 2 * rows * work.hidden_size
            bases = zip(self._phases, self._base_ps(rows, everyone), strict=True)
            self._groups_ps = [fast.groups_ps(base, message, wave) for fast, base in bases]
            self._groups_of = rows, wave, everyone
        total = np.full(steps, self._head_ps(rows), dtype=np.int64)
        for fast, kind, groups in zip(self._phases, work.kinds, self._groups_ps, strict=True):
            total += kind.count * (groups + fast.attention_ps(work, contexts, near, steps))
        return total

    def mixed_ps(
        self,
        contexts: IntArray,
        near: IntArray,
        wave: Wave,
        chunks: Sequence[Chunk],
        everyone: int | None = None,
    ) -> int:
        """Return the length of a step of decoding requests and prompt chunks.

        Prompts use the GPU: base matrices for all tokens together, their adapters' products (A and B
        from HBM, or streamed over the link while the step runs), causal attention. Their keys and
        values go to far memory while the step runs, too, and those of cached prefixes come from there; a
        step lasts at least as long as either stream.
        """
        machine, spec = self.machine, self.spec
        tokens = len(contexts) + sum(chunk.new for chunk in chunks)
        outputs = len(contexts) + sum(1 for chunk in chunks if chunk.last)
        work = self.work
        total = self._head_ps(outputs) if outputs else 0
        attention = sum(self._prompt_attention_ps(chunk) for chunk in chunks)
        message = 2 * tokens * work.hidden_size
        for fast, kind, base in zip(self._phases, work.kinds, self._base_ps(tokens, everyone), strict=True):
            extra = self._prompt_adapters_ps(kind, chunks)
            layer = fast.groups_ps(base, message, wave, extra)
            total += kind.count * (layer + int(fast.attention_ps(work, contexts, near, 1, attention)[0]))
        if self._cold_flop_ps:
            total = self._with_cold_ps(total, chunks)
        if not machine.has_far:
            return total
        streamed = work.rank_bytes * sum(chunk.rank for chunk in chunks if not chunk.cached)
        ports = len(set(machine.up))
        up = duration_ps(float(machine.wire.read(streamed)[1]), machine.link_byte_ps) if streamed else 0
        down = 0
        fetched = sum(chunk.fetched for chunk in chunks)
        if fetched and spec.kv.home == "far":
            size = float(machine.wire.read(fetched * work.token_bytes)[1])
            up += duration_ps(size, machine.link_byte_ps) // ports
        if spec.kv.home == "far":
            stored = sum(chunk.new for chunk in chunks) * work.token_bytes
            down = duration_ps(float(machine.wire.write(stored)[0]), machine.link_byte_ps) // ports
        if spec.launch.blocking:
            matrices = sum(kind.count * len(g.output_dims) for kind in work.kinds for g in kind.lora_groups)
            launched = sum(1 for chunk in chunks if chunk.rank)
            total += round(spec.launch.count * machine.launch_ps) * matrices * launched
        return max(total, up, down)

    def _prompt_adapters_ps(self, kind: LayerKind, chunks: Sequence[Chunk]) -> list[int]:
        """GPU time of the prompts' adapters in every group that adapters touch; empty if there are none."""
        cached = 2 * sum(chunk.rank for chunk in chunks if chunk.cached)
        work = 2 * sum(chunk.new * chunk.rank for chunk in chunks)
        if not work:
            return []
        times, found = self.machine.times, []
        for group in kind.lora_groups:
            width = group.a_columns + group.b_columns
            # A prompt's tokens meet every expert.
            time = times.lora_ps(cached * width * group.experts, work * width * group.used, 1.0)
            if self.machine.sharded_waves:
                time += times.all_reduce_ps(work * group.used * len(group.output_dims))
            found.append(time)
        return found

    def _with_cold_ps(self, total: int, chunks: Sequence[Chunk]) -> int:
        """Return the length of a step that takes `total` once all adapters are in HBM.

        Until the last of them has come the CPU gets x, computes, and returns y while the GPU computes
        the base matrices: layers pass at the pace of the slower of the two. The GPU does the rest.
        """
        cold = [chunk for chunk in chunks if chunk.coming_ps > 0]
        if not cold:
            return total
        coming = max(chunk.coming_ps for chunk in cold)
        groups = [(kind.count, group) for kind in self.work.kinds for group in kind.lora_groups]
        width = sum(count * (g.a_columns + g.b_columns) * g.used for count, g in groups)
        values = sum(count * (g.input_dim * g.inputs + g.b_columns * g.used) for count, g in groups)
        moved = 2 * values * sum(chunk.new for chunk in cold)
        operations = 2 * width * sum(chunk.new * chunk.rank for chunk in cold)
        on_cpu = duration_ps(operations, self._cold_flop_ps) + duration_ps(moved, self._cold_byte_ps)
        slower = max(total, on_cpu)
        return slower if coming >= slower else coming + round(total * (1 - coming / slower))

    def switch_ps(self, weight_bytes: int) -> int:
        """Return the time to add an adapter to a GPU's weights, or take it out: each is read and written once."""
        return duration_ps(2 * weight_bytes, self.machine.times.hbm_ps)

    def _prompt_attention_ps(self, chunk: Chunk) -> int:
        times, model = self.machine.times, self._resolved.model
        ns = kernels.prefill_attention_ns(
            times.gpu,
            chunk.new,
            chunk.past,
            query_heads=model.num_attention_heads // times.gpus,
            kv_heads=max(1, model.num_key_value_heads // times.gpus),
            head_dim=model.head_dim,
            mode=times.mode,
        )
        return round(ns * PS_PER_NS)

    def load_ps(self, size: float) -> int:
        """Return the time in which `size` bytes come over the link into HBM."""
        machine = self.machine
        return duration_ps(float(machine.wire.read(size)[1]), machine.link_byte_ps) if size and machine.has_far else 0
