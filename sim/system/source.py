"""Where requests come from: a named workload, a workload file, or a recorded trace."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from plora.hw.defs.errors import UserError
from plora.sim.system.work import IntArray
from plora.sim.workload.named import Workload, load_workloads
from plora.sim.workload.popularity import Popularity
from plora.sim.workload.requests import NO_ADAPTER, PAPER_RANKS, Requests, adapter_ranks
from plora.sim.workload.traces import read_trace

DEFAULT_BATCH = 32
DEFAULT_ADAPTERS = 1000
"""Adapters over which a trace without adapter identities is spread."""

BASE_ONLY = "none: every request is for the base model"

TRACE_SUFFIXES = (".csv", ".jsonl", ".json")


@dataclass(frozen=True)
class Source:
    """Requests of one workload.

    Attributes:
        name: workload or file name.
        workload: the named workload, or None for a trace.
        trace: the trace, or None.
        adapters: their number.
        batch_size: of a decode step unless the run says otherwise.
        ranks: ranks that adapters are drawn from.
        base_only: whether every request is for the base model.
    """

    name: str
    workload: Workload | None
    trace: Requests | None
    adapters: int
    batch_size: int
    ranks: tuple[int, ...]
    base_only: bool = False

    @property
    def origin(self) -> dict[str, str]:
        """Where arrivals, lengths and adapters come from."""
        if self.base_only:
            return {"adapters": BASE_ONLY}
        if self.workload is not None:
            return {"adapters": f"law: {self.workload.popularity.describe()}"}
        assert self.trace is not None
        return dict(self.trace.metadata)

    def requests(self, count: int, seed: int, rate_per_s: float = float("inf"), cv: float = 1.0) -> Requests:
        """Return `count` requests; a trace gives its first ones with their own arrivals.

        Raises:
            UserError: the trace has fewer.
        """
        if self.workload is not None:
            return self.without_adapters(self.workload.requests(count, rate_per_s, cv=cv, seed=seed))
        assert self.trace is not None
        if len(self.trace) < count:
            raise UserError(f"trace {self.name} has {len(self.trace)} requests, fewer than the {count} asked for")
        found = self.trace.part(slice(0, count))
        return self.without_adapters(found)

    def without_adapters(self, requests: Requests) -> Requests:
        """Return `requests`, all for the base model if that is what this source is about."""
        if not self.base_only:
            return requests
        none = np.full(len(requests), NO_ADAPTER, dtype=np.int32)
        metadata = {**requests.metadata, "adapters": BASE_ONLY}
        return replace(requests, adapter=none, adapters=0, metadata=metadata)

    def adapter_ranks(self, seed: int) -> IntArray:
        """Return the rank of each adapter."""
        return np.asarray(adapter_ranks(self.adapters, seed, self.ranks), dtype=np.int64)


def _with_adapters(workload: Workload, adapters: int) -> Workload:
    law = workload.popularity
    if law.law == "measured":
        raise UserError(f"workload {workload.name} takes its adapters from a trace; their number cannot be changed")
    if law.law == "hot-set":
        if adapters < 2:
            raise UserError(f"workload {workload.name} has hot and other adapters; give at least 2")
        law = replace(law, hot_adapters=min(law.hot_adapters, adapters - 1))
    return replace(workload, popularity=replace(law, adapters=adapters))


def load_source(name: str, num_adapters: int | None, seed: int, popularity: Popularity | None = None) -> Source:
    """Find a workload by name, or read a workload file (.toml) or a trace (.csv, .jsonl).

    A trace without adapter identities is spread evenly over `num_adapters` adapters; 0 serves the base
    model alone. `popularity` is another law than the workload's own, or than evenly.

    Raises:
        UserError: unknown name, unreadable file, or a number of adapters that does not go with it.
    """
    if num_adapters is not None and not 0 <= num_adapters <= 1_000_000:
        raise UserError(f"number of adapters is {num_adapters}; give 0 (base model alone) to 1000000")
    if num_adapters == 0:
        return replace(load_source(name, None, seed), adapters=0, base_only=True)
    path = Path(name)
    if path.suffix in TRACE_SUFFIXES:
        trace = read_trace(path, seed=seed)
        if trace.adapters == 0:
            law = popularity or Popularity("uniform", num_adapters or DEFAULT_ADAPTERS)
            trace = read_trace(path, popularity=law, seed=seed)
        elif popularity is not None:
            raise UserError(f"trace {name} has adapter identities of its own; leave the popularity law out")
        elif num_adapters is not None and trace.adapters != num_adapters:
            raise UserError(f"trace {name} names {trace.adapters} adapters; their number cannot be changed")
        return Source(path.name, None, trace, trace.adapters, DEFAULT_BATCH, PAPER_RANKS)
    if path.suffix == ".toml":
        known = load_workloads(path)
        own = [key for key in known if key not in load_workloads()]
        if len(own) != 1:
            raise UserError(f"{name}: holds {len(own)} new workloads; give exactly one, under a name of its own")
        workload = known[own[0]]
    else:
        known = load_workloads()
        if name not in known:
            raise UserError(
                f"unknown workload {name!r}; known: {', '.join(sorted(known))}, or a .toml, .csv or .jsonl file"
            )
        workload = known[name]
    if popularity is not None:
        count = num_adapters if num_adapters is not None else workload.adapters
        workload = replace(workload, popularity=replace(popularity, adapters=count))
    elif num_adapters is not None:
        workload = _with_adapters(workload, num_adapters)
    return Source(name, workload, None, workload.adapters, workload.batch_size, workload.ranks)
