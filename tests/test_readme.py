# SPDX-FileCopyrightText: The tmaTensorMap contributors
# SPDX-License-Identifier: BSD-3-Clause
"""README.md says what the code does and what was measured."""

from __future__ import annotations

import json
import re
from pathlib import Path

import plot
import pytest
from conftest import RECIPES, ROOT, SCRIPT, run, verified

README = (ROOT / "README.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^## (.+?)\n(.+?)(?=^## |\Z)", README, re.MULTILINE | re.DOTALL))
REQUIREMENTS = [
    line
    for line in (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    if not line.startswith("#")
]


def test_commands() -> None:
    """The two commands at the top; .ci/run takes the second from there and runs it."""
    venv = "python3 -m venv .venv && .venv/bin/python -m pip install -r "
    first = f"```\n{venv}requirements.txt && .venv/bin/python tmaTensorMap.py\n```"
    second = f"```\n{venv}tests/requirements.txt && .venv/bin/python -m pytest\n```"
    assert README.index(first) < README.index(second) < README.index("## Description")


@pytest.mark.parametrize("script", [SCRIPT, *(ROOT / "recipes" / f"{r}.py" for r in RECIPES)])
def test_scripts_list_the_same_requirements(script: Path) -> None:
    """`uv run` reads the one list, pip the other."""
    text = script.read_text(encoding="utf-8")
    block = re.search(r"^# /// script$(.+?)^# ///$", text, re.MULTILINE | re.DOTALL)[1]
    assert re.findall(r'"([^"]+)"', block.split("dependencies")[1]) == REQUIREMENTS
    assert '\n# requires-python = ">=3.10"\n' in block


def test_requirements_table() -> None:
    for requirement in REQUIREMENTS:
        name, lowest, limit = re.match(r"([\w-]+).*>=([\d.]+)(?:,<(\d+))?$", requirement).groups()
        below = f" (below {limit})" if limit else ""
        row = rf"^\| {name}(, .+?)? \| {re.escape(lowest + below)} \|"
        assert re.search(row, SECTIONS["Requirements"], re.MULTILINE), requirement


def test_expected_output() -> None:
    """test_gpu.py compares the same text with what a run prints."""
    assert f"```\n{verified('NVIDIA H200', '9.0')}```" in README


def test_options() -> None:
    help_text = re.sub(r"\s+", " ", run(SCRIPT, "--help").stdout)
    options = re.findall(r"^\| `(--\w+) N`", SECTIONS["How to Run"], re.MULTILINE)
    assert options == re.findall(r"(--\w+) N\]", help_text)
    assert "(default: 1024)" in help_text
    assert "1024 by default" in SECTIONS["How to Run"]


def test_troubleshooting_quotes_messages() -> None:
    """Ours are in the code; the others are Python's, CuPy's, and CUDA's."""
    code = SCRIPT.read_text() + (ROOT / "Utilities" / "cuda_samples_utils.py").read_text()
    foreign = {
        "No module named",
        "cannot import name",
        "Out of memory",
        "Timeout (0:00:10)!",
        "FileNotFoundError",
        "NotADirectoryError",
        "PermissionError",
        "NVRTC_ERROR_COMPILATION",
        "cudaErrorIllegalInstruction",
        "CUDA_ERROR_ILLEGAL_INSTRUCTION",
    }
    quoted = re.findall(r"^\| (`.+?`) (?:at|\|)", SECTIONS["Troubleshooting"], re.MULTILINE)
    texts = {text for row in quoted for text in row.strip("`").split("`, `")}
    assert len(texts) > 10
    for text in texts - foreign:
        assert text in code, text


def test_files_exist() -> None:
    for row in re.findall(r"^\| (`.+?) \|", SECTIONS["Files"], re.MULTILINE):
        for name in re.findall(r"`(.+?)`", row):
            assert (ROOT / name).exists(), name


def test_pitfalls_are_tested() -> None:
    """README.md names no pitfall that no test shows, and the other way around."""
    named = set(re.findall(r"^- \*\*(.+?)\*\*", SECTIONS["Pitfalls"], re.MULTILINE))
    tests = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").glob("test_*.py"))
    shown = re.findall(r"""mark\.pitfall\(\s*["'](.+)["']\s*\)""", tests)
    assert named == set(shown) | {"JAX arrays need a stream."}


def test_tables_are_those_of_the_recorded_results() -> None:
    """If this fails, run benchmarks/plot.py."""
    assert plot.update(README) == README
    for name in ("copies.png", "recipes.png"):
        assert f"benchmarks/results/{name}" in README
        assert (plot.RESULTS / name).read_bytes().startswith(b"\x89PNG")


def test_results_are_those_of_these_kernels() -> None:
    """If this fails, record them again on an H200, as benchmarks/README.md says."""
    assert json.loads((plot.RESULTS / "kernels.json").read_text()) == plot.kernels()
    assert [run["devices"][0]["name"] for run in plot.RUNS] == ["NVIDIA H200"] * 3
