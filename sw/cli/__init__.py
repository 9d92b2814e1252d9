"""The command ``plora``: a table of verbs, and the one place where errors become exit statuses."""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import sys
import traceback
from typing import NoReturn, cast

from plora.hw.defs.errors import UserError
from plora.sw.cli.command import CommandModule, CommandParser, check_out_dir, deliver, say
from plora.sw.version import plora_version

VERBS = {
    "run": "plora.sw.cli.run",
    "serve": "plora.sw.cli.serve",
    "lora": "plora.sw.cli.lora",
    "attention": "plora.sw.cli.attention",
    "rtl": "plora.sw.cli.rtl",
    "predict": "plora.sw.cli.predict",
    "calibrate": "plora.sw.cli.calibrate",
    "defs": "plora.sw.cli.defs",
    "device": "plora.sw.cli.device",
    "synth": "plora.sw.cli.synth",
    "doctor": "plora.sw.cli.doctor",
}

EXIT_USER_ERROR = 2
EXIT_INTERNAL_ERROR = 70
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141


class _Progress(logging.Handler):
    """What the layers below report of long work, on standard error."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print one report."""
        say(record.getMessage())


class _TopParser(argparse.ArgumentParser):
    """Parses what stands before the verb: only ``--help`` and ``--version``."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see `plora --help`)")


def _verb_module(verb: str) -> CommandModule:
    return cast(CommandModule, importlib.import_module(VERBS[verb]))


def _top_parser() -> argparse.ArgumentParser:
    verbs = "\n".join(f"  {verb:<10} {_verb_module(verb).SUMMARY}" for verb in VERBS)
    parser = _TopParser(
        prog="plora",
        description="PLoRA: LoRA serving with near-data processing, in RTL, models and whole-system runs.",
        epilog=f"verbs:\n{verbs}\n\n`plora VERB --help` describes the flags of a verb.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"plora {plora_version()}")
    parser.add_argument("verb", metavar="VERB", choices=list(VERBS), help="what to do, with its own flags")
    return parser


def _run(argv: list[str]) -> int:
    if not argv or argv[0] not in VERBS:
        _top_parser().parse_args(argv[:1])
        raise AssertionError("the top parser accepts only verbs, which were handled before")
    verb, rest = argv[0], argv[1:]
    module = _verb_module(verb)
    parser = CommandParser(prog=f"plora {verb}", summary=module.SUMMARY)
    module.configure(parser)
    args = parser.parse_args(rest)
    out = getattr(args, "out", None)
    if out is not None:
        check_out_dir(out)
    result = module.run(args)
    action = getattr(args, "action", None)
    deliver(
        f"{verb} {action}" if action else verb,
        plora_version(),
        result,
        as_object=getattr(args, "json", False),
        out=out,
    )
    return result.exit_status


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


def main(argv: list[str] | None = None) -> int:
    """Run one command line (default: the process's own) and return the exit status.

    0: done; 2: the user can mend it (one line says how); 70: plora failed; 130: interrupted.
    """
    arguments = sys.argv[1:] if argv is None else argv
    reports = logging.getLogger("plora")
    if not reports.handlers:
        reports.addHandler(_Progress())
        reports.setLevel(logging.INFO)
    debug = "--debug" in arguments or os.environ.get("PLORA_DEBUG", "") not in ("", "0")
    try:
        return _run(arguments)
    except UserError as error:
        if debug:
            traceback.print_exc()
        print(f"plora: error: {_one_line(error)}", file=sys.stderr)
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        print("plora: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader went away (`plora ... | head`): keep the interpreter's final flush quiet too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except Exception as error:
        if debug:
            traceback.print_exc()
        hint = "" if debug else " (--debug shows the traceback)"
        print(
            f"plora: internal error: {type(error).__name__}: {_one_line(error)}{hint}",
            file=sys.stderr,
        )
        return EXIT_INTERNAL_ERROR
