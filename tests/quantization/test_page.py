"""docs/quantization.md says what the code does: its tables and picture are written by a tool, and up to date."""

import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]


def test_tables_and_picture_are_up_to_date():
    command = [sys.executable, "tools/quantization_page.py", "--check"]
    run = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
