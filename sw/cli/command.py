"""What every verb shares: its parser, its flags, its result, and how the result leaves the program.

A verb is a module with

- ``SUMMARY: str``: one line for the help text,
- ``configure(parser: CommandParser) -> None``: adds the verb's own flags,
- ``run(args: argparse.Namespace) -> Result``: does the work.

Verb modules are imported for ``plora --help``: they import numpy, models and tools inside ``run``.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, Protocol

from plora.hw.defs.errors import UserError


@dataclass(frozen=True)
class Result:
    """What a verb hands back.

    Attributes:
        data: the JSON object, without ``version`` and ``command``, which are added for every verb.
            Keys carry units. Values are plain Python or numpy scalars, strings, lists, mappings.
        text: the same for a human, printed where ``--json`` was not asked for.
        files: further files for ``--out DIR``, by path relative to DIR.
        exit_status: status of the program where the work was done but its answer is "no"
            (for example a comparison that found a difference).
    """

    data: Mapping[str, Any]
    text: str
    files: Mapping[str, str | bytes] = field(default_factory=dict)
    exit_status: int = 0


class CommandModule(Protocol):
    """The members of a verb's module."""

    SUMMARY: str

    def configure(self, parser: CommandParser) -> None:
        """Add the verb's flags."""
        ...

    def run(self, args: argparse.Namespace) -> Result:
        """Do the work."""
        ...


class CommandParser(argparse.ArgumentParser):
    """An argument parser that has the common flags and reports mistakes as `UserError`."""

    def __init__(self, *, prog: str, summary: str, **kwargs: Any) -> None:
        super().__init__(
            prog=prog,
            description=summary,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            **kwargs,
        )
        # Left out of the namespace unless given, so that `plora VERB --json NESTED` and
        # `plora VERB NESTED --json` mean the same.
        common = self.add_argument_group("common flags")
        common.add_argument(
            "--json",
            action="store_true",
            default=argparse.SUPPRESS,
            help="print one JSON object on standard output and nothing else there",
        )
        common.add_argument(
            "--out",
            metavar="DIR",
            type=Path,
            default=argparse.SUPPRESS,
            help="write result.json, result.txt and the command's files to DIR",
        )
        common.add_argument(
            "--debug",
            action="store_true",
            default=argparse.SUPPRESS,
            help="show a traceback where plora itself fails",
        )

    def add_nested(self, summaries: Mapping[str, str]) -> dict[str, CommandParser]:
        """Add nested verbs and return their parsers by name; the chosen name lands in ``args.action``."""
        nested = self.add_subparsers(dest="action", metavar="COMMAND", required=True)
        return {
            name: nested.add_parser(name, prog=f"{self.prog} {name}", summary=summary, help=summary)
            for name, summary in summaries.items()
        }

    def error(self, message: str) -> NoReturn:
        """Report a mistake on the command line as one line.

        Raises:
            UserError: always.
        """
        raise UserError(f"{message} (see `{self.prog} --help`)")


def say(message: str) -> None:
    """Print progress or a remark for a human on standard error."""
    print(message, file=sys.stderr, flush=True)


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 0) -> str:
    """Columns of text: the first ``left`` of them left-aligned, the others right-aligned."""
    lines = [head, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]

    def cell(text: str, column: int) -> str:
        return text.ljust(widths[column]) if column < left else text.rjust(widths[column])

    return "\n".join("  ".join(cell(text, i) for i, text in enumerate(line)).rstrip() for line in lines)


def check_out_dir(out: Path) -> None:
    """Refuse an output folder that could not be written, before any work is done.

    Raises:
        UserError: ``out`` or a parent of it is not a folder, or may not be written.
    """
    existing = out
    try:
        os.lstat(out)  # raises for what no path can be, which Path.exists() passes over
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        pass
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"--out {str(out)!r:.80}: no path that a folder can have ({reason})") from None
    try:
        while not existing.exists() and existing != existing.parent:
            if existing.is_symlink():
                raise UserError(f"--out {out}: {existing} is a dangling link")
            existing = existing.parent
    except OSError as error:
        raise UserError(f"--out {out}: {error.strerror}") from None
    if not existing.is_dir():
        raise UserError(f"--out {out}: {existing} is not a folder; name a folder or a new path")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise UserError(f"--out {out}: no permission to write in {existing}")


def as_json(value: Any, where: str = "result") -> Any:
    """Return ``value`` as plain JSON types: numpy scalars and arrays, tuples and paths become plain.

    Raises:
        ValueError: a number that JSON cannot hold (NaN, infinity); the message says where.
        TypeError: a value of a type that JSON cannot hold.
    """
    if isinstance(value, Mapping):
        return {str(key): as_json(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_json(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "tolist"):  # numpy scalar or array, without importing numpy here
        return as_json(value.tolist(), where)
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{where} is {value}, which JSON cannot hold")
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    raise TypeError(f"{where} is a {type(value).__name__}, which JSON cannot hold")


def write_files(out: Path, files: Mapping[str, str | bytes]) -> None:
    """Write ``files`` below ``out``, each under a temporary name that is then renamed.

    All temporary files are complete before the first rename, so a full disk or an interruption
    leaves no half-written result.

    Raises:
        UserError: the folder cannot be made or written.
    """
    staged: list[tuple[Path, Path]] = []
    try:
        for name, content in files.items():
            target = out / name
            target.parent.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
            staged.append((Path(temporary), target))
            with os.fdopen(handle, "wb") as stream:
                stream.write(content.encode() if isinstance(content, str) else content)
            os.chmod(temporary, 0o666 & ~umask())
        for source, target in staged:
            os.replace(source, target)
    except OSError as error:
        raise UserError(f"--out {out}: cannot write {error.filename or out}: {error.strerror}") from error
    finally:
        for source, _ in staged:
            source.unlink(missing_ok=True)


def umask() -> int:
    """The process's mask of file permissions."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


def deliver(command: str, version: str, result: Result, *, as_object: bool, out: Path | None) -> None:
    """Print ``result`` on standard output and write it to ``out`` where one was named."""
    document = json.dumps({"command": command, "version": version} | as_json(result.data), indent=2, allow_nan=False)
    if out is not None:
        text = result.text if result.text.endswith("\n") else result.text + "\n"
        # result.json goes last: whoever sees it may rely on the rest being there.
        write_files(out, {**result.files, "result.txt": text, "result.json": document + "\n"})
        say(f"results are in {out}")
    _print(document if as_object else result.text.rstrip("\n"))


def _print(text: str) -> None:
    if sys.stdout is None:  # closed by the caller (`plora ... >&-`)
        raise UserError("standard output is closed; redirect it to a file, or to /dev/null")
    try:
        print(text, flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise UserError(f"standard output: cannot write ({error.strerror}); redirect it elsewhere") from error
