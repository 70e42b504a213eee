"""A lock for processes on many machines that share a disk, released by itself when its owner dies.

File locks of the operating system do not reach across machines on every shared disk. Here a lock is
a series of small files `<path>.1`, `<path>.2`, ...: the highest one names the owner, and its time
of change is the owner's heartbeat. A process that finds it released or its owner dead makes the
next number with `os.link`, which exactly one of several can do, on NFS too. An owner only ever
touches the file it made, so there is no moment at which one could remove another's lock by mistake.

An owner on the same machine is dead when its process is; one that ran in an earlier start of the
same SLURM job is dead because the job was started again; of any other only its heartbeat is known.
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
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from datasets.errors import BenchError
from datasets.files import RESULTS, StorageArea, storage_errors

TIMEOUT_SECONDS = 120.0  # an owner elsewhere that was silent for so long is taken to be dead
HEARTBEAT_SECONDS = 10.0
POLL_SECONDS = 0.5
NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)


class LockBusy(BenchError):
    """Another process holds the lock."""

    kind = "busy"


class LockLost(BenchError):
    """The lock was taken over because this process seemed dead for too long."""

    kind = "lock_lost"


@dataclass(frozen=True)
class LockOwner:
    """The process that holds a lock, or did.

    Attributes:
        host: the machine, since it was started: process numbers mean nothing elsewhere.
        process: process number and when that process was started, for numbers are used again.
        job: SLURM's name of the job, if it runs in one.
        restart_count: how often SLURM had started that job before.
        released: whether the lock was given back.
    """

    host: str
    process: tuple[int, int]
    job: str = ""
    restart_count: int = 0
    released: bool = False

    def is_dead(self, heartbeat: float, now: float) -> bool:
        """Return whether no living process stands behind the lock any more."""
        us = current_owner()
        if self.released:
            return True
        if self.job and self.job == us.job and self.restart_count < us.restart_count:
            return True
        if self.host == us.host:
            return _start_time(self.process[0]) != self.process[1]
        return now - heartbeat > TIMEOUT_SECONDS

    def to_json(self, *, released: bool = False) -> str:
        """Return the content of a lock file; its keys stay as earlier versions wrote them."""
        content = {
            "place": self.host,
            "process": self.process,
            "job": self.job,
            "start": self.restart_count,
            "released": released,
        }
        return json.dumps(content)

    @classmethod
    def from_json(cls, text: str) -> LockOwner:
        """Read a lock file; ValueError, TypeError or KeyError where its content is torn."""
        content = json.loads(text)
        number, started = content["process"]
        return cls(
            host=str(content["place"]),
            process=(int(number), int(started)),
            job=str(content.get("job", "")),
            restart_count=int(content.get("start", 0)),
            released=bool(content.get("released", False)),
        )


class Lock:
    """One lock. `hold` takes it, `held` only looks."""

    def __init__(self, path: Path, area: StorageArea = RESULTS) -> None:
        self.path = path
        self._area = area
        self._own: Path | None = None
        self._stop = threading.Event()

    @contextmanager
    def hold(self, *, wait: bool) -> Iterator[Lock]:
        """Hold the lock; where another process has it, wait for it or raise `LockBusy`."""
        while not self.acquire():
            if not wait:
                raise LockBusy(f"{self.path} is held by another process")
            time.sleep(POLL_SECONDS)
        try:
            yield self
        finally:
            self.release()

    def acquire(self) -> bool:
        """Try to take the lock, once; return whether it was taken."""
        number, owner, heartbeat = self._last()
        if owner is not None and not owner.is_dead(heartbeat, time.time()):
            return False
        draft = self.path.with_name(f".{self.path.name}.{uuid.uuid4().hex[:8]}.part")
        with storage_errors(self.path, self._area):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            try:
                draft.write_text(current_owner().to_json())
                # The file server's own clock, which may differ from ours, dates the heartbeats.
                if owner is not None and not owner.is_dead(heartbeat, draft.stat().st_mtime):
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
        self._own, self._stop = own, threading.Event()
        threading.Thread(target=_heartbeat, args=(own, self._stop), daemon=True).start()
        return True

    def release(self) -> None:
        """Release the lock; the file stays, so that numbers are never used twice."""
        self._stop.set()
        own, self._own = self._own, None
        if own is None or not own.exists():  # the folder was deleted with everything in it
            return
        draft = own.with_name(f".{own.name}.part")
        with contextlib.suppress(OSError):
            draft.write_text(current_owner().to_json(released=True))
            os.replace(draft, own)

    def check(self) -> None:
        """Raise `LockLost` if the lock was lost to another process."""
        if self._own is not None and self._own != self._numbered(max(self._numbers(), default=0)):
            self._own = None
            raise LockLost(f"{self.path} was taken over", "the other process goes on with it")

    def held(self) -> bool:
        """Return whether any process holds the lock, without touching it."""
        _, owner, heartbeat = self._last()
        return owner is not None and not owner.is_dead(heartbeat, time.time())

    def _numbered(self, number: int) -> Path:
        return self.path.with_name(f"{self.path.name}.{number}")

    def _numbers(self) -> list[int]:
        prefix = f"{self.path.name}."
        try:
            names = os.listdir(self.path.parent)
        except OSError:
            return []
        return [int(n.removeprefix(prefix)) for n in names if _is_number(n, prefix)]

    def _last(self) -> tuple[int, LockOwner | None, float]:
        """Return the highest number, its owner if it can be read, and its heartbeat."""
        number = max(self._numbers(), default=0)
        path = self._numbered(number)
        try:
            heartbeat = path.stat().st_mtime
            return number, LockOwner.from_json(path.read_text()), heartbeat
        except (FileNotFoundError, NotADirectoryError):
            return number, None, 0.0
        except (ValueError, TypeError, KeyError):  # torn by a crash: the heartbeat decides
            return number, LockOwner("", (0, 0)), heartbeat


def _linked(draft: Path, own: Path) -> bool:
    """Link `own` to the draft; return whether the name was free."""
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
def _identity(process: int) -> LockOwner:
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    job = f"{array}_{task}" if array else os.environ.get("SLURM_JOB_ID", "")
    restarts = int(os.environ.get("SLURM_RESTART_COUNT") or 0)
    return LockOwner(_host(), (process, _start_time(process)), job, restarts)


def current_owner() -> LockOwner:
    """Return this process as the owner of a lock."""
    return _identity(os.getpid())


def _host() -> str:
    """Name the machine, its current boot and, in containers, whose process numbers count."""
    boot = namespace = ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink("/proc/self/ns/pid")
    return f"{socket.gethostname()} {boot} {namespace}"


def _start_time(process: int) -> int:
    """Return when a process was started, in ticks since boot; 0 if there is none."""
    try:
        # The second field is the program's name in brackets and may itself contain brackets.
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0 if Path("/proc/self/stat").exists() else _is_alive(process)
    return 0 if fields[0] in "ZX" else int(fields[19])


def _is_alive(process: int) -> int:
    """Return 1 if some process has the number, where there is no /proc."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return 0
    except OSError:
        return 1
    return 1


def _is_number(name: str, prefix: str) -> bool:
    return name.startswith(prefix) and name.removeprefix(prefix).isdigit()


def _heartbeat(own: Path, stop: threading.Event) -> None:
    """Date the lock file anew, until the lock is released or the file is gone."""
    while not stop.wait(HEARTBEAT_SECONDS):
        try:
            os.utime(own)
        except FileNotFoundError:
            return
        except OSError:  # a disk that hiccups; the timeout bears some missed beats
            continue
