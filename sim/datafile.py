"""Reading the data files that describe hardware, models and workloads.

A number in a data file is either bare or a :class:`Fact`, that is a value with its origin::

    hbm_gb_per_s = { value = 3350, status = "verified", source = "data sheet" }

Unknown keys, wrong types, NaN, infinities and numbers out of range are refused with one line that
names the file and the key.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from plora.hw.defs.errors import UserError

Status = Literal["verified", "secondary", "paper", "derived", "fitted", "choice", "recalled", "user"]
"""How a value was obtained.

``verified`` read in a primary source; ``secondary`` read in a source that quotes another;
``paper`` stated in the paper's prose; ``derived`` computed from other values in the file;
``fitted`` solved from measurements or from a claim (the source says which); ``choice`` nothing
decides it; ``recalled`` public knowledge that was not looked up; ``user`` a bare number.
"""

LARGEST = 1e18
SMALLEST_POSITIVE = 1e-3
LONGEST_NS = 1e9
"""Bounds of numbers that users give: with these every time of a run stays far within 64-bit picoseconds."""

T = TypeVar("T")


class Fact(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A number, how it was obtained, and where it is from."""

    value: float
    status: Status
    source: str


Number = Fact | float


def fact(number: Number) -> Fact:
    """Give a bare number the status ``user``."""
    return number if isinstance(number, Fact) else Fact(float(number), "user", "given without a source")


def checked(
    number: Number,
    where: str,
    *,
    minimum: float = 0.0,
    maximum: float = LARGEST,
    exclusive: bool = False,
) -> float:
    """Return the value of `number` as a float after checking that it is finite and in range.

    `exclusive` refuses the minimum itself and what is next to it. Raises :class:`UserError` naming
    `where`.
    """
    value = float(number.value if isinstance(number, Fact) else number)
    least = minimum + SMALLEST_POSITIVE if exclusive else minimum
    if not least <= value <= maximum:  # neither holds for NaN
        raise UserError(f"{where} is {value:g}; give a finite number of at least {least:g} and at most {maximum:g}")
    return value


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file; raises :class:`UserError` if it is missing or not TOML."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; check the path") from None
    except (OSError, ValueError) as error:  # not UTF-8, or a path that no file can have
        raise UserError(f"{path}: cannot be read ({error}); check the file and its permissions") from None
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # TOMLDecodeError, or numbers and nesting beyond all bounds
        raise UserError(f"{path}: not valid TOML ({error}); mend that line") from None


def convert(raw: object, kind: type[T], where: str) -> T:
    """Convert parsed data to `kind` strictly; raises :class:`UserError` naming `where` and the key."""
    try:
        return msgspec.convert(raw, kind, strict=True)
    except msgspec.ValidationError as error:
        raise UserError(f"{where}: {error}; mend or remove that key") from None


def read_table(path: Path, kind: type[T]) -> dict[str, T]:
    """Read a TOML file whose top-level tables are all of type `kind`, keyed by name."""
    return {name: convert(entry, kind, f"{path.name}: [{name}]") for name, entry in read_toml(path).items()}


def pick(name: str, known: Mapping[str, T], what: str) -> T:
    """Look `name` up; raises :class:`UserError` that lists the known names."""
    try:
        return known[name]
    except KeyError:
        raise UserError(f"unknown {what} {name!r}; known: {', '.join(sorted(known))}") from None
