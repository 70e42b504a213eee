"""A lock for processes on many machines that share a disk, which a killed holder cannot keep.

File locks of the operating system do not reach across machines on every shared disk. Here a lock is
a series of small files `<path>.1`, `<path>.2`, ...: the highest one names the holder, and its time
of change is the holder's heartbeat. Whoever finds it released or its holder dead makes the next
number with `os.link`, which exactly one of several can do, on NFS too. A holder only ever touches
the file it made, so there is no moment at which one could remove another's lock by mistake.

A holder on the same machine is dead when its process is; one that ran in an earlier start of the
same SLURM job is dead because the job was started again; of any other we know only its heartbeat.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from bench.files import storage_errors
from datasets.errors import BenchError

LEASE_SECONDS = 120.0  # a holder elsewhere that was silent for so long is taken to be dead
HEARTBEAT_SECONDS = 10.0
POLL_SECONDS = 0.5
NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)


class Busy(BenchError):
    """Somebody else holds the lock."""

    kind = "busy"


class LeaseLost(BenchError):
    """The lock was taken over because this process seemed dead for too long."""

    kind = "lease_lost"


@dataclass(frozen=True)
class Holder:
    """Who holds a lock, or did.

    Attributes:
        place: the machine, since it was started: process numbers mean nothing elsewhere.
        process: process number and when that process was started, for numbers are used again.
        job: SLURM's name of the job, if it runs in one.
        start: how often SLURM had started that job before.
    """

    place: str
    process: tuple[int, int]
    job: str = ""
    start: int = 0
    released: bool = False

    def dead(self, heartbeat: float, now: float) -> bool:
        """Tell whether nobody stands behind the lock any more."""
        us = myself()
        if self.released:
            return True
        if self.job and self.job == us.job and self.start < us.start:
            return True
        if self.place == us.place:
            return _started(self.process[0]) != self.process[1]
        return now - heartbeat > LEASE_SECONDS


class Lease:
    """One lock. `hold` takes it, `held` only looks."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._own: Path | None = None
        self._silence = threading.Event()

    @contextmanager
    def hold(self, *, wait: bool) -> Iterator[Lease]:
        """Hold the lock; where another process has it, wait for it or raise `Busy`."""
        while not self.acquire():
            if not wait:
                raise Busy(f"{self.path} is held by another process")
            time.sleep(POLL_SECONDS)
        try:
            yield self
        finally:
            self.release()

    def acquire(self) -> bool:
        """Try to take the lock, once."""
        number, holder, heartbeat = self._last()
        if holder is not None and not holder.dead(heartbeat, time.time()):
            return False
        draft = self.path.with_name(f".{self.path.name}.{uuid.uuid4().hex[:8]}.part")
        with storage_errors(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            try:
                draft.write_text(json.dumps(asdict(myself())))
                # The file server's own clock, which may differ from ours, dates the heartbeats.
                if holder is not None and not holder.dead(heartbeat, draft.stat().st_mtime):
                    return False
                own = self._numbered(number + 1)
                if not _linked(draft, own):
                    return False
            finally:
                draft.unlink(missing_ok=True)
        numbers = self._numbers()
        if max(numbers, default=0) > number + 1:  # we had looked before others came and went
            own.unlink(missing_ok=True)
            return False
        for older in numbers:
            if older <= number:
                self._numbered(older).unlink(missing_ok=True)
        self._own, self._silence = own, threading.Event()
        threading.Thread(target=_beat, args=(own, self._silence), daemon=True).start()
        return True

    def release(self) -> None:
        """Give the lock back; the file stays, so that numbers are never used twice."""
        self._silence.set()
        own, self._own = self._own, None
        if own is None or not own.exists():  # the folder was deleted with everything in it
            return
        draft = own.with_name(f".{own.name}.part")
        with contextlib.suppress(OSError):
            draft.write_text(json.dumps(asdict(myself()) | {"released": True}))
            os.replace(draft, own)

    def check(self) -> None:
        """Raise if the lock was lost to another process."""
        if self._own is not None and self._own != self._numbered(max(self._numbers(), default=0)):
            self._own = None
            raise LeaseLost(f"{self.path} was taken over", "the other process goes on with it")

    def held(self) -> bool:
        """Tell whether any process holds the lock, without touching it."""
        _, holder, heartbeat = self._last()
        return holder is not None and not holder.dead(heartbeat, time.time())

    def _numbered(self, number: int) -> Path:
        return self.path.with_name(f"{self.path.name}.{number}")

    def _numbers(self) -> list[int]:
        prefix = f"{self.path.name}."
        try:
            names = os.listdir(self.path.parent)
        except OSError:
            return []
        return [int(n.removeprefix(prefix)) for n in names if _is_number(n, prefix)]

    def _last(self) -> tuple[int, Holder | None, float]:
        """Give the highest number, its holder if it can be read, and its heartbeat."""
        number = max(self._numbers(), default=0)
        path = self._numbered(number)
        try:
            heartbeat = path.stat().st_mtime
            content = json.loads(path.read_text())
            content["process"] = tuple(content["process"])
            return number, Holder(**content), heartbeat
        except FileNotFoundError:
            return number, None, 0.0
        except (ValueError, TypeError, KeyError):  # torn by a crash: the heartbeat will tell
            return number, Holder("", (0, 0)), heartbeat


def _linked(draft: Path, own: Path) -> bool:
    """Give a file its second name, if the name is free."""
    try:
        os.link(draft, own)
    except (FileExistsError, FileNotFoundError):  # another was quicker, or is tidying up
        # NFS may lose the answer to a call that succeeded and then refuse to repeat it.
        return draft.exists() and draft.stat().st_nlink == 2
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        try:  # a disk without links; a reader may see the file empty, and then waits
            with own.open("x") as sink:
                sink.write(draft.read_text())
        except FileExistsError:
            return False
    return True


@cache
def _identity(process: int) -> Holder:
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    job = f"{array}_{task}" if array else os.environ.get("SLURM_JOB_ID", "")
    start = int(os.environ.get("SLURM_RESTART_COUNT") or 0)
    return Holder(_place(), (process, _started(process)), job, start)


def myself() -> Holder:
    """Describe this process as a holder."""
    return _identity(os.getpid())


def _place() -> str:
    """Name the machine, its current boot and, in containers, whose process numbers count."""
    boot = namespace = ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink("/proc/self/ns/pid")
    return f"{socket.gethostname()} {boot} {namespace}"


def _started(process: int) -> int:
    """Tell when a process was started, in ticks since boot; 0 if there is none."""
    try:
        # The second field is the program's name in brackets and may itself contain brackets.
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0 if Path("/proc/self/stat").exists() else _alive(process)
    return 0 if fields[0] in "ZX" else int(fields[19])


def _alive(process: int) -> int:
    """Where there is no /proc: 1 if some process has the number."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return 0
    except OSError:
        return 1
    return 1


def _is_number(name: str, prefix: str) -> bool:
    return name.startswith(prefix) and name.removeprefix(prefix).isdigit()


def _beat(own: Path, silence: threading.Event) -> None:
    """Show that the holder lives, until it lets go or the file is gone."""
    while not silence.wait(HEARTBEAT_SECONDS):
        try:
            os.utime(own)
        except FileNotFoundError:
            return
        except OSError:  # a disk that hiccups; the lease bears some missed beats
            continue
