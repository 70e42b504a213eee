"""The catalogue: what it knows of each dataset, and datasets that other packages bring."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from datasets import catalogue, sources, standins
from datasets.base import Facts, Labels, PairAuroc
from datasets.catalogue import datasets_from, get_dataset, load_datasets
from datasets.celeba import CelebaConfig
from datasets.cmnist import CmnistConfig
from datasets.cmnist_irm import CmnistIrmConfig
from datasets.dataset import DATASETS, METRIC_TITLES, Dataset, Progress, register
from datasets.dominoes import DominoesConfig
from datasets.errors import DataMissing, UsageError
from datasets.images import Images, MemoryImages
from datasets.isic import IsicConfig
from datasets.transforms import ResizedCentreCrop, Transform
from datasets.umnist import UmnistConfig
from datasets.waterbirds import WaterbirdsConfig

REPOSITORY = Path(__file__).resolve().parents[2]
BUILT_IN = ["waterbirds", "celeba", "isic", "umnist", "cmnist", "dominoes", "cmnist_irm"]
FINGERPRINTS = [
    ("umnist", UmnistConfig("paper", 3), "77d88bf943e2b048"),
    ("umnist", UmnistConfig("paper", 3, hflip=True), "77d88bf943e2b048"),
    ("umnist", UmnistConfig("paper", 10), "9ea4c77a3999d09b"),
    ("umnist", UmnistConfig("george", 3), "19e16624dfcbb602"),
    ("umnist", UmnistConfig("george", 10), "9b9ed7dcc38954ec"),
    ("cmnist", CmnistConfig("nominal"), "694d90d13d388ba5"),
    ("cmnist", CmnistConfig("cnc"), "592eee251e3a1196"),
    ("cmnist", CmnistConfig("biased_val"), "8623d3c4db07f41d"),
    ("waterbirds", WaterbirdsConfig(), "7a123ebcd64d939e"),
    ("waterbirds", WaterbirdsConfig(resolution=64), "7a123ebcd64d939e"),
    ("celeba", CelebaConfig(), "c2f39af87600735a"),
    ("isic", IsicConfig(unknown="benign"), "afc9237f87a66e3e"),
    ("isic", IsicConfig(unknown="benign", pipeline="george"), "afc9237f87a66e3e"),
    ("isic", IsicConfig(unknown="drop"), "ff15d4c3c756bbb1"),
    ("dominoes", DominoesConfig(), "f6a34d9c41a274e7"),
    ("dominoes", DominoesConfig(0.99), "24487f743cc51421"),
    ("cmnist_irm", CmnistIrmConfig(), "59b41ffe0824ba72"),
]
STANDIN_FINGERPRINTS = {"umnist": "3e43b40f19613485", "cmnist": "59b0fac473c77a05"}


@dataclass(frozen=True)
class DotsConfig:
    side: int = 8


class Dots(Dataset):
    """A dataset as another package would write it: no more than the five things it must say."""

    name: ClassVar[str] = "dots"
    config_type: ClassVar[type[DotsConfig]] = DotsConfig
    search_paths: ClassVar[tuple[str, ...]] = ("dots",)

    def facts(self, config: DotsConfig) -> Facts:
        plain = Transform(ResizedCentreCrop(config.side), config.side, (0.5,), (0.5,))
        return Facts(
            name=self.name,
            protocol="first",
            task="Brightness (binary)",
            spurious="Corner",
            classes=("dark", "bright"),
            groups=("dark", "bright"),
            metric="auroc",
            counts={},
            group_counts={},
            backbone="lenet4",
            channels=1,
            train_transform=plain,
            eval_transform=plain,
        )

    def matches(self, folder: Path) -> bool:
        return (folder / "dots").is_file()

    def labels(self, folder: Path, config: DotsConfig) -> Mapping[str, Labels]:
        sizes = {"train": 2000, "val": 10, "test": 10}
        first, labels = 0, {}
        for split, size in sizes.items():
            ids = torch.arange(first, first + size)
            first += size
            labels[split] = Labels(ids, ids % 2, ids % 2)
        return labels

    def images(
        self, folder: Path, config: DotsConfig, labels: Mapping[str, Labels], progress: Progress
    ) -> Mapping[str, Images]:
        return {
            split: MemoryImages(
                (part.ids % 251).to(torch.uint8).view(-1, 1, 1, 1).expand(-1, 1, 8, 8).clone()
            )
            for split, part in labels.items()
        }


@pytest.fixture
def registry() -> Iterator[dict[str, Dataset]]:
    """The registry, put back as it was afterwards."""
    load_datasets()
    before = dict(DATASETS)
    yield DATASETS
    DATASETS.clear()
    DATASETS.update(before)


PlugIn = Callable[[str], None]


@pytest.fixture
def plug_in(
    registry: dict[str, Dataset], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[PlugIn]:
    """Install a distribution `dots-for-bench` whose entry point has a given value."""
    info = tmp_path / "site" / "dots_for_bench-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: dots-for-bench\nVersion: 1.0\n")
    catalogue._plug_ins.cache_clear()

    def install(value: str) -> None:
        (info / "entry_points.txt").write_text(f"[bench.datasets]\ndots = {value}\n")
        monkeypatch.syspath_prepend(info.parent)

    yield install
    catalogue._plug_ins.cache_clear()
    for name in [name for name in sys.modules if name.startswith("dots_package")]:
        del sys.modules[name]


@pytest.mark.parametrize(("name", "config", "expected"), FINGERPRINTS)
def test_fingerprints_are_those_of_the_stored_runs(name: str, config: Any, expected: str) -> None:
    assert get_dataset(name).facts(config).fingerprint() == expected


def test_fingerprints_of_stand_ins_stay(tmp_path: Path) -> None:
    standins.write("mnist", tmp_path, size=1500)
    for name, expected in STANDIN_FINGERPRINTS.items():
        dataset = get_dataset(name)
        facts = dataset.info_on_disk(dataset.config_type(), dataset.locate(tmp_path))
        assert facts.fingerprint() == expected


def test_every_dataset_carries_what_a_table_needs() -> None:
    datasets = load_datasets()
    assert [name for name in datasets if name in BUILT_IN] == BUILT_IN
    titles = [datasets[name].title for name in BUILT_IN]
    assert titles == ["Waterbirds", "CelebA", "ISIC", "UMNIST", "CMNIST", "Dominoes", "CMNIST-IRM"]
    outside = [name for name in BUILT_IN if datasets[name].extended]
    assert outside == ["dominoes", "cmnist_irm"], "the main table is the paper's"
    for name in BUILT_IN:
        dataset = datasets[name]
        assert dataset is get_dataset(name) and dataset.distribution is None
        isic = ("auroc", "auroc_nonpatch", "auroc_histopath")
        assert dataset.table_metrics == (isic if name == "isic" else ("wga", "avg"))
        facts = dataset.facts(dataset.config_type())
        possible = ["wga", "avg", "avg_train_weighted", "worst_class"]
        possible += [f"wga_{grouping}" for grouping in facts.extra_groupings]
        possible += ["auroc", *facts.pair_aurocs] if facts.metric == "auroc" else []
        assert set(dataset.table_metrics) <= set(possible)
        assert all(metric in dataset.metric_titles for metric in possible)
        assert dataset.table_metrics[0] == facts.metric, "the headline"
    isic = datasets["isic"]
    assert [isic.metric_title(metric) for metric in isic.table_metrics] == [
        "Overall",
        "Non-Patch",
        "Histopath.",
    ]
    assert datasets["umnist"].metric_title("wga_10digit") == "WGA, 10 digits"


def test_the_pairs_of_isic_name_groups_that_it_has() -> None:
    isic = get_dataset("isic")
    facts = isic.facts(isic.config_type())
    assert facts.pair_aurocs["auroc_nonpatch"] == PairAuroc("", 0)
    assert facts.groups[0] == "benign_no_patch"
    named = facts.pair_aurocs["auroc_histopath"]
    assert facts.extra_groupings[named.grouping][named.group or 0] == "benign_hist"
    assert facts.worst_group_metric == "auroc_worst_patch_pair"
    umnist = get_dataset("umnist")
    assert umnist.facts(umnist.config_type()).worst_group_metric == "wga"


def test_the_datasets_made_from_one_source() -> None:
    assert datasets_from("mnist") == ("umnist", "cmnist", "cmnist_irm")
    assert datasets_from("dominoes") == ("dominoes",)
    assert datasets_from("isic") == ("isic",)
    assert datasets_from("umnist") == ()


def test_an_unknown_dataset_suggests_the_nearest() -> None:
    with pytest.raises(UsageError, match="did you mean 'waterbirds'") as caught:
        get_dataset("waterbird")
    assert ", ".join(BUILT_IN) in caught.value.remedy


def test_the_catalogue_imports_no_dataset_before_it_is_asked_for() -> None:
    script = (
        "import sys, datasets.catalogue as c\n"
        "print([m for m in (*c.BUILT_IN.values(), 'pandas') if m in sys.modules])\n"
        "c.get_dataset('umnist')\n"
        "print([m for m in (*c.BUILT_IN.values(), 'pandas') if m in sys.modules])\n"
        "print(list(c.load_datasets())[:7])\n"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[:2] == ["[]", "['datasets.umnist']"]
    assert done.stdout.splitlines()[2] == str(BUILT_IN), "the order does not depend on imports"


@pytest.mark.parametrize(
    "name", ["Dots", "dots-2", "2dots", "", "_dots", "all", "weights", "mnist", "cifar10"]
)
def test_names_that_would_be_ambiguous_are_refused(registry: dict[str, Dataset], name: str) -> None:
    with pytest.raises(UsageError, match="cannot be the name of a dataset"):
        register(type("Other", (Dots,), {"name": name}))
    assert name not in registry


def test_two_datasets_of_one_name_are_refused(registry: dict[str, Dataset]) -> None:
    with pytest.raises(UsageError, match=r"'umnist' is the name of two datasets: in datasets\.um"):
        register(type("Mine", (Dots,), {"name": "umnist"}))


def test_what_a_dataset_leaves_out_has_a_default(registry: dict[str, Dataset]) -> None:
    register(type("Plain", (Dots,), {"name": "plain", "__module__": __name__}))
    plain = get_dataset("plain")
    assert (plain.title, plain.source, plain.distribution) == ("plain", "plain", __name__)
    assert plain.table_metrics == ("auroc",) and plain.metric_titles is METRIC_TITLES
    assert plain.metric_title("wga_colour") == "WGA, colour"
    assert plain.metric_title("auroc_pair") == "auroc_pair"
    assert list(load_datasets())[-1] == "plain"
    assert plain.facts(DotsConfig()).worst_group_metric == "auroc"


@pytest.mark.parametrize("value", ["test_catalogue:Dots", "dots_package"])
def test_a_dataset_of_another_package_is_as_good_as_one_of_ours(
    plug_in: PlugIn, value: str, tmp_path: Path
) -> None:
    plug_in(value)
    (tmp_path / "site" / "dots_package.py").write_text(
        "from datasets.dataset import register\n"
        "from test_catalogue import Dots\n\n"
        "@register\n"
        "class PackagedDots(Dots):\n"
        "    title = 'Dots'\n"
    )
    dots = get_dataset("dots")
    assert dots.distribution == "dots-for-bench"
    assert dots.title == ("Dots" if value == "dots_package" else "dots")
    assert load_datasets()["dots"] is dots is get_dataset("dots")
    with pytest.raises(DataMissing, match="dots is not in"):
        dots.require(tmp_path)
    with pytest.raises(DataMissing, match="has to be downloaded by hand") as caught:
        sources.get("dots", tmp_path, print)
    assert caught.value.remedy == f"put its files in {tmp_path / 'dots'}"
    (tmp_path / "dots").mkdir()
    (tmp_path / "dots" / "dots").write_text("")
    assert sources.get("dots", tmp_path, print) == tmp_path / "dots"
    data = dots.load(tmp_path, DotsConfig(), splits=("train",), quick=True)
    train = data.splits["train"]
    assert len(train) == len(train.images) == 1500
    pixels = train.images.batch(torch.tensor([1499])).pixels
    assert int(pixels[0, 0, 0, 0]) == int(train.labels.ids[1499]) % 251
    with pytest.raises(UsageError, match="there is no 'dats' to get; did you mean 'dots'"):
        sources.get("dats", tmp_path, print)


def test_a_package_imported_before_is_known_by_its_distribution(
    plug_in: PlugIn, registry: dict[str, Dataset]
) -> None:
    register(Dots)
    assert registry["dots"].distribution == "test_catalogue"
    plug_in("test_catalogue")
    assert get_dataset("dots").distribution == "dots-for-bench"


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("dots_package", "ModuleNotFoundError"),
        ("test_catalogue:DotsConfig", "neither a module nor a Dataset class"),
        ("test_catalogue:Clash", "'cmnist' is the name of two datasets"),
    ],
)
def test_a_plug_in_that_fails_is_named(plug_in: PlugIn, value: str, reason: str) -> None:
    plug_in(value)
    with pytest.raises(UsageError, match=reason) as caught:
        load_datasets()
    assert f"the plug-in 'dots' ({value}) of dots-for-bench" in caught.value.message
    assert "pip uninstall dots-for-bench" in caught.value.remedy
    assert get_dataset("umnist").name == "umnist", "what is built in works all the same"


class Clash(Dots):
    name: ClassVar[str] = "cmnist"
