"""The worker processes of a study on one machine: all draw from the same journal.

Whoever starts them hears Ctrl-C and SLURM's warnings, and decides what they mean; the workers are
deaf to both, and end with their launcher. One that dies costs nothing but time: whoever is left, or
comes later, takes over its trial.
"""

from __future__ import annotations

import multiprocessing
import signal
import sys
from dataclasses import replace
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess

from bench.launch.worker import die_with_parent, how_it_died, kills_for_memory, not_for_workers
from bench.study import count_finished
from bench.tune import Say, Tuning, work
from datasets.errors import BenchError


def run_workers(tuning: Tuning, workers: int, say: Say) -> None:
    """Let workers make the trials: this process alone, or as many of its own children."""
    if workers == 1:
        work(tuning, say)
    else:
        run_crew(tuning, workers, say)


def run_crew(tuning: Tuning, workers: int, say: Say, resumes: int = 0) -> None:
    """Keep worker processes at work until none has anything left to do.

    Args:
        tuning: what they tune.
        workers: how many there are.
        say: tells the user something.
        resumes: how many that were killed are replaced.

    Raises:
        BenchError: the trials are not all there because a worker was killed once too often.
    """
    import torch

    gpus = torch.cuda.device_count() if tuning.device == "cuda" else 0
    kills = kills_for_memory()
    crew: dict[BaseProcess, Tuning] = {}
    lost: BenchError | None = None
    try:
        for number in range(workers):
            share = replace(tuning, device=f"cuda:{number % gpus}") if gpus else tuning
            crew[_start(share)] = share
        while crew:
            wait([process.sentinel for process in crew])
            for process in [process for process in crew if not process.is_alive()]:
                process.join()
                share = crew.pop(process)
                if not _killed(process):
                    continue
                died = how_it_died(process.exitcode or 0, kills_for_memory() > kills)
                say(died.message)
                if resumes > 0:
                    crew[_start(share)] = share
                else:
                    lost = died
                resumes -= 1
    finally:
        for process in crew:
            process.kill()
        for process in crew:
            process.join()
    if lost is not None and count_finished(tuning.folder) < tuning.trials:
        raise lost


def _killed(process: BaseProcess) -> bool:
    """Tell whether a worker was ended by a signal; else it has said itself how it ended."""
    return (process.exitcode or 0) < 0


def _start(tuning: Tuning) -> BaseProcess:
    process = multiprocessing.get_context("spawn").Process(
        target=_serve, args=(tuning,), daemon=True
    )
    # It has to be deaf from its first moment, before any code of ours runs in it.
    heard = signal.pthread_sigmask(signal.SIG_BLOCK, not_for_workers())
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, heard)
    return process


def _serve(tuning: Tuning) -> None:
    """Live as a worker process."""
    for deaf_to in not_for_workers():
        signal.signal(deaf_to, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, not_for_workers())
    die_with_parent()

    def say(text: str) -> None:
        sys.stderr.write(text + "\n")
        sys.stderr.flush()

    try:
        work(tuning, say)
    except BenchError as error:
        say(f"bench: {error}")
        sys.exit(2)
