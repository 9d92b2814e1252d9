"""Deliberate faults: copies of a component in which one line of its module is wrong."""

from __future__ import annotations

import importlib
import types
from pathlib import Path
from typing import Any


def faulty_component(module: str, component: str, right: str, wrong: str) -> Any:
    """Return ``component`` from a copy of ``module`` in which the text ``right`` reads ``wrong``."""
    original = importlib.import_module(module)
    assert original.__file__ is not None
    source = Path(original.__file__).read_text()
    assert source.count(right) == 1, f"{module} holds {right!r} {source.count(right)} times"
    copy = types.ModuleType(module)
    exec(compile(source.replace(right, wrong), f"faulty {module}", "exec"), copy.__dict__)
    return getattr(copy, component)
