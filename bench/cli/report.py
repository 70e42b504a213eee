"""`bench report`: every table of the paper from stored runs, the paper's numbers beside ours."""

from __future__ import annotations

import webbrowser
from argparse import Namespace

from bench.api import report
from bench.cli.arguments import store_to_read
from bench.cli.output import log


def run(arguments: Namespace) -> None:
    """Render from the store alone; a partial store renders, empty cells say why."""
    page = report(
        arguments.out,
        results=store_to_read(arguments).root,
        published=arguments.published,
        seeds=arguments.seeds,
        data_root=arguments.data_root,
        methods=arguments.methods,
        datasets=arguments.datasets,
        tables=arguments.tables,
        pdf=arguments.pdf,
    )
    print(page.resolve())
    if arguments.pdf:
        print(page.resolve().with_name("main.pdf"))
    if arguments.open and not webbrowser.open(page.resolve().as_uri()):
        log(f"no browser could be started; open {page.resolve().as_uri()} in one")
