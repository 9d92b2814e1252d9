"""Compiles the C++ of a model once and opens it: a library under the hash of everything it is made from."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from plora.hw.defs.errors import UserError

_FLAGS = ("-std=c++17", "-O2", "-fPIC", "-shared", "-Wall", "-Wextra")


def _compiler() -> list[str]:
    command = shlex.split(os.environ.get("CXX") or "g++")
    if shutil.which(command[0]) is None:
        raise UserError(f"C++ compiler {command[0]!r} not found: install g++, or set CXX to a C++17 compiler")
    return command


def _folder() -> Path:
    """``PLORA_BUILD_DIR``; ``build/native`` of a checkout; else ``plora`` in the user's cache folder."""
    wanted = os.environ.get("PLORA_BUILD_DIR")
    if wanted:
        return Path(wanted).absolute()
    repository = Path(__file__).resolve().parent.parent
    if (repository / "pyproject.toml").is_file() and os.access(repository, os.W_OK):
        return repository / "build" / "native"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "plora" / "native"


def library_path(name: str, sources: Sequence[Path]) -> Path:
    """Path of the library of ``sources``, of which the first is compiled and the others are included by it.

    Built if it is not there yet; it appears whole or not at all.

    Raises:
        UserError: there is no compiler, it fails, or the folder of build results cannot be written.
    """
    compiler = _compiler()
    digest = hashlib.sha256(repr((compiler, _FLAGS)).encode())
    for source in sources:
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    folder = _folder()
    library = folder / f"{name}-{digest.hexdigest()[:20]}.so"
    if library.exists():
        return library
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=folder, prefix=f".{name}.", suffix=".so")
        os.close(handle)
    except OSError as error:
        raise UserError(f"cannot write {folder}: {error.strerror}; set PLORA_BUILD_DIR to a folder of yours") from None
    try:
        run = subprocess.run(
            [*compiler, *_FLAGS, "-o", temporary, str(sources[0])], capture_output=True, text=True, check=False
        )
        if run.returncode:
            reason = next((line for line in run.stderr.splitlines() if "error" in line), run.stderr.strip()[-200:])
            raise UserError(f"compiling {sources[0].name} with {compiler[0]} failed: {reason}; is it a C++17 compiler?")
        os.replace(temporary, library)
    finally:
        Path(temporary).unlink(missing_ok=True)
    return library


@cache
def open_library(name: str, sources: tuple[Path, ...]) -> ctypes.CDLL:
    """The library of ``sources``, see `library_path`."""
    return ctypes.CDLL(str(library_path(name, sources)))
