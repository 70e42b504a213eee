"""`bench doctor`: every check that works without a GPU, and what a GPU that errs would give."""

from __future__ import annotations

import os
import shutil
import sys
from collections import namedtuple
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from bench import doctor
from bench.doctor import Finding
from bench.launch.scheduler import Cluster
from datasets import standins
from datasets.fetch import use_data_root
from datasets.intake import AddOptions, add
from datasets.weights_source import WEIGHTS_FILE

sys.path.append(str(Path(__file__).parents[1]))
from planted import write_planted

CPU = torch.device("cpu")


def levels(findings: list[Finding]) -> list[str]:
    return [finding.level for finding in findings]


def raising(error: Exception) -> Any:
    def function(*_: object, **__: object) -> None:
        raise error

    return function


def test_a_sound_machine_without_data(cli: Any, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    folders = ("--data-root", tmp_path / "data", "--results", tmp_path / "results")
    told = cli("doctor", *folders)
    assert told.code == 0, told.out
    assert "ok    torch" in told.out and "steps on the processor" in told.out
    assert "warn  data      not on disk: " in told.out
    assert "-> python -m bench data get waterbirds" in told.out
    assert "warn  weights" in told.out and "data get weights" in told.out
    assert [*tmp_path.rglob("*")] == [tmp_path / "data"], "nothing is written"
    found = cli("doctor", *folders, "--json").json
    assert {one["check"] for one in found["findings"]} >= {
        *("python", "datasets", "torch", "machine", "data", "weights", "disk", "slurm"),
    }
    assert all(one["level"] == "ok" or one["remedy"] for one in found["findings"])


def test_what_fails_is_said_with_a_remedy_and_exit_code_1(
    cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "results").write_text("a file")
    monkeypatch.setattr(doctor, "check_torch", raising(RuntimeError("libgomp is broken")))
    told = cli("doctor", "--data-root", tmp_path, "--results", tmp_path / "results")
    assert told.code == 1
    assert "fail  torch     RuntimeError: libgomp is broken" in told.out
    assert f"fail  disk      results {tmp_path / 'results'} cannot be written to" in told.out
    assert "-> choose another folder with --results" in told.out
    assert "2 to be put right" in told.err
    found = cli("doctor", "--data-root", tmp_path, "--results", tmp_path / "results", "--json")
    assert found.code == 1 and found.json["fail"] == 2


class TestPackages:
    def test_another_package_that_hides_ours(self, monkeypatch: pytest.MonkeyPatch) -> None:
        clash = ImportError("another package is found instead\n  -> uninstall it")
        monkeypatch.setattr(doctor, "check_datasets_package", raising(clash))
        (finding,) = doctor.check_packages()
        assert finding == Finding(
            "datasets", "fail", "another package is found instead", "uninstall it"
        )

    def test_another_package_beside_ours(self, monkeypatch: pytest.MonkeyPatch) -> None:
        other = SimpleNamespace(version="3.2")
        monkeypatch.setattr(doctor, "distribution", lambda name: other)
        (finding,) = doctor.check_packages()
        assert finding.level == "warn" and "Hugging Face's datasets 3.2" in finding.text
        monkeypatch.setattr(doctor, "distribution", raising(PackageNotFoundError("datasets")))
        assert levels(doctor.check_packages()) == ["ok"]

    def test_no_virtual_environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("CONDA_PREFIX", raising=False)
        monkeypatch.setattr(sys, "prefix", sys.base_prefix)
        assert levels(doctor.check_python()) == ["warn"]
        monkeypatch.setattr(sys, "prefix", "/home/me/.venv")
        assert levels(doctor.check_python()) == ["ok"]


class TestTorch:
    def test_steps_are_the_same_every_time_and_learn(self) -> None:
        state = torch.random.get_rng_state()
        first = doctor.train_steps(CPU)
        assert first == doctor.train_steps(CPU) and first[-1] < first[0]
        assert torch.equal(state, torch.random.get_rng_state())

    def test_a_device_is_compared_with_the_processor(self, monkeypatch: pytest.MonkeyPatch) -> None:
        expected = doctor.train_steps(CPU)
        assert doctor.compare_steps(CPU, expected).level == "ok"
        wrong = [loss * 1.1 for loss in expected]
        finding = doctor.compare_steps(CPU, wrong)
        assert finding.level == "fail" and "where the processor has" in finding.text
        monkeypatch.setattr(doctor, "train_steps", lambda device: [float("nan")] * 3)
        assert doctor.compare_steps(CPU, expected).level == "fail"
        monkeypatch.setattr(doctor, "train_steps", raising(RuntimeError("no kernel image")))
        assert "no kernel image" in doctor.compare_steps(CPU, expected).text

    def test_a_processor_that_does_not_learn(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(doctor, "train_steps", lambda device: [0.7, 0.7, 0.7])
        (finding,) = doctor.check_torch()
        assert finding.level == "fail" and "[0.7, 0.7, 0.7]" in finding.text

    @pytest.mark.parametrize(
        ("driver", "built_for", "level", "words"),
        [
            (None, None, "ok", "none: runs use the processor"),
            ("/usr/bin/nvidia-smi", None, "fail", "built for processors only"),
            ("/usr/bin/nvidia-smi", "12.4", "fail", "finds no GPU"),
        ],
    )
    def test_without_a_gpu(
        self,
        monkeypatch: pytest.MonkeyPatch,
        driver: str | None,
        built_for: str | None,
        level: str,
        words: str,
    ) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setattr(torch.version, "cuda", built_for)
        monkeypatch.setattr(shutil, "which", lambda name: driver)
        first, second = doctor.check_torch()
        assert (first.level, second.level) == ("ok", level) and words in second.text
        assert bool(second.remedy) == (level == "fail")

    def test_each_gpu_is_tried(self, monkeypatch: pytest.MonkeyPatch) -> None:
        tried: list[torch.device] = []

        def compare(device: torch.device, expected: list[float]) -> Finding:
            tried.append(device)
            return Finding("gpu", "ok", str(device))

        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        monkeypatch.setattr(doctor, "compare_steps", compare)
        assert len(doctor.check_torch()) == 3
        assert tried == [torch.device("cuda", 0), torch.device("cuda", 1)]


class TestData:
    def test_a_standin_is_in_order_and_says_what_decoding_takes(self, tmp_path: Path) -> None:
        standins.write("waterbirds", tmp_path, size=40)
        finding = next(f for f in doctor.check_data(tmp_path) if "waterbirds" in f.text)
        assert finding.level == "ok"
        assert "a stand-in" in finding.text and "are still to be decoded" in finding.text

    def test_missing_images_broken_labels_and_no_room(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folder = standins.write("waterbirds", tmp_path, size=40)

        def look() -> Finding:
            return doctor.check_data(tmp_path)[0]

        usage = namedtuple("usage", "total used free")
        with monkeypatch.context() as patch:
            patch.setattr(shutil, "disk_usage", lambda path: usage(0, 0, 1000))
            full = look()
        assert full.level == "fail" and "decoded they need" in full.text
        for file in [*folder.rglob("*.jpg")][:3]:
            file.unlink()
        assert look().level == "fail" and "3 of 120 images are missing" in look().text
        assert "data standin waterbirds" in look().remedy, "a stand-in has no subsets"
        assert "--allow-subset" not in look().remedy
        (folder / "metadata.csv").write_text("img_filename,nothing\n")
        assert look().level == "fail" and "has no column" in look().text

    def test_a_users_own_rows_and_images(self, tmp_path: Path) -> None:
        rng = np.random.default_rng(0)
        rows = rng.normal(size=(60, 4)).astype("float32")
        np.savez(tmp_path / "rows.npz", x=rows, y=rng.integers(0, 2, 60))
        write_planted(tmp_path / "shapes", count=30)
        root = tmp_path / "data"
        add("rows", tmp_path / "rows.npz", root, AddOptions())
        add("shapes", tmp_path / "shapes", root, AddOptions())
        next((tmp_path / "shapes").rglob("*.png")).unlink()
        use_data_root(root)
        found = {finding.text.split()[0]: finding for finding in doctor.check_data(root)}
        assert found["rows"].level == "ok", "rows have no files that could be missing"
        assert "1 of 30 images are missing" in found["shapes"].text
        assert "data add shapes" in found["shapes"].remedy
        assert "--allow-subset" not in found["shapes"].remedy

    def test_weights(self, tmp_path: Path) -> None:
        assert levels(doctor.check_weights(tmp_path)) == ["warn"]
        (tmp_path / "weights").mkdir()
        (tmp_path / "weights" / WEIGHTS_FILE).write_bytes(b"not them")
        found = [f for f in doctor.examine(tmp_path, tmp_path) if f.check == "weights"]
        assert levels(found) == ["fail"] and "SHA-256" in found[0].text


def test_disks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    far = tmp_path / "not" / "yet" / "there"
    for free, level in ((2**29, "fail"), (2**32, "warn"), (2**40, "ok")):
        monkeypatch.setattr(shutil, "disk_usage", lambda path, free=free: usage(0, 0, free))
        (finding,) = doctor.check_disk({"results": far})
        assert finding.level == level and str(far) in finding.text
        assert ("bench clean" in finding.remedy) == (level != "ok")
    closed = raising(PermissionError(13, "Permission denied"))
    monkeypatch.setattr(doctor.tempfile, "TemporaryFile", closed)
    found = doctor.check_disk({"data root": far, "results": far})
    assert levels(found) == ["warn", "fail"], "shared data may be read alone"


def test_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "find_cluster", lambda: Cluster("north", 1001))
    (found,) = doctor.check_slurm()
    assert found.level == "ok" and "north" in found.text
    monkeypatch.setattr(doctor, "find_cluster", lambda: None)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert levels(doctor.check_slurm()) == ["ok"]
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/scontrol")
    assert levels(doctor.check_slurm()) == ["warn"]


def test_memory_and_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "OMP_NUM_THREADS", "3")
    for free, level in ((2**30, "warn"), (2**34, "ok"), (None, "ok")):
        monkeypatch.setattr(doctor, "_free_memory", lambda free=free: free)
        (found,) = doctor.check_machine()
        assert found.level == level and "OMP_NUM_THREADS=3" in found.text
