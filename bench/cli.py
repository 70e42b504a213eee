"""The command line: verbs, and how errors end."""

from __future__ import annotations

import argparse
import importlib
import signal
import sys
from collections.abc import Sequence

from datasets.errors import BenchError

VERBS = {
    "demo": ("bench.commands.demo", "every method on synthetic data, then the report"),
    "list": ("bench.commands.listing", "methods with their tiers, datasets, what is on disk"),
    "data": ("bench.commands.data", "get, verify and stand in for datasets"),
    "plan": ("bench.commands.planning", "what run would do, and its cost"),
    "run": ("bench.commands.run", "run methods on datasets and print the table"),
    "campaign": ("bench.commands.campaign", "the runs behind one of the paper's tables"),
    "tune": ("bench.commands.tune", "search a method's hyperparameters under its own tier"),
    "status": ("bench.commands.status", "what is done, running, failed"),
    "cancel": ("bench.commands.cancel", "take runs off the cluster"),
    "show": ("bench.commands.show", "one run in full"),
    "explain": ("bench.commands.explain", "route images through a trained tree"),
    "report": ("bench.commands.reporting", "measured numbers beside the paper's"),
    "perf": ("bench.commands.perf", "how fast the loop is, against the network alone"),
}
EXAMPLES = {
    "": """examples:
  python -m bench demo
  python -m bench list
  python -m bench run --methods erm --datasets umnist,cmnist --seeds 3
  python -m bench data get waterbirds
  python -m bench status --json
""",
    "demo": "example:\n  python -m bench demo --out demo\n",
    "list": "example:\n  python -m bench list --json | jq '.datasets[].name'\n",
    "data": """examples:
  python -m bench data get mnist && python -m bench data verify umnist cmnist
  python -m bench data get weights
  python -m bench data standin waterbirds --root standins --size 400
""",
    "plan": "example:\n  python -m bench plan --methods all --datasets all --seeds 5\n",
    "run": """examples:
  python -m bench run --methods erm --datasets all --seeds 5
  python -m bench run --methods erm --datasets umnist --seeds 3,7 --set umnist.hflip=true
  python -m bench run --methods nct,jtt --datasets all --seeds 5 --cluster slurm/h100.toml
  python -m bench run --methods erm --datasets waterbirds --data-root standins \\
      --set backbone.name=resnet18 backbone.pretrained=false --quick
""",
    "campaign": """examples:
  python -m bench campaign ablation-aux --datasets umnist,cmnist --plan
  python -m bench campaign ablation-heads --datasets cmnist --workers 2
""",
    "tune": """examples:
  python -m bench tune --method nct --dataset umnist --trials 50 --workers 2
  python -m bench tune --method nct --dataset umnist --show
  python -m bench run --methods nct --datasets umnist --seeds 5 --preset tuned
""",
    "status": "example:\n  python -m bench status --methods erm --datasets umnist --seeds 5\n",
    "cancel": """examples:
  python -m bench cancel
  python -m bench cancel nct-celeba-s3 jtt-celeba-s3
""",
    "show": "example:\n  python -m bench show erm-umnist-s0 --json\n",
    "explain": """examples (of a run made with --keep-models):
  python -m bench explain nct-cmnist-s0 --index 60003,60017
  python -m bench explain nct-cmnist-s0 --images seven.png --json
  python -m bench explain nct-cmnist-s0 --picture tree.png
""",
    "report": """examples:
  python -m bench report --out report
  python -m bench report --out report --pdf
""",
    "perf": """examples:
  python -m bench perf
  python -m bench perf --datasets umnist --repeats 3 --json
""",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a verb; 0 all well, 1 some runs failed, 2 wrong use, 130 interrupted."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        arguments = _parser(words).parse_args(words)
        return int(importlib.import_module(VERBS[arguments.verb][0]).run(arguments))
    except BenchError as error:
        sys.stderr.write(f"bench: {error}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write(
            "\nbench: interrupted; finished runs are kept, and the same command goes on from the "
            "last epoch\n"
        )
        return 130
    except BrokenPipeError:  # the reader, `head` say, has seen enough
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        sys.stderr.close()
        return 1
    except OSError as error:  # a disk can fail in places that nobody guards
        sys.stderr.write(f"bench: {error}\n  -> check the folders the command names\n")
        return 2


def _parser(words: Sequence[str]) -> argparse.ArgumentParser:
    """Build the parser, importing only the verb in use: `--help` should be quick."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description="Robust image classification under spurious correlations.",
        epilog=EXAMPLES[""],
        formatter_class=raw,
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for name, (module, summary) in VERBS.items():
        verb = verbs.add_parser(name, help=summary, epilog=EXAMPLES[name], formatter_class=raw)
        if name in words:
            importlib.import_module(module).add(verb)
    return parser
