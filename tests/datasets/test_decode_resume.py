"""Decoding is taken up where it was killed, and refused beforehand where it cannot succeed."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import time
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from datasets import decode
from datasets.bounded import Bound
from datasets.decode import Cache, content_digest, decode_all, missing_files, open_all
from datasets.errors import DataCorrupt, DataMissing
from datasets.files import StorageError
from datasets.images import MappedImages

BOUND = Bound(10, 12)
COUNT = 30


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    folder = tmp_path / "pictures"
    folder.mkdir()
    rng = np.random.default_rng(0)
    files = [folder / f"{number:03}.png" for number in range(COUNT)]
    for number, file in enumerate(files):
        shape = (20 + number, 30, 3)
        Image.fromarray(rng.integers(0, 256, shape, dtype=np.uint8)).save(file)
    return files


@pytest.fixture(autouse=True)
def at_every_image(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "CHECKPOINT_SECONDS", 0.0)


def content(images: MappedImages) -> list[bytes]:
    return [
        images.batch(torch.tensor([place])).pixels.numpy().tobytes() for place in range(len(images))
    ]


def undisturbed(files: list[Path], tmp_path: Path, bound: Bound | None = BOUND) -> list[bytes]:
    return content(Cache(files, tmp_path / "whole", bound=bound).open(lambda *at: None))


def _stop_at(files: list[Path], target: Path, stop: int) -> None:
    def killed(done: int, total: int) -> None:
        if done == stop:
            os.kill(os.getpid(), signal.SIGKILL)

    Cache(files, target, bound=BOUND).open(killed)


def kill_at(files: list[Path], target: Path, stop: int) -> None:
    """Decode in a process that is killed when so many images are done."""
    child = os.fork()
    if child == 0:
        _stop_at(files, target, stop)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL


def test_killed_three_times_it_decodes_only_the_rest(
    files: list[Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target = tmp_path / "cache"
    for stop in (7, 8, 22):
        kill_at(files, target, stop)
        assert Cache(files, target, bound=BOUND).find() is None
    decoded: list[int] = []
    with caplog.at_level(logging.INFO):
        images = Cache(files, target, bound=BOUND).open(lambda done, total: decoded.append(done))
    assert decoded == list(range(23, COUNT + 1))
    assert "22 of 30 images are decoded already" in caplog.text
    assert content(images) == undisturbed(files, tmp_path)
    assert decode.cache_fault(target, None, None) == ""
    assert not list(tmp_path.glob("cache.building")) + list(tmp_path.glob("cache.journal"))
    whole = Path(f"{tmp_path / 'whole'}.json").read_text()
    assert Path(f"{target}.json").read_text() == whole, "checksums and all"


DAMAGES = ["torn journal", "zeroed pixels", "short pixels", "longer pixels", "no pixels", "garbage"]


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_does_not_hold_is_not_taken_up(files: list[Path], tmp_path: Path, damage: str) -> None:
    target = tmp_path / "cache"
    kill_at(files, target, 20)
    pixels, journal = Path(f"{target}.building"), Path(f"{target}.journal")
    first = 1
    if damage == "torn journal":
        journal.write_text(journal.read_text()[:-5])
        first = 20  # the last image is decoded again
    elif damage == "zeroed pixels":
        pixels.write_bytes(bytes(pixels.stat().st_size))
    elif damage == "short pixels":
        os.truncate(pixels, 100)
    elif damage == "longer pixels":  # written after the last checkpoint
        with pixels.open("ab") as sink:
            sink.write(b"more" * 1000)
        first = 21
    elif damage == "no pixels":
        pixels.unlink()
    else:
        journal.write_bytes(b"\xff{]")
    decoded: list[int] = []
    images = Cache(files, target, bound=BOUND).open(lambda done, total: decoded.append(done))
    assert decoded == list(range(first, COUNT + 1))
    assert content(images) == undisturbed(files, tmp_path)


def test_another_bound_or_other_files_begin_anew(files: list[Path], tmp_path: Path) -> None:
    for number, other in enumerate(
        (Cache(files, tmp_path), Cache(files[1:], tmp_path, bound=BOUND))
    ):
        target = tmp_path / f"cache{number}"
        kill_at(files, target, 9)
        decoded: list[int] = []
        cache = Cache(other.files, target, bound=other.bound)
        cache.open(lambda done, total, decoded=decoded: decoded.append(done))  # type: ignore[misc]
        assert decoded == list(range(1, len(other.files) + 1))


def test_an_interruption_keeps_what_there_is(
    files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode, "CHECKPOINT_SECONDS", 3600.0)

    def interrupted(done: int, total: int) -> None:
        if done == 12:
            raise KeyboardInterrupt

    cache = Cache(files, tmp_path / "cache", bound=BOUND)
    with pytest.raises(KeyboardInterrupt):
        cache.open(interrupted)
    decoded: list[int] = []
    cache.open(lambda done, total: decoded.append(done))
    assert decoded[0] == 13


def test_a_checkpoint_is_made_now_and_then(
    files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode, "CHECKPOINT_SECONDS", 0.05)
    slow, cache = [], Cache(files, tmp_path / "cache", bound=BOUND)
    flush = decode.Draft.flush
    monkeypatch.setattr(decode.Draft, "flush", lambda self: (slow.append(1), flush(self)))
    cache.open(lambda done, total: time.sleep(0.01))
    assert 2 <= len(slow) <= 10


def test_missing_files_are_summed_up_before_anything_is_decoded(
    files: list[Path], tmp_path: Path
) -> None:
    for file in files[3:20:2]:
        file.unlink()
    assert missing_files(files) == files[3:20:2]
    caches = {
        name: Cache(own, tmp_path / name)
        for name, own in (("train", files[:10]), ("val", files[10:]))
    }
    decoded: list[Any] = []
    with pytest.raises(DataMissing) as caught:
        open_all(caches, lambda *at: decoded.append(at), "birds")
    assert not decoded and not list(tmp_path.glob("train*"))
    message = caught.value.message
    assert "9 of 30 images of birds are missing" in message
    named = [file for file in files if str(file) in message]
    assert named == files[3:13:2] and "and 4 more" in message
    assert "--allow-subset" in caught.value.remedy
    listed = (tmp_path / "missing-birds.txt").read_text().splitlines()
    assert listed == [str(file) for file in files[3:20:2]]
    gone = tmp_path / "no" / "such" / "folder.jpg"
    assert missing_files([gone]) == [gone]


def test_a_disk_without_room_is_noticed_before_the_first_byte(
    files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    caches = {"train": Cache(files, tmp_path / "train"), "val": Cache(files, tmp_path / "val")}
    needed = sum(3 * 30 * (20 + number) for number in range(COUNT))
    for cache in caches.values():
        assert cache.missing_bytes() == needed
    half = Bound(15, 15)
    smaller = Cache(files, tmp_path / "small", bound=half).missing_bytes()
    assert smaller == sum(3 * np.prod(half.size(30, 20 + number)) for number in range(COUNT))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(0, 0, 2 * needed - 1))
    with pytest.raises(
        StorageError, match=r"need about 0\.0 GB in .*, where 0\.0 GB are free"
    ) as e:
        open_all(caches, lambda *at: None, "birds")
    assert "smaller resolution" in e.value.remedy
    assert not list(tmp_path.glob("train*"))
    # What was decoded before a kill need not be written again.
    kill_at(files, tmp_path / "cache", 20)
    left = Cache(files, tmp_path / "cache", bound=BOUND).missing_bytes()
    assert 0 < left < Cache(files, tmp_path / "other", bound=BOUND).missing_bytes() / 2
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(0, 0, 2 * needed))
    assert len(open_all(caches, lambda *at: None, "birds")) == 2


def test_a_file_that_is_not_the_registered_one_is_refused(
    files: list[Path], tmp_path: Path
) -> None:
    digests = [content_digest(file.read_bytes()) for file in files]
    Cache(files, tmp_path / "first", digests=digests).open(lambda *at: None)
    shutil.copy(files[0], files[5])
    with pytest.raises(DataCorrupt, match=r"005\.png .* not the file that was registered"):
        Cache(files, tmp_path / "second", digests=digests).open(lambda *at: None)


def test_decoding_runs_a_bounded_number_ahead_and_stops_with_its_reader() -> None:
    begun: list[int] = []
    several = decode_all(range(10_000), lambda number: begun.append(number) or number)
    assert [next(several) for _ in range(5)] == [0, 1, 2, 3, 4]
    several.close()  # type: ignore[attr-defined]
    assert len(begun) <= decode.DECODED_AHEAD + 5
    assert list(decode_all([], str)) == []
