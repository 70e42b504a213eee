"""Stored runs stay valid as the code grows: the guards of a run's identity."""

from __future__ import annotations

import ast
import dataclasses
import itertools
import math
import os
import re
import shutil
import subprocess
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest

from bench.context import stage_address
from bench.job import Job, Request, expand
from bench.record import Record, Unreadable, read_record
from bench.resources import published_folder
from datasets.catalogue import get_dataset, load_datasets
from datasets.config import as_plain, field_types, identity_values
from datasets.errors import BenchError
from datasets.files import digest
from methods.base import get_method, load_methods
from methods.presets import preset_config

HOUSE = Path(__file__).parents[2]
RECORDS = sorted((published_folder() / "runs").glob("*/record.json"))
WHAT_TO_WRITE = """
{folder} is a stored run that today's code would no longer find: {changes}.

If a setting was ADDED to a config, declare with which value the stored runs were made:
    nesterov: bool = added(False)          # from datasets.config
If one was RENAMED:    rate: float = renamed("lr", 0.1)
If one was REMOVED:    retired: ClassVar[Mapping[str, object]] = {{"min_group": 1}}
If the behaviour changed, raise the method's version and run the published seeds again.
"""
CONFIGS = {
    **{name: preset_config(method, "umnist") for name, method in load_methods().items()},
    **{name: dataset.config_type() for name, dataset in load_datasets().items()},
}


def rebuilt_identity(job: Job) -> dict[str, Any]:
    """The identity of a stored job by today's classes, under the version that made it."""
    method, dataset = get_method(job.method), get_dataset(job.dataset)
    config, settings = job.method_config(), job.dataset_config()
    return {
        "method": method.name,
        "version": job.version,
        "config": {
            "method": identity_values(config),
            "dataset": identity_values(settings),
            "backbone": {k: v for k, v in job.config.backbone.items() if k != "weights"},
        },
        "fingerprint": dataset.facts(settings).fingerprint(),
        "seed": job.seed,
        "quick": job.quick,
    }


def published_jobs() -> dict[str, Job]:
    """The jobs of the published runs, by the name of their folder."""
    found = {}
    for path in RECORDS:
        record = read_record(path)
        assert isinstance(record, Record), record
        found[path.parent.name] = record.job
    return found


def test_every_published_run_keeps_its_id() -> None:
    assert len(RECORDS) >= 214
    for folder, job in published_jobs().items():
        identity = rebuilt_identity(job)
        if f"{job.method}-{job.dataset}-s{job.seed}-{digest(identity, 10)}" != folder:
            from bench.job import identity_changes

            changes = identity_changes(job.identity, identity)
            pytest.fail(WHAT_TO_WRITE.format(folder=folder, changes=changes))


def test_a_version_is_raised_with_its_reason() -> None:
    """Published runs are of today's version, or of an earlier one that the protocol speaks of."""
    protocol = (HOUSE / "docs" / "protocol.md").read_text()
    for folder, job in published_jobs().items():
        method = get_method(job.method)
        today = method.version_of(job.method_config())
        assert 1 <= job.version <= today, folder
        assert job.version == today or f"{method.title} {today}" in protocol, folder


def test_plan_of_the_main_table_is_what_is_published() -> None:
    """But for runs of which an earlier version is published, which are made again."""
    main = tuple(name for name, method in load_methods().items() if not method.extended)
    jobs = expand(Request(main, ("umnist", "cmnist"), tuple(range(5)), Path("/")))
    published = published_jobs()
    earlier = {
        (job.method, job.dataset, job.seed)
        for job in published.values()
        if job.version < get_method(job.method).version_of(job.method_config())
    }
    missing = sorted(
        job.run_id
        for job in jobs
        if job.preset == "paper"
        and job.run_id not in published
        and (job.method, job.dataset, job.seed) not in earlier
    )
    assert not missing


def test_shared_stages_keep_their_addresses() -> None:
    """Runs made later find the stages that earlier ones left."""
    checked = 0
    for path in RECORDS:
        record = read_record(path)
        assert not isinstance(record, Unreadable) and record is not None
        for stage in get_method(record.job.method).stages(record.job.method_config()):
            stored = [f"{s.name}-{s.key}" for s in record.cost.stages if s.name == stage.name]
            assert [stage_address(record.job, stage)] == stored
            checked += 1
    assert checked >= 60


def other_values(value: Any, kind: Any) -> Iterator[Any]:
    """Values that a field of this type may have instead; not all need be legal."""
    if typing.get_origin(kind) is Literal:
        yield from (choice for choice in typing.get_args(kind) if choice != value)
    elif isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield from (value + 1, value - 1, value * 2 + 1, 1, 2, 3, 32, 64)
    elif isinstance(value, float):
        yield from (value / 2, value * 2, value + 0.125, 0.5, 0.25, 1.0, 1.5)
    elif isinstance(value, str):
        yield from ("sgd", "adamw", "val_avg", "last", "none")
    elif isinstance(value, tuple):
        yield from (value[:-1], value[::-1], (*value, *value[-1:]), (1,), (1, 2), (0.5,), (3.0,))
        for position, item in enumerate(value):
            for other in other_values(item, type(item)):
                yield (*value[:position], other, *value[position + 1 :])
    elif value is None:
        yield from (1, 0.5, "x", (1,))


def changed(config: Any) -> Iterator[tuple[str, Any]]:
    """Every field, nested ones included, set to another legal value."""
    kinds = field_types(type(config))
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            for name, inner in changed(value):
                yield f"{field.name}.{name}", dataclasses.replace(config, **{field.name: inner})
            continue
        for other in other_values(value, kinds[field.name]):
            if other == value:
                continue
            try:
                yield field.name, dataclasses.replace(config, **{field.name: other})
            except (BenchError, TypeError, ValueError):
                continue
            break
        else:
            if isinstance(value, str):  # a rule that a method has no other of
                continue
            pytest.fail(f"no other legal value for {field.name} = {value!r}")


@pytest.mark.parametrize("owner", CONFIGS)
def test_every_setting_is_part_of_the_identity(owner: str) -> None:
    config = CONFIGS[owner]
    before = digest(identity_values(config))
    for name, other in changed(config):
        assert other != config
        assert digest(identity_values(other)) != before, f"{owner}.{name} does not count"


def attributes_read() -> set[str]:
    """Names that some code of the three packages reads from an object."""
    found: set[str] = set()
    for path in itertools.chain.from_iterable(
        (HOUSE / package).rglob("*.py") for package in ("bench", "methods", "datasets")
    ):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                found.add(node.attr)
    return found


def all_fields(config: Any) -> Iterator[str]:
    for field in dataclasses.fields(config):
        yield field.name
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from all_fields(value)


def test_no_setting_is_dead() -> None:
    """A setting that no code reads would make other runs of the same thing."""
    read = attributes_read()
    dead = {f"{owner}.{n}" for owner, c in CONFIGS.items() for n in all_fields(c) if n not in read}
    assert not dead


def test_how_a_run_is_carried_out_is_no_part_of_it() -> None:
    (job,) = expand(Request(("erm",), ("cmnist",), (0,), Path("/")))
    later = dataclasses.replace(job, variant="another", preset="tuned", splits=("train", "val"))
    assert later.run_id == job.run_id
    assert not {"threads", "device", "workers", "variant", "preset"} & set(job.identity)


def test_configs_are_plain_values() -> None:
    for owner, config in CONFIGS.items():
        for value in as_plain(config).values():
            assert not (isinstance(value, float) and not math.isfinite(value)), owner


NEW_OPTIONS = {
    "methods/optimisation.py": ("class TrainConfig:", "nesterov: bool = added(False)"),
    "methods/nct/config.py": ("class NctConfig:", "shuffle_nodes: bool = added(False)"),
    "datasets/umnist.py": ("class UmnistConfig:", "inverted: bool = added(False)"),
}
MAIN_TABLE = """
from bench import paper
from bench.reporting import ReportInput, collect
from bench.resources import published_folder
from bench.store import Store
from pathlib import Path
given = ReportInput(collect(Store(published_folder()), ()), Path("/"), paper.reference())
print(next(table for table in (build(given) for build in paper.TABLES[:1])).to_csv())
"""


def test_new_options_leave_the_published_main_table_as_it_is(tmp_path: Path) -> None:
    """In a copy of the tree with an option more in three configs."""
    for package in ("bench", "methods", "datasets"):
        shutil.copytree(HOUSE / package, tmp_path / package)
    (tmp_path / "results").symlink_to(HOUSE / "results")
    for file, (after, option) in NEW_OPTIONS.items():
        path = tmp_path / file
        lines = path.read_text().splitlines()
        fields = [i for i, line in enumerate(lines) if re.match(r"    \w+: .* = ", line)]
        start = lines.index(next(line for line in lines if line.startswith(after[:-1])))
        last = max(i for i in fields if i < _end_of_class(lines, start))
        lines.insert(last + 1, f"    {option}")
        text = "\n".join(lines) + "\n"
        imports = "\nfrom datasets.config import added\nfrom dataclasses"
        path.write_text(text.replace("\nfrom dataclasses", imports, 1))
    found = [
        subprocess.run(
            [sys.executable, "-P", "-c", MAIN_TABLE],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONPATH": str(root)},
            cwd=root,
        ).stdout
        for root in (HOUSE, tmp_path)
    ]
    assert "nct" in found[0] and found[0].count("measured") > 20
    assert found[0] == found[1]


def _end_of_class(lines: list[str], start: int) -> int:
    rest = (i for i, line in enumerate(lines[start + 1 :], start + 1) if re.match(r"\S", line))
    return next(rest, len(lines))
