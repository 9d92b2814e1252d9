"""The serving loop: arrivals, admission, prompts, decoding, preemption.

One iteration is one step of the engine, or as many decode steps as can pass before anything else
may happen: no request ends, none could be admitted, memory suffices, and the manager is not due.
Such steps are advanced together, exactly: the number taken at once changes nothing in the results.

Requests are admitted first come first served, with a seat, token budget and KV blocks for the whole
prompt. When blocks run out, the request admitted last gives up its own and is computed again later
(recompute, as vLLM does), prompt and tokens so far as one prompt.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from plora.hw.defs.errors import UserError
from plora.sim.llm.shapes import resident_weight_bytes
from plora.sim.manager.online import Manager
from plora.sim.serving.memory import AdapterCache, Blocks
from plora.sim.serving.options import ServeOptions
from plora.sim.serving.steps import Chunk, StepTimer, load_byte_ps
from plora.sim.system.clock import PS_PER_S, duration_ps
from plora.sim.system.config import Resolved
from plora.sim.system.decide import AttentionModel, cost_model
from plora.sim.system.decode import TYPICAL_RANK
from plora.sim.system.engine import NoProgressError
from plora.sim.system.fastwave import Wave
from plora.sim.system.spec import STRATEGIES, SystemSpec
from plora.sim.system.work import IntArray
from plora.sim.workload.requests import NO_ADAPTER, Requests

NEVER = 1 << 62

IDLE_ITERATIONS = 1000
"""Iterations in a row that may pass without time or work going on, before the run is given up."""


@dataclass
class Outcome:
    """When things happened to each request, and how long every step took. Times in picoseconds.

    Attributes:
        admitted_ps, first_token_ps, finished_ps: (requests,), -1 where it did not happen.
        preemptions: (requests,).
        step_ps, step_tokens: length of every token-yielding step, and how many running requests got their next
            token at its end.
        pauses_ps: intervals between two tokens of requests that were preempted in between.
        samples: (time, running, waiting, KV blocks) at every change of the batch.
        prompt_steps, decode_steps: steps with and without prompts.
        duration_ps: end of the last step.
        loaded_bytes: adapters that came over a link into HBM on demand, and ahead of demand.
        kv_blocks: their number, or None if unlimited; `peak_blocks` in use at most.
        strategies: requests' steps by strategy of their adapter.
        evictions: idle adapters dropped from HBM.
    """

    admitted_ps: IntArray
    first_token_ps: IntArray
    finished_ps: IntArray
    preemptions: IntArray
    step_ps: list[int] = field(default_factory=list)
    step_tokens: list[int] = field(default_factory=list)
    pauses_ps: list[int] = field(default_factory=list)
    samples: list[tuple[int, int, int, int]] = field(default_factory=list)
    prompt_steps: int = 0
    decode_steps: int = 0
    prompt_tokens: int = 0
    duration_ps: int = 0
    loaded_bytes: float = 0.0
    ahead_bytes: float = 0.0
    kv_blocks: int | None = None
    block_tokens: int = 0
    peak_blocks: int = 0
    evictions: int = 0
    adapter_steps: dict[str, int] = field(default_factory=dict)


class Simulation:
    """One serving run of one system."""

    def __init__(self, resolved: Resolved, spec: SystemSpec, options: ServeOptions, requests: Requests) -> None:
        """Set everything up.

        Raises:
            UserError: the weights, or a single request, do not fit.
        """
        self._options, self._spec = options, spec
        self._timer = StepTimer(resolved, spec)
        machine, work = self._timer.machine, self._timer.work
        self._ranks = spec.adapters.stored_ranks(resolved.source.adapter_ranks(resolved.options.seed))
        self._prompt: list[int] = requests.input_tokens.tolist()
        self._output: list[int] = requests.output_tokens.tolist()
        self._adapter: list[int] = requests.adapter.tolist()
        self._arrival: list[int] = np.rint(requests.arrival_s * PS_PER_S).astype(np.int64).tolist()
        count = len(self._prompt)
        self._generated = [0] * count
        self._done = [0] * count  # tokens of the prompt (or of what is computed again) that have been computed
        self._last_token = [-1] * count
        self._pausing: set[int] = set()
        none = np.full(count, -1, dtype=np.int64)
        self.outcome = Outcome(none, none.copy(), none.copy(), np.zeros(count, dtype=np.int64))
        # Every GPU holds its share and has its own pool: what fits is a question of one of them.
        self._weights = round(resident_weight_bytes(resolved.model, resolved.work.weights) / machine.gpus)
        self._rank_bytes = work.rank_bytes
        token_bytes = work.token_bytes
        room = self._kv_room(machine.hbm_budget_bytes, machine.far_capacity_bytes)
        block_bytes = options.block_size * token_bytes
        unlimited = spec.kv.home == "hbm" and spec.overflow == "report"
        self._blocks = Blocks(options.block_size, None if unlimited else max(0, int(room / block_bytes)))
        self.outcome.kv_blocks, self.outcome.block_tokens = self._blocks.capacity, options.block_size
        self._cache = self._load_ps = None
        if spec.adapters.load_link is not None:
            sizes = self._ranks * self._rank_bytes
            self._cache = AdapterCache(sizes, self._blocks, block_bytes)
            self._load_ps = load_byte_ps(spec)
        elif spec.adapters.home == "hbm" and not unlimited:
            held = float(self._ranks.sum()) * self._rank_bytes
            self._blocks.reserved = -int(-held // block_bytes)
        self._check_sizes(block_bytes)
        self._attention = AttentionModel(self._timer.setting(1))
        self._manager = self._make_manager(resolved)
        self._wave = Wave(*(np.zeros(0, dtype=np.int64) for _ in range(4)))
        self._share = 1.0 if spec.kv.home == "hbm" else 0.0
        self._arrived: list[int] = []
        self._left: list[int] = []
        self._undecided = 0
        self._now = 0
        self._next = 0
        self._waiting: deque[int] = deque()
        self._loading: list[tuple[int, int, int]] = []  # heap of (ready, order of admission, request)
        self._ready_at: dict[int, int] = {}
        self._admitted = 0
        self._link_free = 0
        self._due = 0
        self._prefilling: list[int] = []
        self._running: list[int] = []
        self._contexts = np.zeros(0, dtype=np.int64)
        self._remaining = np.zeros(0, dtype=np.int64)
        self._near = np.zeros(0, dtype=np.int64)
        self._changed = True
        self._merged = NO_ADAPTER
        self._owed_ps = 0  # transfers and merges that were ordered and that no step has paid for yet

    def _kv_room(self, hbm_budget: int, far_capacity: int) -> float:
        spec = self._spec
        left = hbm_budget - self._weights
        if left < 0 and spec.overflow != "report":
            raise UserError(
                f"system {spec.name}: the weights take {self._weights / 1e9:.1f} GB, HBM has {hbm_budget / 1e9:.1f} GB "
                "beside its reserve; use a larger GPU or more of them"
            )
        if spec.kv.home == "hbm":
            return left
        stored = float(self._ranks.sum()) * self._rank_bytes if spec.adapters.home == "far" else 0.0
        if stored > far_capacity:
            raise UserError(
                f"system {spec.name}: the adapters take {stored / 1e12:.2f} TB, far memory has "
                f"{far_capacity / 1e12:.2f} TB; use more devices or fewer adapters"
            )
        if left < 0:
            raise UserError(f"system {spec.name}: the weights take {self._weights / 1e9:.1f} GB, more than HBM has")
        return far_capacity - stored

    def _check_sizes(self, block_bytes: float) -> None:
        """Refuse a request that could never run, before it blocks the queue for ever."""
        if self._blocks.capacity is None:
            return
        for request, (prompt, output) in enumerate(zip(self._prompt, self._output, strict=True)):
            needed = self._blocks.of(prompt + output)
            adapter = self._adapter[request]
            if self._cache is not None and adapter >= 0:
                needed += -int(-float(self._cache.sizes[adapter]) // block_bytes)
            limit = self._blocks.capacity - (0 if self._cache is not None else self._blocks.reserved)
            if needed > limit:
                raise UserError(
                    f"system {self._spec.name}: request {request} with {prompt} + {output} tokens needs {needed} "
                    f"blocks of {self._options.block_size}, there are {max(0, limit)}; "
                    "use more memory or shorter requests"
                )

    def _make_manager(self, resolved: Resolved) -> Manager | None:
        """Return the manager, or None where nothing is to be decided."""
        spec, machine = self._spec, self._timer.machine
        allowed = [STRATEGIES.index(s) for s in spec.adapters.strategies]
        if len(allowed) == 1 and not spec.kv.hbm_copies:
            return None
        setting = self._timer.setting(min(self._options.max_num_seqs, 64))
        model = cost_model(setting, resolved.options.composition, TYPICAL_RANK)
        return Manager(
            model,
            self._ranks,
            np.arange(len(self._ranks)) % max(1, machine.far_devices),
            allowed,
            float(machine.hbm_budget_bytes - self._weights),
            caches_free=spec.adapters.assume_fits,
        )

    # Requests: arrival, admission, end.

    def run(self) -> Outcome:
        """Serve every request and return what happened.

        Raises:
            NoProgressError: the loop went round without anything happening.
        """
        idle = 0
        while True:
            before = self._now, len(self.outcome.step_ps), self._next, len(self._waiting), len(self._loading)
            self._take_arrivals()
            chunks = self._schedule()
            if chunks:
                self._mixed_step(chunks)
            elif self._running:
                self._decode_steps()
            else:
                wake = min(self._next_arrival(), self._loading[0][0] if self._loading else NEVER)
                if wake == NEVER and not self._waiting:
                    break
                if wake != NEVER:
                    self._now = max(self._now, wake)
            after = self._now, len(self.outcome.step_ps), self._next, len(self._waiting), len(self._loading)
            idle = idle + 1 if after == before else 0
            if idle > IDLE_ITERATIONS:
                raise NoProgressError(
                    f"serving stands still at {self._now / PS_PER_S:.3f} s with {len(self._waiting)} requests waiting, "
                    f"{len(self._running)} running, {self._blocks.free} KV blocks free"
                )
        self.outcome.duration_ps = self._now
        self.outcome.peak_blocks = self._blocks.peak
        if self._cache is not None:
            self.outcome.loaded_bytes = self._cache.fetched_bytes * self._timer.machine.gpus
            self.outcome.evictions = self._cache.evictions
        return self.outcome

    def _next_arrival(self) -> int:
        return self._arrival[self._next] if self._next < len(self._arrival) else NEVER

    def _take_arrivals(self) -> None:
        while self._next < len(self._arrival) and self._arrival[self._next] <= self._now:
            self._waiting.append(self._next)
            self._next += 1

    def _tokens(self, request: int) -> int:
        """Return the tokens that have to be computed before the request decodes."""
        return self._prompt[request] + self._generated[request]

    def _seats(self) -> int:
        return self._options.max_num_seqs - len(self._running) - len(self._prefilling) - len(self._loading)

    def _admit(self) -> bool:
        """Admit the first waiting request if there is room for it; its adapter may have to be fetched first."""
        if not self._waiting or self._seats() <= 0:
            return False
        request = self._waiting[0]
        adapter = self._adapter[request]
        blocks = self._blocks.of(self._tokens(request) + 1)
        # Every running request may need a block for its next token; without them it would be preempted at once.
        spare = len(self._running) + len(self._prefilling)
        if self._cache is not None and adapter >= 0:
            if not self._cache.can_hold(adapter, blocks + spare):
                return False
            fetched = self._cache.acquire(adapter, blocks + spare)
            self._blocks.take(blocks)
            assert self._load_ps is not None
            # Fetches follow one another on the link; a request whose adapter is on its way waits for it, too.
            if fetched:
                self._link_free = max(self._link_free, self._now) + duration_ps(fetched, self._load_ps)
                self._ready_at[adapter] = self._link_free
            ready = self._ready_at.get(adapter, 0)
        else:
            if blocks + spare > self._blocks.free:
                return False
            self._blocks.take(blocks)
            ready = 0
        self._waiting.popleft()
        self._admitted += 1
        if self.outcome.admitted_ps[request] < 0:
            self.outcome.admitted_ps[request] = self._now
        if ready > self._now and not self._spec.adapters.cold_start_tflops:
            heapq.heappush(self._loading, (ready, self._admitted, request))
        else:
            self._prefilling.append(request)
        return True

    def _schedule(self) -> list[tuple[int, int]]:
        """Return the prompts of the next step and how many of their tokens it computes."""
        while self._loading and self._loading[0][0] <= self._now:
            self._prefilling.append(heapq.heappop(self._loading)[2])
        options = self._options
        chunked = options.enable_chunked_prefill
        budget = options.max_num_batched_tokens - (len(self._running) if chunked else 0)
        chunks: list[tuple[int, int]] = []
        position = 0
        while budget > 0:
            if position == len(self._prefilling) and not self._admit():
                break
            if position == len(self._prefilling):
                continue  # admitted, but its adapter is still on its way
            request = self._prefilling[position]
            left = self._tokens(request) - self._done[request]
            if not chunked and left > budget and chunks:
                break
            size = min(left, budget) if chunked else left
            chunks.append((request, size))
            budget -= size
            position += 1
        return chunks

    # Steps.

    def _decide(self) -> int:
        """Let the manager look at a changed batch, or at one whose time has come; return the time of its loads."""
        served = self._manager
        if served is None:
            if self._changed:
                self._fixed_wave()
                self._changed = False
            return 0
        if not self._changed and self._undecided < self._due:
            return 0
        rows = len(self._running)
        total = int(self._contexts.sum())
        cost = self._attention.cost(rows, total, self._attended(total))
        change = served.step(self._arrived, self._left, cost, steps=self._undecided)
        self._undecided, self._due = 0, served.due_in
        self._arrived, self._left = [], []
        self._share = change.kv_share
        self._near = np.floor(self._contexts * self._share).astype(np.int64)
        ids = served.serving()
        self._new_wave(Wave(served.rows[ids], served.ranks[ids], served.devices[ids], served.strategies[ids]))
        self._changed = False
        self.outcome.loaded_bytes += change.loaded_bytes * self._timer.machine.gpus
        self.outcome.ahead_bytes += change.ahead_bytes * self._timer.machine.gpus
        return self._timer.load_ps(change.loaded_bytes)

    def _attended(self, total: int) -> float:
        """Return the tokens that a mean layer attends to."""
        work = self._timer.work
        seen = total * work.layers
        for kind in work.kinds:
            if kind.window is not None:
                seen -= kind.count * (total - int(np.minimum(self._contexts, kind.window).sum()))
        return max(seen / work.layers, 1.0)

    def _merge(self, requests: list[int]) -> None:
        """Merge the adapter that all `requests` share, or take the merged one out of the weights."""
        if not self._spec.adapters.merge:
            return
        used = {self._adapter[request] for request in requests}
        wanted = used.pop() if len(used) == 1 else NO_ADAPTER
        if wanted != self._merged:
            passes = (self._merged >= 0) + (wanted >= 0)
            self._owed_ps += passes * self._timer.switch_ps(self._weights)
            self._merged = wanted
            self._changed = True

    def _owed(self) -> int:
        """Return the time that transfers and merges add to the step that is about to run."""
        time, self._owed_ps = self._owed_ps, 0
        return time

    def _fixed_wave(self) -> None:
        """Set the wave of a system with one strategy."""
        adapters = np.array([self._adapter[r] for r in self._running], dtype=np.int64)
        ids, rows = np.unique(adapters[(adapters >= 0) & (adapters != self._merged)], return_counts=True)
        strategy = STRATEGIES.index(self._spec.adapters.strategies[0])
        devices = ids % max(1, self._timer.machine.far_devices)
        self._new_wave(Wave(rows, self._ranks[ids], devices, np.full(len(ids), strategy)))
        self._near = np.zeros_like(self._contexts)
        self._arrived, self._left = [], []

    def _new_wave(self, wave: Wave) -> None:
        old = self._wave
        same = len(old.rows) == len(wave.rows) and all(
            np.array_equal(getattr(old, name), getattr(wave, name))
            for name in ("rows", "ranks", "devices", "strategies")
        )
        if not same:
            self._wave = wave

    def _count_strategies(self, steps: int) -> None:
        counts = np.bincount(self._wave.strategies, weights=self._wave.rows, minlength=len(STRATEGIES))
        for name, rows in zip(STRATEGIES, counts.tolist(), strict=True):
            if rows:
                self.outcome.adapter_steps[name] = self.outcome.adapter_steps.get(name, 0) + int(rows) * steps

    def _sample(self) -> None:
        self._take_arrivals()
        waiting = len(self._waiting) + len(self._loading) + len(self._prefilling)
        self.outcome.samples.append((self._now, len(self._running), waiting, self._blocks.used))

    def _decode_steps(self) -> None:
        """Advance the batch by as many steps as nothing can interrupt."""
        most = min(int(self._remaining.min()), self._options.max_steps_at_once)
        self._merge(self._running)
        self._owed_ps += self._decide()
        if self._manager is not None:
            most = min(most, max(1, self._due - self._undecided))
        most = self._make_room(most)
        if most == 0:
            return
        wake = NEVER
        if self._seats() > 0 and not self._waiting:
            wake = self._next_arrival()
        if self._loading:
            wake = min(wake, self._loading[0][0])
        times = self._timer.decode_ps(self._contexts, self._near, self._wave, most)
        times[0] += self._owed()
        ends = np.cumsum(times) + self._now
        steps = min(most, int(np.searchsorted(ends, wake, side="left")) + 1) if wake != NEVER else most
        self._grow(steps)
        self.outcome.step_ps += times[:steps].tolist()
        self.outcome.step_tokens += [len(self._running)] * steps
        self.outcome.decode_steps += steps
        self._count_strategies(steps)
        self._now = int(ends[steps - 1])
        self._advance(steps)

    def _make_room(self, most: int) -> int:
        """Return how many steps memory allows, preempting requests if it is none; 0 if the batch has changed."""
        able = self._blocks.steps_until_full(self._contexts, most)
        while able == 0 and self._cache is not None and self._cache.idle:
            self._cache.evict()
            able = self._blocks.steps_until_full(self._contexts, most)
        if able:
            return able
        self._preempt()
        return 0

    def _preempt(self) -> None:
        """Send the request admitted last back to the queue; it gives up its blocks and is computed again."""
        # Prompts that are being computed or wait for their adapter were admitted after those that decode.
        if self._loading:
            latest = max(self._loading, key=lambda entry: entry[1])
            self._loading.remove(latest)
            heapq.heapify(self._loading)
            request = latest[2]
            self._blocks.give(self._blocks.of(self._tokens(request) + 1))
        elif self._prefilling:
            request = self._prefilling.pop()
            self._blocks.give(self._blocks.of(self._tokens(request) + 1))
        else:
            if len(self._running) == 1:
                raise NoProgressError(f"request {self._running[0]} alone exceeds the KV cache")
            request = self._running[-1]
            self._blocks.give(self._blocks.of(int(self._contexts[-1]) - 1))
            self._remove([len(self._running) - 1])
            self._pausing.add(request)
        self._done[request] = 0
        self.outcome.preemptions[request] += 1
        if self._cache is not None and self._adapter[request] >= 0:
            self._cache.release(self._adapter[request])
        self._waiting.appendleft(request)

    def _grow(self, steps: int) -> None:
        """Take the blocks that `steps` more tokens of every running request need."""
        before = -(-(self._contexts - 1) // self._blocks.size)
        after = -(-(self._contexts - 1 + steps) // self._blocks.size)
        self._blocks.take(int((after - before).sum()))

    def _advance(self, steps: int) -> None:
        """Note that every running request has got `steps` tokens, and let those that are done leave."""
        self._contexts = self._contexts + steps
        self._remaining = self._remaining - steps
        self._undecided += steps
        done = np.flatnonzero(self._remaining == 0).tolist()
        if done:
            for position in done:
                request = self._running[position]
                self.outcome.finished_ps[request] = self._now
                self._blocks.give(self._blocks.of(int(self._contexts[position]) - 1))
                if self._cache is not None and self._adapter[request] >= 0:
                    self._cache.release(self._adapter[request])
            self._remove(done)
            self._sample()

    def _remove(self, positions: list[int]) -> None:
        """Take requests out of the batch."""
        for position in positions:
            request = self._running[position]
            self._generated[request] = self._output[request] - int(self._remaining[position])
            self._last_token[request] = self._now
            if self._adapter[request] >= 0:
                self._left.append(self._adapter[request])
        keep = np.ones(len(self._running), dtype=bool)
        keep[positions] = False
        for position in reversed(positions):
            del self._running[position]
        self._contexts, self._remaining = self._contexts[keep], self._remaining[keep]
        self._near = self._near[keep]
        self._changed = True

    def _mixed_step(self, chunks: list[tuple[int, int]]) -> None:
        """Compute prompts; with chunked prefill the running requests get their next token in the same step."""
        decoding = bool(self._running) and self._options.enable_chunked_prefill
        self._merge([*(self._running if decoding else ()), *(request for request, _ in chunks)])
        if decoding:
            self._owed_ps += self._decide()
            if not self._make_room(1):
                return  # the batch has changed; the loop schedules again
        parts, until = [], 0
        for request, size in chunks:
            adapter = self._adapter[request]
            cached = adapter >= 0 and (
                self._spec.adapters.home == "hbm"
                or (self._manager is not None and int(self._manager.cached[adapter]) == 2)
            )
            rank = int(self._ranks[adapter]) if adapter >= 0 and adapter != self._merged else 0
            past, arrives = self._done[request], self._ready_at.get(adapter, 0)
            last = past + size == self._tokens(request)
            parts.append(Chunk(size, past, last, rank, cached, max(0, arrives - self._now)))
            if last:
                # Decoding needs the adapter in HBM; a prompt that ends before it has come waits for it.
                until = max(until, arrives)
        nothing = np.zeros(0, dtype=np.int64)
        if decoding:
            time = self._timer.mixed_ps(self._contexts, self._near, self._wave, parts)
            self._grow(1)
            self._count_strategies(1)
        else:
            time = self._timer.mixed_ps(nothing, nothing, EMPTY, parts)
        time = max(time + self._owed(), until - self._now)
        self._now += time
        self.outcome.prompt_steps += 1
        self.outcome.prompt_tokens += sum(part.new for part in parts)
        self.outcome.step_ps.append(time)
        self.outcome.step_tokens.append(len(self._running) if decoding else 0)
        if decoding:
            self._advance(1)
        for (request, size), part in zip(chunks, parts, strict=True):
            self._done[request] += size
            if part.last:
                self._first_token(request)
        self._sample()

    def _first_token(self, request: int) -> None:
        """A prompt is complete: it yields a token, and the request decodes from now on."""
        self._prefilling.remove(request)
        context = self._tokens(request) + 1
        self._generated[request] += 1
        if self.outcome.first_token_ps[request] < 0:
            self.outcome.first_token_ps[request] = self._now
        elif request in self._pausing:
            self.outcome.pauses_ps.append(self._now - self._last_token[request])
            self._pausing.discard(request)
        left = self._output[request] - self._generated[request]
        # Admission took a block for the token just made; decoding counts it from its context.
        self._blocks.give(self._blocks.of(context) - self._blocks.of(context - 1))
        if left == 0:
            self.outcome.finished_ps[request] = self._now
            self._blocks.give(self._blocks.of(context - 1))
            if self._cache is not None and self._adapter[request] >= 0:
                self._cache.release(self._adapter[request])
            return
        self._running.append(request)
        self._contexts = np.append(self._contexts, context)
        self._remaining = np.append(self._remaining, left)
        self._near = np.append(self._near, 0)
        if self._adapter[request] >= 0:
            self._arrived.append(self._adapter[request])
        self._changed = True


EMPTY = Wave(*(np.zeros(0, dtype=np.int64) for _ in range(4)))
"""No adapters."""
