"""The cache of decoded images: built once, never half, rebuilt when the files change."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import re
import resource
import signal
import stat
import time
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import numpy as np
import platformdirs
import pytest
import torch
from PIL import Image

from datasets import decode
from datasets.decode import Cache, decoded_folder
from datasets.errors import DataCorrupt
from datasets.files import StorageError
from datasets.images import MappedImages, MemoryImages
from datasets.lock import LockLost, LockOwner

SIZES = [(31, 20), (8, 44), (25, 25), (1, 3), (40, 12)]
SPAWN = multiprocessing.get_context("spawn")


def silent(done: int, total: int) -> None:
    pass


def mapped_images(
    files: list[Path], target: Path, progress: Any, elsewhere: Path | None = None
) -> MappedImages:
    return Cache(files, target, elsewhere).open(progress)


def write_pictures(folder: Path, sizes: list[tuple[int, int]] = SIZES) -> list[Path]:
    """Pictures of several sizes, modes and formats, as the released folders have them."""
    folder.mkdir(exist_ok=True)
    rng = np.random.default_rng(0)
    files = []
    for index, (height, width) in enumerate(sizes):
        picture = Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))
        mode, suffix = [("RGB", "jpg"), ("L", "jpg"), ("RGBA", "png"), ("P", "png")][index % 4]
        files.append(folder / f"{index:03}.{suffix}")
        picture.convert(mode).save(files[-1])
    return files


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    return write_pictures(tmp_path / "pictures")


def pil_pixels(file: Path) -> np.ndarray:
    with Image.open(file) as image:
        return np.asarray(image.convert("RGB"))


def assert_holds(images: MappedImages, files: list[Path]) -> None:
    """Every image is PIL's, at its native size, with black beyond it."""
    assert len(images) == len(files)
    batch = images.batch(torch.arange(len(files)))
    for slot, file in enumerate(files):
        expected = pil_pixels(file)
        height, width = batch.sizes[slot].tolist()
        assert (height, width) == expected.shape[:2]
        pixels = batch.pixels[slot].permute(1, 2, 0).numpy()
        assert np.array_equal(pixels[:height, :width], expected)
        assert not pixels[height:].any() and not pixels[:, width:].any()


def test_decoded_pixels_are_pils_and_batches_are_padded(files: list[Path], tmp_path: Path) -> None:
    images = mapped_images(files, tmp_path / "cache", silent)
    assert_holds(images, files)
    batch = images.batch(torch.tensor([3, 1]))
    assert batch.pixels.shape == (2, 3, 8, 44) and batch.pixels.dtype == torch.uint8
    assert batch.sizes.tolist() == [[1, 3], [8, 44]]
    assert batch[:1].pixels.shape == (1, 3, 8, 44)
    assert sorted(os.listdir(tmp_path)) == [
        "cache.json",
        "cache.lock.1",
        "cache.npy",
        "cache.u8",
        "pictures",
    ]


def test_subset_device_and_pickle_keep_the_images(files: list[Path], tmp_path: Path) -> None:
    images = mapped_images(files, tmp_path / "cache", silent)
    chosen = images.subset(torch.tensor([4, 0]))
    assert_holds(chosen, [files[4], files[0]])
    arrived = pickle.loads(pickle.dumps(chosen))
    assert_holds(arrived, [files[4], files[0]])
    assert len(pickle.dumps(images)) < 5000, "the pixels are not pickled"
    assert_holds(images.to(torch.device("cpu")), files)


def test_the_cache_is_built_once(files: list[Path], tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    for _ in range(2):
        images = mapped_images(files, tmp_path / "cache", lambda *at: calls.append(at))
    assert calls == [(done, len(files)) for done in range(1, len(files) + 1)]
    assert_holds(images, files)


def _open_when_told(files: list[Path], target: Path, go: Event, log: Path) -> None:
    """Count the builds by appending to a file; slowly, so that two builders would overlap."""
    build = decode._build

    def counted(*arguments: object) -> None:
        with log.open("a") as lines:
            lines.write("built\n")
        time.sleep(0.5)
        build(*arguments)  # type: ignore[arg-type]

    decode._build = counted  # type: ignore[assignment]
    go.wait()
    assert_holds(mapped_images(files, target, silent), files)


def test_two_processes_at_once_build_it_once(files: list[Path], tmp_path: Path) -> None:
    go, log = SPAWN.Event(), tmp_path / "log"
    arguments = (files, tmp_path / "cache", go, log)
    workers = [SPAWN.Process(target=_open_when_told, args=arguments) for _ in range(2)]
    for worker in workers:
        worker.start()
    go.set()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0, 0]
    assert log.read_text() == "built\n"


def _stall_half_way(files: list[Path], target: Path, reached: Event) -> None:
    def stall(done: int, total: int) -> None:
        if done == 3:
            reached.set()
            time.sleep(600)

    mapped_images(files, target, stall)


def test_a_killed_build_is_done_again(files: list[Path], tmp_path: Path) -> None:
    target, reached = tmp_path / "cache", SPAWN.Event()
    child = SPAWN.Process(target=_stall_half_way, args=(files, target, reached))
    child.start()
    assert reached.wait(60)
    assert child.pid is not None
    os.kill(child.pid, signal.SIGKILL)
    child.join(60)
    assert Path(f"{target}.building").exists(), "it was killed in the middle"
    assert not Path(f"{target}.json").exists()
    assert_holds(mapped_images(files, target, silent), files)
    assert not Path(f"{target}.building").exists()


@pytest.mark.parametrize("step", ["save", "replace", "write_text"])
def test_dying_between_the_last_steps_leaves_no_valid_cache(
    files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    class Killed(BaseException):
        pass

    where: Any = {"save": np, "replace": os, "write_text": Path}[step]
    real = getattr(where, step)

    def die(path: object, *arguments: object) -> None:
        if ".lock." not in str(path):  # the lock of a process that died is released by itself
            raise Killed
        real(path, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(where, step, die)
        with pytest.raises(Killed):
            mapped_images(files, tmp_path / "cache", silent)
    assert Cache(files, tmp_path / "cache").find() is None
    assert_holds(mapped_images(files, tmp_path / "cache", silent), files)


def test_changed_files_are_decoded_anew(files: list[Path], tmp_path: Path) -> None:
    target = tmp_path / "cache"
    mapped_images(files, target, silent)
    Image.new("RGB", (50, 60), (9, 8, 7)).save(files[0])
    assert_holds(mapped_images(files, target, silent), files)
    assert_holds(mapped_images(files[1:], target, silent), files[1:])
    assert_holds(mapped_images(files[::-1], target, silent), files[::-1])


DAMAGES = {
    "truncate": r"have [\d,]+ bytes instead of",
    "zero": "have a wrong checksum in block 0 of 1",
    "foreign pixels": "have a wrong checksum in block 0 of 1",
    "foreign": "belong to other image files",
    "flip index": "have an index with a wrong checksum",
    "remove index": r"lack their \.npy file",
    "garble header": "cannot be read",
    "older header": "were made by an older version, without checksums",
    "no pixels": r"lack their \.u8 file",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_cache_is_decoded_anew(
    files: list[Path], tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    target = tmp_path / "cache"
    mapped_images(files, target, silent)
    pixels, header = Path(f"{target}.u8"), Path(f"{target}.json")
    other = write_pictures(tmp_path / "others", SIZES[::-1])
    mapped_images(other, tmp_path / "other", silent)
    if damage == "truncate":
        pixels.write_bytes(pixels.read_bytes()[:-1])
    elif damage == "zero":
        pixels.write_bytes(bytes(pixels.stat().st_size))
    elif damage == "foreign pixels":
        assert Path(tmp_path / "other.u8").stat().st_size == pixels.stat().st_size
        (tmp_path / "other.u8").replace(pixels)
    elif damage == "foreign":
        for ending in ("u8", "json", "npy"):
            (tmp_path / f"other.{ending}").replace(f"{target}.{ending}")
    elif damage == "flip index":
        index = bytearray(Path(f"{target}.npy").read_bytes())
        index[-1] ^= 1
        Path(f"{target}.npy").write_bytes(index)
    elif damage == "older header":
        known = json.loads(header.read_text())
        header.write_text(json.dumps({k: known[k] for k in ("identity", "bytes", "images")}))
    elif damage == "remove index":
        Path(f"{target}.npy").unlink()
    elif damage == "garble header":
        header.write_text(header.read_text()[:40])
    else:
        pixels.unlink()
    assert not caplog.messages
    assert_holds(mapped_images(files, target, silent), files)
    (note,) = caplog.messages
    assert re.search(DAMAGES[damage], note) and str(target) in note and "decoding again" in note
    assert_holds(mapped_images(files, target, silent), files)
    assert len(caplog.messages) == 1, "once"


def test_opening_checks_some_blocks_and_verifying_all(
    files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode, "BLOCK_BYTES", 100)
    monkeypatch.setattr(decode, "CHECKED_BLOCKS", 4)
    monkeypatch.setattr(decode.cache_fault, "__defaults__", (4,))
    target = tmp_path / "cache"
    mapped_images(files, target, silent)
    pixels = bytearray(Path(f"{target}.u8").read_bytes())
    assert decode.remove_damaged(tmp_path, "cache") == []
    blocks = -(-len(pixels) // 100)
    unchecked = next(n for n in range(blocks) if n not in decode.spread(blocks, 4))
    pixels[unchecked * 100 + 99] ^= 1
    Path(f"{target}.u8").write_bytes(pixels)
    assert Cache(files, target).find() is not None, "too little to be seen at a glance"
    (note,) = decode.remove_damaged(tmp_path, "cache")
    assert f"wrong checksum in block {unchecked} of {blocks}" in note
    assert Cache(files, target).find() is None
    assert_holds(mapped_images(files, target, silent), files)


def grey_16(values: list[list[int]]) -> Image.Image:
    return Image.fromarray(np.array(values, dtype=np.uint16))


@pytest.mark.parametrize("suffix", ["png", "tif", "pgm"])
def test_images_of_16_bits_are_scaled(tmp_path: Path, suffix: str) -> None:
    values = [[0, 255, 256], [32768, 65279, 65535]]
    grey_16(values).save(tmp_path / f"grey.{suffix}")
    pixels = decode.decode(tmp_path / f"grey.{suffix}")
    assert pixels.shape == (2, 3, 3) and pixels.dtype == np.uint8
    assert pixels[..., 0].tolist() == [[0, 0, 1], [128, 254, 255]]
    assert np.array_equal(pixels[..., 0], pixels[..., 2])


@pytest.mark.parametrize("kind", [np.int32, np.float32])
def test_images_of_32_bits_are_refused(tmp_path: Path, kind: Any) -> None:
    Image.fromarray(np.array([[0, 70000]], dtype=kind)).save(tmp_path / "deep.tif")
    with pytest.raises(DataCorrupt, match=r"pixels of 32 bits .* have no known scale"):
        decode.decode(tmp_path / "deep.tif")


def test_an_unreadable_image_is_named_and_nothing_passes_for_a_cache(
    files: list[Path], tmp_path: Path
) -> None:
    files[2].write_bytes(files[2].read_bytes()[:60])
    with pytest.raises(DataCorrupt, match=files[2].name) as caught:
        mapped_images(files, tmp_path / "cache", silent)
    assert "data verify" in caught.value.remedy
    assert Cache(files, tmp_path / "cache").find() is None
    with pytest.raises(DataCorrupt, match="absent"):
        mapped_images([tmp_path / "absent.jpg"], tmp_path / "other", silent)


def test_a_full_disk_says_so(files: list[Path], tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(
            StorageError, match=r"no room left to write .*cache: File too large"
        ) as e:
            mapped_images(files, tmp_path / "cache", silent)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "move the data root to a larger disk" in e.value.remedy
    assert not list(tmp_path.glob("cache.[bju]*"))


def test_a_builder_that_was_taken_for_dead_leaves_the_cache_to_the_other(
    files: list[Path], tmp_path: Path
) -> None:
    target = tmp_path / "cache"

    def replaced(done: int, total: int) -> None:
        """Take the lock over and build, as a process elsewhere would after a long silence."""
        if done == 1:
            (tmp_path / "cache.lock.9").write_text(LockOwner("elsewhere", (1, 1)).to_json())
            Path(f"{target}.building").unlink()
            Path(f"{target}.building").write_bytes(b"of the other")

    with pytest.raises(LockLost):
        mapped_images(files, target, replaced)
    assert Path(f"{target}.building").read_bytes() == b"of the other"
    assert not Path(f"{target}.json").exists()


def test_a_closed_data_folder_falls_back_to_the_users_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platformdirs, "user_cache_dir", lambda name: str(tmp_path / "user" / name))
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
    assert decoded_folder(first) == first / ".decoded"
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    fallbacks = {decoded_folder(first), decoded_folder(second)}
    assert len(fallbacks) == 2, "two data folders never share a cache"
    assert all(path.is_dir() and tmp_path / "user" in path.parents for path in fallbacks)


@pytest.mark.skipif(os.geteuid() == 0, reason="permissions do not bind root")
def test_a_read_only_data_folder_can_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platformdirs, "user_cache_dir", lambda name: str(tmp_path / "user"))
    files = write_pictures(tmp_path / "pictures")
    files[0].parent.chmod(stat.S_IRUSR | stat.S_IXUSR)
    try:
        cache = decoded_folder(files[0].parent)
        assert tmp_path / "user" in cache.parents
        assert_holds(mapped_images(files, cache / "photos", silent), files)
    finally:
        files[0].parent.chmod(stat.S_IRWXU)


def test_something_in_the_way_of_the_folder_falls_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platformdirs, "user_cache_dir", lambda name: str(tmp_path / "user"))
    (tmp_path / ".decoded").write_text("a file")
    assert tmp_path / "user" in decoded_folder(tmp_path).parents


def test_images_in_memory() -> None:
    pixels = torch.arange(4 * 3 * 2 * 5, dtype=torch.uint8).view(4, 3, 2, 5)
    images = MemoryImages(pixels)
    batch = images.batch(torch.tensor([2, 0]))
    assert torch.equal(batch.pixels, pixels[[2, 0]])
    assert batch.sizes.tolist() == [[2, 5], [2, 5]]
    part = images.subset(torch.tensor([1]))
    assert part.pixels.untyped_storage().nbytes() == 30, "a subset leads to nothing else"
    assert torch.equal(pickle.loads(pickle.dumps(images)).pixels, pixels)
    with pytest.raises(ValueError, match="uint8"):
        MemoryImages(pixels.float())


def test_a_cache_that_its_owner_built_is_used_where_it_lies(
    files: list[Path], tmp_path: Path
) -> None:
    shared, mine = tmp_path / "shared", tmp_path / "mine"
    mapped_images(files, shared, silent)
    images = mapped_images(files, mine, silent, elsewhere=shared)
    assert images.path == f"{shared}.u8"
    assert not list(tmp_path.glob("mine*"))
    fewer = mapped_images(files[1:], mine, silent, elsewhere=shared)
    assert fewer.path == f"{mine}.u8", "one of other files is left alone"
    assert_holds(fewer, files[1:])
    assert_holds(images, files)
