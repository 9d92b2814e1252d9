"""One replica of a system: its queue, what is admitted, preempted and batched, step by step.

Requests are admitted first come first served, with a seat, token budget and KV blocks for the whole
prompt. When blocks run out, the request admitted last gives up its own and is computed again later
(recompute, as vLLM does), prompt and tokens so far as one prompt.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, replace

import numpy as np

from plora.hw.defs.errors import UserError
from plora.sim.llm.shapes import resident_weight_bytes
from plora.sim.serving.bounds import Snapshots
from plora.sim.serving.capacity import check_sizes, kv_and_adapters
from plora.sim.serving.decoding import Decoding
from plora.sim.serving.options import ServeOptions
from plora.sim.serving.outcome import nothing_happened
from plora.sim.serving.prefix import Key, PrefixCache
from plora.sim.serving.steps import EMPTY, Chunk, StepTimer, load_byte_ps
from plora.sim.system.clock import PS_PER_S, duration_ps
from plora.sim.system.config import Resolved
from plora.sim.system.engine import NoProgressError
from plora.sim.system.spec import SystemSpec
from plora.sim.system.work import IntArray
from plora.sim.workload.requests import Requests

NEVER = 1 << 62

LONGEST_S = 9e6
"""Longest run: 64-bit picoseconds end at 9.2e6 s."""

IDLE_ITERATIONS = 1000
"""Iterations in a row that may pass without time or work going on, before the run is given up."""

_NOTHING = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True)
class Plan:
    """What a replica is about to do.

    Attributes:
        chunks: prompts of the step, and how many of their tokens it computes; empty for decode steps.
        parts: the same as the timer wants them.
        decoding: whether the running requests get a token.
        most: steps that can pass before anything else may happen here, but for `wake`.
        wake: when something may happen that the next step has to see.
        until: the step does not end before.
    """

    chunks: list[tuple[int, int]]
    parts: list[Chunk]
    decoding: bool
    most: int
    wake: int
    until: int


class Replica:
    """One replica and the requests that it serves."""

    def __init__(
        self, resolved: Resolved, spec: SystemSpec, options: ServeOptions, requests: Requests, timer: StepTimer
    ) -> None:
        """Set everything up.

        Raises:
            UserError: the weights, or a single request, do not fit.
        """
        self._options, self._spec, self._timer = options, spec, timer
        machine = timer.machine
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
        self.outcome = nothing_happened(count)
        shares = machine.times.expert_parallel
        weights = resident_weight_bytes(resolved.model, resolved.work.weights, expert_parallel=shares) / machine.gpus
        self._blocks, self._cache = kv_and_adapters(
            spec, machine, timer.work, options, weight_bytes=round(weights), ranks=self._ranks
        )
        check_sizes(spec, self._blocks, self._cache, self._prompt, self._output, self._adapter)
        self.outcome.kv_blocks, self.outcome.block_tokens = self._blocks.capacity, options.block_size
        self._load_ps = load_byte_ps(spec)
        self._decoding = Decoding(
            resolved,
            timer,
            seats=options.max_num_seqs,
            weight_bytes=round(weights),
            ranks=self._ranks,
            adapters=self._adapter,
            outcome=self.outcome,
        )
        self._prefixes, self._keys = self._prefix_cache(requests)
        self._held: dict[int, list[Key]] = {}  # cached blocks that a request uses
        self.snapshots = Snapshots()
        self.now = 0
        self._next = 0
        self._waiting: deque[int] = deque()
        self._loading: list[tuple[int, int, int]] = []  # heap of (ready, order of admission, request)
        self._ready_at: dict[int, int] = {}
        self._admitted = 0
        self._link_free = 0
        self._prefilling: list[int] = []

    def _prefix_cache(self, requests: Requests) -> tuple[PrefixCache | None, list[list[Key]]]:
        """Return the prefix cache and every request's keys, or None and nothing.

        Raises:
            UserError: blocks of the trace's hashes are not made of whole KV blocks.
        """
        size = requests.prefix_block_tokens
        if not self._options.enable_prefix_caching or requests.prefix_blocks is None or not size:
            return None, []
        if size % self._options.block_size:
            raise UserError(
                f"prefixes are known in blocks of {size} tokens, which are no whole number of KV blocks of "
                f"{self._options.block_size}; choose a block size that divides {size}"
            )
        assert requests.prefix_offsets is not None
        bounds, hashes = requests.prefix_offsets.tolist(), requests.prefix_blocks.tolist()
        keys = [
            [(adapter, h) for h in hashes[first : min(last, first + prompt // size)]]
            for adapter, prompt, first, last in zip(self._adapter, self._prompt, bounds, bounds[1:], strict=False)
        ]
        self._prefix_tokens = size
        return PrefixCache(self._blocks, size // self._options.block_size), keys

    # What the loop sees.

    @property
    def tokens(self) -> int:
        """Requests that decode."""
        return len(self._decoding)

    def state(self) -> tuple[int, ...]:
        """Return what changes whenever anything happens."""
        return self.now, len(self.outcome.step_ps), self._next, len(self._waiting), len(self._loading)

    def take_arrivals(self) -> None:
        """Queue what has arrived."""
        while self._next < len(self._arrival) and self._arrival[self._next] <= self.now:
            self._waiting.append(self._next)
            self._next += 1

    def next_event(self) -> int:
        """Return when something will happen by itself: an arrival, or an adapter that has come."""
        arrival = self._arrival[self._next] if self._next < len(self._arrival) else NEVER
        return min(arrival, self._loading[0][0] if self._loading else NEVER)

    @property
    def waiting(self) -> bool:
        """Whether requests wait for admission."""
        return bool(self._waiting)

    def standing(self) -> str:
        """Return where the replica stands, for a report."""
        return f"{len(self._waiting)} requests waiting, {self.tokens} running, {self._blocks.free} KV blocks free"

    def close(self) -> None:
        """Complete the outcome after the last step."""
        self.outcome.duration_ps = self.now
        self.outcome.peak_blocks = self._blocks.peak
        if self._cache is not None:
            self.outcome.loaded_bytes = self._cache.fetched_bytes * self._timer.machine.gpus
            self.outcome.evictions = self._cache.evictions

    def plan(self) -> Plan | None:
        """Return what comes next, or None if there is nothing to compute before `next_event`.

        Raises:
            NoProgressError: requests are preempted again and again.
        """
        for _ in range(IDLE_ITERATIONS):
            chunks = self._schedule()
            if not chunks and not len(self._decoding):
                return None
            plan = self._plan_prompts(chunks) if chunks else self._plan_decoding()
            if plan is not None:
                # What has been scheduled ahead joins the step after this one.
                ahead = self._options.async_scheduling and self._admit_ahead(plan)
                return replace(plan, most=1) if ahead else plan
        raise NoProgressError(f"serving stands still at {self.now / PS_PER_S:.3f} s with {self.standing()}")

    def plan_tokens(self, plan: Plan) -> int:
        """Return the tokens that a step of `plan` computes."""
        return sum(part.new for part in plan.parts) + (len(self._decoding) if plan.decoding else 0)

    def times(self, plan: Plan, steps: int, everyone: int | None = None) -> IntArray:
        """Return the length (steps,) of the next steps; `everyone` counts the tokens of all replicas."""
        of = self._decoding
        if not plan.chunks:
            times = self._timer.decode_ps(of.contexts, of.near, of.wave, steps, everyone)
            times[0] += of.owed()
            return times
        if plan.decoding:
            time = self._timer.mixed_ps(of.contexts, of.near, of.wave, plan.parts, everyone)
        else:
            time = self._timer.mixed_ps(_NOTHING, _NOTHING, EMPTY, plan.parts, everyone)
        return np.array([max(time + of.owed(), plan.until - self.now)], dtype=np.int64)

    def advance(self, plan: Plan, times: IntArray) -> None:
        """Let the steps of lengths `times` pass.

        Raises:
            UserError: the run lasts longer than its times can say.
        """
        steps, outcome, lengths = len(times), self.outcome, times.tolist()
        if min(lengths) < 0 or self.now + sum(lengths) > LONGEST_S * PS_PER_S:
            raise UserError(
                f"system {self._spec.name}: the run lasts longer than {LONGEST_S:g} s of simulated time; give fewer "
                "requests, shorter ones, or faster hardware"
            )
        if not plan.chunks:
            self.snapshots.note(outcome.decode_steps, steps, self._decoding)
        if plan.decoding:
            self._take_blocks(steps)
            self._decoding.count_strategies(steps)
        self.now += sum(lengths)
        outcome.step_ps += lengths
        outcome.step_tokens += [len(self._decoding) if plan.decoding else 0] * steps
        if plan.chunks:
            outcome.prompt_steps += 1
            outcome.prompt_tokens += sum(part.new for part in plan.parts)
        else:
            outcome.decode_steps += steps
        if plan.decoding:
            self._finish(self._decoding.grow(steps))
        if plan.chunks:
            for (request, size), part in zip(plan.chunks, plan.parts, strict=True):
                self._done[request] += size
                if part.last:
                    self._first_token(request)
            self._sample()

    # Admission and preemption.

    def _tokens(self, request: int) -> int:
        """Return the tokens that have to be computed before the request decodes."""
        return self._prompt[request] + self._generated[request]

    def _seats(self) -> int:
        return self._options.max_num_seqs - len(self._decoding) - len(self._prefilling) - len(self._loading)

    def _found(self, request: int) -> tuple[list[Key], int]:
        """Return the blocks of the request's prompt that are cached, and how many KV blocks of them nobody uses.

        The last token is always computed, since the first one of the output comes from it.
        """
        if self._prefixes is None:
            return [], 0
        keys = self._keys[request][: (self._tokens(request) - 1) // self._prefix_tokens]
        held, idle = self._prefixes.held(keys)
        return keys[:held], idle * self._prefixes.unit

    def _admit(self) -> bool:
        """Admit the first waiting request if there is room for it; its adapter may have to be fetched first."""
        if not self._waiting or self._seats() <= 0:
            return False
        request = self._waiting[0]
        adapter = self._adapter[request]
        found, idle = self._found(request)
        blocks = self._blocks.of(self._tokens(request) + 1)
        if found and self._prefixes is not None:
            blocks -= len(found) * self._prefixes.unit
        # Every running request may need a block for its next token; without them it would be preempted at once.
        needed = blocks + idle + len(self._decoding) + len(self._prefilling)
        fetched, ready = 0.0, 0
        if self._cache is not None and adapter >= 0:
            if not self._cache.can_hold(adapter, needed):
                return False
            self._use_prefix(request, found)
            fetched = self._cache.acquire(adapter, needed - idle)
            # Fetches follow one another on the link; a request whose adapter is on its way waits for it, too.
            if fetched:
                self._link_free = max(self._link_free, self.now) + duration_ps(fetched, self._load_ps)
                self._ready_at[adapter] = self._link_free
            ready = self._ready_at.get(adapter, 0)
        elif needed > self._blocks.free:
            return False
        else:
            self._use_prefix(request, found)
        self._blocks.take(blocks)
        self._waiting.popleft()
        self._admitted += 1
        if self.outcome.admitted_ps[request] < 0:
            self.outcome.admitted_ps[request] = self.now
        if ready > self.now and not self._spec.adapters.cold_start_tflops:
            heapq.heappush(self._loading, (ready, self._admitted, request))
        else:
            self._prefilling.append(request)
        return True

    def _use_prefix(self, request: int, found: list[Key]) -> None:
        if self._prefixes is None:
            return
        self._prefixes.use(found)
        self._held[request] = list(found)
        self._done[request] = len(found) * self._prefix_tokens
        self.outcome.prefix_tokens += self._done[request]
        self.outcome.asked_tokens += self._tokens(request)

    def _keep_prefix(self, request: int) -> None:
        """A prompt has been computed: its full blocks are there for others from now on."""
        if self._prefixes is None:
            return
        held = self._held[request]
        held += [key for key in self._keys[request][len(held) :] if self._prefixes.add(key)]

    def _give(self, request: int, blocks: int) -> None:
        """Return a request's `blocks` blocks, and what it has of the prefix cache and of the adapters in HBM."""
        if self._prefixes is not None:
            held = self._held.pop(request)
            blocks -= len(held) * self._prefixes.unit
            self._prefixes.leave(held)
        self._blocks.give(blocks)
        if self._cache is not None and self._adapter[request] >= 0:
            self._cache.release(self._adapter[request])

    def _preempt(self) -> None:
        """Send the request admitted last back to the queue; it gives up its blocks and is computed again."""
        of = self._decoding
        # Prompts that are being computed or wait for their adapter were admitted after those that decode.
        if self._loading:
            latest = max(self._loading, key=lambda entry: entry[1])
            self._loading.remove(latest)
            heapq.heapify(self._loading)
            request = latest[2]
            self._give(request, self._blocks.of(self._tokens(request) + 1))
        elif self._prefilling:
            request = self._prefilling.pop()
            self._give(request, self._blocks.of(self._tokens(request) + 1))
        else:
            if len(of) == 1:
                raise NoProgressError(f"request {of.requests[0]} alone exceeds the KV cache")
            request = of.requests[-1]
            self._give(request, self._blocks.of(int(of.contexts[-1]) - 1))
            self._remove([len(of) - 1])
            self._pausing.add(request)
        self._done[request] = 0
        self.outcome.preemptions[request] += 1
        self._waiting.appendleft(request)

    def _make_room(self, most: int) -> int:
        """Return how many steps memory allows, preempting requests if it is none; 0 if the batch has changed."""
        contexts = self._decoding.contexts
        able = self._blocks.steps_until_full(contexts, most)
        while able == 0 and self._cache is not None and self._cache.idle:
            self._cache.evict()
            able = self._blocks.steps_until_full(contexts, most)
        if able:
            return able
        self._preempt()
        return 0

    # Steps.

    def _schedule(self) -> list[tuple[int, int]]:
        """Return the prompts of the next step and how many of their tokens it computes."""
        while self._loading and self._loading[0][0] <= self.now:
            self._prefilling.append(heapq.heappop(self._loading)[2])
        options = self._options
        chunked = options.enable_chunked_prefill
        budget = options.max_num_batched_tokens - (len(self._decoding) if chunked else 0)
        # With asynchronous scheduling a busy replica has settled this step's requests one step ago.
        settled = options.async_scheduling and bool(self._prefilling or len(self._decoding))
        chunks: list[tuple[int, int]] = []
        position = 0
        while budget > 0:
            if position == len(self._prefilling) and (settled or not self._admit()):
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

    def _admit_ahead(self, plan: Plan) -> bool:
        """Admit requests to the step after `plan`'s, which is scheduled now; return whether there are any."""
        computed = dict(plan.chunks)
        budget, before = self._options.max_num_batched_tokens, self._admitted
        if self._options.enable_chunked_prefill:
            budget -= len(self._decoding)
        # A prompt that ends now decodes next.
        budget -= sum(max(1, self._tokens(r) - self._done[r] - computed.get(r, 0)) for r in self._prefilling)
        while budget > 0 and self._waiting:
            request = self._waiting[0]
            if not self._admit():
                break
            budget -= self._tokens(request) - self._done[request]
        return self._admitted > before

    def _plan_prompts(self, chunks: list[tuple[int, int]]) -> Plan | None:
        """Prompts; with chunked prefill the running requests get their next token in the same step."""
        of = self._decoding
        decoding = bool(of.requests) and self._options.enable_chunked_prefill
        of.merge([*(of.requests if decoding else ()), *(request for request, _ in chunks)])
        if decoding:
            of.owed_ps += of.decide()
            if not self._make_room(1):
                return None  # the batch has changed: schedule again
        parts, until = [], 0
        for request, size in chunks:
            adapter = self._adapter[request]
            rank = int(self._ranks[adapter]) if adapter >= 0 and adapter != of.merged else 0
            past, arrives = self._done[request], self._ready_at.get(adapter, 0)
            last = past + size == self._tokens(request)
            # Keys and values found in the prefix cache are read once, by the chunk that begins after them.
            found = len(self._held.get(request, ())) * self._prefix_tokens if self._prefixes is not None else 0
            fetched = past if past == found else 0
            coming = max(0, arrives - self.now)
            parts.append(Chunk(size, past, last, rank, of.cached(adapter), coming, fetched))
            if last:
                # Decoding needs the adapter in HBM; a prompt that ends before it has come waits for it.
                until = max(until, arrives)
        return Plan(chunks, parts, decoding, 1, NEVER, until)

    def _plan_decoding(self) -> Plan | None:
        """As many steps of the running requests as nothing here can interrupt."""
        of = self._decoding
        most = min(int(of.remaining.min()), self._options.max_steps_at_once)
        of.merge(of.requests)
        of.owed_ps += of.decide()
        if of.manager is not None:
            most = min(most, max(1, of.due - of.undecided))
        most = self._make_room(most)
        if most == 0:
            return None
        wake = self._loading[0][0] if self._loading else NEVER
        if self._seats() > 0 and not self._waiting:
            wake = min(wake, self.next_event())
        return Plan([], [], True, most, wake, 0)

    def _take_blocks(self, steps: int) -> None:
        """Take the blocks that `steps` more tokens of every running request need."""
        contexts, size = self._decoding.contexts, self._blocks.size
        before, after = -(-(contexts - 1) // size), -(-(contexts - 1 + steps) // size)
        self._blocks.take(int(np.add.reduce(after - before)))

    def _finish(self, positions: list[int]) -> None:
        """Let the running requests at `positions`, which have all their tokens, leave."""
        if not positions:
            return
        of = self._decoding
        for position in positions:
            request = of.requests[position]
            self.outcome.finished_ps[request] = self.now
            self._give(request, self._blocks.of(int(of.contexts[position]) - 1))
        self._remove(positions)
        self._sample()

    def _remove(self, positions: list[int]) -> None:
        of = self._decoding
        for position in positions:
            request = of.requests[position]
            self._generated[request] = self._output[request] - int(of.remaining[position])
            self._last_token[request] = self.now
        of.remove(positions)

    def _first_token(self, request: int) -> None:
        """A prompt is complete: it yields a token, and the request decodes from now on."""
        self._prefilling.remove(request)
        self._keep_prefix(request)
        context = self._tokens(request) + 1
        self._generated[request] += 1
        if self.outcome.first_token_ps[request] < 0:
            self.outcome.first_token_ps[request] = self.now
        elif request in self._pausing:
            self.outcome.pauses_ps.append(self.now - self._last_token[request])
            self._pausing.discard(request)
        left = self._output[request] - self._generated[request]
        # Admission took a block for the token just made; decoding counts it from its context.
        self._blocks.give(self._blocks.of(context) - self._blocks.of(context - 1))
        if left == 0:
            self.outcome.finished_ps[request] = self.now
            self._give(request, self._blocks.of(context - 1))
            return
        self._decoding.join(request, context, left)

    def _sample(self) -> None:
        self.take_arrivals()
        waiting = len(self._waiting) + len(self._loading) + len(self._prefilling)
        self.outcome.samples.append((self.now, len(self._decoding), waiting, self._blocks.used))
