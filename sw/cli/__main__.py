"""Lets ``python -m plora.sw.cli`` stand for the command ``plora``."""

import sys

from plora.sw.cli import main

sys.exit(main())
