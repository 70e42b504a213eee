"""Which device runs are for; GPUs are made up here."""

from __future__ import annotations

import pytest
import torch

from bench.devices import choose_device, gpus_of
from datasets.errors import UsageError


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.parametrize(
    ("asked", "device"),
    [(None, "cuda"), ("cpu", "cpu"), ("cuda", "cuda"), ("cuda:0", "cuda:0"), ("cuda:1", "cuda:1")],
)
def test_a_device_is_what_was_asked_for(two_gpus: None, asked: str | None, device: str) -> None:
    assert choose_device(asked) == device


@pytest.mark.parametrize(
    ("asked", "message", "remedy"),
    [
        ("cuda:2", "there is no cuda:2", "cuda:0 to cuda:1"),
        ("gpu", "must be cpu, cuda or cuda:N", "cuda:0"),
        ("cuda:x", "must be cpu, cuda or cuda:N", "cuda:0"),
    ],
)
def test_a_device_that_is_none(two_gpus: None, asked: str, message: str, remedy: str) -> None:
    with pytest.raises(UsageError) as caught:
        choose_device(asked)
    assert message in caught.value.message and remedy in caught.value.remedy


@pytest.mark.parametrize(
    ("built", "message"), [(False, "is built without CUDA"), (True, "torch finds none")]
)
def test_a_gpu_where_there_is_none(
    no_gpu: None, monkeypatch: pytest.MonkeyPatch, built: bool, message: str
) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: built)
    with pytest.raises(UsageError, match=message) as caught:
        choose_device("cuda")
    assert "--device cpu" in caught.value.remedy
    assert choose_device(None) == choose_device("cpu") == "cpu"


def test_the_gpus_of_a_device(two_gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpus_of("cpu") == ()
    assert gpus_of("cuda") == ("0", "1")
    assert gpus_of("cuda:1") == ("1",)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, GPU-7")  # as a scheduler sets it
    assert gpus_of("cuda") == ("3", "GPU-7")
    assert gpus_of("cuda:1") == ("GPU-7",)
