"""`bench new method|dataset NAME`: begin a method or dataset of one's own."""

from __future__ import annotations

from argparse import Namespace

from bench.cli.output import log
from bench.scaffold import new


def run(arguments: Namespace) -> None:
    """Print the files that were written, and what comes next."""
    name, folder = arguments.name, arguments.out
    files = new(arguments.kind, name, folder, package=arguments.package)
    for file in files:
        print(file)
    if arguments.package:
        root = folder / f"{name}_bench"
        log(f"  -> pip install -e {root}; then `python -m bench test {name}`, and every command")
        log(f"     knows it, as in `python -m bench list` ({root / name}_bench/{name}.py is yours)")
    else:
        log(f"  -> python -m bench test {files[0]}")
        log(f"     `import {name}` makes it known to a program; --package does to every command")
