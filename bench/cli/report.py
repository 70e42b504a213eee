"""`bench report`: every table of the paper from stored runs, the paper's numbers beside ours."""

from __future__ import annotations

from argparse import Namespace

from bench.api import report
from bench.cli.arguments import store_to_read
from bench.reporting import build_pdf


def run(arguments: Namespace) -> None:
    """Render from the store alone; a partial store renders, empty cells say why."""
    store, out, root = store_to_read(arguments), arguments.out, arguments.data_root
    published, seeds = arguments.published, arguments.seeds
    page = report(out, results=store.root, published=published, seeds=seeds, data_root=root)
    if arguments.pdf:
        print(build_pdf(out))
    print(f"open {page.resolve().as_uri()}")
