"""What `data verify` says of labels and pixels, and how data that is not the release is called."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.job import Request, expand
from datasets import standins
from datasets.standins import MARKER_NAME
from datasets.waterbirds import Waterbirds

REBUILT = 'kind = "rebuilt"\nname = "other-scenes"\nnote = "birds on other scenes"\n'


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small release: a stand-in without a marker, under a protocol that asserts no counts."""
    folder = standins.write("waterbirds", tmp_path / "data", size=60)
    (folder / MARKER_NAME).unlink()
    pin(monkeypatch)
    return folder


def pin(monkeypatch: pytest.MonkeyPatch, **digests: str) -> None:
    real = ORIGINAL_FACTS
    changes: dict[str, Any] = {"counts": {}, "group_counts": {}, "label_digest": None, **digests}
    monkeypatch.setattr(Waterbirds, "facts", lambda self, own: replace(real(self, own), **changes))


ORIGINAL_FACTS = Waterbirds.facts


def verify(cli: Any, folder: Path, *more: str) -> Any:
    return cli("data", "verify", "waterbirds", "--data-root", folder.parents[1], *more)


def test_mnist_is_pinned_by_its_files(mnist_root: Path, cli: Any) -> None:
    told = cli("data", "verify", "umnist", "--data-root", str(mnist_root))
    assert told.code == 0
    assert "umnist (paper): verified" in told.out and "but for pixels" not in told.out
    assert "counts: equal to the protocol's; labels: pinned, equal\n" in told.out
    assert "pixels pinned, equal: digest " in told.out


def test_verify_says_what_is_not_pinned_and_compares_what_is(
    folder: Path, cli: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = verify(cli, folder)
    assert told.code == 0
    assert "counts: not asserted by the protocol; labels: not pinned" in told.out
    assert "pixels not pinned: digest " in told.out
    (found,) = json.loads(verify(cli, folder, "--json").out)
    assert found["data_kind"] == "release" and not found["pixels_pinned"]
    names = ("pixel_digest", "full_pixel_digest")
    digests = {name: found[name] for name in names}
    assert all(digest in told.out for digest in digests.values())

    pin(monkeypatch, **digests)
    told = verify(cli, folder)
    assert told.code == 0 and "pixels pinned, equal" in told.out
    assert "waterbirds (released): verified" in told.out and "but for" not in told.out
    for name in names:
        pin(monkeypatch, **{**digests, name: "0" * 64})
        told = verify(cli, folder)
        assert told.code == 2 and "verified" not in told.out
        assert f"expected pixel digest {'0' * 64}, found {digests[name]}" in told.err
        assert "origin.toml" in told.err


def test_rebuilt_data_never_claims_to_be_the_release(
    folder: Path, cli: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pin(monkeypatch, pixel_digest="0" * 64, full_pixel_digest="0" * 64)
    (folder / "origin.toml").write_text(REBUILT)
    told = verify(cli, folder)
    assert told.code == 0 and "verified" not in told.out and "(released)" not in told.out
    assert "not the release" in told.out and "other-scenes: birds on other scenes" in told.out
    assert "pixels not pinned" in told.out
    assert "rebuilt" in cli("data", "status", "--data-root", folder.parents[1]).out
    refused = cli("data", "get", "waterbirds", "--data-root", folder.parents[1])
    assert refused.code == 2 and "is rebuilt data (other-scenes), not the release" in refused.err


def test_jobs_on_rebuilt_data_are_labelled_and_have_other_ids(folder: Path) -> None:
    untrained = {"backbone.pretrained": "false"}
    root = folder.parents[1]
    request = Request(("erm",), ("waterbirds",), (0,), root, overrides=untrained)
    (release,) = expand(request)
    (folder / "origin.toml").write_text(REBUILT)
    (job,) = expand(request)
    assert (release.data_kind, release.labels) == ("release", [])
    assert (job.data_kind, job.standin, job.labels) == ("rebuilt", False, ["rebuilt"])
    assert job.protocol == "released-rebuilt-other-scenes"
    assert job.run_id != release.run_id
