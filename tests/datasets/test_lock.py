from __future__ import annotations

import errno
import json
import multiprocessing
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from datasets import lock as lock_module
from datasets.files import StorageError
from datasets.lock import TIMEOUT_SECONDS, Lock, LockBusy, LockLost, LockOwner

SPAWN = multiprocessing.get_context("spawn")
ELSEWHERE = {"place": "another machine", "process": [4, 5], "job": "", "start": 0}


def hold_for_ever(path: Path, ready: Any) -> None:
    with Lock(path).hold(wait=False):
        ready.set()
        time.sleep(600)


def contend(path: Path, start: Any, rounds: int, answers: Any) -> None:
    """Take the lock over and over, and count how often another was inside."""
    start.wait()
    clashes = 0
    inside = path.with_name("inside")
    for _ in range(rounds):
        with Lock(path).hold(wait=True):
            try:
                os.close(os.open(inside, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                clashes += 1
            inside.unlink()
    answers.put(clashes)


def take(path: Path, start: Any, answers: Any) -> None:
    lock = Lock(path)
    start.wait()
    answers.put(lock.acquire())
    time.sleep(5)  # a winner that ended at once would leave a dead owner for the next


def left_by(path: Path, age: float, **facts: Any) -> Path:
    """Write the lock of a owner on another machine whose last heartbeat was `age` seconds ago."""
    lock = path.with_name(f"{path.name}.7")
    lock.write_text(json.dumps({**ELSEWHERE, **facts}))
    os.utime(lock, (time.time() - age,) * 2)
    return lock


def test_one_owner_at_a_time(tmp_path: Path) -> None:
    first, second = Lock(tmp_path / "lock"), Lock(tmp_path / "lock")
    with first.hold(wait=False):
        assert second.held()
        with pytest.raises(LockBusy), second.hold(wait=False):
            pytest.fail("two hold it")
        first.check()
    assert not second.held()
    with second.hold(wait=False):
        assert first.held()


def test_a_killed_owner_on_this_machine_is_known_at_once(
    tmp_path: Path, wait_until: Callable[[Callable[[], Any]], Any]
) -> None:
    path, ready = tmp_path / "lock", SPAWN.Event()
    owner = SPAWN.Process(target=hold_for_ever, args=(path, ready))
    owner.start()
    wait_until(ready.is_set)
    assert Lock(path).held()
    assert not Lock(path).acquire()
    owner.kill()
    owner.join()
    assert not Lock(path).held()
    began = time.monotonic()
    assert Lock(path).acquire()
    assert time.monotonic() - began < TIMEOUT_SECONDS / 2


@pytest.mark.parametrize(
    ("age", "free"), [(TIMEOUT_SECONDS / 2, False), (TIMEOUT_SECONDS + 5, True), (-3600, False)]
)
def test_a_owner_elsewhere_is_dead_when_its_lease_ran_out(
    tmp_path: Path, age: float, free: bool
) -> None:
    left_by(tmp_path / "lock", age)
    assert Lock(tmp_path / "lock").held() is not free
    assert Lock(tmp_path / "lock").acquire() is free


def test_an_earlier_start_of_the_same_job_is_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "lock"
    for name, value in {"ARRAY_JOB_ID": "12", "ARRAY_TASK_ID": "3", "RESTART_COUNT": "1"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    lock_module._identity.cache_clear()
    left_by(path, 0, job="12_4")
    assert not Lock(path).acquire()  # another task of the array
    left_by(path, 0, job="12_3", start=1)
    assert not Lock(path).acquire()  # this very start
    left_by(path, 0, job="12_3", start=0)
    assert Lock(path).acquire()
    lock_module._identity.cache_clear()


def test_a_torn_lock_is_waited_for_and_then_taken(tmp_path: Path) -> None:
    lock = left_by(tmp_path / "lock", 0)
    lock.write_text("")
    assert not Lock(tmp_path / "lock").acquire()
    os.utime(lock, (0, 0))
    assert Lock(tmp_path / "lock").acquire()


def test_a_disk_without_links_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: Path, target: Path) -> None:
        raise PermissionError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", refuse)
    first, second = Lock(tmp_path / "lock"), Lock(tmp_path / "lock")
    assert first.acquire()
    assert not second.acquire()
    first.release()
    assert second.acquire()


def test_heartbeats_keep_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wait_until: Callable[..., Any]
) -> None:
    monkeypatch.setattr(lock_module, "HEARTBEAT_SECONDS", 0.02)
    with Lock(tmp_path / "lock").hold(wait=False):
        (file,) = tmp_path.iterdir()
        os.utime(file, (0, 0))
        wait_until(lambda: file.stat().st_mtime > time.time() - 60)


def test_a_owner_learns_that_it_lost_the_lock(tmp_path: Path) -> None:
    lock = Lock(tmp_path / "lock")
    assert lock.acquire()
    left_by(tmp_path / "lock", 0)  # number 7, so later than ours
    with pytest.raises(LockLost):
        lock.check()
    lock.release()
    assert Lock(tmp_path / "lock").held()  # what the other holds is not touched


def test_of_several_that_take_over_one_wins(tmp_path: Path) -> None:
    path, start, answers = tmp_path / "lock", SPAWN.Event(), SPAWN.Queue()
    left_by(path, TIMEOUT_SECONDS * 2)
    takers = [SPAWN.Process(target=take, args=(path, start, answers)) for _ in range(4)]
    for taker in takers:
        taker.start()
    start.set()
    assert sorted(answers.get(timeout=120) for _ in takers) == [False, False, False, True]
    for taker in takers:
        taker.kill()
        taker.join()


def test_two_owners_are_never_inside_at_once(tmp_path: Path) -> None:
    path, start, answers = tmp_path / "lock", SPAWN.Event(), SPAWN.Queue()
    rivals = [SPAWN.Process(target=contend, args=(path, start, 8, answers)) for _ in range(3)]
    for rival in rivals:
        rival.start()
    start.set()
    assert [answers.get(timeout=120) for _ in rivals] == [0, 0, 0]
    for rival in rivals:
        rival.join()


def test_lock_files_keep_the_keys_of_earlier_versions(tmp_path: Path) -> None:
    with Lock(tmp_path / "lock").hold(wait=False):
        (file,) = tmp_path.iterdir()
        content = json.loads(file.read_text())
        assert set(content) == {"place", "process", "job", "start", "released"}
        assert content["process"][0] == os.getpid() and content["released"] is False
    assert json.loads(file.read_text())["released"] is True
    left = LockOwner.from_json(json.dumps(ELSEWHERE))
    assert left == LockOwner("another machine", (4, 5))


def test_a_lock_below_a_folder_that_is_no_folder_names_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot write") as caught:
        Lock(tmp_path / "file" / "lock").acquire()
    assert "--results" in caught.value.remedy
