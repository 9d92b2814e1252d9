"""Makes `core_bench`, the helpers of this folder's tests, importable."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
