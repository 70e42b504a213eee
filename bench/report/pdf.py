"""Building the PDF, where LaTeX is installed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from datasets.errors import BenchError, UsageError

PACKAGES = (
    "texlive-latex-base texlive-latex-recommended texlive-latex-extra texlive-fonts-recommended"
)
TWICE = 2  # the list of tables and the references are right after the second run
AT_MOST_SECONDS = 600


def build_pdf(out: Path) -> Path:
    """Compile `main.tex` in the report's folder; LaTeX may run no other program."""
    program = shutil.which("pdflatex")
    if program is None:
        raise UsageError(
            "--pdf needs pdflatex, which is not installed",
            f"on Debian: apt-get install {PACKAGES}; or leave out --pdf and compile main.tex later",
        )
    command = [program, "-interaction=nonstopmode", "-halt-on-error", "-no-shell-escape"]
    for _ in range(TWICE):
        done = subprocess.run(
            [*command, "main.tex"],
            cwd=out,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=AT_MOST_SECONDS,
        )
        if done.returncode != 0:
            said = [line for line in done.stdout.splitlines() if line.startswith(("!", "l."))]
            raise BenchError(
                f"pdflatex could not compile {out / 'main.tex'}: {' '.join(said) or 'no message'}",
                f"see {out / 'main.log'}",
            )
    return out / "main.pdf"
