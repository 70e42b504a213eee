"""From names to jobs: methods x datasets x seeds, each with its resolved configuration.

A job's id is a hash of its identity: method, version, settings, data and seed. The same request
finds the same run whatever order, machine or folder it comes from, and a changed value is another
run. How a run is carried out (threads, workers, device) is no part of it. `datasets.config` says
how a setting that is added, renamed or removed later leaves stored runs as they are.
"""

from __future__ import annotations

import hashlib
import os
import shlex
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from datasets.base import SPLITS, BackboneSpec, DataKind, Facts
from datasets.catalogue import get_dataset, load_datasets
from datasets.config import (
    Values,
    as_plain,
    build_config,
    coerce,
    identity_values,
    read_stored,
    with_overrides,
)
from datasets.dataset import OnDisk
from datasets.errors import DataMissing, UsageError, did_you_mean
from datasets.fetch import get_command
from datasets.files import digest
from datasets.own import ARRAYS, PROTOCOL
from datasets.weights_source import FETCHED_BACKBONES, find_weights
from methods.backbones import (
    LENETS,
    SMALL_NETWORKS,
    check_backbone,
    check_frozen,
    check_input,
    check_network,
)
from methods.base import Method, Supervision, get_method, load_methods
from methods.network_input import NetworkInput, given_input, input_for
from methods.presets import KINDS, has_preset, preset_values

NO_DATA = Path(os.devnull)  # a data root under which nothing is found: real data is meant
PUBLISHED_SEEDS = tuple(range(10))  # the paper's five, and as many more for statistics
FIRST_DEVELOPMENT_SEED = 100
SEED_DIGITS = 18  # so that tables keep every seed in 64 bits
MOST_SEEDS = 10_000  # more are a mistake, such as a seed that was meant as one of a list
DEFAULT_PRESET = "default"
"""The preset of a method that has none for a dataset or its kind: the defaults of its config."""
NO_IDENTITY = ("weights", "input_ignored")  # of a backbone's settings: a path, and a remark
FREE_PROTOCOLS = (PROTOCOL, ARRAYS)  # of a user's own data, which say nothing of a network's input
KIND_PREFIX = "kind-"  # of the recorded name of a preset that is for a kind of data

# Names in record.json, where they differ from those of the fields.
STORED_NAMES = {"version": "method_version", "fingerprint": "data_fingerprint"}


@dataclass(frozen=True)
class RunConfig:
    """The resolved settings of a run, in the form in which they are recorded."""

    method: Values
    dataset: Values
    backbone: Values


@dataclass(frozen=True)
class Job:
    """One run, fully described; plain values only, so that it can be sent anywhere.

    Attributes:
        identity: what makes two runs the same run; the id is its hash.
        overrides: what the user changed from the preset, by `--set` key.
        variant: the campaign's column it was made for; a label, no part of the identity.
        splits: what is loaded; a tuning trial has no test split.
    """

    method: str
    version: int
    supervision: Supervision
    dataset: str
    protocol: str
    fingerprint: str
    standin: bool
    quick: bool
    preset: str
    config: RunConfig
    seed: int
    identity: Values
    overrides: Mapping[str, str] = field(default_factory=dict)
    variant: str = ""
    data_kind: DataKind = "release"
    splits: tuple[str, ...] = SPLITS

    @cached_property
    def run_id(self) -> str:
        """The name of the run: what it is, and the hash of its identity."""
        return f"{self.method}-{self.dataset}-s{self.seed}-{digest(self.identity, 10)}"

    @property
    def labels(self) -> list[str]:
        """What keeps a run of it from being a result, whatever its settings."""
        rebuilt = [self.data_kind] * (self.data_kind not in ("release", "standin"))
        return ["stand-in"] * self.standin + rebuilt + ["quick"] * self.quick

    def method_config(self) -> Any:
        """Return the method's configuration."""
        return read_stored(get_method(self.method).config_type, self.config.method, self.method)

    def dataset_config(self) -> Any:
        """Return the dataset's configuration."""
        return read_stored(get_dataset(self.dataset).config_type, self.config.dataset, self.dataset)

    def derived_identity(self) -> dict[str, object]:
        """Return what the identity is by what the job says; a plug-in's has its name besides."""
        return {
            "method": self.method,
            "version": self.version,
            "config": {
                "method": identity_values(self.method_config()),
                "dataset": identity_values(self.dataset_config()),
                "backbone": {k: v for k, v in self.config.backbone.items() if k not in NO_IDENTITY},
            },
            "fingerprint": self.fingerprint,
            "seed": self.seed,
            "quick": self.quick,
        }

    def network(self) -> BackboneSpec:
        """Return the network that images go through."""
        values = self.config.backbone
        known = ("name", "pretrained", "weights", "frozen", "head")
        own = {name: values[name] for name in known if name in values}
        return build_config(BackboneSpec, own, "backbone")

    def backbone(self) -> BackboneSpec:
        """Return the network as a task carries it: of a frozen one, what is on its features."""
        network = self.network()
        return BackboneSpec(network.head) if network.frozen else network

    def command(self) -> str:
        """Return the command that runs this job alone."""
        parts = ["python -m bench run", f"--methods {self.method}", f"--datasets {self.dataset}"]
        parts.append(f"--seeds {self.seed},")
        if self.preset not in ("paper", DEFAULT_PRESET):
            parts.append(f"--preset {self.preset.removeprefix(KIND_PREFIX)}")
        if self.overrides:
            settings = (shlex.quote(f"{k}={v}") for k, v in self.overrides.items())
            parts.append("--set " + " ".join(settings))
        if self.quick:
            parts.append("--quick")
        if self.data_kind == "subset":
            parts.append("--allow-subset")
        return " ".join(parts)

    def to_json(self) -> dict[str, object]:
        """Return the job as the keys that a record begins with."""
        values = {name: value for name, value in vars(self).items() if name != "run_id"}
        values |= {"supervision": asdict(self.supervision), "config": vars(self.config)}
        values["splits"] = list(self.splits)
        return {STORED_NAMES.get(name, name): value for name, value in values.items()}

    @staticmethod
    def from_json(raw: Values) -> Job:
        """Read a job back; keys that are not a job's are passed over."""
        names = {f.name: STORED_NAMES.get(f.name, f.name) for f in fields(Job)}
        values = {name: raw[stored] for name, stored in names.items() if stored in raw}
        return build_config(Job, values, "record")


@dataclass(frozen=True)
class Request:
    """What the user asked for.

    Attributes:
        presets: where the user's tuned presets are, if anywhere.
        all_methods: whether methods were asked for by `all`, of which those that cannot run on a
            dataset are left out; one that was named is an error instead.
        allow_subset: whether a dataset some of whose images are missing is used without them.
    """

    methods: tuple[str, ...]
    datasets: tuple[str, ...]
    seeds: tuple[int, ...]
    data_root: Path
    preset: str = "paper"
    overrides: Mapping[str, str] = field(default_factory=dict)
    quick: bool = False
    presets: Path | None = None
    all_methods: bool = False
    allow_subset: bool = False


@dataclass(frozen=True)
class Unsuited:
    """A method that cannot run on a dataset, as it is configured."""

    method: str
    dataset: str
    reason: str
    remedy: str


def locate(request: Request) -> dict[str, OnDisk | None]:
    """Look for the request's datasets on disk."""
    return {name: get_dataset(name).locate(request.data_root) for name in request.datasets}


def expand(
    request: Request,
    found: Mapping[str, OnDisk | None] | None = None,
    left_out: list[Unsuited] | None = None,
) -> list[Job]:
    """Resolve every configuration; any wrong name or value is an error here, before any work.

    Args:
        request: what is asked for.
        found: where the datasets lie, if that is known already.
        left_out: is filled with the methods that cannot run on a dataset.
    """
    found = locate(request) if found is None else found
    methods = [get_method(name) for name in request.methods]
    by_owner = _split_overrides(request)
    jobs: list[Job] = []
    for name in request.datasets:
        dataset, place = get_dataset(name), found[name]
        settings = build_config(dataset.config_type, by_owner.get(name, {}), name)
        if request.allow_subset and place is not None:
            place = dataset.subset(place, settings)
        facts = dataset.info_on_disk(settings, place)
        root = request.data_root
        usually = facts.backbone, facts.pretrained
        kind = "release" if place is None else place.data_kind
        changes = by_owner.get("backbone", {})
        asked_frozen = coerce(changes.get("frozen", False), bool, "backbone.frozen")
        if asked_frozen:
            check_frozen(changes.get("name", facts.backbone), rows=facts.rows, data=name)
        backbone = resolve_backbone(*usually, changes, root)
        shape = facts.eval_transform.shape
        check_input(str(backbone["name"]), rows=facts.rows, data=name, shape=shape)
        preset_backbone = resolve_backbone(*usually, {}, root)
        backbone |= resolve_input(facts, backbone, changes.get("input", "auto"))
        preset_backbone |= resolve_input(facts, preset_backbone, "auto")
        shared = {name: as_plain(settings), "backbone": backbone}
        usual = {name: as_plain(dataset.config_type()), "backbone": preset_backbone}
        frozen = "frozen" in backbone
        for method in methods:
            own_kind = kind_of(facts, backbone) if kind == "own" or frozen else ""
            asked, recorded = preset_names(method, name, request.preset, own_kind, frozen=frozen)
            config = _method_config(method, name, request, by_owner, kind, asked, frozen=frozen)
            unsuited = why_unsuited(method, config, facts, frozen=frozen)
            if unsuited is not None:
                if not request.all_methods:
                    raise UsageError(unsuited.reason, unsuited.remedy)
                if left_out is not None:
                    left_out.append(unsuited)
                continue
            values = as_plain(config)
            usual_config = _method_config(method, name, request, {}, kind, asked, frozen=frozen)
            preset = as_plain(usual_config)
            changed = identity_changes(
                {**shared, method.name: values}, {**usual, method.name: preset}
            )
            outside = {"method": method.distribution, "dataset": dataset.distribution}
            plugin = {what: known for what, known in outside.items() if known is not None}
            first = Job(
                method=method.name,
                version=method.version_of(config),
                supervision=method.supervision(config),
                dataset=name,
                protocol=facts.protocol,
                fingerprint=facts.fingerprint(),
                standin=kind == "standin",
                quick=request.quick,
                preset=recorded,
                config=RunConfig(values, as_plain(settings), backbone),
                seed=0,
                identity={},
                overrides={
                    key: value
                    for key, value in request.overrides.items()
                    if (f"{key}_sha256" if key == "backbone.weights" else key) in changed
                },
                data_kind=kind,
            )
            identity = first.derived_identity() | ({"plugin": plugin} if plugin else {})
            for seed in request.seeds:
                jobs.append(replace(first, seed=seed, identity={**identity, "seed": seed}))
    return jobs


def _method_config(
    method: Method,
    dataset: str,
    request: Request,
    overrides: Mapping[str, Mapping[str, str]],
    kind: DataKind,
    asked: str,
    *,
    frozen: bool,
) -> Any:
    """Build a method's configuration: defaults, then the preset, then the user's overrides."""
    folder, quick = request.presets, request.quick
    preset = preset_values(
        method, dataset, asked, folder=folder, quick=quick, data_kind=kind, frozen=frozen
    )
    values = with_overrides(preset, overrides.get(method.name, {}))
    config = build_config(method.config_type, values, method.name)
    return config.quick() if quick and hasattr(config, "quick") else config


def preset_names(
    method: Method, dataset: str, asked: str, own_kind: str, *, frozen: bool = False
) -> tuple[str, str]:
    """Return which preset's values a run takes, and the name under which that is recorded.

    A user's own data has no presets: there `paper` is the one for its kind. Nor do the paper's
    fit a head on frozen features, since they are for training whole networks.
    """
    if asked == "paper" and (frozen or not has_preset(method, dataset)):
        if not own_kind or not has_preset(method, dataset, own_kind):
            return asked, DEFAULT_PRESET
        asked = own_kind
    return asked, f"{KIND_PREFIX}{asked}" if asked in KINDS else asked


def kind_of(facts: Facts, backbone: Values) -> str:
    """Return the kind of data and network by which a preset is chosen for a user's own data."""
    if facts.rows or "frozen" in backbone:
        return "features"
    if backbone["name"] in LENETS:
        return "digits"
    return "pretrained" if backbone["pretrained"] else "scratch"


def why_unsuited(
    method: Method, config: Any, facts: Facts, *, frozen: bool = False
) -> Unsuited | None:
    """Return why a method cannot run on a dataset, or on frozen features of it, if it cannot."""
    tier = method.supervision(config)
    needs = [s for s, needed in (("train", tier.train_groups), ("val", tier.val_groups)) if needed]
    if hidden := [split for split in needs if split not in facts.group_splits]:
        free = replace(config, selection="val_avg") if hasattr(config, "selection") else config
        instead = method.supervision(free)
        can = all(split in facts.group_splits for split in ("train",) if instead.train_groups)
        can = can and not instead.val_groups
        return Unsuited(
            method.name,
            facts.name,
            f"{method.name} needs group labels of {' and '.join(hidden)}, which {facts.name} does "
            "not have",
            f"--set {method.name}.selection=val_avg chooses its epoch without them"
            if can
            else "register the data with --groups COLUMN, or leave the method out",
        )
    if (facts.rows or frozen) and not method.takes_rows:
        given = "frozen features are" if frozen else f"{facts.name} has"
        return Unsuited(
            method.name,
            facts.name,
            f"{method.name} works on images, and {given} rows of features",
            "leave the method out",
        )
    return None


def resolve_backbone(
    default: str, pretrained: bool, overrides: Mapping[str, str], root: Path
) -> dict[str, object]:
    """Describe the network; ImageNet weights are known by their digest, not by their path.

    Weights that are given are used, and a network that stays frozen starts from weights.
    """
    needs = overrides.get("weights", "none") not in ("none", "None", "")
    needs = needs or coerce(overrides.get("frozen", False), bool, "backbone.frozen")
    usual = {"name": default, "pretrained": pretrained or needs}
    asked = build_config(BackboneSpec, {**usual, **overrides}, "backbone")
    name, weights = asked.name, asked.weights
    if name != default:
        check_backbone(name)
    if weights is not None and not Path(weights).is_file():
        raise UsageError(f"backbone.weights: there is no file {weights}", "give a weights file")
    if needs and not asked.pretrained:
        what = "frozen features are those of weights" if asked.frozen else "a weights file is given"
        raise UsageError(
            f"{what}, and backbone.pretrained=false asks for a network without any",
            "leave backbone.pretrained out",
        )
    if weights is not None and name in SMALL_NETWORKS:
        raise UsageError(
            f"{name} takes no weights file", "leave backbone.weights out, or name the --backbone"
        )
    if not asked.frozen and "head" in overrides:
        raise UsageError(
            "backbone.head is the network on frozen features, and nothing is frozen here",
            "add --features, or leave backbone.head out",
        )
    pretrained = asked.pretrained and name not in SMALL_NETWORKS
    spec: dict[str, object] = {"name": name, "pretrained": pretrained}
    if spec["pretrained"]:
        fetched = find_weights(root) if name in FETCHED_BACKBONES else None
        path = Path(weights).resolve() if weights else fetched
        spec["weights"] = str(path) if path else None
        spec["weights_sha256"] = f"{name}.imagenet"
        if weights and path:
            with path.open("rb") as source:
                spec["weights_sha256"] = hashlib.file_digest(source, "sha256").hexdigest()[:16]
    if asked.frozen:
        spec |= {"frozen": True, "head": asked.head}
    return spec


def resolve_input(facts: Facts, backbone: Values, asked: str) -> dict[str, object]:
    """Return how images are brought to a network whose weights expect another way than the data's.

    `input` is the network's way, where that is taken; `input_ignored` says what it would be, where
    the data's own way is.
    """
    asked = coerce(asked, Literal["auto", "data", "network"], "backbone.input")
    if not backbone["pretrained"] or (wanted := input_for(facts, str(backbone["name"]))) is None:
        return {}
    if asked == "network" or (asked == "auto" and facts.protocol in FREE_PROTOCOLS):
        return {"input": wanted.plain()}
    given = given_input(facts)
    assert given is not None  # else there would be no difference
    return {"input_ignored": "; ".join(wanted.differences(given))}


def input_notes(jobs: Iterable[Job]) -> list[str]:
    """Return, for each network whose weights expect other images than the data's, what is done."""
    notes: dict[str, None] = {}
    for job in jobs:
        backbone = job.config.backbone
        where = f"note: {job.dataset}: the weights of {backbone['name']} expect"
        if "input" in backbone:
            own = NetworkInput.from_plain(backbone["input"])
            notes[f"{where} {own.describe()}, and images are brought to it so"] = None
        elif "input_ignored" in backbone:
            notes[
                f"{where} {backbone['input_ignored']}; images are brought to it as the data says "
                "(--set backbone.input=network changes that)"
            ] = None
    return list(notes)


def require_weights(jobs: Iterable[Job], root: Path) -> None:
    """Fail before any work if ImageNet weights that a job needs are not on disk or do not fit."""
    checked: set[object] = set()
    for job in jobs:
        backbone = job.network()
        if backbone.pretrained and backbone.weights is None:
            known = backbone.name in FETCHED_BACKBONES
            fetch = f"{get_command('weights', root)}, or " if known else ""
            raise DataMissing(
                f"{job.dataset} starts from ImageNet weights ({backbone.name}), which are not "
                "on disk",
                f"{fetch}--set backbone.weights=FILE, or train from "
                "scratch with --set backbone.pretrained=false"
                if not backbone.frozen
                else f"{fetch}--set backbone.weights=FILE",
            )
        if (key := (backbone, job.dataset, str(job.config.dataset))) not in checked:
            checked.add(key)
            facts = get_dataset(job.dataset).facts(job.dataset_config())
            check_network(backbone, facts.channels, facts.eval_transform.resolution)


def overrides_without(overrides: Mapping[str, str], owners: Set[str]) -> dict[str, str]:
    """Return the overrides that do not belong to these methods or datasets."""
    return {key: value for key, value in overrides.items() if key.split(".")[0] not in owners}


def _split_overrides(request: Request) -> dict[str, dict[str, str]]:
    """Sort overrides by owner, refusing owners that take no part in the request."""
    owners = {*load_methods(), *load_datasets(), "backbone"}
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
            absent = f"--set {key}: {owner} takes no part in this command"
            raise UsageError(absent, "leave it out, or add it")
        by_owner.setdefault(owner, {})[knob] = value
    return by_owner


def identity_changes(
    before: Values, after: Values, prefix: str = ""
) -> dict[str, tuple[object, object]]:
    """Return the parts in which two identities differ, by dotted name, each with both values."""
    changes: dict[str, tuple[object, object]] = {}
    for name in dict.fromkeys((*before, *after)):
        old, new = before.get(name), after.get(name)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            changes |= identity_changes(old, new, f"{prefix}{name}.")
        elif old != new:
            changes[f"{prefix}{name}"] = (old, new)
    return changes


def shown_split(seed: int) -> Literal["val", "test"]:
    """Return the split whose figures the terminal shows of a run with this seed.

    What is settled on development seeds is settled by validation: a test figure that was seen
    cannot be unseen.
    """
    return "val" if seed >= FIRST_DEVELOPMENT_SEED else "test"


def parse_seeds(text: str) -> tuple[int, ...]:
    """Read `5` as 0..4, and `3,7` or `3,` as exactly those."""
    parts = [part.strip() for part in text.split(",")]
    numbers = [part for part in parts if part]
    if not numbers or not all(part.isdecimal() for part in numbers):
        raise UsageError(f"--seeds must be a count or a list but got '{text}'", "e.g. 5 or 3,7")
    if len(parts) == 1:
        if not numbers[0].strip("0"):
            raise UsageError("--seeds must ask for at least one seed", "e.g. --seeds 1")
        if len(numbers[0]) > SEED_DIGITS or int(numbers[0]) > MOST_SEEDS:
            raise UsageError(
                f"--seeds {text[:30]} asks for so many runs of every method and dataset",
                f"give at most {MOST_SEEDS}; one seed is written with a comma, as in --seeds 3,",
            )
        return tuple(range(int(numbers[0])))
    if longest := [part for part in numbers if len(part) > SEED_DIGITS]:
        long = f"--seeds: a seed has at most {SEED_DIGITS} digits but got {longest[0][:30]}"
        raise UsageError(long, "e.g. --seeds 3,7")
    return tuple(dict.fromkeys(int(part) for part in numbers))


def parse_names(text: str, known: Sequence[str]) -> tuple[str, ...]:
    """Read a comma-separated list; `all` means every known name."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise UsageError("an empty list of names", f"choose from {', '.join(known)}, or all")
    return tuple(dict.fromkeys(n for name in names for n in (known if name == "all" else [name])))


def parse_overrides(texts: Sequence[str]) -> dict[str, str]:
    """Read `owner.knob=value` pairs; a knob of a method's first stage is `owner.stage.knob`."""
    overrides = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or key.count(".") not in (1, 2) or not all(key.split(".")):
            raise UsageError(f"--set {text}: expected OWNER.KNOB=VALUE", "e.g. --set erm.lr=0.01")
        overrides[key] = value
    return overrides
