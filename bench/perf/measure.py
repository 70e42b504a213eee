"""Measuring arms interleaved, so that whatever disturbs the machine disturbs them all.

The numbers are kept in a CSV file for each kind of machine.
"""

from __future__ import annotations

import csv
import io
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch

from bench.process import CpuClock, available_cores, keep_freed_memory
from bench.provenance import environment, git_state
from datasets.errors import UsageError
from datasets.files import atomic_file

EAGER_LIMIT = "eager limit"
THREADS = 1  # a second one waits for the first more than it works, on networks of this size
DIGITS = {"images_per_cpu_second": 1, "images_per_second": 1, "spread": 4, "ratio": 4}
NOISE = r"\((?:r|tm)\)|\bcpu\b|\bprocessor\b|\bwith\b.*|@.*|\b\d+-core\b"
"""What a processor's name says that a file's need not."""


@dataclass(frozen=True)
class Sample:
    """What one turn of an arm did, and what it took, worker processes included."""

    images: int
    spent: CpuClock

    @property
    def per_cpu_second(self) -> float:
        """Images per second of processor time."""
        return self.images / self.spent.cpu


Samples = Mapping[str, Sample]
"""What one turn measured, by the name of the arm."""
Arm = Callable[[], Samples]
"""Takes one turn; most return one sample under their own name, a fit of a tree one a phase."""


@dataclass(frozen=True)
class Case:
    """Arms that do the same work in different ways."""

    name: str
    build: Callable[[], Sequence[Arm]]  # called when it is measured: arms hold data and workers
    max_repeats: int = 1000  # turns that are enough, where one takes long
    limit: str = EAGER_LIMIT  # the arm that ratios are taken against


@dataclass(frozen=True)
class Row:
    """One arm of one case over all turns."""

    case: str
    arm: str
    images_per_cpu_second: float  # the median
    images_per_second: float  # the median
    spread: float  # distance of the quartiles of the former, as a share of the median
    ratio: float  # the former against the limit's in the same turn; the median over turns


COLUMNS = (*(own.name for own in fields(Row)), "commit")


def timed(work: Callable[[], int], times: int = 1) -> Sample:
    """Time work that returns how many images it did."""
    began = CpuClock.now()
    images = sum(work() for _ in range(times))
    return Sample(images, CpuClock.now() - began)


def measure_interleaved(case: Case, repeats: int) -> list[dict[str, Sample]]:
    """Return what each turn measured; a turn runs every arm once.

    The order alternates from turn to turn, and a first turn, which warms up, is dropped.
    """
    with one_thread():
        arms = list(case.build())
        turns = []
        for turn in range(1 + min(repeats, case.max_repeats)):
            measured: dict[str, Sample] = {}
            for arm in arms if turn % 2 else reversed(arms):
                measured.update(arm())
            turns.append(measured)
    return turns[1:]


@contextmanager
def one_thread() -> Iterator[None]:
    """Limit torch to one thread inside the block, and keep freed memory as runs do."""
    before = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    keep_freed_memory()
    try:
        yield
    finally:
        torch.set_num_threads(before)


def summarise(case: Case, turns: Sequence[Samples]) -> list[Row]:
    """Return medians, spreads and ratios, the limit first."""
    rows = []
    for arm in sorted(turns[0], key=lambda arm: arm != case.limit):
        speeds = [turn[arm].per_cpu_second for turn in turns]
        by_wall = statistics.median(turn[arm].images / turn[arm].spent.wall for turn in turns)
        low, middle, high = (
            statistics.quantiles(speeds, n=4, method="inclusive") if len(speeds) > 1 else speeds * 3
        )
        ratio = speed_ratio(turns, arm, case.limit)
        rows.append(
            Row(case.name, arm, statistics.median(speeds), by_wall, (high - low) / middle, ratio)
        )
    return rows


def speed_ratio(turns: Sequence[Samples], arm: str, against: str) -> float:
    """Return an arm's images per CPU-second over another's in the same turn; the median turn's."""
    return statistics.median(
        turn[arm].per_cpu_second / turn[against].per_cpu_second for turn in turns
    )


@dataclass(frozen=True)
class MachineInfo:
    """What the numbers depend on; a plus sign after the commit marks changes that are in none."""

    processor: str
    cores: int
    threads: int
    torch: str | None
    commit: str

    @property
    def file_name(self) -> str:
        """The hardware's name for a file: `amd-epyc-2-cores-1-thread.csv`."""
        plain = re.sub(NOISE, " ", self.processor.lower())
        processor = re.sub("[^a-z0-9]+", "-", plain).strip("-") or "unknown"
        cores = f"{self.cores}-core" + "s" * (self.cores != 1)
        return f"{processor}-{cores}-{self.threads}-thread.csv"


def machine_info() -> MachineInfo:
    """Describe the machine and the code at hand."""
    known, state = environment(), git_state()
    commit = "unknown" if not state.commit else state.commit[:12] + "+" * bool(state.dirty)
    processor = known.processor or "unknown processor"
    return MachineInfo(processor, available_cores(), THREADS, known.libraries["torch"], commit)


def write_csv(folder: Path, rows: Sequence[Row]) -> Path:
    """Put the rows into this machine's file; cases that were not measured now are kept."""
    machine = machine_info()
    path = folder / machine.file_name
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    measured = {row.case for row in rows}
    writer.writerows(line for line in _read_csv(path) if line["case"] not in measured)
    for row in rows:
        values = {k: round(v, DIGITS[k]) if k in DIGITS else v for k, v in asdict(row).items()}
        writer.writerow({**values, "commit": machine.commit})
    with atomic_file(path) as draft:
        draft.write_text(text.getvalue())
    return path


def _read_csv(path: Path) -> list[dict[str, str]]:
    """Read what an earlier measurement wrote, if there was one."""
    if not path.is_file():
        return []
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        if tuple(reader.fieldnames or ()) != COLUMNS:
            raise UsageError(
                f"{path} is not a table of measurements: its columns are {reader.fieldnames}",
                "delete it, or give another folder with --out",
            )
        return list(reader)
