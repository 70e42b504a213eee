"""A grid whose processes are killed at random ends with the results of an undisturbed one.

    python tests/chaos.py --kills 50 --where local
    python tests/chaos.py --kills 50 --where slurm    starts a one-machine SLURM unless one runs

Twenty short runs on stand-in digits are made twice: once left alone, and once while their processes
are ended with `kill -9`, the command being given again whenever it has ended before its time. On
the way no finished run may disappear or change. At the end predictions, partitions, metrics and
history (times aside) must equal those of the undisturbed grid bit for bit, and no process, task,
temporary folder or checkpoint may be left over. What was killed is printed with the seed that chose
it; `--folder` keeps everything, and a reference that is there already is used again.

The processes: the `launcher` is the command; a `task` is what SLURM starts in its place; each of
them has a fork `server`, from which it gets a `worker` for each run, which loads the data, audits
and evaluates (an `evaluator` once it does the last), and of which the `fit` is a child.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
MARK = "BENCH_CHAOS"  # in the environment of every process of a grid, wherever it was started
LOCAL, SLURM = "local", "slurm"
ROLES = {
    LOCAL: ("launcher", "server", "worker", "evaluator", "fit"),
    SLURM: ("launcher", "task", "server", "worker", "evaluator", "fit"),
}
PATIENCE = 30.0  # how long to wait for a process of the chosen role before another is chosen
STUCK = 600.0  # how long nothing may be killed or finished before that counts as a hang
ENDING = 60.0  # how long processes may take to end after their launcher
SAME = (
    *("status", "metrics", "partition", "selection", "nct", "config", "identity", "seed"),
    *("seed_tree", "threads", "label_digest", "data_fingerprint", "code"),
)
"""The fields of a record that an interruption must not change."""


SETTINGS = (
    *("erm.epochs=40", "dfr.erm.epochs=40", "dfr.splits=1", "dfr.retrains=3"),  # a shared stage
    *("groupdro.epochs=40", "jtt.epochs=15", "jtt.identification_epoch=5", "jtt.upweight=5"),
    *("nct.iterations=3", "nct.epochs=6,12,12"),
)
"""Runs of some seconds, for most kills to hit a process that works: `--quick` ones are shorter."""


@dataclass(frozen=True)
class Grid:
    """The runs that are made."""

    methods: tuple[str, ...] = ("erm", "groupdro", "jtt", "dfr", "nct")
    datasets: tuple[str, ...] = ("umnist", "cmnist")
    seeds: int = 2

    @property
    def size(self) -> int:
        return len(self.methods) * len(self.datasets) * self.seeds

    def words(self, data: Path, results: Path) -> list[str]:
        """Return the command that carries it out."""
        names = ["--methods", ",".join(self.methods), "--datasets", ",".join(self.datasets)]
        own = [text for text in SETTINGS if text.partition(".")[0] in self.methods]
        places = ["--data-root", str(data), "--results", str(results)]
        return ["run", *names, "--seeds", str(self.seeds), *places, "--set", *own]


SMALL = Grid(("erm", "dfr", "nct"), seeds=1)
"""Enough for a test that is run with every change."""


@dataclass(frozen=True)
class Process:
    """A process as /proc has it; the time of its start tells it from a later one of its number."""

    number: int
    started: int
    parent: int
    words: tuple[str, ...]

    @staticmethod
    def read(folder: Path) -> Process | None:
        """Read it; none if it has ended."""
        with contextlib.suppress(OSError):
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            words = tuple((folder / "cmdline").read_text().split("\0"))
            if fields[0] not in "ZX":
                return Process(int(folder.name), int(fields[19]), int(fields[1]), words)
        return None

    @property
    def forked(self) -> bool:
        """Whether it is a fork server or comes from one: they all look like it."""
        return any("multiprocessing.forkserver" in word for word in self.words)

    def kill(self) -> bool:
        """Kill it; return whether it was still there."""
        if Process.read(Path(f"/proc/{self.number}")) != self:
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.number, signal.SIGKILL)
            return True
        return False


def processes(mark: str = "") -> list[Process]:
    """List the processes that run, or those of them whose environment has a mark."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark.encode() in (folder / "environ").read_bytes():
                found.append(Process.read(folder))
    return [process for process in found if process is not None]


def by_role(known: list[Process]) -> dict[str, list[Process]]:
    """Sort processes by what they are; those that are about to end with their parent have none."""

    def children(parents: list[Process]) -> list[Process]:
        numbers = {parent.number for parent in parents}
        return [each for each in known if each.forked and each.parent in numbers]

    launchers = [each for each in known if each.words[1:4] == ("-m", "bench", "run")]
    tasks = [
        each
        for each in known
        if "submitit.core._submit" in each.words and not each.words[0].endswith("srun")
    ]
    servers = children([*launchers, *tasks])
    workers = children(servers)
    return {
        "launcher": launchers,
        "task": tasks,
        "server": servers,
        "worker": workers,
        "fit": children(workers),
    }


@dataclass
class Figures:
    """What was done to a grid, and what it took."""

    where: str
    seed: int
    runs: int
    kills: Counter[str] = field(default_factory=Counter)
    at_work: int = 0  # kills that hit a run in its training or evaluation, directly or from above
    rounds: int = 1  # how often the grid was made: it is begun anew while there are kills to make
    launchers: int = 0
    attempts: int = 0  # of runs: how often a worker took one up
    resumed: int = 0  # runs that were taken up more than once
    equal: int = 0
    seconds: float = 0.0
    seconds_undisturbed: float = 0.0


class Chaos:
    """A grid, and what is done to it."""

    def __init__(
        self,
        folder: Path,
        where: str,
        grid: Grid,
        seed: int,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.folder, self.where, self.grid = folder.resolve(), where, grid
        self.data, self.reference = self.folder / "digits", self.folder / "reference"
        self.results = self.folder / f"{where}-1"
        self.rng = random.Random(seed)
        self.mark = f"{MARK}={uuid.uuid4().hex}"
        name, _, value = self.mark.partition("=")
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST", "COV"))}
        path = os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])
        self.environment = {**inherited, **(environment or {}), name: value, "PYTHONPATH": path}
        self.launcher: subprocess.Popen[bytes] | None = None
        self.done: dict[str, dict[str, int]] = {}
        self.workers_of: dict[str, set[tuple[int, int]]] = {}
        self.figures = Figures(where, seed, grid.size)
        self.changed = time.monotonic()

    def __call__(self, kills: int) -> Figures:
        """Make the undisturbed grid and the disturbed one, and compare them."""
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            self.make_reference()
            began = time.monotonic()
            self.disturb(kills)
            self.figures.seconds = time.monotonic() - began
            self.check_nothing_left()
            self.figures.equal = self.compare()
        finally:
            self.end()
        return self.figures

    def start(self, results: Path, *words: str) -> subprocess.Popen[bytes]:
        """Start the command; what it prints goes to a file of its own."""
        self.figures.launchers += 1
        log = self.folder / f"{results.name}-launcher-{self.figures.launchers}.log"
        command = [sys.executable, "-m", "bench", *self.grid.words(self.data, results), *words]
        with log.open("wb") as sink:
            return subprocess.Popen(
                command, env=self.environment, cwd=self.folder, stdout=sink, stderr=sink
            )

    def cluster(self) -> list[str]:
        """Return the words that send a grid to SLURM; some runs share a task, and few starts are
        granted, so that some tasks are lost and have to be submitted again."""
        if self.where == LOCAL:
            return []
        profile = self.folder / "profile.toml"
        keys = {"partition": "main", "minutes": 30, "signal_seconds": 10, "parallel": 2}
        keys |= {"pack": 2, "requeues": 1}
        profile.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in keys.items()))
        return ["--cluster", str(profile), "--wait"]

    def make_reference(self) -> None:
        """Make the undisturbed grid on this machine, unless it is there."""
        if not (self.data / "mnist").is_dir():
            words = ["data", "standin", "mnist", "--root", str(self.data), "--size", "600"]
            command = [sys.executable, "-m", "bench", *words]
            subprocess.run(command, env=self.environment, check=True, stdout=subprocess.DEVNULL)
        began = time.monotonic()
        code = self.start(self.reference).wait()
        assert code == 0, f"the undisturbed grid ended with {code}; see {self.folder}"
        self.figures.seconds_undisturbed = time.monotonic() - began
        self.figures.launchers = 0

    def disturb(self, kills: int) -> None:
        """Kill until enough were killed and a whole grid has come through."""
        figures, self.changed = self.figures, time.monotonic()
        while True:
            self.go_on()
            made = figures.kills.total()
            if len(self.done) == self.grid.size and self.launcher is None:
                if made == kills:
                    return
                figures.rounds += 1
                self.results = self.folder / f"{self.where}-{figures.rounds}"
                self.done = {}
            elif made < kills:
                # Kills keep step with the runs, so that they hit all parts of the grid.
                behind = made / kills < len(self.done) / self.grid.size
                self.kill_one(self.rng.choice(ROLES[self.where]), 0.5 if behind else 3.0)
            else:
                time.sleep(0.2)

    def kill_one(self, role: str, pause: float) -> None:
        """Kill a process of a role after a random time, if one comes up before long."""
        began, pause = time.monotonic(), self.rng.uniform(0.0, pause)
        while time.monotonic() < began + pause + PATIENCE:
            # An evaluation is soon over: look often, and hit any moment of it.
            time.sleep(0.01 if role == "evaluator" else 0.1)
            self.go_on()
            if len(self.done) == self.grid.size:
                return
            if time.monotonic() < began + pause:
                continue
            if role == "evaluator" and "evaluating" not in self.stages().values():
                continue
            known = by_role(processes(self.mark))
            runs, stages = self.runs_of(known["worker"]), self.stages()
            if role == "evaluator":
                found = [w for w in known["worker"] if stages.get(runs.get(w, "")) == "evaluating"]
                time.sleep(self.rng.uniform(0.0, 0.1))
            else:
                found = known[role]
            if found and (victim := self.rng.choice(found)).kill():
                self.note(role, victim, known, {w: (r, stages.get(r, "")) for w, r in runs.items()})
                return

    def note(
        self,
        role: str,
        victim: Process,
        known: Mapping[str, list[Process]],
        at: Mapping[Process, tuple[str, str]],
    ) -> None:
        """Print and count what was killed, and what it was doing."""
        parents = {p.number: p.parent for each in known.values() for p in each}

        def is_hit(worker: Process) -> bool:
            line = [worker.number]
            while line[-1] in parents:
                line.append(parents[line[-1]])
            return victim.number in line or victim.parent == worker.number

        hit = [f"{run} ({stage})" for worker, (run, stage) in at.items() if is_hit(worker)]
        figures, self.changed = self.figures, time.monotonic()
        figures.kills[role] += 1
        figures.at_work += any(not text.endswith(("()", "(loading)")) for text in hit)
        what = f"{role} {victim.number}" + (f" at {', '.join(hit)}" if hit else "")
        print(f"kill {figures.kills.total()}: {what}; {len(self.done)} runs done", flush=True)

    def go_on(self) -> None:
        """See to it that the command runs as long as runs are missing, and watch the results."""
        self.watch()
        if self.launcher is not None and (code := self.launcher.poll()) is not None:
            self.launcher = None
            log = self.folder / f"{self.results.name}-launcher-{self.figures.launchers}.log"
            assert code in (0, 1, -signal.SIGKILL), f"a launcher ended with {code}: {log}"
            assert "Traceback" not in log.read_text(), f"a launcher ended with an error: {log}"
            if code == 0:
                assert len(self.done) == self.grid.size, f"all well with runs missing: {log}"
        if self.launcher is None and len(self.done) < self.grid.size:
            self.launcher = self.start(self.results, *self.cluster())
        quiet = time.monotonic() - self.changed
        assert quiet < STUCK, f"nothing happened for {quiet:.0f} s; see {self.folder}"

    def watch(self) -> None:
        """Check that what was done is so still, and as it was; note who works at what."""
        for run_id, files in self.done.items():
            now = files_with_times(self.results / "runs" / run_id)
            assert now == files, f"{run_id} was done and has changed: {files} -> {now}"
        for path in (self.results / "runs").glob("[!.]*/record.json"):
            run_id = path.parent.name
            with contextlib.suppress(FileNotFoundError):  # a failed one is being replaced
                if run_id in self.done or json.loads(path.read_text())["status"] != "done":
                    continue
                self.done[run_id] = files_with_times(path.parent)
                self.changed = time.monotonic()
        for run_id, owner in self.owners().items():
            of_run = self.workers_of.setdefault(f"{self.results.name}/{run_id}", set())
            of_run.add(owner)
        taken = self.workers_of.values()
        self.figures.attempts = sum(map(len, taken))
        self.figures.resumed = sum(len(owners) > 1 for owners in taken)

    def owners(self) -> dict[str, tuple[int, int]]:
        """Return the number and start of the process that holds each run that is not done."""
        found = {}
        for folder in (self.results / "work").glob("*"):
            with contextlib.suppress(OSError, ValueError):  # the run has ended meanwhile
                for path in sorted(folder.glob("lock.*")):
                    content = json.loads(path.read_text())
                    if not content["released"]:
                        number, started = content["process"]
                        found[folder.name] = number, started
        return found

    def runs_of(self, workers: list[Process]) -> dict[Process, str]:
        """Return the run that each worker holds."""
        runs = {owner: run_id for run_id, owner in self.owners().items()}
        pairs = [(worker, runs.get((worker.number, worker.started))) for worker in workers]
        return {worker: run_id for worker, run_id in pairs if run_id is not None}

    def stages(self) -> dict[str, str]:
        """Return what each run that is not done was last at."""
        found = {}
        for path in (self.results / "work").glob("*/progress.json"):
            with contextlib.suppress(OSError, ValueError):
                content = json.loads(path.read_text())
                epoch = f" epoch {content['epoch']}" if "epoch" in content else ""
                found[path.parent.name] = f"{content.get('stage', '')}{epoch}"
        return found

    def check_nothing_left(self) -> None:
        """Check what a user finds who gives the command once more, and that nothing is left."""
        again = self.start(self.results, *self.cluster())
        assert again.wait() == 0
        self.figures.launchers -= 1
        self.watch()
        end = time.monotonic() + ENDING
        while (alive := processes(self.mark)) and time.monotonic() < end:
            time.sleep(0.2)
        assert not alive, f"processes outlived their launchers: {alive}"
        for number in range(1, self.figures.rounds + 1):
            results = self.folder / f"{self.where}-{number}"
            left = [
                *results.glob("runs/.*"),
                *results.glob("stages/.*"),
                *results.glob("stages/*.work"),
                *results.glob("work/*"),
                *(path for path in results.glob("audits/*") if self.is_run(path.stem)),
            ]
            assert not left, f"left over: {left}"

    def is_run(self, name: str) -> bool:
        return (self.reference / "runs" / name).is_dir()

    def compare(self) -> int:
        """Compare every run with the undisturbed one, bit for bit; return how many there are."""
        names = sorted(path.name for path in (self.reference / "runs").glob("[!.]*"))
        assert len(names) == self.grid.size
        for number in range(1, self.figures.rounds + 1):
            runs = self.folder / f"{self.where}-{number}" / "runs"
            assert sorted(path.name for path in runs.glob("[!.]*")) == names
            for name in names:
                assert_same_run(runs / name, self.reference / "runs" / name)
        return len(names) * self.figures.rounds

    def end(self) -> None:
        """End what is left of a grid that went wrong."""
        if self.launcher is not None and self.launcher.poll() is None:
            self.launcher.kill()
            self.launcher.wait()
        for process in processes(self.mark):
            process.kill()


def files_with_times(folder: Path) -> dict[str, int]:
    """Return when each file of a folder was changed last."""
    return {path.name: path.stat().st_mtime_ns for path in sorted(folder.glob("*"))}


def assert_same_run(ours: Path, theirs: Path) -> None:
    """Compare two runs bit for bit, times and where they ran aside."""
    import pandas as pd

    mine, other = (json.loads((path / "record.json").read_text()) for path in (ours, theirs))
    for name in SAME:
        assert mine.get(name) == other.get(name), (ours, name)
    passes = [
        sorted((stage["name"], stage["key"], stage["image_passes"]) for stage in record["stages"])
        for record in (mine, other)
    ]
    assert passes[0] == passes[1], (ours, passes)
    assert [path.name for path in sorted(ours.iterdir())] == [
        path.name for path in sorted(theirs.iterdir())
    ]
    for path in ours.glob("*.parquet"):
        if path.name != "history.parquet":
            assert path.read_bytes() == (theirs / path.name).read_bytes(), path
    tables = [pd.read_parquet(path / "history.parquet") for path in (ours, theirs)]
    first, second = (table.drop(columns="seconds", errors="ignore") for table in tables)
    pd.testing.assert_frame_equal(first, second, check_exact=True)


@contextlib.contextmanager
def one_machine_slurm() -> Iterator[dict[str, str]]:
    """Start a SLURM here, unless there is one; yield what has to be in the environment for it."""
    if "BENCH_DEV_CLUSTER" in os.environ:
        yield {}
        return
    script = REPOSITORY / "slurm" / "dev_cluster.sh"
    started = subprocess.run([script, "start"], capture_output=True, text=True, check=True)
    settings = dict(word.split("=", 1) for word in started.stdout.split()[1:])
    try:
        yield settings
    finally:
        subprocess.run([script, "stop"], env={**os.environ, **settings}, check=True)


def main() -> None:
    """Do it, and print the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--where", choices=(LOCAL, SLURM), default=LOCAL)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--folder", type=Path, help="a folder to keep (default: a temporary one)")
    asked = parser.parse_args()
    folder = asked.folder or Path(tempfile.mkdtemp(prefix="chaos-"))
    print(f"seed {asked.seed}, in {folder}", flush=True)
    cluster = one_machine_slurm() if asked.where == SLURM else contextlib.nullcontext({})
    with cluster as environment:
        figures = Chaos(folder, asked.where, Grid(), asked.seed, environment)(asked.kills)
    print(json.dumps({**vars(figures), "kills": dict(figures.kills)}, indent=1))
    if asked.folder is None:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
