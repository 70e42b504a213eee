"""What can be typed: every verb with its arguments and examples.

Nothing heavy is imported here, so that `--help` answers at once; the file of a verb is imported
when it runs.
"""

from __future__ import annotations

from argparse import (
    Action,
    ArgumentParser,
    ArgumentTypeError,
    RawDescriptionHelpFormatter,
    _SubParsersAction,
)
from collections.abc import Callable, Mapping
from pathlib import Path

from bench import numerics
from bench.cli.hints import HintingParser
from bench.paper.campaigns import CAMPAIGNS
from bench.perf import DEFAULT_DATASETS
from bench.tuning import TRIALS, WARM_UP
from datasets.fetch import default_data_root

DEFAULT_RESULTS = Path("results")
RERUN = ("missing", "failed", "always", "never")  # as `bench.api.RERUN`, which is heavy to import
RESUME = ("same-code", "anyway")
CLEANED = {
    "stages": "stages that runs share; made again when a run needs one",
    "features": "what frozen networks made of images; made again when a run needs them",
    "work": "checkpoints of unfinished runs and stages; without them these begin anew",
    "audits": "audits of runs and stages that are gone",
    "launches": "launches on a cluster that have ended",
    "decoded": "decoded photographs; decoded again when a run needs them",
    "leftovers": "what killed processes left over an hour ago, and what was damaged and set aside",
}
"""What `clean` can free."""
DEVELOPMENT_SEED = 100  # as `bench.job.FIRST_DEVELOPMENT_SEED`, likewise


def _flag(parser: ArgumentParser, name: str, meaning: str) -> None:
    parser.add_argument(name, action="store_true", help=meaning)


def _number(parser: ArgumentParser, name: str, default: int | None, meaning: str) -> None:
    parser.add_argument(name, type=int, default=default, metavar="N", help=meaning)


def _folder(parser: ArgumentParser, name: str, default: Path, meaning: str) -> None:
    text = f"{meaning} (default: ./{default})"
    parser.add_argument(name, type=Path, default=default, metavar="DIR", help=text)


def _results(parser: ArgumentParser, meaning: str = "where runs are kept") -> None:
    _folder(parser, "--results", DEFAULT_RESULTS, meaning)


def _data_root(parser: ArgumentParser, meaning: str = "where the datasets are") -> None:
    text = f"{meaning} (default: $BENCH_DATA or the user's cache)"
    root = default_data_root()
    parser.add_argument("--data-root", type=Path, default=root, metavar="DIR", help=text)


def _json(parser: ArgumentParser) -> None:
    _flag(parser, "--json", "print JSON instead of a table")


def _paths(parser: ArgumentParser) -> None:
    _data_root(parser)
    _results(parser)
    _json(parser)


def _overrides(parser: ArgumentParser, meaning: str) -> None:
    parser.add_argument(
        "--set", nargs="+", action="extend", default=[], metavar="KEY=VALUE", help=meaning
    )


def _cluster(parser: ArgumentParser, what: str) -> None:
    meaning = f"submit {what}to SLURM as this profile says (slurm/*.toml), and return at once"
    parser.add_argument("--cluster", type=Path, metavar="FILE", help=meaning)


def _features(parser: ArgumentParser) -> None:
    meaning = "keep the network frozen: compute features once, train heads (backbone.frozen=true)"
    _flag(parser, "--features", meaning)


def _one_seed(text: str) -> str:
    """Read the number of one seed, as `--seeds` has it."""
    if not text.isascii() or not text.isdecimal():
        raise ArgumentTypeError(f"one number is meant, as in --seed 3, but got '{text}'")
    return f"{text},"


def _seeds(parser: ArgumentParser, default: str | None, meaning: str) -> None:
    """Add the two ways to say which seeds."""
    either = parser.add_mutually_exclusive_group()
    either.add_argument("--seeds", default=default, metavar="N|A,B", help=meaning)
    one = "this one seed: --seed 200, where --seeds 200 means two hundred"
    either.add_argument("--seed", dest="seeds", type=_one_seed, metavar="S", help=one)


def _selection(parser: ArgumentParser) -> None:
    """Add the arguments that name a grid of runs."""
    parser.add_argument("--methods", default="all", metavar="A,B", help="methods, or all")
    parser.add_argument("--datasets", default="all", metavar="A,B", help="datasets, or all")
    _seeds(parser, default="5", meaning="how many: 5 is 0 to 4; or which: 3,7 is those two")
    meaning = "whose settings: paper (default), tuned, or those of a kind of data (small, ...)"
    parser.add_argument("--preset", default="paper", help=meaning)
    meaning = "a network: a timm name, a LeNet, linear or mlp on features (backbone.name)"
    parser.add_argument("--backbone", metavar="NAME", help=meaning)
    _number(
        parser, "--resolution", None, "side of the images the network sees (DATASET.resolution)"
    )
    _features(parser)
    _overrides(parser, "change a setting: METHOD.KNOB, DATASET.KNOB or backbone.KNOB")
    _flag(parser, "--quick", "smoke run: two epochs, a few hundred images")
    meaning = "run on the images that are there where some are missing; labelled, and no result"
    _flag(parser, "--allow-subset", meaning)


def _launching(parser: ArgumentParser) -> None:
    """Add what says how runs are carried out, whichever verb named them."""
    _number(parser, "--workers", None, "worker processes on this machine")
    meaning = "cores of one run, a LeNet's aside (default: $OMP_NUM_THREADS, or all that are free)"
    _number(parser, "--threads", None, meaning)
    meaning = "cpu, cuda (one GPU for each worker) or cuda:N (default: GPUs where there are any)"
    parser.add_argument("--device", metavar="NAME", help=meaning)
    meaning = "which runs: those without a result (default), those that failed, all, or none"
    parser.add_argument("--rerun", choices=RERUN, default="missing", help=meaning)
    _number(parser, "--retries", 0, "try a failed run up to N times more")
    _cluster(parser, "")
    _flag(parser, "--wait", "with --cluster: follow the runs until they end")
    _flag(parser, "--keep-models", "keep each run's weights")
    meaning = "epochs after which the model is judged on true groups (default: all; 5 for photos)"
    parser.add_argument("--audit", metavar="all|N|last|off", help=meaning)
    meaning = "whether what other code began starts again (default), or goes on and is no result"
    parser.add_argument("--resume", choices=RESUME, default="same-code", help=meaning)
    meaning = f"the processor's instruction set (default: ${numerics.VARIABLE}, or pinned)"
    parser.add_argument("--numerics", choices=numerics.CHOICES, help=meaning)


def _demo(parser: ArgumentParser) -> None:
    _folder(parser, "--out", Path("demo"), "where data, runs and report go")


def _list(parser: ArgumentParser) -> None:
    _data_root(parser)
    _json(parser)


def _data(parser: ArgumentParser) -> None:
    names = "status|get|verify|standin|add|show|remove"
    verbs = parser.add_subparsers(dest="data_verb", required=True, metavar=names)
    _list(verbs.add_parser("status", help="what is on disk"))
    getting = verbs.add_parser("get", help="fetch datasets, or ImageNet weights")
    names = "dataset, what several are made from, weights"
    getting.add_argument("names", nargs="+", metavar="NAME", help=names)
    _list(getting)
    verifying = verbs.add_parser("verify", help="recount labels and decode every image")
    names = "dataset, what several are made from, or all"
    verifying.add_argument("names", nargs="+", metavar="NAME", help=names)
    _list(verifying)
    standing = verbs.add_parser("standin", help="write small synthetic data in the real format")
    standing.add_argument("name", metavar="NAME", help="dataset, or what several are made from")
    standing.add_argument("--root", type=Path, required=True, metavar="DIR", help="a data root")
    _number(standing, "--size", 400, "training images")
    standing.add_argument("--seed", type=int, default=0, metavar="S")
    _own_data(verbs)


def _own_data(verbs: _SubParsersAction[ArgumentParser]) -> None:
    """Add what registers a user's own data."""
    adding = verbs.add_parser("add", help="register your own images or features; copies nothing")
    adding.add_argument("name", metavar="NAME", help="by which every verb knows it then")
    meaning = "a folder for each class, a folder with metadata.csv, or a table or .npz of features"
    adding.add_argument("path", type=Path, metavar="PATH", help=meaning)
    meaning = "columns of the table that form groups with the label"
    adding.add_argument("--groups", default="", metavar="A,B", help=meaning)
    _number(adding, "--split-seed", 0, "draws the splits that are missing (default: 0)")
    _flag(adding, "--skip-bad", "leave out images that cannot be read")
    meaning = "the network trained by default: a timm name, a LeNet, linear or mlp on features"
    adding.add_argument("--backbone", default="", metavar="NAME", help=meaning)
    _number(adding, "--resolution", 0, "side of the images it sees (default: by their sizes)")
    _flag(adding, "--scratch", "start it from random weights instead of ImageNet's")
    _list(adding)
    showing = verbs.add_parser("show", help="what was registered, with pictures of each group")
    showing.add_argument("name", metavar="NAME")
    showing.add_argument("--out", type=Path, metavar="DIR", help="where (default: ./NAME-sheets)")
    _list(showing)
    removing = verbs.add_parser("remove", help="forget registered data; its files stay")
    removing.add_argument("name", metavar="NAME")
    _list(removing)


def _plan(parser: ArgumentParser) -> None:
    _selection(parser)
    _flag(parser, "--published", "show which runs are published, not which are done here")
    _paths(parser)


def _run(parser: ArgumentParser) -> None:
    _selection(parser)
    _launching(parser)
    _paths(parser)


def _campaign(parser: ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help=", ".join(CAMPAIGNS))
    parser.add_argument("--datasets", default="all", metavar="A,B", help="datasets, or all")
    _seeds(parser, default=None, meaning="instead of its own")
    _flag(parser, "--plan", "show the runs and their cost, and do nothing")
    _overrides(parser, "change a setting, which keeps runs out of the paper's tables")
    _flag(parser, "--quick", "smoke runs")
    _launching(parser)
    _paths(parser)


def _tune(parser: ArgumentParser) -> None:
    parser.add_argument("--method", required=True, metavar="M")
    parser.add_argument("--dataset", required=True, metavar="D")
    meaning = f"finished trials to reach (default: {TRIALS}, the first {WARM_UP} random)"
    _number(parser, "--trials", None, meaning)
    meaning = "worker processes, here or on the cluster; one makes the same trials every time "
    _number(parser, "--workers", 1, meaning + "(default)")
    _cluster(parser, "the workers ")
    meaning = f"a development seed (default: {DEVELOPMENT_SEED})"
    parser.add_argument("--seed", type=int, default=DEVELOPMENT_SEED, metavar="S", help=meaning)
    meaning = "whose settings hold where nothing is searched: paper (default), or a kind of data"
    parser.add_argument("--preset", default="paper", help=meaning)
    _features(parser)
    _overrides(parser, "a setting that holds in every trial, searched or not")
    meaning = f"after {WARM_UP} trials, stop those below the earlier ones' median of the same epoch"
    _flag(parser, "--prune", meaning)
    _flag(parser, "--quick", "smoke trials, a study of their own")
    _flag(parser, "--show", "show the study as it is, run nothing")
    _paths(parser)


def _status(parser: ArgumentParser) -> None:
    _selection(parser)
    parser.set_defaults(methods=None, datasets=None)  # without either, all that is stored is shown
    _flag(parser, "--published", "show the published runs instead")
    _flag(parser, "--runs", "a line for each run, also for those that are done")
    meaning = "show it again every N seconds (default: 5) until nothing runs any more"
    parser.add_argument("--watch", type=int, nargs="?", const=5, metavar="N", help=meaning)
    _paths(parser)


def _cancel(parser: ArgumentParser) -> None:
    meaning = "run or study, by a beginning or end of its name, or a study's array (default: all)"
    parser.add_argument("runs", nargs="*", metavar="RUN", help=meaning)
    _results(parser)
    _json(parser)


def _show(parser: ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="a run id, or the beginning or end of one")
    _results(parser, "where it is looked for, before the published runs")
    _json(parser)


def _explain(parser: ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="a run made with --keep-models")
    parser.add_argument("--images", nargs="+", type=Path, metavar="FILE", help="image files")
    parser.add_argument("--index", metavar="I,J", help="sample ids of the split")
    splits = ("train", "val", "test")
    parser.add_argument("--split", choices=splits, default="test", help="default: test")
    _number(parser, "--limit", 10, "without --index")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw the tree: png, svg, pdf")
    _paths(parser)


def _predict(parser: ArgumentParser) -> None:
    meaning = "a run made with --keep-models, its folder, or the file of a model"
    parser.add_argument("run", metavar="RUN", help=meaning)
    meaning = "an image, a folder of images, or a file of feature rows (.npy, .npz, .parquet)"
    parser.add_argument("path", type=Path, metavar="PATH", help=meaning)
    parser.add_argument("--out", type=Path, metavar="FILE", help="a CSV file (default: print it)")
    _results(parser, "where the run is looked for, before the published runs")
    _json(parser)


def _new(parser: ArgumentParser) -> None:
    parser.add_argument("kind", choices=("method", "dataset"), help="what to begin")
    parser.add_argument("name", metavar="NAME", help="lower-case letters, digits, underscores")
    meaning = "where to write (default: here)"
    parser.add_argument("--out", type=Path, default=Path(), metavar="DIR", help=meaning)
    meaning = "write a package with an entry point, which pip installs, instead of a file"
    _flag(parser, "--package", meaning)


def _test(parser: ArgumentParser) -> None:
    meaning = "a method or dataset by its name, or a file that registers some"
    parser.add_argument("subject", metavar="METHOD|DATASET|FILE", help=meaning)


def _slices(parser: ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="a finished run whose method finds a partition")
    meaning = "where page and table are written (default: ./slices/RUN)"
    parser.add_argument("--out", type=Path, metavar="DIR", help=meaning)
    splits = ("train", "val", "test")
    meaning = "rank slices on this one (default: val, where slices reach it)"
    parser.add_argument("--split", choices=splits, help=meaning)
    meaning = "look at RUN's predictions in the slices of this other run on the same data"
    parser.add_argument("--by", metavar="RUN", help=meaning)
    meaning = "judge the first model that slices were found from (its default), or RUN's own"
    parser.add_argument("--judge", choices=("first", "own"), help=meaning)
    meaning = "only list the samples of a slice, by name or number or 'worst': files or ids, or CSV"
    parser.add_argument("--export", nargs=2, metavar=("SLICE", "FILE"), help=meaning)
    _paths(parser)


def _report(parser: ArgumentParser) -> None:
    _folder(parser, "--out", Path("report"), "where it is written")
    _results(parser, "whose runs are shown")
    _flag(parser, "--published", "show the published runs instead")
    meaning = "of the published seeds, 0 to 9, those that tables average; 5 is the paper's 0..4"
    parser.add_argument("--seeds", default="10", metavar="N|A,B", help=meaning)
    parser.add_argument("--methods", default="all", metavar="A,B", help="only these methods")
    parser.add_argument("--datasets", default="all", metavar="A,B", help="only these datasets")
    meaning = "only these tables, by the names of their files, as main_results"
    parser.add_argument("--tables", default="all", metavar="A,B", help=meaning)
    _data_root(parser, "datasets found there are counted again")
    _flag(parser, "--pdf", "also build main.pdf and PDFs of the figures; needs pdflatex")
    _flag(parser, "--open", "open the page in a browser")


def _check(parser: ArgumentParser) -> None:
    meaning = "a results folder, a folder of runs, or the folder of one run"
    parser.add_argument("path", type=Path, metavar="PATH", help=meaning)
    meaning = "make N of the runs again and compare them, bit by bit on the same kind of machine"
    _number(parser, "--recompute", 0, meaning)
    _number(parser, "--pick-seed", None, "chooses which (default: drawn and printed)")
    _data_root(parser, "labels are compared with the datasets that are there")
    _json(parser)


def _publish(parser: ArgumentParser) -> None:
    meaning = "a results folder, one's own or another machine's, a folder of runs, or one run"
    parser.add_argument("path", type=Path, metavar="RUNS|STORE", help=meaning)
    parser.add_argument("--to", type=Path, metavar="DIR", help="instead of this tree's store")
    _data_root(parser, "labels are compared with the datasets that are there")
    _json(parser)


def _clean(parser: ArgumentParser) -> None:
    meaning = f"free these: {', '.join(CLEANED)} (default: only show how much each takes)"
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=meaning)
    _flag(parser, "--yes", "free all of them")
    _paths(parser)


def _perf(parser: ArgumentParser) -> None:
    measured = ",".join(DEFAULT_DATASETS)
    meaning = f"stand-in images of these (default: {measured}; photos take a ResNet-50)"
    parser.add_argument("--datasets", default=measured, metavar="A,B", help=meaning)
    _number(parser, "--repeats", 5, "measured turns of every arm (default: 5; photos take fewer)")
    meaning = "JPEG files that are enlarged to native size (default: photos are drawn)"
    parser.add_argument("--photos", type=Path, metavar="DIR", help=meaning)
    _folder(parser, "--out", Path("results/perf"), "where this machine's CSV goes")
    _results(parser, "whose stored runs are added up")
    _json(parser)


def _doctor(parser: ArgumentParser) -> None:
    _paths(parser)


VERBS: Mapping[str, tuple[str, Callable[[ArgumentParser], None]]] = {
    "demo": ("see a shortcut learnt and undone: two minutes, no data needed", _demo),
    "list": ("methods, datasets, and which data are on disk", _list),
    "data": ("get and verify datasets; register your own images", _data),
    "plan": ("what run would do, and how long it would take", _plan),
    "run": ("train what is missing and print the table", _run),
    "campaign": ("the runs behind one of the paper's tables", _campaign),
    "tune": ("search a method's settings with what it may see", _tune),
    "status": ("what is done, running, unfinished or failed", _status),
    "cancel": ("take runs off the cluster", _cancel),
    "show": ("one run: its numbers, settings and cost", _show),
    "explain": ("where images go in a trained tree, and why", _explain),
    "predict": ("label images by a model that was kept", _predict),
    "slices": ("which part of the data a run fails on", _slices),
    "report": ("a page with every table and figure, the paper's beside them", _report),
    "check": ("whether stored runs are what their records say", _check),
    "publish": ("put checked runs among the published ones", _publish),
    "clean": ("what takes room besides runs, and free it", _clean),
    "perf": ("how fast training is on this machine", _perf),
    "doctor": ("whether this machine is in order, and what to do if not", _doctor),
    "new": ("begin a method or dataset of your own", _new),
    "test": ("the contract tests on a method or dataset of your own", _test),
}
"""What each is for, and what adds its arguments."""

PURPOSES: Mapping[str, tuple[str, ...]] = {
    "see what this is": ("demo", "list"),
    "compare methods": ("data", "plan", "run", "campaign", "tune"),
    "see how runs are doing": ("status", "cancel", "clean"),
    "read results": ("report", "show", "explain", "slices", "predict"),
    "check and share results": ("check", "publish"),
    "build your own": ("new", "test"),
    "look at this machine": ("doctor", "perf"),
}
"""The verbs by what one wants to do, as the overview lists them."""

EXAMPLES = {
    "": (
        "demo",
        "run --methods erm,nct --datasets cmnist --seeds 1",
        "data add pets ~/pictures/pets",
        "report --out report",
    ),
    "demo": ("demo --out demo",),
    "list": ("list --json | jq '.datasets[].name'",),
    "data": (
        "data get mnist && python -m bench data verify umnist cmnist",
        "data get weights",
        "data standin waterbirds --root standins --size 400",
        "data add pets ~/pictures/pets && python -m bench data show pets",
        "data add pets ~/pictures/pets --groups place,season --skip-bad",
    ),
    "plan": ("plan --methods all --datasets all --seeds 5",),
    "run": (
        "run --methods erm --datasets all --seeds 5",
        "run --methods erm --datasets umnist --seeds 3,7 --set umnist.hflip=true",
        "run --methods nct --datasets cmnist --seed 200",
        "run --methods nct,jtt --datasets all --seeds 5 --cluster slurm/h100.toml",
        "run --methods erm,nct,george --datasets pets --preset small --seeds 3",
        "run --methods erm --datasets waterbirds --data-root standins \\\n"
        "      --set backbone.name=resnet18 backbone.pretrained=false --quick",
    ),
    "campaign": (
        "campaign ablation-aux --datasets umnist,cmnist --plan",
        "campaign ablation-heads --datasets cmnist --workers 2",
    ),
    "tune": (
        "tune --method nct --dataset umnist --trials 50 --workers 2",
        "tune --method nct --dataset umnist --show",
        "run --methods nct --datasets umnist --seeds 5 --preset tuned",
    ),
    "status": (
        "status --watch",
        "status --methods erm --datasets umnist --seeds 5",
        "status --published --runs",
    ),
    "cancel": ("cancel", "cancel nct-celeba-s3 jtt-celeba-s3"),
    "show": ("show erm-umnist-s0 --json",),
    "explain": (
        "explain nct-cmnist-s0 --index 60003,60017",
        "explain nct-cmnist-s0 --images seven.png --json",
        "explain nct-cmnist-s0 --picture tree.png",
    ),
    "predict": (
        "predict nct-cmnist-s0 photos > labels.csv",
        "predict model.safetensors photos --out labels.csv",
    ),
    "doctor": ("doctor", "doctor --json | jq '.findings[] | select(.level != \"ok\")'"),
    "new": ("new method smooth", "new dataset birds --package --out ~/projects"),
    "test": ("test smooth.py", "test smooth"),
    "slices": (
        "slices nct-umnist-s0",
        "slices nct-umnist-s0 --out page --json | jq '.worst'",
        "slices erm-umnist-s0 --by nct-umnist-s0",
        "slices nct-umnist-s0 --export worst samples.txt",
    ),
    "report": ("report --out report", "report --out report --published --seeds 5 --pdf"),
    "check": (
        "check results",
        "check results/published --recompute 2",
        "check submission/runs --recompute 3 --pick-seed 1234 --json",
    ),
    "publish": ("publish results", "publish /mnt/other-machine/results --to results/published"),
    "clean": ("clean", "clean stages leftovers", "clean --yes"),
    "perf": ("perf", "perf --datasets umnist --repeats 3 --json"),
}


def make_parser() -> ArgumentParser:
    """Return the parser of the whole command line."""
    parser = _Overview(prog="python -m bench", formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--version", action=_PrintVersion, nargs=0, help="print the version")
    verbs = parser.add_subparsers(
        dest="verb", required=True, metavar="VERB", parser_class=HintingParser
    )
    for name, (summary, add_arguments) in VERBS.items():
        verb = verbs.add_parser(name, help=summary, epilog=_epilog(name))
        verb.description = summary[0].upper() + summary[1:] + "."
        verb.formatter_class = RawDescriptionHelpFormatter
        add_arguments(verb)
    return parser


class _Overview(HintingParser):
    """The parser whose help lists the verbs by what one wants to do."""

    def format_help(self) -> str:
        """Return the overview."""
        return overview()


def overview() -> str:
    """Return every verb with what it is for, by what one wants to do."""
    lines = [
        "usage: python -m bench VERB ...",
        "",
        "Train and compare image classifiers that do not fall for shortcuts.",
    ]
    for purpose, names in PURPOSES.items():
        lines += ["", f"to {purpose}:", *(f"  {name:9} {VERBS[name][0]}" for name in names)]
    more = "python -m bench VERB --help explains a verb; --version prints the version."
    return "\n".join([*lines, "", _epilog("").rstrip(), "", more]) + "\n"


NOTES = {
    "run": "\nwhile it runs: nct-2-1 is iteration 2, phase 1 of NCT; selection is what an\n"
    "epoch is chosen by, on validation data\n"
}


def _epilog(verb: str) -> str:
    lines = "".join(f"  python -m bench {example}\n" for example in EXAMPLES[verb])
    return f"example{'s' if len(EXAMPLES[verb]) > 1 else ''}:\n{lines}{NOTES.get(verb, '')}"


class _PrintVersion(Action):
    """Prints the installed version, which is looked up only when it is asked for."""

    def __call__(self, parser: ArgumentParser, *_: object) -> None:
        from importlib.metadata import PackageNotFoundError, version

        try:
            print(f"nct-bench {version('nct-bench')}")
        except PackageNotFoundError:
            print("nct-bench, not installed: run from its source tree")
        parser.exit()
