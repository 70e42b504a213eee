"""Files that are whole or not there, and what is said when they cannot be written."""

from __future__ import annotations

import errno
import json
import math
import os
from pathlib import Path

import pytest

from datasets.files import (
    DATA,
    DECODED,
    RESULTS,
    StorageError,
    append_line,
    atomic_file,
    atomic_folder,
    digest,
    read_lines,
    remove_stale_temporaries,
    storage_errors,
    to_json,
)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_names_what_to_do_about_that_kind_of_file(number: int) -> None:
    remedies = set()
    for area in (RESULTS, DATA, DECODED):
        refused = pytest.raises(StorageError, match="no room left to write place: ")
        with refused as caught, storage_errors(Path("place"), area):
            raise OSError(number, os.strerror(number))
        assert os.strerror(number) in caught.value.message
        remedies.add(caught.value.remedy)
    assert len(remedies) == 3
    assert "--results" in RESULTS.if_full and "--data-root" in DATA.if_full


def test_an_unwritable_folder_names_the_option() -> None:
    for area, option in ((RESULTS, "--results"), (DATA, "BENCH_DATA"), (DECODED, "--data-root")):
        refused = pytest.raises(StorageError, match="cannot write place: Permission")
        with refused as caught, storage_errors(Path("place"), area):
            raise PermissionError(errno.EACCES, "Permission denied")
        assert option in caught.value.remedy


def test_other_errors_pass_where_files_come_from_a_network() -> None:
    with pytest.raises(ConnectionResetError), storage_errors(Path("place"), DATA):
        raise ConnectionResetError(errno.ECONNRESET, "reset")
    with pytest.raises(StorageError), storage_errors(Path("place")):
        raise ConnectionResetError(errno.ECONNRESET, "reset")


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "file"
    with atomic_file(path) as draft:
        draft.write_text("first")
    with pytest.raises(ZeroDivisionError), atomic_file(path) as draft:
        draft.write_text("half")
        raise ZeroDivisionError
    assert path.read_text() == "first" and os.listdir(path.parent) == ["file"]


def test_a_folder_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "run"
    for content in ("first", "second"):
        with atomic_folder(path) as draft:
            (draft / content).write_text(content)
    with pytest.raises(ZeroDivisionError), atomic_folder(path) as draft:
        (draft / "third").write_text("half")
        raise ZeroDivisionError
    assert os.listdir(path) == ["second"] and os.listdir(tmp_path) == ["run"]


def test_what_killed_writers_left_is_removed(tmp_path: Path) -> None:
    old, part = tmp_path / ".run.12345678.old", tmp_path / ".other.12345678.part"
    writing = tmp_path / ".third.12345678.part", tmp_path / ".third.12345678.old"
    old.mkdir()
    (old / "record").write_text("kept")
    for file in (part, *writing):
        file.write_text("half")
    remove_stale_temporaries(tmp_path, lambda name: name == "third")
    assert (tmp_path / "run" / "record").read_text() == "kept", "a half replaced folder is back"
    assert not part.exists()
    assert all(file.exists() for file in writing), "nothing is taken from a living writer"


def test_numbers_that_are_not_json_become_null() -> None:
    value = {"a": math.nan, "b": [1.5, -math.inf], 3: (True, None)}
    assert json.loads(to_json(value)) == {"a": None, "b": [1.5, None], "3": [True, None]}


def test_digests_do_not_depend_on_the_order_of_keys() -> None:
    assert digest({"a": 1, "b": [2, 3]}) == digest({"b": [2, 3], "a": 1})
    assert digest({"a": 1}, 10) == "015abd7f5c" and len(digest({})) == 16


def test_a_torn_line_costs_only_itself(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "lines"
    assert read_lines(path) == []
    append_line(path, {"epoch": 1, "loss": math.nan})
    with path.open("a") as sink:
        sink.write('{"epoch": 2, "lo')
    append_line(path, {"epoch": 3})
    assert read_lines(path) == [{"epoch": 1, "loss": None}, {"epoch": 3}]
