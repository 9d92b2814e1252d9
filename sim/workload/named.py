"""The named workloads of the paper's Table VII, and those of a user's file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import msgspec

from plora.hw.defs.errors import UserError
from plora.sim.datafile import Fact, Number, checked, fact, pick, read_table
from plora.sim.workload.popularity import Popularity
from plora.sim.workload.requests import PAPER_RANKS, Requests, synthetic

_WORKLOADS = Path(__file__).parent / "data" / "workloads.toml"

_TAGS = {"paper": "P", "fitted": "F", "recalled": "R", "choice": "C"}


class _WorkloadData(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One table of a workload file."""

    adapters: Number
    batch_size: Number
    input_tokens: Number
    output_tokens: Number
    popularity: str
    input_cv: Number = 0.0
    output_cv: Number = 0.0
    alpha: float = 1.0
    hot_adapters: int = 0
    hot_share: float = 0.0
    shares: tuple[float, ...] = ()
    ranks: tuple[int, ...] = PAPER_RANKS
    popularity_source: str = "given without a source"
    description: str = ""


@dataclass(frozen=True)
class Workload:
    """A workload: who asks, for how long, in what batch.

    `context_tokens`, the mean context of a decode step, is the prompt and half of the output.
    """

    name: str
    description: str
    batch_size: int
    input_tokens: float
    output_tokens: float
    input_cv: float
    output_cv: float
    popularity: Popularity
    ranks: tuple[int, ...]
    facts: Mapping[str, Fact] = field(default_factory=dict, compare=False)

    @property
    def adapters(self) -> int:
        """Number of adapters."""
        return self.popularity.adapters

    @property
    def context_tokens(self) -> float:
        """Mean context over a request's decode."""
        return self.input_tokens + self.output_tokens / 2

    @property
    def mean_rank(self) -> float:
        """Mean adapter rank."""
        return sum(self.ranks) / len(self.ranks)

    @property
    def tags(self) -> dict[str, str]:
        """What each value rests on: P prose of the paper, F fitted, R recalled, C choice, or the status."""
        return {key: _TAGS.get(f.status, f.status) for key, f in self.facts.items()}

    def requests(self, count: int, rate_per_s: float, *, cv: float = 1.0, seed: int = 0) -> Requests:
        """`count` requests of this workload arriving at `rate_per_s`."""
        return synthetic(
            count=count,
            rate_per_s=rate_per_s,
            popularity=self.popularity,
            input_tokens=self.input_tokens,
            output_tokens=self.output_tokens,
            input_cv=self.input_cv,
            output_cv=self.output_cv,
            cv=cv,
            seed=seed,
        )


def _whole(number: Number, where: str) -> int:
    value = checked(number, where, minimum=1)
    if value != int(value):
        raise UserError(f"{where} is {value:g}; give a whole number")
    return int(value)


def _build(name: str, data: _WorkloadData, where: str) -> Workload:
    if not data.ranks or min(data.ranks) < 1:
        raise UserError(f"{where}: ranks is {list(data.ranks)}; give at least one positive integer")
    adapters = _whole(data.adapters, f"{where}: adapters")
    try:
        popularity = Popularity(
            law=data.popularity,
            adapters=adapters,
            alpha=data.alpha,
            hot_adapters=data.hot_adapters,
            hot_share=data.hot_share,
            shares=data.shares,
        )
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    keys = ("adapters", "batch_size", "input_tokens", "output_tokens", "input_cv", "output_cv")
    return Workload(
        name=name,
        description=data.description,
        batch_size=_whole(data.batch_size, f"{where}: batch_size"),
        input_tokens=checked(data.input_tokens, f"{where}: input_tokens", minimum=1),
        output_tokens=checked(data.output_tokens, f"{where}: output_tokens", minimum=1),
        input_cv=checked(data.input_cv, f"{where}: input_cv"),
        output_cv=checked(data.output_cv, f"{where}: output_cv"),
        popularity=popularity,
        ranks=data.ranks,
        facts={k: fact(getattr(data, k)) for k in keys},
    )


@cache
def _bundled() -> dict[str, Workload]:
    table = read_table(_WORKLOADS, _WorkloadData)
    return {name: _build(name, data, f"workloads.toml: [{name}]") for name, data in table.items()}


def load_workloads(path: Path | None = None) -> dict[str, Workload]:
    """The bundled workloads, and those of `path` over them; raises :class:`UserError` for bad data."""
    own = read_table(path, _WorkloadData) if path is not None else {}
    return _bundled() | {name: _build(name, data, f"{path}: [{name}]") for name, data in own.items()}


def load_workload(name: str, path: Path | None = None) -> Workload:
    """One workload by name; raises :class:`UserError` that lists the known names."""
    return pick(name, load_workloads(path), "workload")
