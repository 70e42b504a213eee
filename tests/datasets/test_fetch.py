"""Downloads against a real local server that breaks off, lies and refuses, and hostile archives."""

from __future__ import annotations

import hashlib
import http.server
import io
import os
import re
import stat
import subprocess
import sys
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from datasets import archives, sources, standins, weights_source
from datasets.archives import unpack
from datasets.errors import BenchError, DataCorrupt, DataMissing, UsageError
from datasets.fetch import default_data_root, download, get_command, md5_of, sha256_of
from datasets.files import StorageError

REPOSITORY = Path(__file__).parents[2]
BODY = bytes(range(256)) * 4096
SHA256 = hashlib.sha256(BODY).hexdigest()


@dataclass
class Host:
    """A server's content, its faults, and what it was asked for."""

    url: str = ""
    body: bytes = BODY
    content_type: str = "application/octet-stream"
    ranges: bool = True
    break_after: list[int] = field(default_factory=list)
    """For each coming answer, the number of bytes after which the connection is closed."""
    asked: list[str | None] = field(default_factory=list)
    """The Range header of each request."""
    sent: list[int] = field(default_factory=list)


@pytest.fixture
def host() -> Iterator[Host]:
    """Serve on 127.0.0.1 from a thread."""
    host = Host()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked = self.headers.get("Range")
            host.asked.append(asked)
            start = int(asked[6:-1]) if asked and host.ranges else 0
            if "missing" in self.path:
                self.send_error(404)
                return
            if asked and host.ranges and start >= len(host.body):
                self.send_response(416)
                self.send_header("Content-Range", f"bytes */{len(host.body)}")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            rest = host.body[start:]
            self.send_response(206 if start else 200)
            if start:
                size = len(host.body)
                self.send_header("Content-Range", f"bytes {start}-{size - 1}/{size}")
            self.send_header("Content-Length", str(len(rest)))
            self.send_header("Content-Type", host.content_type)
            self.end_headers()
            if host.break_after:
                rest = rest[: host.break_after.pop(0)]
            host.sent.append(len(rest))  # first, for whoever has read the last byte looks at it
            self.wfile.write(rest)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    host.url = f"http://127.0.0.1:{server.server_address[1]}/file.bin"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield host
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """Where the file shall come to lie."""
    return tmp_path / "data" / "file.bin"


def part_of(target: Path, content: bytes) -> Path:
    """Leave what an earlier download would have left."""
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(target.name + ".part")
    part.write_bytes(content)
    return part


def test_download_verifies_reports_progress_and_keeps_what_is_there(
    host: Host, target: Path
) -> None:
    seen: list[tuple[int, int | None]] = []
    md5 = hashlib.md5(BODY).hexdigest()
    for _ in range(2):
        assert download(
            host.url, target, sha256=SHA256, md5=md5, progress=lambda *at: seen.append(at)
        )
    assert target.read_bytes() == BODY
    assert host.asked == [None]
    assert seen[-1] == (len(BODY), len(BODY))
    assert os.listdir(target.parent) == ["file.bin"]
    assert (sha256_of(target), md5_of(target)) == (SHA256, md5)


def test_a_break_is_continued_within_one_call(host: Host, target: Path) -> None:
    host.break_after = [300_000]
    download(host.url, target, sha256=SHA256[:8])
    assert host.asked == [None, "bytes=300000-"]
    assert sum(host.sent) == len(BODY)
    assert sha256_of(target) == SHA256


def test_a_later_call_asks_for_the_missing_bytes_only(host: Host, target: Path) -> None:
    host.break_after = [400_000, 100_000, 0]
    with pytest.raises(DataMissing, match=r"broke off.*500,000 bytes"):
        download(host.url, target, sha256=SHA256)
    assert not target.exists()
    download(host.url, target, sha256=SHA256)
    assert host.asked[-1] == "bytes=500000-"
    assert host.sent[-1] == len(BODY) - 500_000
    assert sha256_of(target) == SHA256


def test_a_server_without_ranges_starts_over(host: Host, target: Path) -> None:
    part_of(target, BODY[:1000])
    host.ranges = False
    download(host.url, target, sha256=SHA256)
    assert host.sent == [len(BODY)]


@pytest.mark.parametrize(("there", "requests"), [(BODY, 1), (BODY + b"more", 2)])
def test_416_means_complete_or_start_over(
    host: Host, target: Path, there: bytes, requests: int
) -> None:
    part_of(target, there)
    download(host.url, target, sha256=SHA256)
    assert len(host.asked) == requests
    assert target.read_bytes() == BODY


def test_half_of_another_version_is_thrown_away(host: Host, target: Path) -> None:
    part_of(target, b"x" * 1000)
    download(host.url, target, sha256=SHA256)
    assert host.asked == ["bytes=1000-", None]
    assert target.read_bytes() == BODY


def test_a_wrong_sum_names_both_and_leaves_nothing(host: Host, target: Path) -> None:
    with pytest.raises(DataCorrupt, match=f"{SHA256}, expected 1234abcd"):
        download(host.url, target, sha256="1234abcd")
    assert os.listdir(target.parent) == []


@pytest.mark.parametrize(
    ("content_type", "body"),
    [
        ("text/html; charset=utf-8", b"quota exceeded"),
        ("application/zip", b"\n <!DOCTYPE html><p>quota exceeded"),
        ("application/zip", b"\xef\xbb\xbf<HTML><p>quota exceeded"),
    ],
)
def test_a_page_posing_as_a_file_is_refused(
    host: Host, target: Path, content_type: str, body: bytes
) -> None:
    part = part_of(target, BODY[:10])
    host.content_type, host.body, host.ranges = content_type, body, False
    with pytest.raises(DataCorrupt, match="web page") as caught:
        download(host.url, target)
    assert f"save the real file as {target}" in caught.value.remedy
    assert part.read_bytes() == BODY[:10], "the good half survives the quota page"
    download(host.url, target.with_suffix(".html"))


def test_no_such_file_and_no_server(host: Host, target: Path) -> None:
    with pytest.raises(DataMissing, match="404"):
        download(host.url + "/missing", target)
    with pytest.raises(DataMissing) as caught:
        download("http://127.0.0.1:9/file.bin", target, timeout=2)
    assert str(target) in caught.value.remedy


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_says_so_and_keeps_the_part(host: Host, target: Path) -> None:
    target.parent.mkdir()
    part = target.with_name("file.bin.part")
    part.symlink_to("/dev/full")
    with pytest.raises(BenchError, match="no room left to write") as caught:
        download(host.url, target)
    assert "--data-root" in caught.value.remedy
    assert part.is_symlink()


def test_two_processes_fetch_once(host: Host, tmp_path: Path) -> None:
    script = (
        "import sys, pathlib\n"
        "from datasets.fetch import download, fetch_lock\n"
        "root = pathlib.Path(sys.argv[2])\n"
        "with fetch_lock(root, 'thing'):\n"
        "    download(sys.argv[1], root / 'file.bin')\n"
    )
    command = [sys.executable, "-c", script, host.url, str(tmp_path)]
    running = [subprocess.Popen(command, cwd=REPOSITORY) for _ in range(3)]
    assert [process.wait(60) for process in running] == [0, 0, 0]
    assert len(host.asked) == 1


def tar_with(path: Path, member: tarfile.TarInfo, content: bytes = b"") -> Path:
    with tarfile.open(path, "w:gz") as tar:
        good = tarfile.TarInfo("top/good.txt")
        good.size = 4
        tar.addfile(good, io.BytesIO(b"good"))
        member.size = len(content)
        tar.addfile(member, io.BytesIO(content))
    return path


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    return info


HOSTILE = [
    member("../escape.txt"),
    member("top/../../escape.txt"),
    member("/tmp/escape.txt"),
    member("C:\\escape.txt"),
    member("top/link", tarfile.SYMTYPE, "../../escape"),
    member("top/link", tarfile.SYMTYPE, "sub/../good.txt"),
    member("top/link", tarfile.SYMTYPE, "/etc/passwd"),
    member("top/link", tarfile.LNKTYPE, "../escape.txt"),
    member("top/device", tarfile.CHRTYPE),
    member("top/fifo", tarfile.FIFOTYPE),
]


@pytest.mark.parametrize("hostile", HOSTILE, ids=lambda info: f"{info.name}->{info.linkname}")
def test_a_hostile_tar_leaves_nothing(tmp_path: Path, hostile: tarfile.TarInfo) -> None:
    archive = tar_with(tmp_path / "a.tar.gz", hostile)
    with pytest.raises(DataCorrupt, match=re.escape("a.tar.gz cannot be unpacked")):
        unpack(archive, tmp_path / "out")
    assert os.listdir(tmp_path) == ["a.tar.gz"]


def zip_with(path: Path, name: str, mode: int = stat.S_IFREG | 0o644, text: str = "x") -> Path:
    with zipfile.ZipFile(path, "w") as zipped:
        zipped.writestr("top/good.txt", "good")
        info = zipfile.ZipInfo(name)
        info.external_attr = mode << 16
        zipped.writestr(info, text)
    return path


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("../escape.txt", stat.S_IFREG),
        ("/tmp/escape.txt", stat.S_IFREG),
        ("top\\..\\..\\escape.txt", stat.S_IFREG),
        ("top/link", stat.S_IFLNK),
        ("top/device", stat.S_IFCHR),
    ],
)
def test_a_hostile_zip_leaves_nothing(tmp_path: Path, name: str, mode: int) -> None:
    archive = zip_with(tmp_path / "a.zip", name, mode | 0o644, "/etc/passwd")
    with pytest.raises(DataCorrupt, match=re.escape("a.zip cannot be unpacked")):
        unpack(archive, tmp_path / "out")
    assert os.listdir(tmp_path) == ["a.zip"]


def test_good_archives_unpack(tmp_path: Path) -> None:
    inside = member("top/link", tarfile.SYMTYPE, "good.txt")
    for archive in (
        tar_with(tmp_path / "a.tar.gz", inside),
        zip_with(tmp_path / "a.zip", "top/sub/more.txt"),
    ):
        out = tmp_path / f"{archive.name}-out"
        unpack(archive, out)
        assert (out / "top" / "good.txt").read_bytes() == b"good"
        with pytest.raises(BenchError, match="already there"):
            unpack(archive, out)
    assert (tmp_path / "a.tar.gz-out" / "top" / "link").read_bytes() == b"good"


@pytest.mark.parametrize("damage", ["truncate", "checksum", "garbage", "page"])
def test_a_damaged_archive_is_corrupt(tmp_path: Path, damage: str) -> None:
    for archive in (
        tar_with(tmp_path / "a.tar.gz", member("top/noise"), os.urandom(50_000)),
        zip_with(tmp_path / "a.zip", "top/noise", text="noise" * 1000),
    ):
        content = archive.read_bytes()
        if damage == "checksum":  # gzip's stands at the end; in the zip, alter the stored text
            content = content.replace(b"noisenoise", b"noisenoisy", 1)
            content = content[:-8] + b"\0\0\0\0" + content[-4:] if content[:1] != b"P" else content
        damaged = {"truncate": content[: len(content) // 2], "garbage": b"PK garbage" * 99}
        page = b"<!DOCTYPE html><title>Quota exceeded</title>"
        archive.write_bytes({**damaged, "page": page}.get(damage, content))
        with pytest.raises(DataCorrupt, match="web page" if damage == "page" else "unpacked"):
            unpack(archive, tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == ["a.tar.gz", "a.zip"]


def test_default_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("BENCH_DATA", str(tmp_path))
    assert default_data_root() == tmp_path
    assert get_command("isic", tmp_path) == "python -m bench data get isic"
    monkeypatch.delenv("BENCH_DATA")
    assert default_data_root().parts[-2:] == ("nct-bench", "data")
    assert get_command("isic", Path("/a b")).endswith("get isic --data-root '/a b'")


def test_unknown_name_suggests() -> None:
    with pytest.raises(UsageError) as caught:
        sources.get("watrbirds", Path("/nowhere"), print)
    assert "did you mean 'waterbirds'?" in caught.value.message


def waterbirds_tarball(root: Path, metadata: bytes) -> None:
    folder = root / "waterbirds"
    folder.mkdir(parents=True)
    info = member(f"{sources.WATERBIRDS}/metadata.csv")
    tar_with(folder / f"{sources.WATERBIRDS}.tar.gz", info, metadata)


def test_waterbirds_from_a_tarball_the_user_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = hashlib.sha256(b"released").hexdigest()
    monkeypatch.setattr(sources, "WATERBIRDS_METADATA_SHA256", released)
    waterbirds_tarball(tmp_path, b"released")
    said: list[str] = []
    for _ in range(2):
        folder = sources.get("waterbirds", tmp_path, said.append)
    assert folder == tmp_path / "waterbirds" / sources.WATERBIRDS
    assert "using" in said[0]
    assert "already there" in said[-1]
    assert sorted(p.name for p in folder.parent.iterdir()) == [folder.name, f"{folder.name}.tar.gz"]


def test_regenerated_waterbirds_is_corrupt(tmp_path: Path) -> None:
    waterbirds_tarball(tmp_path, b"regenerated")
    with pytest.raises(DataCorrupt, match="regenerated copy"):
        sources.get("waterbirds", tmp_path, print)


def kaggle_zip(path: Path, images: int = 3) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as zipped:
        for index in range(1, images + 1):
            zipped.writestr(f"img_align_celeba/img_align_celeba/{index:06}.jpg", b"jpeg")
        zipped.writestr("list_attr_celeba.csv", "image_id,Blond_Hair\n")
        rows = "".join(f"{index:06}.jpg,0\n" for index in range(1, 4))
        zipped.writestr("list_eval_partition.csv", "image_id,partition\n" + rows)


def test_celeba_from_kaggles_zip(tmp_path: Path) -> None:
    kaggle_zip(tmp_path / "celeba" / "archive.zip")
    folder = sources.get("celeba", tmp_path, print)
    assert sorted(os.listdir(folder)) == [
        "archive.zip",
        "img_align_celeba",
        "list_attr_celeba.csv",
        "list_eval_partition.csv",
    ]
    assert len(os.listdir(folder / "img_align_celeba")) == 3


def test_celeba_unzipped_by_the_user(tmp_path: Path) -> None:
    nested = tmp_path / "celeba" / "img_align_celeba" / "img_align_celeba"
    nested.mkdir(parents=True)
    (nested / "000001.jpg").write_bytes(b"jpeg")
    for sub, name in (("Anno", "list_attr_celeba.txt"), ("Eval", "list_eval_partition.txt")):
        (tmp_path / "celeba" / sub).mkdir()
        (tmp_path / "celeba" / sub / name).write_text("000001.jpg 0\n")
    folder = sources.get("celeba", tmp_path, print)
    assert os.listdir(folder / "img_align_celeba") == ["000001.jpg"]
    assert (folder / "list_eval_partition.txt").is_file()


def test_celeba_short_of_images_or_absent(tmp_path: Path) -> None:
    with pytest.raises(DataMissing) as caught:
        sources.get("celeba", tmp_path, print)
    assert all(f"  {step}. " in caught.value.remedy for step in (1, 2, 3))
    kaggle_zip(tmp_path / "celeba" / "archive.zip", images=2)
    with pytest.raises(DataCorrupt, match="has 2 images, but the partition names 3"):
        sources.get("celeba", tmp_path, print)


def test_a_celeba_archive_with_a_known_name_must_have_the_known_sum(tmp_path: Path) -> None:
    kaggle_zip(tmp_path / "celeba" / "img_align_celeba.zip")
    with pytest.raises(DataCorrupt, match=r"has the MD5 .* expected 00d2c5bc6d35"):
        sources.get("celeba", tmp_path, print)
    (tmp_path / "celeba" / "img_align_celeba.zip").rename(tmp_path / "celeba" / "archive.zip")
    lines: list[str] = []
    sources.get("celeba", tmp_path, lines.append)
    assert any("archive.zip is not pinned" in line and "SHA-256 is " in line for line in lines)


def test_rebuilt_data_is_not_taken_for_the_release(tmp_path: Path) -> None:
    folder = tmp_path / "isic"
    (folder / "images").mkdir(parents=True)
    (folder / "images" / "a.jpg").write_bytes(b"jpeg")
    (folder / "labels.csv").write_text("Image Index\n")
    (folder / "origin.toml").write_text('kind = "rebuilt"\nname = "mine"\n')
    with pytest.raises(UsageError, match=r"is rebuilt data \(mine\), not the release"):
        sources.get("isic", tmp_path, print)


def test_isic_needs_a_person_unless_it_is_there(tmp_path: Path) -> None:
    with pytest.raises(DataMissing) as caught:
        sources.get("isic", tmp_path, print)
    assert "benign_malignant" in caught.value.remedy
    (tmp_path / "isic" / "images").mkdir(parents=True)
    (tmp_path / "isic" / "images" / "a.jpg").write_bytes(b"jpeg")
    (tmp_path / "isic" / "labels.csv").write_text("Image Index\n")
    assert sources.get("isic", tmp_path, print) == tmp_path / "isic"


def absurd_archive(path: Path, kind: str, members: int, size: int) -> None:
    """Zeros, which pack to next to nothing."""
    if kind == "zip":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as zipped:
            for index in range(members):
                zipped.writestr(f"{index}", bytes(size))
    else:
        with tarfile.open(path, "w:gz") as tar:
            for index in range(members):
                member = tarfile.TarInfo(f"{index}")
                member.size = size
                tar.addfile(member, io.BytesIO(bytes(size)))


@pytest.mark.parametrize("kind", ["zip", "tar.gz"])
@pytest.mark.parametrize(("members", "size"), [(1, 4_000_001), (5, 1_000_000), (11, 0)])
def test_archives_that_unpack_to_too_much_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, members: int, size: int
) -> None:
    monkeypatch.setattr(archives, "MOST_MEMBERS", 10)
    monkeypatch.setattr(archives, "MOST_BYTES", 4_000_000)
    written: list[int] = []
    for opener in (zipfile.ZipFile, tarfile.TarFile):
        real = opener.extract

        def counted(self: Any, member: Any, *args: Any, real: Any = real, **named: Any) -> Any:
            written.append(getattr(member, "file_size", 0) or getattr(member, "size", 0))
            return real(self, member, *args, **named)

        monkeypatch.setattr(opener, "extract", counted)
    absurd_archive(tmp_path / f"bomb.{kind}", kind, members, size)
    with pytest.raises(DataCorrupt, match=r"is refused: it unpacks to more than 10 files or"):
        unpack(tmp_path / f"bomb.{kind}", tmp_path / "into")
    assert sum(written) <= 4_000_000, "nothing is written beyond the limit"
    assert kind != "zip" or not written, "a zip says beforehand what is in it"
    assert os.listdir(tmp_path) == [f"bomb.{kind}"]


@pytest.mark.parametrize("kind", ["zip", "tar.gz"])
def test_archives_that_do_not_fit_the_disk_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    absurd_archive(tmp_path / f"large.{kind}", kind, 1, 5001)
    usage = SimpleNamespace(free=5000)
    monkeypatch.setattr(archives.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(StorageError, match="needs more than 5,001 bytes, 5,000 are free"):
        unpack(tmp_path / f"large.{kind}", tmp_path / "into")
    usage.free = 5001
    unpack(tmp_path / f"large.{kind}", tmp_path / "into")


@pytest.mark.parametrize("name", ["mnist", "cmnist", "waterbirds", "celeba", "isic"])
def test_a_standin_survives_getting_the_real_data(tmp_path: Path, name: str) -> None:
    folder = standins.write(name, tmp_path, size=40)
    for state in ("whole", "lacking a file"):  # nor must it be completed with real files
        if state != "whole":
            parts = [path for path in folder.iterdir() if path.name != standins.MARKER_NAME]
            parts[0].rename(tmp_path / "gone")
        before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
        with pytest.raises(UsageError, match="is a stand-in for") as caught:
            sources.get(name, tmp_path, print)
        assert "choose another --data-root" in caught.value.remedy
        assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


def test_weights_are_checked_and_missing_ones_explained(
    tmp_path: Path, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_hub(folder: Path) -> Path:
        raise DataMissing("huggingface_hub is not installed")

    monkeypatch.setattr(weights_source, "_weights_from_hub", no_hub)
    monkeypatch.setattr(weights_source, "TORCHVISION_WEIGHTS_URL", host.url + "/missing")
    with pytest.raises(DataMissing, match="404") as caught:
        sources.get("weights", tmp_path, print)
    assert "--set backbone.weights=FILE" in caught.value.remedy
    monkeypatch.setattr(weights_source, "TORCHVISION_WEIGHTS_URL", host.url)
    name, lines = weights_source.TORCHVISION_WEIGHTS_FILE, []
    with pytest.raises(DataMissing, match=f"has the SHA-256 {SHA256}, expected 0676ba61"):
        sources.get("weights", tmp_path, print)
    monkeypatch.setattr(weights_source, "TORCHVISION_WEIGHTS_SHA256", SHA256)
    assert sources.get("weights", tmp_path, lines.append).name == name
    assert f"weights: {name} has the published SHA-256" in lines
    assert sources.get("weights", tmp_path, print).name == name
    (tmp_path / "weights" / name).write_bytes(BODY[:-1] + b"x")
    with pytest.raises(DataCorrupt, match="is not the released ResNet-50"):
        sources.get("weights", tmp_path, print)


def test_weights_of_the_hub_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole safetensors file of a ResNet is not yet the one that is meant."""
    hub = pytest.importorskip("huggingface_hub")
    header = b'{"conv1.weight":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}'
    content = len(header).to_bytes(8, "little") + header + b"data"
    (tmp_path / "cached").write_bytes(content)
    cached = str(tmp_path / "cached")
    monkeypatch.setattr(hub, "try_to_load_from_cache", lambda *names: cached)
    monkeypatch.setattr(weights_source, "TORCHVISION_WEIGHTS_URL", "http://127.0.0.1:9/missing")
    with pytest.raises(DataMissing, match=r"is not the released ResNet-50.*expected 5d061a3c"):
        sources.get("weights", tmp_path, print)
    assert not list((tmp_path / "weights").iterdir())
    sha256 = hashlib.sha256(content).hexdigest()
    monkeypatch.setattr(weights_source, "WEIGHTS_SHA256", sha256)
    assert sources.get("weights", tmp_path, print).name == weights_source.WEIGHTS_FILE
