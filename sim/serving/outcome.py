"""What happened in a serving run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from plora.sim.system.work import IntArray


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
        prompt_tokens: tokens of prompts that were computed.
        prefix_tokens: tokens found in the prefix cache, of `asked_tokens` that were looked up.
        duration_ps: end of the last step.
        loaded_bytes: adapters that came over a link into HBM on demand; `ahead_bytes` ahead of demand.
        kv_blocks: their number, or None if unlimited; `peak_blocks` in use at most.
        adapter_steps: requests' steps by strategy of their adapter.
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
    prefix_tokens: int = 0
    asked_tokens: int = 0
    duration_ps: int = 0
    loaded_bytes: float = 0.0
    ahead_bytes: float = 0.0
    kv_blocks: int | None = None
    block_tokens: int = 0
    peak_blocks: int = 0
    evictions: int = 0
    adapter_steps: dict[str, int] = field(default_factory=dict)


def nothing_happened(count: int) -> Outcome:
    """Return the outcome of `count` requests before anything has happened."""
    none = np.full(count, -1, dtype=np.int64)
    return Outcome(none, none.copy(), none.copy(), np.zeros(count, dtype=np.int64))


_SUMS = (
    "prompt_steps",
    "decode_steps",
    "prompt_tokens",
    "prefix_tokens",
    "asked_tokens",
    "loaded_bytes",
    "ahead_bytes",
    "peak_blocks",
    "evictions",
)


def merged(outcomes: Sequence[Outcome], places: Sequence[slice], count: int) -> Outcome:
    """Return what replicas did together; request i of replica r is number ``places[r]`` gives of `count`."""
    if len(outcomes) == 1:
        return outcomes[0]
    whole = nothing_happened(count)
    whole.block_tokens = outcomes[0].block_tokens
    for outcome, place in zip(outcomes, places, strict=True):
        for name in ("admitted_ps", "first_token_ps", "finished_ps", "preemptions"):
            getattr(whole, name)[place] = getattr(outcome, name)
        for name in ("step_ps", "step_tokens", "pauses_ps"):
            getattr(whole, name).extend(getattr(outcome, name))
        for name in _SUMS:
            setattr(whole, name, getattr(whole, name) + getattr(outcome, name))
        for name, steps in outcome.adapter_steps.items():
            whole.adapter_steps[name] = whole.adapter_steps.get(name, 0) + steps
    whole.duration_ps = max(outcome.duration_ps for outcome in outcomes)
    known = [outcome.kv_blocks for outcome in outcomes if outcome.kv_blocks is not None]
    whole.kv_blocks = sum(known) if len(known) == len(outcomes) else None
    whole.samples = _together([outcome.samples for outcome in outcomes])
    return whole


def _together(of: Sequence[list[tuple[int, int, int, int]]]) -> list[tuple[int, int, int, int]]:
    """Sum the replicas' samples, each as it was last seen."""
    events = sorted((sample[0], replica, sample[1:]) for replica, samples in enumerate(of) for sample in samples)
    last = [(0, 0, 0)] * len(of)
    found = []
    for time, replica, seen in events:
        last[replica] = seen
        running, waiting, blocks = (sum(column) for column in zip(*last, strict=True))
        found.append((time, running, waiting, blocks))
    return found
