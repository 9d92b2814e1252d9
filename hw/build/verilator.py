"""Builds a design's Verilog and the C++ test bench into one shared library, once per content."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TextIO

from plora.hw.build.cache import LOG, build_root, cached, content_key
from plora.hw.build.toolchain import find_cxx, find_make, find_verilator
from plora.hw.defs.errors import UserError

HARNESS = Path(__file__).resolve().parent.parent / "cosim" / "cpp"
PREFIX = "Vndp"
LIBRARY = "libndp.so"

TRACE_FORMATS = ("vcd", "fst")

_VERILATOR_FLAGS = (
    "--cc",
    "-O3",
    "--assert",
    "--no-timing",
    # Registers that the design does not initialise start with seeded random values.
    *("--x-initial", "unique"),
    *("--x-assign", "fast"),
    # Compilers take more than linear time over long functions: this halves the time to build the small
    # device (77 to 40 CPU seconds) and costs a tenth of its speed.
    *("--output-split-cfuncs", "300"),
    # The Verilog is generated: what lint says about it is about the generator's style.
    "-Wno-lint",
)
_CXX_FLAGS = ("-fPIC", "-std=gnu++17", "-DVL_USER_STOP", "-DVL_USER_FATAL")
_OPTIMIZE_DESIGN = "-O2"
_OPTIMIZE_WAVES = "-O0"
"""Of designs with waves: what records them is most of the C++, and few cycles are ever looked at."""
_OPTIMIZE_RUNTIME = "-O1"

# The smallest design, to get Verilator's makefile for its runtime.
_EMPTY_DESIGN = "module empty(input clk);\nendmodule\n"


def build_library(
    verilog: str,
    *,
    top: str,
    channels: int = 0,
    trace: str | None = None,
    name: str | None = None,
    harness: Path = HARNESS,
    blocks: Sequence[str] = (),
    untraced: Sequence[str] = (),
) -> Path:
    """Return the path of a shared library with the design ``verilog`` inside a C++ test bench.

    Args:
        verilog: text of the design.
        top: its top module, with the outer ports of the device.
        channels: number of its ``m_axi`` ports, ``NDP_CHANNELS`` in C++.
        trace: compile waves in, ``"vcd"`` or ``"fst"`` (slower to build and to run; FST needs zlib's headers).
        name: what to call the library; default ``top``.
        harness: folder of the test bench, with a file ``harness.cpp``; default that of `plora.hw.cosim`.
        blocks: modules that are compiled once and called, instead of being flattened into the design: less
            to compile where one has many instances, slower to run.
        untraced: modules whose inner signals are left out of waves; their ports show in the modules that use them.

    Raises:
        UserError: a tool is missing, or one of them failed; the message names the log.
    """
    build = _Build(trace)
    untraced_lines = []
    if trace:
        untraced_lines = [f'tracing_off -file "*/{top}.v" -lines {a}-{b}' for a, b in _module_lines(verilog, untraced)]
    sources = sorted(path for path in harness.rglob("*") if path.is_file())
    files = [path.read_bytes() for path in sources]
    key = content_key(verilog, *files, f"{top} {channels} {blocks}", build.identity, *untraced_lines)
    settings = [*[f'hier_block -module "{block}"' for block in blocks], *untraced_lines]
    label = (name or top) + (f"-{trace}" if trace else "")

    def fill(work: Path) -> None:
        runtime = build.runtime()
        (work / f"{top}.v").write_text(verilog)
        with (work / "build.log").open("w") as log:
            archives = [f"lib{PREFIX}.a", *[f"V{block}/lib{block}.a" for block in blocks]]
            objects = build.verilate(work, top, archives, log, settings)
            build.link(work, objects, [objects / name for name in archives] + [runtime], harness, channels, log)
        shutil.rmtree(objects)

    folder = _cached(f"lib-{label}", key, fill)
    return folder / LIBRARY


def _cached(name: str, key: str, fill: Callable[[Path], None]) -> Path:
    try:
        return cached(name, key, fill)
    except subprocess.CalledProcessError as error:
        log = build_root() / f"{name}-{key}.log"
        tool = Path(str(error.cmd[0])).name
        raise UserError(f"building {name} failed in {tool} (status {error.returncode}): see {log}") from error


def _module_lines(verilog: str, modules: Sequence[str]) -> list[tuple[int, int]]:
    """First and last line of each of ``modules``."""
    lines = verilog.splitlines()
    found = []
    for first, line in enumerate(lines, 1):
        if (name := re.match(r"module (\w+)", line)) and name[1] in modules:
            found.append((first, next(n for n in range(first, len(lines) + 1) if lines[n - 1].startswith("endmodule"))))
    return found


class _Build:
    """The tools and flags of one kind of build.

    Attributes:
        identity: text that changes whenever the tools or flags do.
    """

    def __init__(self, trace: str | None) -> None:
        if trace not in (None, *TRACE_FORMATS):
            raise ValueError(f"trace must be one of {TRACE_FORMATS}, not {trace!r}")
        self.verilator, (self.cxx, cxx_version), self.make = find_verilator(), find_cxx(), find_make()
        self.trace = trace
        self.optimize = _OPTIMIZE_WAVES if trace else _OPTIMIZE_DESIGN
        self.cxx_flags = [*_CXX_FLAGS]
        if "clang" not in cxx_version:
            # GCC's unique symbols would be shared by all libraries in the process, whatever their design.
            self.cxx_flags.append("-fno-gnu-unique")
        if trace == "fst":
            self.cxx_flags.append(f"-I{HARNESS / 'shim'}")
        self.verilator_flags = [*_VERILATOR_FLAGS, *([f"--trace-{trace}"] if trace else [])]
        self.identity = " ".join(
            [
                *(self.verilator.origin, self.verilator.version, self.cxx, cxx_version),
                *self.verilator_flags,
                *self.cxx_flags,
                *(self.optimize, _OPTIMIZE_RUNTIME),
            ]
        )

    def runtime(self) -> Path:
        """Return Verilator's own runtime, compiled once for all designs (it takes longer than a small design)."""

        def fill(work: Path) -> None:
            (work / "empty.v").write_text(_EMPTY_DESIGN)
            with (work / "build.log").open("w") as log:
                objects = self.verilate(work, "empty", ["libverilated.a"], log)
            (objects / "libverilated.a").rename(work / "libverilated.a")
            shutil.rmtree(objects)

        name = f"runtime-{self.trace}" if self.trace else "runtime"
        return _cached(name, content_key(_EMPTY_DESIGN, self.identity), fill) / "libverilated.a"

    def verilate(self, work: Path, top: str, targets: Sequence[str], log: TextIO, settings: Sequence[str] = ()) -> Path:
        """Translate ``work/TOP.v`` to C++, make ``targets`` of it, and return their folder.

        ``settings``: lines of a Verilator control file.
        """
        if any(character.isspace() for character in str(work)):
            raise UserError(f"make cannot build in a folder with a space in its name: set PLORA_BUILD_DIR (now {work})")
        LOG.info("  translating %s with Verilator", top)
        objects = work / "objects"
        control = work / "settings.vlt"
        control.write_text("\n".join(["`verilator_config", *settings, ""]))
        self._run(
            [
                str(self.verilator.program),
                *self.verilator_flags,
                *("--top-module", top),
                *("--prefix", PREFIX),
                *("--Mdir", str(objects)),
                *("-CFLAGS", " ".join(self.cxx_flags)),
                *(["--hierarchical"] if any(line.startswith("hier_block") for line in settings) else []),
                str(control),
                str(work / f"{top}.v"),
            ],
            log,
        )
        LOG.info("  compiling its C++")
        variables = {
            **self.verilator.make_variables(self.cxx),
            "OPT_FAST": self.optimize,
            "OPT_GLOBAL": _OPTIMIZE_RUNTIME,
        }
        self._run(
            [
                self.make,
                f"-j{min(os.cpu_count() or 1, 4)}",
                *("-C", str(objects)),
                *("-f", f"{PREFIX}.mk"),
                *[f"{variable}={value}" for variable, value in variables.items()],
                *targets,
            ],
            log,
        )
        return objects

    def link(
        self, work: Path, objects: Path, archives: Sequence[Path], harness: Path, channels: int, log: TextIO
    ) -> None:
        """Compile the test bench against the design in ``objects`` and link all to ``work/libndp.so``."""
        include = self._include(objects)
        self._run(
            [
                self.cxx,
                *self.cxx_flags,
                self.optimize,
                "-Wall",
                f"-DNDP_CHANNELS={channels}",
                *([f"-DNDP_TRACE_{self.trace.upper()}"] if self.trace else []),
                *("-isystem", str(objects), "-isystem", include, "-isystem", f"{include}/vltstd"),
                *("-shared", "-o", str(work / LIBRARY)),
                str(harness / "harness.cpp"),
                *[str(archive) for archive in archives],
                "-pthread",
                *(["-lz"] if self.trace == "fst" else []),
            ],
            log,
        )

    def _include(self, objects: Path) -> str:
        """Return Verilator's folder of C++ headers; a system's Verilator names its root in what it generates."""
        if self.verilator.root is not None:
            return str(self.verilator.root / "include")
        for line in (objects / f"{PREFIX}.mk").read_text().splitlines():
            if line.startswith("VERILATOR_ROOT ="):
                return line.split("=", 1)[1].strip() + "/include"
        raise RuntimeError(f"{objects / PREFIX}.mk does not say where Verilator's headers are")

    def _run(self, command: Sequence[str], log: TextIO) -> None:
        print(" ".join(command), file=log, flush=True)
        subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, env=self.verilator.environment(), check=True)
