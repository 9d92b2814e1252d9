"""Reads value change dumps: the values of chosen signals just before every rising edge of the clock."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

Signal = tuple[str, ...]
"""A signal by the names of the scopes around it, from the outermost, and its own."""


class VcdReader:
    """A dump file.

    Args:
        path: the file.

    Raises:
        ValueError: it is not a dump.

    Attributes:
        codes: the identifier code of every signal.
        widths: its bits.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.codes: dict[Signal, str] = {}
        self.widths: dict[Signal, int] = {}
        scopes: list[str] = []
        with path.open() as lines:
            for line in lines:
                words = line.split()
                if not words:
                    continue
                if words[0] == "$scope":
                    scopes.append(words[2].removeprefix("\\"))
                elif words[0] == "$upscope":
                    scopes.pop()
                elif words[0] == "$var":
                    signal = (*scopes, words[4].removeprefix("\\"))
                    self.codes[signal], self.widths[signal] = words[3], int(words[2])
                elif words[0] == "$enddefinitions":
                    return
        raise ValueError(f"{path} is not a value change dump")

    def scope_of(self, module: str) -> Signal:
        """Return the outermost scope called ``module``.

        Raises:
            ValueError: there is none.
        """
        scopes = {signal[: depth + 1] for signal in self.codes for depth in range(len(signal) - 1)}
        found = [scope for scope in scopes if scope[-1] == module]
        if not found:
            raise ValueError(f"{self.path} has no scope {module}")
        return min(found, key=len)

    def before_edges(self, clock: Signal, wanted: Iterable[Signal]) -> Iterator[dict[Signal, int]]:
        """Yield, for every rising edge of ``clock``, those values of ``wanted`` that changed since the last.

        The first dictionary has all of them. Unknown bits read as zero.

        Raises:
            ValueError: a signal is not in the dump.
        """
        names: dict[str, list[Signal]] = {}
        for signal in wanted:
            if signal not in self.codes:
                raise ValueError(f"{self.path} has no signal {'.'.join(signal)}")
            names.setdefault(self.codes[signal], []).append(signal)
        clock_code = self.codes[clock]
        changed: dict[Signal, int] = {signal: 0 for signals in names.values() for signal in signals}
        pending: dict[str, str] = {}
        level = "0"
        with self.path.open() as lines:
            for line in lines:
                if line.startswith("$enddefinitions"):
                    break
            for line in lines:
                first = line[0]
                if first == "#":
                    rising = level == "0" and pending.get(clock_code) == "1"
                    if rising:
                        yield changed
                        changed = {}
                    level = pending.get(clock_code, level)
                    for code, text in pending.items():
                        for signal in names.get(code, ()):
                            changed[signal] = int(text, 2)
                    pending = {}
                elif first in "01xzXZ":
                    pending[line[1:].rstrip()] = "1" if first == "1" else "0"
                elif first in "bB":
                    text, code = line[1:].split()
                    if code in names:
                        pending[code] = text.translate(_KNOWN)
            if level == "0" and pending.get(clock_code) == "1":
                yield changed


_KNOWN = str.maketrans("xXzZ", "0000")
