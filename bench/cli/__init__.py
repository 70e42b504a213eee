"""The command line: how it starts, and how errors end.

`parser.py` has every verb with its arguments. The file of a verb has `run(arguments)`, which
returns the exit code, or none where all is well; it is imported only when the verb is used.
"""

from __future__ import annotations

import importlib
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from bench import check_datasets_package, numerics

BEGIN_A_ROOT = ("get", "add")
"""Verbs of `data` that may begin a new data root."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a verb; 0 all well, 1 some runs failed, 2 wrong use, 130 interrupted."""
    try:
        check_datasets_package()
    except ImportError as clash:
        sys.stderr.write(f"bench: {clash}\n")
        return 2
    from bench.cli.parser import make_parser, overview
    from bench.process import quiet_libraries
    from datasets.errors import BenchError, UsageError
    from datasets.fetch import use_data_root
    from datasets.files import NO_SPACE, RESULTS

    words = sys.argv[1:] if argv is None else [*argv]
    if not words:
        sys.stdout.write(overview())
        return 0
    quiet_libraries()
    try:
        arguments = make_parser().parse_args(words)
        arguments.command = f"python -m bench {shlex.join(words)}"
        choice = getattr(arguments, "numerics", None) or os.environ[numerics.VARIABLE]
        if choice not in numerics.CHOICES:
            raise UsageError(
                f"${numerics.VARIABLE} must be {' or '.join(numerics.CHOICES)} but is '{choice}'"
            )
        numerics.apply(choice)  # before a verb imports torch
        if getattr(arguments, "data_root", None) is not None:
            if getattr(arguments, "data_verb", "") not in BEGIN_A_ROOT:
                _require_data_root(arguments.data_root)
            use_data_root(arguments.data_root)
        return int(importlib.import_module(f"bench.cli.{arguments.verb}").run(arguments) or 0)
    except BenchError as error:
        sys.stderr.write(f"bench: {error}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write(
            "\nbench: interrupted; finished runs are kept, and the same command goes on from the "
            "last epoch\n  -> python -m bench status shows what is unfinished\n"
        )
        return 130
    except BrokenPipeError:  # the reader, `head` say, has seen enough
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        sys.stderr.close()
        return 1
    except OSError as error:  # a disk can fail in places that nothing guards
        full = error.errno in NO_SPACE
        remedy = RESULTS.if_full if full else "check the folders the command names"
        sys.stderr.write(f"bench: {error}\n  -> {remedy}\n")
        return 2


def _require_data_root(root: Path) -> None:
    """Refuse a data root that was named and is not there; the default one is made when needed."""
    from datasets.errors import UsageError
    from datasets.fetch import default_data_root

    if root != default_data_root() and not root.exists():
        raise UsageError(
            f"there is no folder {root}",
            "correct --data-root, or make the folder; `data get` and `data add` make it",
        )
