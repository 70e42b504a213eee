"""`data add`, `show`, `remove`, and what every other verb then does with the name."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from PIL import Image

sys.path.append(str(Path(__file__).parents[2]))
from planted import CLASSES, planted, write_planted

Outcome = Any
Cli = Callable[..., Outcome]
Maker = Callable[[Path], Path]
QUICK = ("--quick", "--audit", "off", "--seeds", "100,", "--workers", "1")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, in which commands write."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def table_of(folder: Path, count: int = 60, **changed: Any) -> Path:
    """Write images and a table of them: file, label, place, split as WILDS numbers it."""
    folder.mkdir(parents=True)
    rows = []
    for number, sample in enumerate(planted(count, 0.3, seed=1)):
        Image.fromarray(sample.pixels).save(folder / f"{number}.png")
        place = CLASSES[sample.label ^ sample.minority]
        split = number % 6 // 2
        rows.append({"img_filename": f"{number}.png", "y": sample.label, "split": split})
        rows[-1] |= {"place": place, "weight": number / 2}
    table = pd.DataFrame(rows)
    for column, value in changed.items():
        table[column] = value(table) if callable(value) else value
    table.to_csv(folder / "metadata.csv", index=False)
    return folder


def features_of(file: Path, **changed: Any) -> Path:
    rng = np.random.default_rng(0)
    y = np.arange(60) % 2
    arrays: dict[str, Any] = {"x": rng.normal(size=(60, 5)) + y[:, None], "y": y}
    arrays = {n: v for n, v in {**arrays, **changed}.items() if v is not None}
    np.savez(file, **arrays)
    return file


class TestAFolderForEachClass:
    def test_says_what_it_found_and_copies_nothing(self, home: Path, cli: Cli) -> None:
        write_planted(home / "shapes", count=60)
        said = cli("data", "add", "shapes", "shapes", "--data-root", "data")
        assert said.code == 0
        for part in ("round", "square", "60", "32 x 32", "RGB 60", "no image was copied", "drawn"):
            assert part in said.out, said.out
        kept = [p.name for p in Path("data/own/shapes").iterdir()]
        assert sorted(kept) == ["dataset.toml", "samples.parquet"]
        toml = tomllib.loads(Path("data/own/shapes/dataset.toml").read_text())
        assert toml["classes"] == ["round", "square"]
        assert toml["counts"] == {"train": 36, "val": 12, "test": 12}
        assert toml["source"] == str(home / "shapes")

    def test_splits_are_drawn_once_by_the_seed_alone(self, home: Path, cli: Cli) -> None:
        write_planted(home / "shapes", count=60)
        tables = []
        for root, seed in (("a", 0), ("b", 0), ("c", 1)):
            words = ("--data-root", root, "--split-seed", seed)
            assert cli("data", "add", "shapes", "shapes", *words).code == 0
            tables.append(pd.read_parquet(f"{root}/own/shapes/samples.parquet"))
        assert tables[0].equals(tables[1])
        assert not tables[0]["split"].equals(tables[2]["split"])
        assert (tables[0].groupby(["y", "split"]).size() == [18, 6, 6] * 2).all()

    def test_given_splits_are_kept_and_a_missing_one_is_drawn(self, home: Path, cli: Cli) -> None:
        write_planted(home / "shapes/train", count=60, seed=1)
        write_planted(home / "shapes/test", count=20, seed=2)
        said = cli("data", "add", "shapes", "shapes", "--data-root", "data", "--json")
        assert said.json["counts"] == {"train": 48, "val": 12, "test": 20}
        assert said.json["drawn"] == ["val"]

    def test_every_verb_knows_the_name_until_it_is_removed(self, home: Path, cli: Cli) -> None:
        write_planted(home / "shapes", count=60)
        root = ("--data-root", "data")
        cli("data", "add", "shapes", "shapes", *root)
        listed = cli("list", "--json", *root).json["datasets"]
        assert {"shapes": "own"}.items() <= {r["name"]: r["data_kind"] for r in listed}.items()
        assert "shapes" in cli("data", "status", *root).out
        assert cli("data", "verify", "shapes", *root).code == 0
        planned = cli("plan", "--datasets", "shapes", "--seeds", "1", "--json", *root).json
        assert {row["preset"] for row in planned["runs"]} == {"kind-digits"}
        shown = cli("data", "show", "shapes", "--json", *root).json
        sheets = [Image.open(file).size for file in shown["sheets"][1:]]
        assert sheets == [(960, 288), (960, 288)]  # 30 images of a class, ten in a row
        assert "data:image/png;base64," in Path(shown["sheets"][0]).read_text()
        assert cli("data", "remove", "shapes", *root).code == 0
        assert not Path("data/own/shapes").exists() and len(list(home.rglob("0*.png"))) > 60
        assert cli("plan", "--datasets", "shapes", *root).code == 2

    def test_runs_without_groups_report_classes(self, home: Path, cli: Cli) -> None:
        write_planted(home / "shapes", count=120)
        cli("data", "add", "shapes", "shapes", "--data-root", "data")
        words = ("--datasets", "shapes", "--preset", "small", "--data-root", "data", *QUICK)
        said = cli("run", "--methods", "erm,nct,george", *words, "--json")
        assert said.code == 0, said.err
        for row in said.json["runs"]:
            record = cli("show", row["run_id"], "--json").json
            assert record["preset"] == "kind-small" and record["data_kind"] == "own"
            for split in ("val", "test"):
                found = record["metrics"][split]
                assert {"avg", "worst_class", "balanced", "auroc", "ece"} <= set(found)
                assert "wga" not in found and "avg_train_weighted" not in found
                assert list(found["group_accuracy"]) == list(CLASSES)
                assert found["worst_class"] == min(found["group_accuracy"].values())
            assert row["method"] in record["provenance"]["command"] if "provenance" in record else 1
        assert cli("run", "--methods", "erm,nct,george", *words).out.count("worst class") == 1
        assert cli("check", "results", "--data-root", "data").code == 0
        assert cli("report", "--out", "report", "--data-root", "data").code == 0
        assert Path("report/index.html").is_file()

    def test_methods_that_need_groups_are_left_out_or_refused(self, home: Path, cli: Cli) -> None:
        write_planted(home / "shapes", count=60)
        root = ("--data-root", "data", "--seeds", "1", "--datasets", "shapes")
        cli("data", "add", "shapes", "shapes", "--data-root", "data")
        said = cli("plan", "--methods", "all", *root, "--json").json
        left_out = {row["method"]: row for row in said["left_out"]}
        assert set(left_out) == {
            *("groupdro", "jtt", "eiil", "dfr", "cnc"),
            *("rwy", "suby", "rwg", "subg", "afr", "self", "cbllr"),
        }
        assert "group labels of train and val" in left_out["groupdro"]["reason"]
        assert {row["method"] for row in said["runs"]} == {
            *("erm", "george", "exmap", "nct", "nct_plus"),
            *("xrm", "lff", "evals", "dpe"),
        }
        refused = cli("plan", "--methods", "erm,jtt", *root)
        assert refused.code == 2 and "jtt.selection=val_avg" in refused.err
        free = cli("plan", "--methods", "jtt", *root, "--set", "jtt.selection=val_avg", "--json")
        assert len(free.json["runs"]) == 1


class TestATable:
    def test_wilds_table_with_groups_goes_through_every_method(self, home: Path, cli: Cli) -> None:
        table_of(home / "birds")
        said = cli("data", "add", "birds", "birds", "--groups", "place", "--data-root", "data")
        assert said.code == 0, said.err
        assert "0_round" in said.out and "known in train, val, test" in said.out
        words = ("--datasets", "birds", "--data-root", "data", *QUICK)
        ran = cli("run", "--methods", "groupdro", *words, "--json")
        assert ran.code == 0, ran.err
        found = cli("show", ran.json["runs"][0]["run_id"], "--json").json["metrics"]["test"]
        assert list(found["group_accuracy"]) == ["0_round", "0_square", "1_round", "1_square"]
        assert {"wga", "balanced", "avg_train_weighted"} <= set(found)

    def test_groups_of_one_split_are_used_there_alone(self, home: Path, cli: Cli) -> None:
        known = lambda table: table["place"].where(table["split"] != 0)  # noqa: E731
        table_of(home / "birds", place=known)
        words = ("--data-root", "data")
        cli("data", "add", "birds", "birds", "--groups", "place", *words)
        planned = cli("plan", "--datasets", "birds", "--seeds", "1", "--json", *words).json
        assert [row["method"] for row in planned["left_out"]] == ["groupdro", "rwg", "subg"]
        ran = cli("run", "--methods", "jtt,nct", "--datasets", "birds", *words, *QUICK, "--json")
        assert ran.code == 0, ran.err
        for row in ran.json["runs"]:
            found = cli("show", row["run_id"], "--json").json["metrics"]["test"]
            assert "wga" in found and "avg_train_weighted" not in found

    def test_further_columns_are_the_metadata(self, home: Path, cli: Cli) -> None:
        from datasets.catalogue import get_dataset
        from datasets.fetch import use_data_root

        table_of(home / "birds")
        cli("data", "add", "birds", "birds", "--data-root", "data")
        use_data_root(Path("data"))
        dataset = get_dataset("birds")
        known = dataset.metadata(Path("data/own/birds"), dataset.config_type())
        assert known is not None and list(known) == ["id", "place", "weight"]
        assert known["weight"].dtype == float and known["id"].is_unique

    def test_bad_images_are_left_out_and_recorded(self, home: Path, cli: Cli) -> None:
        table_of(home / "birds")
        (home / "birds/7.png").write_bytes((home / "birds/7.png").read_bytes()[:200])
        assert cli("data", "add", "birds", "birds", "--data-root", "data").code == 2
        said = cli("data", "add", "birds", "birds", "--data-root", "data", "--skip-bad")
        assert said.code == 0 and "7.png" in said.out
        toml = tomllib.loads(Path("data/own/birds/dataset.toml").read_text())
        assert len(toml["skipped"]) == 1 and sum(toml["counts"].values()) == 59
        assert cli("data", "verify", "birds", "--data-root", "data").code == 0

    def test_an_exchanged_image_is_found(self, home: Path, cli: Cli) -> None:
        table_of(home / "birds")
        cli("data", "add", "birds", "birds", "--data-root", "data")
        Image.new("RGB", (32, 32)).save(home / "birds/7.png")
        said = cli("data", "verify", "birds", "--data-root", "data")
        assert said.code == 2 and "7.png: not the file that was registered" in said.err


class TestFeatures:
    def test_digits_as_rows(self, home: Path, cli: Cli) -> None:
        from sklearn.datasets import load_digits

        x, y = load_digits(return_X_y=True)
        rng = np.random.default_rng(0)
        odd, group = y % 2, rng.random(len(y)) < 0.1
        x = np.concatenate([x, (odd ^ group)[:, None] * 16.0], axis=1)  # a shortcut in a column
        features_of(home / "digits.npz", x=x, y=odd, group=group.astype(int))
        cli("data", "add", "digits", "digits.npz", "--data-root", "data")
        words = ("--datasets", "digits", "--data-root", "data", "--audit", "off", "--seeds", "100,")
        short = ("--set", "nct.epochs=2,4,4")
        said = cli("run", "--methods", "erm,nct,groupdro", *words, *short, "--json")
        assert said.code == 0, said.err
        for row in said.json["runs"]:
            record = cli("show", row["run_id"], "--json").json
            assert record["preset"] == "kind-features"
            assert record["metrics"]["val"]["avg"] > 85
            assert list(record["metrics"]["val"]["group_accuracy"]) == ["0_0", "0_1", "1_0", "1_1"]
        assert cli("check", "results", "--data-root", "data").code == 0
        assert cli("report", "--out", "report", "--data-root", "data").code == 0
        refused = cli("plan", "--features", "--datasets", "digits", "--data-root", "data")
        assert refused.code == 2 and "digits has rows of features" in refused.err

    def test_tuning_writes_a_whole_recipe(self, home: Path, cli: Cli) -> None:
        features_of(home / "rows.npz")
        cli("data", "add", "rows", "rows.npz", "--data-root", "data")
        words = ("--method", "erm", "--dataset", "rows", "--data-root", "data", "--trials", "1")
        said = cli("tune", *words, "--quick", "--set", "erm.epochs=3")
        assert said.code == 0, said.err
        (file,) = Path("results/presets").iterdir()
        preset = tomllib.loads(file.read_text())["erm"]
        recipe = "here: one recipe for every method on data of this kind"
        assert preset["optimizer"] == {"value": "adamw", "source": recipe}
        assert preset["epochs"] == {"value": 3, "source": "set by hand in the study"}
        assert preset["lr"]["source"].startswith("study erm-rows-own-quick, trial 0")

    def test_words_hashed_by_scikit_learn(self, home: Path, cli: Cli) -> None:
        from sklearn.feature_extraction.text import HashingVectorizer

        rng = np.random.default_rng(1)
        words = ("good", "fine", "great"), ("bad", "poor", "awful")
        fillers = ["it", "was", "the", "film", "a", "plot"]
        y = np.arange(200) % 2
        texts = [" ".join([*rng.choice(fillers, 6), *rng.choice(words[own], 2)]) for own in y]
        x = HashingVectorizer(n_features=64, alternate_sign=False).transform(texts).toarray()
        table = pd.DataFrame({"label": np.array(["like", "dislike"])[y], "length": len(texts[0])})
        table["x"] = list(x.astype("float32"))
        table.to_parquet(home / "reviews.parquet")
        cli("data", "add", "reviews", "reviews.parquet", "--data-root", "data")
        words_ = ("--datasets", "reviews", "--data-root", "data", "--audit", "off")
        seeds = ("--seeds", "100,", "--backbone", "linear")
        said = cli("run", "--methods", "erm", *words_, *seeds, "--json")
        assert said.code == 0, said.err
        record = cli("show", said.json["runs"][0]["run_id"], "--json").json
        assert record["metrics"]["val"]["avg"] > 90
        assert record["config"]["backbone"] == {"name": "linear", "pretrained": False}


def flat(folder: Path) -> Path:
    folder.mkdir()
    Image.new("RGB", (32, 32)).save(folder / "a.png")
    return folder


def empty(folder: Path) -> Path:
    folder.mkdir()
    return folder


def folders(folder: Path, *names: str, count: int = 10) -> Path:
    """Write a folder for each name, every image another one."""
    rng = np.random.default_rng(len(names))
    for name in names:
        (folder / name).mkdir(parents=True)
        for number in range(count):
            pixels = rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{number}.png")
    return folder


def in_two_splits(folder: Path) -> Path:
    folders(folder, "train/a", "train/b", "test/a", "test/b")
    (folder / "test/a/9.png").write_bytes((folder / "train/a/0.png").read_bytes())
    return folder


def with_broken_image(folder: Path) -> Path:
    folders(folder, "a", "b")
    (folder / "a/3.png").write_bytes(b"no image")
    return folder


def broken_table(folder: Path) -> Path:
    folder.mkdir()
    (folder / "metadata.csv").write_bytes(b"\xff\xfe\x00\x01" * 9)
    return folder


def file_with(content: bytes, name: str) -> Maker:
    def make(path: Path) -> Path:
        (file := path.with_name(name)).write_bytes(content)
        return file

    return make


def rows_with(**changed: Any) -> Maker:
    return lambda path: features_of(path.with_suffix(".npz"), **changed)


def column_with(**changed: Any) -> Maker:
    return lambda path: table_of(path, **changed)


NOT_FINITE = np.where(np.arange(300).reshape(60, 5) == 7, np.nan, 1.0)
BAD: dict[str, tuple[Maker, str]] = {
    "nothing there": (lambda path: path, "there is nothing at"),
    "an empty folder": (empty, "holds no images"),
    "images without labels": (flat, "1 images but no labels"),
    "one class": (lambda path: folders(path, "a"), "of one class, 'a'"),
    "a class missing in a split": (
        lambda path: folders(path, "train/a", "train/b", "val/a", "test/a", "test/b"),
        "the val split has no sample of 'b'",
    ),
    "a class of two images": (
        lambda path: folders(folders(path, "a", "b"), "c", count=2),
        "no sample of 'c' (2 in all)",
    ),
    "a folder beside the splits": (
        lambda path: folders(path, "train/a", "train/b", "cats"),
        "'cats' beside 'train'",
    ),
    "an image in two splits": (in_two_splits, "1 images are in two splits"),
    "an unreadable image": (with_broken_image, "1 of 20 images cannot be read"),
    "an unreadable table": (broken_table, "cannot be read as a table"),
    "a file of another kind": (file_with(b"text", "notes.txt"), "neither a folder nor a table"),
    "no column of labels": (
        lambda path: _renamed(table_of(path), "y", "kind"),
        "has no column of labels",
    ),
    "columns that are not separated by commas": (
        lambda path: _separated(table_of(path)),
        "separate the columns by commas",
    ),
    "labels that are measurements": (
        rows_with(y=np.arange(60) / 7),
        "and 50 more classes",
    ),
    "no column of files": (
        lambda path: _renamed(table_of(path), "img_filename", "number"),
        "has no column of files",
    ),
    "a row without a label": (
        column_with(y=lambda table: table["y"].where(table.index != 4)),
        "1 of 60 samples",
    ),
    "a row without a file": (
        column_with(img_filename=lambda table: table["img_filename"].where(table.index != 4)),
        "names no file in 1 rows",
    ),
    "a file named twice": (
        column_with(img_filename=lambda t: t["img_filename"].replace("4.png", "5.png")),
        "names '5.png' more than once",
    ),
    "a file that is not there": (
        column_with(img_filename=lambda t: t["img_filename"].replace("4.png", "no.png")),
        "no.png: there is no such file",
    ),
    "an unknown split": (
        column_with(split=lambda table: table["split"].astype(str).replace("2", "holdout")),
        "unknown split 'holdout'",
    ),
    "a row without a split": (
        column_with(split=lambda table: table["split"].where(table.index != 4)),
        "1 of 60 samples in",
    ),
    "no training split": (
        column_with(split=lambda table: table["split"].replace(0, 1)),
        "is of the split train",
    ),
    "a table without rows": (
        lambda path: _cut(table_of(path)),
        "has no samples",
    ),
    "rows without labels": (rows_with(y=None), "not x and y"),
    "rows and labels of different length": (rows_with(y=np.arange(59) % 2), "(59,) and x (60, 5)"),
    "rows that are not finite": (rows_with(x=NOT_FINITE), "not finite in 1 rows"),
    "rows of another shape": (rows_with(x=np.zeros((60, 2, 2))), "not a table of numbers"),
    "rows of text": (rows_with(x=np.full((60, 2), "a")), "not a table of numbers"),
    "pickled arrays": (rows_with(y=np.array(["a", None] * 30, dtype=object)), "cannot be read"),
    "a broken file of rows": (file_with(b"PK\x03\x04zip", "rows.npz"), "cannot be read"),
}


def _renamed(folder: Path, old: str, new: str) -> Path:
    path = folder / "metadata.csv"
    pd.read_csv(path).rename(columns={old: new}).to_csv(path, index=False)
    return folder


def _separated(folder: Path) -> Path:
    path = folder / "metadata.csv"
    pd.read_csv(path).to_csv(path, index=False, sep=";")
    return folder


def _cut(folder: Path) -> Path:
    path = folder / "metadata.csv"
    pd.read_csv(path)[:0].to_csv(path, index=False)
    return folder


def one_refusal(home: Path, said: Outcome, part: str) -> None:
    assert said.code == 2, said
    assert said.out == "" and "Traceback" not in said.err
    assert said.err.count("bench: ") == 1 and said.err.count("\n  -> ") == 1, said.err
    assert part in said.err, said.err
    assert not (home / "data").exists()  # nothing is left behind, not even the data root


@pytest.mark.parametrize("kind", BAD)
def test_bad_input_gets_one_message_and_leaves_nothing(kind: str, home: Path, cli: Cli) -> None:
    make, part = BAD[kind]
    path = make(home / "given")
    one_refusal(home, cli("data", "add", "given", path, "--data-root", home / "data"), part)


WRONG_WORDS = {
    "a name that is none": (("My Set", "birds"), "'My Set' cannot be the name of a dataset"),
    "a reserved name": (("backbone", "birds"), "'backbone' cannot be"),
    "another dataset's name": (("umnist", "birds"), "the name of another dataset"),
    "an unknown column": (("birds", "birds", "--groups", "plaice"), "no further column 'plaice'"),
    "a resolution that no LeNet takes": (
        ("birds", "birds", "--resolution", "64", "--backbone", "lenet5"),
        "lenet5 takes images of side 32",
    ),
    "a network that is none": (
        ("birds", "birds", "--backbone", "resnet_18"),
        "unknown backbone 'resnet_18'",
    ),
    "a negative seed": (("birds", "birds", "--split-seed", "-1"), "--split-seed must not be"),
    "a negative resolution": (
        ("birds", "birds", "--resolution", "-4", "--backbone", "resnet18"),
        "--resolution must not be negative but got -4",
    ),
    "a resolution that is too small": (
        ("birds", "birds", "--resolution", "5", "--backbone", "resnet18"),
        "resolution must be at least 8",
    ),
    "a network for rows": (
        ("birds", "birds", "--backbone", "mlp"),
        "'mlp' does not take images",
    ),
}


@pytest.mark.parametrize("kind", WRONG_WORDS)
def test_wrong_words_get_one_message_and_leave_nothing(kind: str, home: Path, cli: Cli) -> None:
    table_of(home / "birds")
    words, part = WRONG_WORDS[kind]
    one_refusal(home, cli("data", "add", *words, "--data-root", home / "data"), part)


def test_rows_have_no_resolution(home: Path, cli: Cli) -> None:
    features_of(home / "rows.npz")
    words = ("rows", "rows.npz", "--resolution", "64", "--data-root", home / "data")
    one_refusal(home, cli("data", "add", *words), "rows of features have no --resolution")


def test_groups_are_told_apart_whatever_they_are_called(home: Path, cli: Cli) -> None:
    """Labels a and a_b with places b_c and c: "a_b_c" would be two groups."""
    even = lambda table: table.index // 6 % 2 == 0  # noqa: E731
    table_of(
        home / "birds",
        y=lambda table: np.where(table["y"] == 0, "a", "a_b"),
        place=lambda table: np.where(even(table), "b_c", "c"),
        season=lambda table: np.where(table.index // 12 % 2 == 0, "c", "b_c"),
        time=lambda table: np.where(even(table), "x", "x_b"),
    )
    root = ("--data-root", "data", "--json")
    said = cli("data", "add", "one", "birds", "--groups", "place", *root).json
    assert said["groups"] == ["a__b_c", "a__c", "a_b__b_c", "a_b__c"]
    said = cli("data", "add", "two", "birds", "--groups", "time,season", *root).json
    assert len({*said["groups"]}) == 8  # two labels, two times, two seasons


def test_groups_that_are_partly_empty_are_refused(home: Path, cli: Cli) -> None:
    table_of(home / "birds", place=lambda table: table["place"].where(table.index != 4))
    words = ("--groups", "place", "--data-root", home / "data")
    one_refusal(home, cli("data", "add", "birds", "birds", *words), "empty in 1 of 20 samples")


def test_a_taken_name_is_refused_and_stays(home: Path, cli: Cli) -> None:
    table_of(home / "birds")
    root = ("--data-root", "data")
    assert cli("data", "add", "birds", "birds", *root).code == 0
    said = cli("data", "add", "birds", "birds", *root)
    assert said.code == 2 and "data remove birds" in said.err
    assert cli("data", "show", "birds", *root).code == 0
    assert cli("data", "remove", "bird", *root).code == 2
    assert cli("data", "show", "umnist", *root).code == 2


def test_an_edited_description_is_read_and_checked(home: Path, cli: Cli) -> None:
    table_of(home / "birds")
    root = ("--data-root", "data")
    cli("data", "add", "birds", "birds", *root)
    path = home / "data/own/birds/dataset.toml"
    said = path.read_text()
    edited = said.replace('"0", "1"', '"land", "water"').replace('"lenet5"', '"lenet4"')
    path.write_text(edited)
    planned = cli("plan", "--methods", "erm", "--datasets", "birds", "--seeds", "1", *root)
    assert planned.code == 0
    shown = cli("data", "show", "birds", *root).out
    assert "land" in shown and "lenet4" in shown
    path.write_text(said.replace("train = 20", "train = 21"))
    refused = cli("data", "verify", "birds", *root)
    assert refused.code == 2 and "expected train size 21, found 20" in refused.err
    assert "data remove birds" in refused.err
    path.write_text(said.replace("train = 20", "train = many"))
    refused = cli("plan", "--datasets", "birds", *root)
    assert refused.code == 2 and "dataset.toml cannot be read" in refused.err
    assert cli("plan", "--datasets", "umnist", *root).code == 0
    path.write_text(said)
    (home / "birds").rename(home / "moved")
    refused = cli("data", "verify", "birds", *root)
    assert refused.code == 2 and "correct `source`" in refused.err
