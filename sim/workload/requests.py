"""Requests as columns, generated or read, and the ranks of the adapters that they ask for."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from plora.hw.defs.errors import UserError
from plora.sim.workload.popularity import FloatArray, IntArray, Popularity

PAPER_RANKS = (8, 16, 32, 64, 128)
"""Adapter ranks, drawn evenly (the paper, section VII-A); mean 49.6."""

NO_ADAPTER = -1
"""Adapter of a request to the base model."""

_STREAMS = {"arrivals": 0, "input": 1, "output": 2, "adapters": 3, "ranks": 4}


def stream(seed: int, purpose: str) -> np.random.Generator:
    """A generator of its own for each purpose, so that changing one leaves the others as they were."""
    if seed < 0:
        raise UserError(f"seed is {seed}; give an integer of at least 0")
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, _STREAMS[purpose]])))


@dataclass(frozen=True)
class Requests:
    """Requests in order of arrival, one array element each.

    `arrival_s` starts at 0; `adapter` is an index or `NO_ADAPTER`. `prefix_blocks`, if a trace has
    them, are hashes of consecutive blocks of `prefix_block_tokens` prompt tokens, request i owning
    ``prefix_blocks[prefix_offsets[i]:prefix_offsets[i + 1]]``. `metadata` says where arrivals,
    lengths and adapters are from; it belongs in every result.
    """

    arrival_s: FloatArray
    input_tokens: IntArray
    output_tokens: IntArray
    adapter: IntArray
    adapters: int
    metadata: Mapping[str, str] = field(default_factory=dict)
    prefix_blocks: IntArray | None = None
    prefix_offsets: IntArray | None = None
    prefix_block_tokens: int = 0

    def __len__(self) -> int:
        return len(self.arrival_s)

    @property
    def total_tokens(self) -> int:
        """Prompt and output tokens of all requests."""
        return int(self.input_tokens.sum(dtype=np.int64) + self.output_tokens.sum(dtype=np.int64))

    def part(self, place: slice) -> Requests:
        """Return the requests at `place`, prefixes included."""
        blocks, offsets = self.prefix_blocks, self.prefix_offsets
        if blocks is not None and offsets is not None:
            bounds = list(zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True))[place]
            pieces = [blocks[first:last] for first, last in bounds]
            blocks = np.concatenate(pieces) if pieces else blocks[:0]
            offsets = np.cumsum([0, *(len(piece) for piece in pieces)]).astype(offsets.dtype)
        return replace(
            self,
            arrival_s=self.arrival_s[place],
            input_tokens=self.input_tokens[place],
            output_tokens=self.output_tokens[place],
            adapter=self.adapter[place],
            prefix_blocks=blocks,
            prefix_offsets=offsets,
        )

    def with_shared_prefix(self, tokens: int, block_tokens: int) -> Requests:
        """Return the requests as if every prompt of more than `tokens` tokens began with the same `tokens`.

        Whole blocks of `block_tokens` of them are known to be alike.
        """
        size = tokens // block_tokens * block_tokens
        if not size:
            return self
        long = self.input_tokens > size
        return replace(
            self,
            metadata={**self.metadata, "prefixes": f"the same {size} tokens begin every longer prompt"},
            prefix_blocks=np.zeros(int(long.sum()), dtype=np.int32),
            prefix_offsets=np.concatenate([[0], np.cumsum(long)]).astype(np.int32),
            prefix_block_tokens=size,
        )

    def to_csv(self) -> str:
        """The requests as ``arrived_at,num_prefill_tokens,num_decode_tokens,lora_id``."""
        rows = zip(
            self.arrival_s.tolist(),
            self.input_tokens.tolist(),
            self.output_tokens.tolist(),
            self.adapter.tolist(),
            strict=True,
        )
        lines = (f"{t!r},{i},{o},{a}" for t, i, o, a in rows)
        return "\n".join(("arrived_at,num_prefill_tokens,num_decode_tokens,lora_id", *lines, ""))


def adapter_ranks(adapters: int, seed: int, choices: Sequence[int] = PAPER_RANKS) -> IntArray:
    """Rank of each adapter (adapters,), drawn evenly from `choices`."""
    if not choices or min(choices) < 1:
        raise UserError(f"adapter ranks {list(choices)!r}; give at least one positive integer")
    return stream(seed, "ranks").choice(np.asarray(choices, dtype=np.int32), adapters)


MOST_CV = 1e6
"""Largest coefficient of variation; the smallest but 0 is its inverse. Beyond, squares leave double precision."""


def _check_cv(name: str, cv: float) -> None:
    if not (cv == 0 or 1 / MOST_CV <= cv <= MOST_CV):
        raise UserError(f"cv of the {name} is {cv:g}; give 0, or a number from {1 / MOST_CV:g} to {MOST_CV:g}")


def gamma_arrivals(rate_per_s: float, cv: float, count: int, seed: int) -> FloatArray:
    """Arrival times in seconds (count,) with gamma intervals of mean 1 / rate and coefficient of variation `cv`.

    cv 1 is Poisson, cv 0 evenly spaced, an infinite rate all at once (as S-LoRA's generator has it,
    the first request comes after the first interval).
    """
    if not rate_per_s > 0:
        raise UserError(f"request rate is {rate_per_s!r} per second; give a positive number")
    _check_cv("arrivals", cv)
    if math.isinf(rate_per_s):
        return np.zeros(count)
    if cv == 0:
        return np.arange(1, count + 1) / rate_per_s
    shape = 1.0 / (cv * cv)
    return np.cumsum(stream(seed, "arrivals").gamma(shape, 1.0 / (rate_per_s * shape), count))


def _lengths(rng: np.random.Generator, mean: float, cv: float, count: int, longest: int) -> IntArray:
    """Log-normal token counts of the given mean and cv, at least 1 and at most `longest`."""
    if cv == 0:
        return np.full(count, max(1, round(mean)), dtype=np.int32)
    sigma2 = math.log1p(cv * cv)
    drawn = rng.lognormal(math.log(mean) - sigma2 / 2, math.sqrt(sigma2), count)
    return np.clip(np.rint(drawn), 1, longest).astype(np.int32)


def synthetic(
    *,
    count: int,
    rate_per_s: float,
    popularity: Popularity,
    input_tokens: float,
    output_tokens: float,
    input_cv: float = 0.0,
    output_cv: float = 0.0,
    cv: float = 1.0,
    longest: int = 32768,
    seed: int = 0,
) -> Requests:
    """`count` requests with gamma arrivals, log-normal lengths and a popularity law. Same seed, same bytes."""
    if count < 1:
        raise UserError(f"number of requests is {count}; give at least 1")
    for name, value in (("input", input_tokens), ("output", output_tokens)):
        if not (math.isfinite(value) and value >= 1):
            raise UserError(f"mean {name} length is {value!r} tokens; give at least 1")
    for name, value in (("input", input_cv), ("output", output_cv)):
        _check_cv(f"{name} lengths", value)
    return Requests(
        arrival_s=gamma_arrivals(rate_per_s, cv, count, seed),
        input_tokens=_lengths(stream(seed, "input"), input_tokens, input_cv, count, longest),
        output_tokens=_lengths(stream(seed, "output"), output_tokens, output_cv, count, longest),
        adapter=popularity.draw(stream(seed, "adapters"), count),
        adapters=popularity.adapters,
        metadata={
            "arrivals": f"gamma, {rate_per_s:g} requests/s, cv {cv:g}, seed {seed}",
            "lengths": f"mean {input_tokens:g} in, {output_tokens:g} out, "
            f"cv {input_cv:g} and {output_cv:g}, seed {seed}",
            "adapters": f"law: {popularity.describe()}, seed {seed}",
        },
    )


def slora(
    *,
    adapters: int,
    alpha: float,
    rate_per_s: float,
    cv: float,
    duration_s: float,
    input_range: tuple[int, int],
    output_range: tuple[int, int],
    seed: int = 42,
) -> Requests:
    """S-LoRA's synthetic workload, by its published generator's recipe.

    ``int(rate * duration)`` requests, adapter ``floor(adapters * u)`` with u from a power law of
    exponent `alpha`, lengths uniform over [low, high), gamma intervals. Source: S-LoRA
    benchmarks/trace.py, generate_requests; its random stream is not reproduced, its laws are.
    """
    if not (math.isfinite(duration_s) and duration_s > 0):
        raise UserError(f"duration is {duration_s!r} s; give a positive number")
    if not (math.isfinite(rate_per_s) and rate_per_s > 0):
        raise UserError(f"request rate is {rate_per_s!r} per second; give a positive number")
    count = int(rate_per_s * duration_s)
    if count < 1:
        raise UserError(f"{rate_per_s:g} requests/s for {duration_s:g} s is less than one request; raise one of them")
    for name, (low, high) in (("input", input_range), ("output", output_range)):
        if not 1 <= low < high:
            raise UserError(f"{name} range is [{low}, {high}); give 1 <= low < high tokens")
    popularity = Popularity("power", adapters, alpha=alpha)
    return Requests(
        arrival_s=gamma_arrivals(rate_per_s, cv, count, seed),
        input_tokens=stream(seed, "input").integers(*input_range, count, dtype=np.int32),
        output_tokens=stream(seed, "output").integers(*output_range, count, dtype=np.int32),
        adapter=popularity.draw(stream(seed, "adapters"), count),
        adapters=adapters,
        metadata={
            "arrivals": f"gamma, {rate_per_s:g} requests/s, cv {cv:g}, {duration_s:g} s, seed {seed}",
            "lengths": f"uniform, in {input_range}, out {output_range}, seed {seed}",
            "adapters": f"law: {popularity.describe()}, seed {seed}",
        },
    )
