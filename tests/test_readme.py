# SPDX-FileCopyrightText: The tmaTensorMap contributors
# SPDX-License-Identifier: BSD-3-Clause
"""README.md says what the code does and what was measured."""

from __future__ import annotations

import hashlib
import json
import re
from decimal import ROUND_HALF_UP, Decimal
from typing import Any

import copyBandwidth
import pytest
from conftest import ROOT, run_sample, verified

import tmaTensorMap as sample

README = (ROOT / "README.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^## (.+?)\n(.+?)(?=^## |\Z)", README, re.MULTILINE | re.DOTALL))
RESULTS = json.loads((ROOT / "benchmarks" / "results" / "h200.json").read_text(encoding="utf-8"))
SCRIPT_TEXT = (ROOT / "tmaTensorMap.py").read_text(encoding="utf-8")
HELPER_TEXT = (ROOT / "Utilities" / "cuda_samples_utils.py").read_text(encoding="utf-8")


def test_sections() -> None:
    wanted = "Description, What You'll Learn, Key Libraries, Key APIs, Requirements, Installation,"
    wanted += " How to Run, Expected Output, Exit Status, How It Works, Performance, Pitfalls,"
    wanted += " Troubleshooting, Files, Tests, See Also"
    assert list(SECTIONS) == wanted.split(", ")


def test_commands() -> None:
    """The two commands of the top; .ci/run takes the second from there and runs it."""
    venv = "python3 -m venv .venv && .venv/bin/python -m pip install -r "
    first = f"```\n{venv}requirements.txt && .venv/bin/python tmaTensorMap.py\n```"
    second = f"```\n{venv}tests/requirements.txt && .venv/bin/python -m pytest\n```"
    assert README.index(first) < README.index(second) < README.index("## Description")
    assert (ROOT / "tests" / "requirements.txt").read_text().startswith("-r ../requirements.txt\n")


def requirements() -> list[str]:
    lines = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if not line.startswith("#")]


def test_script_lists_the_same_requirements() -> None:
    """`uv run` reads the one list, pip the other."""
    assert sample.utils.inline_dependencies(sample.__file__) == requirements()


def test_requirements_table() -> None:
    for requirement in requirements():
        name, lowest, limit = re.match(r"([\w-]+).*>=([\d.]+)(?:,<(\d+))?$", requirement).groups()
        below = f" (below {limit})" if limit else ""
        row = rf"^\| {name}(, .+?)? \| {re.escape(lowest + below)} \|"
        assert re.search(row, SECTIONS["Requirements"], re.MULTILINE), requirement
    assert "\n| Python | 3.10 |" in SECTIONS["Requirements"]
    assert '\n# requires-python = ">=3.10"\n' in SCRIPT_TEXT


def test_expected_output() -> None:
    """test_gpu.py compares the same text with what a run prints."""
    expected = verified("NVIDIA H200", "9.0")
    assert f"```\n{expected}```" in SECTIONS["Expected Output"]
    for line in expected.splitlines()[3:]:
        pattern = re.escape(line).replace("1024", ".+").replace("8", ".+")
        assert re.search(pattern, SCRIPT_TEXT), line


def test_options_and_defaults() -> None:
    told = run_sample("--help").stdout
    for option in re.findall(r"`(--\w+) N`", SECTIONS["How to Run"]):
        assert f"{option} N" in told
    assert "(default: 1024)" in re.sub(r"\s+", " ", told)
    assert "1024 by default" in SECTIONS["How to Run"]


def test_troubleshooting_quotes_messages() -> None:
    rows = re.findall(r"^\| (`.+?) \|", SECTIONS["Troubleshooting"], re.MULTILINE)
    quoted = [text for row in rows for text in re.findall(r"`(.+?)`", row)]
    assert len(quoted) > 10
    told = re.sub(r'"\s+f?"', "", SCRIPT_TEXT + HELPER_TEXT)  # joins what stands on several lines
    for text in quoted:
        assert text in told or text.startswith("CUDA_ERROR_"), text


def test_files_exist() -> None:
    for name in re.findall(r"^\| `(.+?)`", SECTIONS["Files"], re.MULTILINE):
        assert (ROOT / name).exists(), name


def test_figures_of_the_check_and_the_deadline() -> None:
    text = SECTIONS["How It Works"]
    assert f"{sample.GUARD_ELEMENTS:,} guard elements" in text
    assert f"at most {sample.DEADLINE_SECONDS} s" in text
    assert f"block of {sample.BLOCK_THREADS} threads" in text
    assert sample.TILES_PER_BOX == 4
    assert "box of four rows" in text
    assert sample.SECOND_PATTERN ^ sample.FIRST_PATTERN == 0xFFFFFFFF  # the bits of ~i


def test_results_are_those_of_the_shipped_kernel() -> None:
    """Where this fails, record them again: copyBandwidth.py --json … --plot … on an H200."""
    kernel = hashlib.sha256(sample.KERNEL_SOURCE.encode()).hexdigest()
    assert RESULTS["machine"]["kernel_sha256"] == kernel
    assert RESULTS["machine"]["tile_elements"] == sample.TILE_ELEMENTS
    assert RESULTS["machine"]["tiles_per_box"] == sample.TILES_PER_BOX
    assert (ROOT / "benchmarks" / "results" / "h200.png").read_bytes().startswith(b"\x89PNG")


def fixed(value: float, digits: int = 0) -> str:
    """Return a figure rounded as people do: 0.985 to 0.99, which a float's format does not."""
    step = Decimal(1).scaleb(-digits)
    return str(Decimal(str(value)).quantize(step, rounding=ROUND_HALF_UP))


def copies(size: int) -> dict[str, dict[str, Any]]:
    return next(row for row in RESULTS["bandwidth"] if row["bytes"] == size)["contenders"]


def ratio(size: int, name: str = "this sample") -> str:
    """Return the ratio to cudaMemcpyAsync, of the medians: the recorded one is rounded already."""
    rows = copies(size)
    return fixed(rows[name]["median"] / rows["cudaMemcpyAsync"]["median"], 2)


def performance_statements() -> list[str]:
    """Return the sentences and rows of the section Performance that state figures."""
    machine, host, process = (RESULTS[part] for part in ("machine", "host", "process"))
    kib, mib, gib = 2**10, 2**20, 2**30
    names = ("this sample", "cudaMemcpyAsync", "torch copy_", "CuPy copyto")
    names += ("Gluon 1-D TMA", "Triton TMA", "plain loads", "textbook TMA")
    rows = []
    for name in names:
        cells = [
            f"{fixed(copies(size)[name]['median'])} ({ratio(size, name)})"
            for size in (mib, 64 * mib, gib)
        ]
        rows.append(f"| {name} | {' | '.join(cells)} |")

    plain = [ratio(size, "plain loads") for size in (64 * kib, 256 * kib, mib, 4 * mib)]
    best, peak = copies(gib)["this sample"]["median"], machine["memory_peak_gb_s"]
    in_flight = 16 * machine["multiprocessors"] * 4 * sample.TILE_ELEMENTS / 1e6  # MB
    textbook_read = copies(gib)["textbook TMA"]["median"] / 2
    latency = in_flight * 1e3 / textbook_read  # µs, of MB and GB/s
    seconds = {name: f"{fixed(row['median'], 1)} s" for name, row in process["seconds"].items()}
    stages = {name: f"{fixed(row['median'], 1)} s" for name, row in process["stages"].items()}
    grown = {row["elements"]: row for row in RESULTS["growth"]}
    grown_seconds = {
        power: f"{fixed(grown[2**power]['seconds']['median'], 1)} s" for power in (10, 26, 30, 32)
    }
    largest = grown[2**32]
    array_mib = largest["array_bytes"] / mib
    microseconds = {name: f"{fixed(row['median'], 1)} µs" for name, row in host.items()}
    return [
        f"one {machine['gpu']} (driver {machine['driver']}, NVRTC {machine['nvrtc']},"
        f" cuda-core {machine['packages']['cuda-core']})",
        *rows,
        f"Up to {copyBandwidth.GRAPH_UP_TO // mib} MiB many copies are timed in a CUDA graph",
        f"At 1 GiB it moves {fixed(best)} GB/s, {fixed(best / peak, 2)} of the memory's peak of"
        f" {peak} GB/s",
        f"Gluon with 256 elements a block reaches {ratio(64 * kib, 'Gluon 1-D TMA')} of"
        f" `cudaMemcpyAsync` at 64 KiB and {ratio(256 * kib, 'Gluon 1-D TMA')} at 256 KiB",
        f"installed, as they were here ({machine['packages']['torch']} and"
        f" {machine['packages']['triton']})",
        f"{ratio(64 * kib)} of `cudaMemcpyAsync` at 64 KiB, {ratio(256 * kib)} at 256 KiB,"
        f" {ratio(mib)} at 1 MiB and {ratio(4 * mib)} at 4 MiB",
        f'("plain loads") reaches {plain[0]}, {plain[1]}, {plain[2]} and {plain[3]}.',
        f"{4 * sample.TILE_ELEMENTS} bytes in a block of 128 threads. 16 such blocks fit on each of"
        f" {machine['multiprocessors']} multiprocessors: {fixed(in_flight, 2)} MB in flight."
        f" It reads {fixed(textbook_read)} GB/s, half of what it moves, so with all of them in"
        f" flight a block takes {fixed(latency, 3)} µs",
        f"To read the {fixed(best / 2)} GB/s of the sample at that latency takes"
        f" {fixed(best / 2 * latency / 1e3, 2)} MB in flight."
        f" Four tiles a block bring {fixed(4 * in_flight, 2)} MB",
        f"takes {microseconds['build_tensor_map']}, the view included,"
        f" and `launch_copy()` {microseconds['launch_copy']}",
        f"takes {microseconds['replace_address(array)']} with an array and"
        f" {microseconds['replace_address(view)']} with a view",
        f"takes {seconds['cold']} with an empty CuPy cache and {seconds['warm']} with a filled one",
        f"{stages['imports']} go into imports, {stages['device']} into the device's context,"
        f" {stages['compilation']} into the compilation",
        f"{stages['data']} into the data, and {stages['copy and check']} into both copies",
        f"the cold run takes {fixed(process['seconds']['cold, cupy.array_equal']['median'], 1)} s",
        f"takes {grown_seconds[10]} for 2^10 elements, {grown_seconds[26]} for 2^26,"
        f" {grown_seconds[30]} for 2^30 and {grown_seconds[32]} for 2^32",
        f"Three arrays of 2^32 elements take {fixed(array_mib)} MiB; the rest of the process takes"
        f" {fixed(largest['process_bytes'] / mib - array_mib)} MiB",
    ]


def test_performance_figures() -> None:
    text = re.sub(r"\s+", " ", SECTIONS["Performance"])
    for statement in performance_statements():
        assert statement in text, statement
    # And no figure stands there that is none of these, but for sizes of what is measured.
    for statement in performance_statements():
        text = text.replace(statement, "")
    text = re.sub(r"```.+?```|`.+?`|\(benchmarks.+?\)", "", text)
    text = text.replace("| GB/s | 1 MiB | 64 MiB | 1 GiB |", "").replace("below about 1 MiB", "")
    for words in (
        "in less than 20 seconds",
        "from 16 MiB on",
        "from the 10th to the 90th",
        "from 1 MiB on",
        "larger than the L2 cache",
    ):
        text = text.replace(words, "")
    assert not re.findall(r"\d+", text), re.findall(r".{20}\d.{20}", text)


def test_the_kernel_is_as_fast_as_claimed() -> None:
    """What the section says in words."""
    assert all(copies(2**power)["this sample"]["ratio"] >= 0.99 for power in (24, 26, 28, 30, 32))
    for power in (24, 26, 28, 30, 32):
        ours, triton, gluon = (
            copies(2**power)[name]["median"]
            for name in ("this sample", "Triton TMA", "Gluon 1-D TMA")
        )
        assert ours > max(triton, gluon)
    for power in range(20, 34, 2):  # their best block is the sample's box
        assert copies(2**power)["Triton TMA"]["variant"] == f"{sample.TILES_PER_BOX} rows"
        box = sample.TILES_PER_BOX * sample.TILE_ELEMENTS
        assert copies(2**power)["Gluon 1-D TMA"]["variant"] == f"{box} elements"
    assert {copies(2**power)["Gluon 1-D TMA"]["variant"] for power in (16, 18)} == {"256 elements"}
    assert all(copies(2**power)["this sample"]["ratio"] < 0.97 for power in (16, 18, 20))


@pytest.mark.parametrize("text", [SCRIPT_TEXT, HELPER_TEXT, README])
def test_lines_fit(text: str) -> None:
    """Tables, links and commands apart, for readers of the plain text."""
    long = [line for line in text.splitlines() if len(line) > 110]
    assert all(line.startswith(("|", "- [", "for ", "python3 ")) for line in long), long
