"""A folder of build results, each under the hash of everything it was made from.

A result appears whole or not at all: it is built in a temporary folder that is renamed. Processes
that want the same result wait for the first of them, so a parallel test run builds it once.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from plora.hw.defs.errors import UserError

LOG = logging.getLogger(__name__)
"""Says what is built, while it is; silent where everything is there."""

SOURCES = Path(__file__).resolve().parent.parent
"""The folder of `plora.hw`."""

KEPT_RESULTS = 6
"""Results of one name that are kept however old they are."""

KEPT_S = 3600
"""Seconds for which every result is kept after its last use: another process may be about to open it."""

ABANDONED_S = 6 * 3600
"""Seconds after which a temporary folder is taken for that of a build that was killed."""


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


def _prune(root: Path, name: str) -> None:
    """Remove results of ``name`` that newer ones have replaced, and what interrupted builds left behind."""
    now = time.time()
    results = [path for path in root.iterdir() if re.fullmatch(rf"{re.escape(name)}-[0-9a-f]+", path.name)]
    results.sort(key=lambda path: path.stat().st_mtime, reverse=True)
    old = [path for path in results[KEPT_RESULTS:] if now - path.stat().st_mtime > KEPT_S]
    old += [path for path in root.glob(".*-*") if now - path.stat().st_mtime > ABANDONED_S]
    for path in old:
        shutil.rmtree(path, ignore_errors=True)


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
        os.utime(final)  # the age of a result is counted from its last use
        return final
    try:
        (root / "locks").mkdir(parents=True, exist_ok=True)
        with _locked(root / "locks" / f"{name}-{key}"):
            if final.is_dir():
                return final
            work = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=root))
            start = time.perf_counter()
            LOG.info("building %s, once for these sources", name)
            try:
                build(work)
                work.chmod(0o755)
                work.rename(final)
                LOG.info("built %s in %.0f s", name, time.perf_counter() - start)
            finally:
                log = work / "build.log"
                if log.is_file():
                    log.replace(root / f"{name}-{key}.log")
                shutil.rmtree(work, ignore_errors=True)
            _prune(root, name)
    except (PermissionError, FileExistsError, NotADirectoryError) as error:
        raise UserError(f"cannot build in {root}: {error.strerror}; set PLORA_BUILD_DIR to another folder") from error
    return final
