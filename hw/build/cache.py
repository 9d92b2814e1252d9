"""A folder of build results, each under the hash of everything it was made from.

A result appears whole or not at all: it is built in a temporary folder that is renamed. Processes
that want the same result wait for the first of them, so a parallel test run builds it once.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from plora.hw.defs.errors import UserError

SOURCES = Path(__file__).resolve().parent.parent
"""The folder of `plora.hw`."""


def build_root() -> Path:
    """Return the folder of build results.

    ``PLORA_BUILD_DIR`` where set; ``build/rtl`` of a checkout; else ``plora`` in the user's cache folder.
    """
    wanted = os.environ.get("PLORA_BUILD_DIR")
    if wanted:
        return Path(wanted).absolute()
    repository = SOURCES.parent
    if (repository / "pyproject.toml").is_file() and os.access(repository, os.W_OK):
        return repository / "build" / "rtl"
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "plora" / "rtl"


def content_key(*parts: str | bytes) -> str:
    """Return a short hash of ``parts``, each with its length, so that no two lists run together."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()[:20]


def sources_key() -> str:
    """Return a hash of every source file of `plora.hw`: RTL generators, definitions and C++."""
    parts: list[str | bytes] = []
    for path in sorted(SOURCES.rglob("*")):
        if path.suffix in (".py", ".v", ".cpp", ".h", ".toml") and path.is_file():
            parts += [str(path.relative_to(SOURCES)), path.read_bytes()]
    return content_key(*parts)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)  # released when the file closes, also if the process dies
        yield


def cached(name: str, key: str, build: Callable[[Path], None]) -> Path:
    """Return the folder of the result ``name`` with content hash ``key``, building it where absent.

    Args:
        name: what it is, for people who look into the folder.
        key: hash of all that the result depends on.
        build: fills an empty folder with the result. An exception leaves nothing behind, except
            that a file ``build.log`` is kept beside, as ``NAME-KEY.log``.

    Raises:
        UserError: the build folder cannot be written.
    """
    root = build_root()
    final = root / f"{name}-{key}"
    if final.is_dir():
        return final
    try:
        (root / "locks").mkdir(parents=True, exist_ok=True)
        with _locked(root / "locks" / f"{name}-{key}"):
            if final.is_dir():
                return final
            work = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=root))
            try:
                build(work)
                work.chmod(0o755)
                work.rename(final)
            finally:
                log = work / "build.log"
                if log.is_file():
                    log.replace(root / f"{name}-{key}.log")
                shutil.rmtree(work, ignore_errors=True)
    except (PermissionError, FileExistsError, NotADirectoryError) as error:
        raise UserError(f"cannot build in {root}: {error.strerror}; set PLORA_BUILD_DIR to another folder") from error
    return final
