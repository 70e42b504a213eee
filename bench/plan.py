"""From names to jobs: methods x datasets x seeds, each with its resolved configuration.

A job's id is a hash of what the job means, so that the same request finds the same run whatever
order, machine or folder it comes from, and a changed value is another run.
"""

from __future__ import annotations

import hashlib
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from bench.files import digest
from datasets.base import BackboneSpec
from datasets.catalogue import DATASETS, get_dataset
from datasets.config import as_plain, build_config, coerce, with_overrides
from datasets.errors import DataMissing, UsageError, did_you_mean
from datasets.fetch import get_command
from datasets.weights_source import find_weights
from methods.backbones import LENETS, check_backbone
from methods.base import Method, get_method, load_methods
from methods.presets import preset_values

NOWHERE = Path(os.devnull)  # a data root for those who mean real data, whatever is on disk
FETCHED = ("resnet50", "resnet50.tv_in1k")  # the networks whose weights `data get weights` fetches


@dataclass(frozen=True)
class Job:
    """One run, fully described; plain values only, so that it can be sent anywhere.

    Attributes:
        config: resolved settings of the method, the dataset and the backbone.
        overrides: what the user changed from the preset, by `--set` key.
        stack: seeds that train in one model, this one among them; none if it trains alone. That
            it is stacked belongs to what a job means, with whom does not.
    """

    method: str
    method_version: int
    dataset: str
    protocol: str
    fingerprint: str
    standin: bool
    seed: int
    preset: str
    quick: bool
    config: dict[str, dict[str, Any]]
    supervision: dict[str, bool]
    overrides: dict[str, str] = field(default_factory=dict)
    variant: str = ""
    stack: tuple[int, ...] = ()

    @cached_property
    def run_id(self) -> str:
        """Name the run by what it is and by the hash of what it means."""
        backbone = {k: v for k, v in self.config["backbone"].items() if k != "weights"}
        meaning = {
            "method": self.method,
            "version": self.method_version,
            "config": {**self.config, "backbone": backbone},
            "fingerprint": self.fingerprint,
            "seed": self.seed,
            "quick": self.quick,
            **({"stacked": True} if self.stack else {}),
        }
        return f"{self.method}-{self.dataset}-s{self.seed}-{digest(meaning, 10)}"

    def command(self) -> str:
        """Give the command that runs this job alone."""
        parts = ["python -m bench run", f"--methods {self.method}", f"--datasets {self.dataset}"]
        parts.append(f"--seeds {self.seed},")
        if self.preset != "paper":
            parts.append(f"--preset {self.preset}")
        if self.overrides:
            settings = (shlex.quote(f"{k}={v}") for k, v in self.overrides.items())
            parts.append("--set " + " ".join(settings))
        if self.quick:
            parts.append("--quick")
        if self.stack:
            parts.append("--stack-seeds")
        return " ".join(parts)


@dataclass(frozen=True)
class Request:
    """What the user asked for.

    Attributes:
        presets: where the user's tuned presets are, if anywhere.
    """

    methods: tuple[str, ...]
    datasets: tuple[str, ...]
    seeds: tuple[int, ...]
    data_root: Path
    preset: str = "paper"
    overrides: Mapping[str, str] = field(default_factory=dict)
    quick: bool = False
    presets: Path | None = None


def one_seed(request: Request) -> Request:
    """Cut a request down to what is enough to check it: configurations do not depend on seeds."""
    return replace(request, seeds=request.seeds[:1])


def expand(request: Request) -> list[Job]:
    """Resolve every configuration; any wrong name or value is an error here, before any work."""
    methods = [get_method(name) for name in request.methods]
    by_owner = _split_overrides(request)
    jobs = []
    for dataset_name in request.datasets:
        dataset = get_dataset(dataset_name)
        settings = build_config(dataset.config_type, by_owner.get(dataset_name, {}), dataset_name)
        found = dataset.locate(request.data_root)
        facts = dataset.facts_of(settings, found)
        backbone = resolve_backbone(facts.backbone, by_owner.get("backbone", {}), request.data_root)
        usual_backbone = resolve_backbone(facts.backbone, {}, request.data_root)
        for method in methods:
            standin = found is not None and found.marker is not None
            config = method_config(method, dataset_name, request, by_owner, standin)
            resolved = {
                method.name: as_plain(config),
                dataset_name: as_plain(settings),
                "backbone": backbone,
            }
            usual = {
                method.name: as_plain(method_config(method, dataset_name, request, {}, standin)),
                dataset_name: as_plain(dataset.config_type()),
                "backbone": usual_backbone,
            }
            for seed in request.seeds:
                jobs.append(
                    Job(
                        method=method.name,
                        method_version=method.version,
                        dataset=dataset_name,
                        protocol=facts.protocol,
                        fingerprint=facts.fingerprint(),
                        standin=standin,
                        seed=seed,
                        preset=request.preset,
                        quick=request.quick,
                        config={
                            "method": as_plain(config),
                            "dataset": as_plain(settings),
                            "backbone": backbone,
                        },
                        supervision=asdict(method.supervision(config)),
                        overrides=_changes(request.overrides, resolved, usual),
                    )
                )
    return jobs


def method_config(
    method: Method,
    dataset: str,
    request: Request,
    overrides: Mapping[str, Mapping[str, str]],
    standin: bool,
) -> Any:
    """Build a method's configuration: defaults, then the preset, then the user's overrides."""
    preset = preset_values(
        method,
        dataset,
        request.preset,
        folder=request.presets,
        quick=request.quick,
        standin=standin,
    )
    values = with_overrides(preset, overrides.get(method.name, {}))
    config = build_config(method.config_type, values, method.name)
    quick = getattr(config, "quick", None)
    return quick() if request.quick and quick is not None else config


def resolve_backbone(default: str, overrides: Mapping[str, str], root: Path) -> dict[str, Any]:
    """Describe the network; ImageNet weights are known by their digest, not by their path."""
    known = {"name": str, "pretrained": bool, "weights": str | None}
    for key in overrides:
        if key not in known:
            raise UsageError(
                f"unknown setting 'backbone.{key}'{did_you_mean(key, known, 'backbone.')}",
                f"settings of backbone: {', '.join(known)}",
            )
    values = {k: coerce(v, known[k], f"backbone.{k}") for k, v in overrides.items()}
    name = values.get("name", default)
    if name != default:
        check_backbone(name)
    pretrained = values.get("pretrained", name not in LENETS)
    weights = values.get("weights")
    if weights is not None and not Path(weights).is_file():
        raise UsageError(f"backbone.weights: there is no file {weights}", "give a weights file")
    spec: dict[str, Any] = {"name": name, "pretrained": pretrained and name not in LENETS}
    if spec["pretrained"]:
        fetched = find_weights(root) if name in FETCHED else None
        path = Path(weights).resolve() if weights else fetched
        spec["weights"] = str(path) if path else None
        spec["weights_sha256"] = _sha256(path) if weights and path else f"{name}.imagenet"
    return spec


def backbone_spec(config: Mapping[str, Any]) -> BackboneSpec:
    """Turn a job's description of its network into what a task carries."""
    return BackboneSpec(config["name"], config["pretrained"], config.get("weights"))


def missing_data(names: Sequence[str], root: Path) -> list[str]:
    """List the datasets that are not on disk."""
    return [name for name in names if get_dataset(name).locate(root) is None]


def require_weights(jobs: Sequence[Job], root: Path) -> None:
    """Fail before any work if a job needs ImageNet weights that are not on disk."""
    for job in jobs:
        backbone = job.config["backbone"]
        if backbone["pretrained"] and backbone.get("weights") is None:
            fetch = f"{get_command('weights', root)}, or " if backbone["name"] in FETCHED else ""
            raise DataMissing(
                f"{job.dataset} starts from ImageNet weights ({backbone['name']}), which are not "
                "on disk",
                f"{fetch}--set backbone.weights=FILE, or train from "
                "scratch with --set backbone.pretrained=false",
            )


def _split_overrides(request: Request) -> dict[str, dict[str, str]]:
    """Sort overrides by owner, refusing owners that take no part in the request."""
    owners = {*load_methods(), *DATASETS, "backbone"}
    present = {*request.methods, *request.datasets, "backbone"}
    by_owner: dict[str, dict[str, str]] = {}
    for key, value in request.overrides.items():
        owner, _, knob = key.partition(".")
        if owner not in owners:
            raise UsageError(
                f"--set {key}: nothing is called '{owner}'{did_you_mean(owner, owners)}",
                f"set knobs of methods, datasets or backbone: {', '.join(sorted(owners))}",
            )
        if owner not in present:
            raise UsageError(
                f"--set {key}: {owner} takes no part in this command", "leave it out, or add it"
            )
        by_owner.setdefault(owner, {})[knob] = value
    return by_owner


def _changes(
    overrides: Mapping[str, str],
    resolved: Mapping[str, Mapping[str, Any]],
    usual: Mapping[str, Mapping[str, Any]],
) -> dict[str, str]:
    """Keep the overrides that change what a job means; one that repeats the preset does not."""
    changed = {}
    for key, value in overrides.items():
        owner, _, knob = key.partition(".")
        knob = "weights_sha256" if (owner, knob) == ("backbone", "weights") else knob
        if owner in resolved and _at(resolved[owner], knob) != _at(usual[owner], knob):
            changed[key] = value
    return changed


def _at(values: Mapping[str, Any], knob: str) -> Any:
    """Look up a knob; `part.knob` is one of a config within the config."""
    part, dot, rest = knob.partition(".")
    return _at(values.get(part, {}), rest) if dot else values.get(knob)


def _sha256(path: Path) -> str:
    with path.open("rb") as source:
        return hashlib.file_digest(source, "sha256").hexdigest()[:16]
