"""``plora defs``: print the device's interface as a C header, as Markdown tables or as JSON."""

from __future__ import annotations

import argparse
import json

from plora.sw.cli.command import CommandParser, Result

SUMMARY = "print the device's interface: C header, tables or JSON"

FORMATS = {"c-header": "plora_device.h", "markdown": "interface.md", "json": "interface.json"}
"""Formats and the file that each becomes under ``--out``."""


def configure(parser: CommandParser) -> None:
    """Add the flags of the verb."""
    parser.add_argument("--format", choices=list(FORMATS), default="markdown", help="what to print (default: markdown)")


def run(args: argparse.Namespace) -> Result:
    """Render the definitions; ``--json`` gives the JSON object whatever the format."""
    from plora.hw.defs.export import as_dict, c_header, markdown

    definitions = as_dict()
    if args.format == "json":
        text = json.dumps(definitions, indent=2) + "\n"
    else:
        text = c_header() if args.format == "c-header" else markdown()
    return Result(data=definitions, text=text, files={FORMATS[args.format]: text})
