"""`bench test METHOD`: the contract tests on a method or dataset of one's own."""

from __future__ import annotations

from argparse import Namespace

from bench.scaffold import run_contract_tests


def run(arguments: Namespace) -> int:
    """Run them; 1 if some fail, 2 if there is nothing to test."""
    code = run_contract_tests(arguments.subject)
    return code if code in (0, 1) else 2
