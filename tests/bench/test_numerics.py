"""Arithmetic that travels: one instruction set, whatever the processor offers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch

from bench import numerics
from bench.cli import main
from bench.provenance import environment
from bench.store import Store

CPUINFO = Path("/proc/cpuinfo")  # the processor's own word: else an arithmetic lost is a skip
pinned_here = pytest.mark.skipif(
    not CPUINFO.is_file() or " avx2 " not in CPUINFO.read_text(),
    reason="not an x86 processor with AVX2",
)


def in_a_new_process(code: str, **environment: str) -> dict[str, str]:
    bare = {name: value for name, value in os.environ.items() if name not in numerics.PINNED}
    bare.pop(numerics.VARIABLE, None)
    shown = f"{code}\nimport json, torch\nprint(json.dumps({{**numerics.in_effect(), "
    shown += "'torch': torch.backends.cpu.get_cpu_capability()}))"
    done = subprocess.run(
        [sys.executable, "-c", shown],
        env={**bare, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    found: dict[str, str] = json.loads(done.stdout)
    return found


@pinned_here
def test_importing_bench_before_torch_pins_all_libraries() -> None:
    found = in_a_new_process("from bench import numerics")
    assert found == {"choice": "pinned", **numerics.PINNED, "torch": "AVX2"}


@pinned_here
def test_numpys_blas_is_pinned_as_well() -> None:
    """With kernels for AVX-512 mixtures, by which GEORGE clusters, end in other bits."""
    cores = (
        "[own['architecture'] for own in threadpool_info() if own['internal_api'] == 'openblas']"
    )
    code = (
        "from bench import numerics\nimport numpy\nfrom threadpoolctl import threadpool_info\n"
        f"assert {{*{cores}}} <= {{'Haswell'}}"
    )
    found = in_a_new_process(code, OPENBLAS_CORETYPE="SkylakeX")
    assert found["OPENBLAS_CORETYPE"] == "Haswell"


@pinned_here
def test_after_torch_it_may_be_too_late_and_the_record_does_not_claim_it() -> None:
    found = in_a_new_process("import torch\nfrom bench import numerics")
    assert found["choice"] == "native"


def test_native_leaves_what_the_user_had_set() -> None:
    found = in_a_new_process("from bench import numerics", BENCH_NUMERICS="native")
    assert found["choice"] == "native" and not set(numerics.PINNED) & set(found)
    found = in_a_new_process(
        "from bench import numerics; numerics.apply('native')", MKL_CBWR="COMPATIBLE"
    )
    assert found["MKL_CBWR"] == "COMPATIBLE"


@pinned_here
def test_the_choice_of_a_process_is_inherited_by_those_it_starts() -> None:
    found = in_a_new_process(
        "from bench import numerics", **numerics.PINNED, BENCH_NUMERICS="native"
    )
    assert found["choice"] == "native"


def test_a_choice_that_is_none_is_wrong_use(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(numerics.VARIABLE, "exact")
    assert main(["list"]) == 2
    assert "BENCH_NUMERICS must be pinned or native but is 'exact'" in capsys.readouterr().err


def test_records_tell_processors_of_one_name_apart() -> None:
    found = environment()
    assert found.numerics == numerics.in_effect()
    assert found.cpu_capability == torch.backends.cpu.get_cpu_capability()
    assert found.cpu is not None
    if sys.platform == "linux" and "flags" in Path("/proc/cpuinfo").read_text():
        assert {"vendor_id", "cpu_family", "model", "flags"} <= set(found.cpu)


# First-epoch losses of LeNets on one thread, as an AVX2-only processor computed them.
REFERENCES = [("umnist", 0, 0.23556431505787515), ("cmnist", 1, 0.4411109302662037)]


@pinned_here
@pytest.mark.slow
@pytest.mark.parametrize(("dataset", "seed", "loss"), REFERENCES)
def test_bits_travel(
    tmp_path: Path, mnist_root: Path, dataset: str, seed: int, loss: float
) -> None:
    chosen = ["--methods", "erm", "--datasets", dataset, "--seeds", f"{seed},"]
    command = ["run", *chosen, "--set", "erm.epochs=1", "--results", str(tmp_path)]
    assert main([*command, "--data-root", str(mnist_root)]) == 0
    store = Store(tmp_path)
    (record,) = store.records()
    assert record.provenance.environment.numerics == {"choice": "pinned", **numerics.PINNED}
    history = store.history(record.run_id)
    assert isinstance(history, pd.DataFrame)
    assert history["loss"].tolist() == [loss]
