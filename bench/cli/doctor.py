"""`bench doctor`: whether this machine is in order."""

from __future__ import annotations

from argparse import Namespace
from collections import Counter
from dataclasses import asdict

from bench.cli.output import log, print_json
from bench.doctor import FAIL, WARN, examine


def run(arguments: Namespace) -> int:
    """Print a line for each finding as it comes; exit code 1 if anything fails."""
    findings = []
    for finding in examine(arguments.data_root, arguments.results):
        findings.append(finding)
        if not arguments.json:
            print(finding.line(), flush=True)
    counts: Counter[str] = Counter(finding.level for finding in findings)
    if arguments.json:
        rows = [asdict(finding) for finding in findings]
        print_json({"findings": rows, "warn": counts[WARN], "fail": counts[FAIL]})
    elif counts[FAIL]:
        log(f"{counts[FAIL]} to be put right, {counts[WARN]} to know about")
    return int(counts[FAIL] > 0)
