"""The compiled bench (bench.py behind the C++ in cpp/) as numpy functions, and its stimuli and expectations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from plora.hw.build.verilator import build_library
from plora.hw.build.verilog import cached_verilog
from plora.hw.defs.config import NdpConfig
from plora.hw.defs.queue import NUMERIC_NAN, NUMERIC_OVERFLOW
from plora.hw.rtl.pe.drain import score_layout
from plora.hw.rtl.sfu.exp2_fraction import Exp2Fraction
from plora.hw.rtl.sfu.p_scaler import PScaler
from plora.hw.rtl.sfu.row_state import RowState as RowStateUnit
from plora.hw.rtl.sfu.row_state import state_layout
from plora.hw.rtl.sfu.sfu import Sfu, unit_layout, weights_layout
from plora.sim.golden.numerics import Scores
from plora.sim.golden.softmax import RowState, softmax_tile
from tests.hw.rtl.pe.compiled import Array, Compiled
from tests.hw.rtl.sfu.bench import CONFIGS, ROWS, TAG_BITS

CPP = Path(__file__).resolve().parent / "cpp"


def build() -> Path:
    """Return the path of the library of `SfuUnits`, built where its sources changed."""
    verilog = cached_verilog("tests.hw.rtl.sfu.bench:SfuBench", name="sfu_bench")
    return build_library(verilog, top="sfu_bench", harness=CPP)


def words(values: Sequence[int], bits: int) -> Array:
    """Return integers of ``bits`` bits as rows of 32-bit words."""
    size = 4 * max(1, -(-bits // 32))
    return np.frombuffer(b"".join(value.to_bytes(size, "little") for value in values), np.uint32).copy()


def integers(rows: Array, count: int) -> list[int]:
    """Return the rows of a flat array of 32-bit words as integers."""
    return [int.from_bytes(row.tobytes(), "little") for row in rows.reshape(count, -1)]


@dataclass(frozen=True)
class Unit:
    """What the SFU is given in one cycle. Scores are `score_layout` integers, one for each lane."""

    scores: tuple[int, ...]
    overflow: int
    exists: int
    row: int
    begin: bool
    scale: int
    """FP32 bits."""
    tag: int
    valid: bool = True

    def bits(self, config: NdpConfig) -> int:
        """Return it as a `unit_layout`."""
        layout = unit_layout(config, ROWS, TAG_BITS)
        scores = sum(score << index * score_layout.size for index, score in enumerate(self.scores))
        fields = {
            "scores": scores, "overflow": self.overflow, "exists": self.exists, "row": self.row,
            "begin": self.begin, "scale": self.scale, "tag": self.tag,
        }  # fmt: skip
        return sum(int(value) << layout[name].offset for name, value in fields.items())


@dataclass(frozen=True)
class State:
    """A `state_layout`."""

    anchor: int
    shift: int
    total: int
    nan: bool

    @classmethod
    def from_bits(cls, bits: int) -> State:
        """Return the fields of a `state_layout` integer."""
        parts = {name: bits >> f.offset & (1 << f.width) - 1 for name, f in state_layout}
        anchor = parts["anchor"] - ((parts["anchor"] >> 15) << 16)
        return cls(anchor, parts["shift"], parts["total"], bool(parts["nan"]))


@dataclass(frozen=True)
class Answer:
    """What the SFU makes of a unit."""

    p: tuple[int, ...]
    numeric: int
    anchor: int
    tag: int

    @classmethod
    def from_bits(cls, bits: int, config: NdpConfig) -> Answer:
        """Return the fields of a `weights_layout` integer."""
        layout = weights_layout(config, TAG_BITS)
        parts = {name: bits >> f.offset & (1 << f.width) - 1 for name, f in layout}
        p = tuple(parts["p"] >> 16 * lane & 0xFFFF for lane in range(config.channels))
        return cls(p, parts["numeric"], parts["anchor"] - ((parts["anchor"] >> 15) << 16), parts["tag"])


def score_bits(scores: Scores, index: int) -> int:
    """Return one score as a `score_layout` integer."""
    names = ("mantissa", "exponent", "negative", "infinite", "nan")
    return sum(int(getattr(scores, name)[index]) << score_layout[name].offset for name in names)


def scores_of(units: Sequence[Unit]) -> Scores:
    """Return the scores of units as arrays (units, lanes); lanes without one as a masked token."""
    raw = np.array([unit.scores for unit in units], np.int64)
    parts = {name: raw >> f.offset & (1 << f.width) - 1 for name, f in score_layout}
    lanes = np.arange(raw.shape[1])
    exists, overflow = (
        np.array([getattr(unit, name) for unit in units])[:, None] >> lanes & 1 == 1 for name in ("exists", "overflow")
    )
    infinite, nan = parts["infinite"] == 1, parts["nan"] == 1
    infinite = ~exists | (infinite & ~nan)
    return Scores(
        parts["mantissa"],
        parts["exponent"],
        (parts["negative"] == 1) | ~exists,
        infinite,
        nan & exists,
        overflow & exists & (infinite | nan),
    )


@dataclass
class Model:
    """The golden SFU, unit by unit."""

    config: NdpConfig
    states: dict[int, RowState] = field(default_factory=dict)

    def answer(self, unit: Unit) -> Answer:
        """Return what becomes of ``unit``, and remember its row."""
        state = RowState.start(1) if unit.begin else self.states[unit.row]
        scale = float(np.array(unit.scale, np.uint32).view(np.float32))
        weights, self.states[unit.row] = softmax_tile(scores_of([unit]), scale, state, self.config)
        numeric = NUMERIC_NAN * bool(weights.nan.any()) | NUMERIC_OVERFLOW * bool(weights.overflow.any())
        return Answer(tuple(weights.p[0].view(np.uint16).tolist()), numeric, int(weights.anchors[0, 0]), unit.tag)

    def state(self, row: int) -> State:
        """Return what is known of a row."""
        state = self.states[row]
        return State(int(state.anchor[0]), int(state.shift[0]), int(state.total[0]), bool(state.nan[0]))


@dataclass(frozen=True)
class Run:
    """What an SFU did in every cycle."""

    valid: list[bool]
    weights: list[int]
    busy: list[bool]
    states: list[int]


class SfuUnits(Compiled):
    """Exp2 unit, SFUs and p scalers, see cpp."""

    def __init__(self, library: Path) -> None:
        super().__init__(library, "sfu")

    def exp2(self, fractions: Array) -> Array:
        """Return the value of every fraction."""
        padded = np.append(fractions, [0] * Exp2Fraction.LATENCY).astype(np.uint32)
        values = np.empty(padded.size, np.uint32)
        self._call("exp2", padded.size, padded, values)
        return values[Exp2Fraction.LATENCY :]

    def run(self, name: str, units: Sequence[Unit], read_rows: Sequence[int]) -> Run:
        """Give one unit a cycle to the SFU ``name`` and ask for one row's state."""
        config, count = CONFIGS[name], len(units)
        layouts = unit_layout(config, ROWS, TAG_BITS), weights_layout(config, TAG_BITS), state_layout
        given = words([unit.bits(config) for unit in units], layouts[0].size)
        weights, states = (np.empty(count * -(-layout.size // 32), np.uint32) for layout in layouts[1:])
        weights_valid, busy = (np.empty(count, np.uint32) for _ in range(2))
        valid = np.array([unit.valid for unit in units], np.uint32)
        rows = np.array(read_rows, np.uint32)
        self._call(f"{name}_unit", count, valid, given, rows, weights_valid, weights, busy, states)
        return Run(
            (weights_valid == 1).tolist(), integers(weights, count), (busy != 0).tolist(), integers(states, count)
        )

    def scaler(self, name: str, p: Array, anchors: Array, last: Array, stall: float = 0.0) -> Array:
        """Return p' of p (beats, 16) with anchors (beats, units) and last (beats,).

        In a part ``stall`` of the cycles the scaler stands still, with other values at its ports.
        """
        latency, count = PScaler.LATENCY, len(p)
        rng = np.random.default_rng(count)
        enabled = np.repeat(True, count + latency)
        if stall:
            enabled = rng.random(4 * len(enabled)) >= stall
            enabled = enabled[: np.flatnonzero(np.cumsum(enabled) == count + latency)[0] + 1]
        beats = np.minimum(np.cumsum(enabled) - 1, count - 1)
        beats = np.where(enabled, beats, rng.integers(count, size=len(beats)))
        p, anchors, last = (np.concatenate([part[beats], part[:1]]) for part in (p, anchors, last))
        # A single anchor has a word of its own, as its port has.
        raw = np.ascontiguousarray(anchors.astype(np.int16).view(np.uint16))
        raw = raw.astype(np.uint32) if raw.shape[1] == 1 else raw
        scaled = np.empty((len(p), 16), np.uint16)
        self._call(
            f"{name}_scaler",
            *(len(p), np.ascontiguousarray(p, np.uint16), raw),
            *(np.ascontiguousarray(last.astype(np.int16).view(np.uint16), np.uint32),),
            *(np.append(enabled, False).astype(np.uint32), scaled),
        )
        return scaled[np.flatnonzero(enabled)[latency - 1 : count + latency - 1] + 1]


def check_run(name: str, units: Sequence[Unit], run: Run, read_rows: Sequence[int]) -> Model:
    """Compare a run with the golden SFU: what it gives and when, and states where nothing is on its way."""
    config = CONFIGS[name]
    model = Model(config)
    expected = {index + Sfu.LATENCY: model.answer(unit) for index, unit in enumerate(units) if unit.valid}
    for cycle, valid in enumerate(run.valid):
        assert valid == (cycle in expected), f"cycle {cycle}: p {'without a unit' if valid else 'missing'}"
        if valid:
            got = Answer.from_bits(run.weights[cycle], config)
            assert got == expected[cycle], f"unit of cycle {cycle - Sfu.LATENCY}: {units[cycle - Sfu.LATENCY]}"
    for cycle in range(len(units) - RowStateUnit.READ_LATENCY):
        row = read_rows[cycle]
        begun = any(unit.valid and unit.row == row for unit in units[:cycle])
        if begun and not run.busy[cycle] and not any(unit.valid for unit in units[cycle:]):
            assert State.from_bits(run.states[cycle + RowStateUnit.READ_LATENCY]) == model.state(row), f"row {row}"
    return model
