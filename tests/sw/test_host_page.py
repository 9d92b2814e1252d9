"""The example of docs/host.md runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest


def test_the_example_of_the_page_runs(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", (repository / "docs" / "host.md").read_text(), re.DOTALL)
    monkeypatch.chdir(repository)
    names: dict[str, Any] = {}
    exec(compile(example, "docs/host.md", "exec"), names)
    assert names["y"].shape == (4, 64)
    assert np.any(names["y"])
