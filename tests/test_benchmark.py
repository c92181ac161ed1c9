# SPDX-FileCopyrightText: The tmaTensorMap contributors
# SPDX-License-Identifier: BSD-3-Clause
"""The benchmark judges its arguments first, measures the shipped kernel, and writes whole files."""

from __future__ import annotations

import io
import json
import shutil
import sys
from pathlib import Path

import copyBandwidth
import pytest
from conftest import ROOT, run

import tmaTensorMap as sample

SCRIPT = ROOT / "benchmarks" / "copyBandwidth.py"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "-1"], "argument --device: -1 is negative, and ids start at 0"),
        (["--rounds", "3"], "unrecognized arguments: --rounds 3"),
        (["--json", "/nowhere/results.json"], "argument --json: /nowhere/results.json cannot be"),
        (["--json", "/"], "argument --json: / cannot be written"),
        (["--plot", "/nowhere/plot.png"], "argument --plot: /nowhere/plot.png cannot be written"),
        (["--json", "/dev/null"], "argument --json: /dev/null cannot be written"),
        (
            ["--json", "/etc/passwd/results.json"],
            "argument --json: /etc/passwd/results",
        ),
        (["--json", ""], "argument --json: . cannot be written"),
        (["--json", "x.png", "--plot", "x.png"], "argument --plot: x.png is what --json names too"),
        (["--json", "x.png", "--plot", "y/../x.png"], "argument --plot: y/../x.png is what --json"),
        (["--plot", "plot.doc"], "argument --plot: plot.doc must end in .png, .svg or .pdf"),
    ],
)
def test_wrong_arguments(tmp_path: Path, arguments: list[str], message: str) -> None:
    process = run([sys.executable, SCRIPT, *arguments], cwd=tmp_path)
    assert process.returncode == 2, process
    assert process.stderr.splitlines()[-1].startswith(f"copyBandwidth.py: error: {message}")
    assert "Traceback" not in process.stderr
    assert process.stdout == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("beside", ["nothing", "the script alone", "another script"])
def test_sample_missing(tmp_path: Path, beside: str) -> None:
    (tmp_path / "benchmarks").mkdir()
    script = shutil.copy(SCRIPT, tmp_path / "benchmarks")
    if beside == "the script alone":  # without its Utilities
        shutil.copy(ROOT / "tmaTensorMap.py", tmp_path)
    elif beside == "another script":
        (tmp_path / "tmaTensorMap.py").touch()
    process = run([sys.executable, script])
    assert process.returncode == 1, process
    assert process.stderr == (
        "copyBandwidth.py: error: tmaTensorMap.py or its Utilities is missing:"
        " download the whole sample\n"
    )


@pytest.mark.no_driver
def test_no_driver(tmp_path: Path) -> None:
    process = run([sys.executable, SCRIPT, "--json", tmp_path / "results.json"])
    assert process.returncode == 1, process
    assert process.stderr.startswith("copyBandwidth.py: error: no NVIDIA driver was found")
    assert process.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_no_half_of_a_file_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "results.json"
    target.write_text("of last week")

    def fail(path: Path, content: bytes) -> None:
        path.write_text("half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", fail)
    with pytest.raises(sample.utils.SampleError, match="results.json cannot be written: No space"):
        copyBandwidth.write_whole(target, b"whole")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["of last week"]


def test_link_is_followed(tmp_path: Path) -> None:
    link = tmp_path / "link.json"
    link.symlink_to(link)  # in a circle
    assert not copyBandwidth.can_be_written(link)
    link.unlink()
    folder = tmp_path / "perhaps on another disk"
    folder.mkdir()
    link.symlink_to(folder / "target.json")
    assert copyBandwidth.can_be_written(link)
    assert copyBandwidth.unfinished(link).parent == folder  # a rename stays on one disk
    copyBandwidth.unfinished(link).touch()  # of an earlier run, or a user's: trying leaves it
    assert copyBandwidth.can_be_written(link)
    assert copyBandwidth.unfinished(link).exists()
    copyBandwidth.write_whole(link, b"whole")
    assert link.is_symlink()
    assert [path.read_text() for path in folder.iterdir()] == ["whole"]


def test_best_variant_is_shown() -> None:
    measured = {
        copyBandwidth.REFERENCE: [100.0] * 10,
        "Triton TMA / 8 rows": [50.0] * 10,
        "Triton TMA / 32 rows": [80.0] * 9 + [10.0],
    }
    best = copyBandwidth.best_variants(measured)
    assert list(best) == [copyBandwidth.REFERENCE, "Triton TMA"]
    assert best["Triton TMA"]["variant"] == "32 rows"
    assert best["Triton TMA"]["ratio"] == 0.8
    assert best["Triton TMA"]["median"] == 80


def test_spread() -> None:
    assert copyBandwidth.spread(range(101)) == {"median": 50, "p10": 10, "p90": 90}


@pytest.mark.parametrize("arch", ["sm_90", "sm_100", "sm_120"])
@pytest.mark.parametrize("source", [copyBandwidth.TEXTBOOK_SOURCE, copyBandwidth.PLAIN_SOURCE])
def test_other_kernels_compile(monkeypatch: pytest.MonkeyPatch, arch: str, source: str) -> None:
    logs = io.StringIO()
    monkeypatch.setattr(sample, "KERNEL_SOURCE", source)
    assert sample.compile_kernel(arch, logs=logs).code
    assert logs.getvalue() == ""


def test_plot(tmp_path: Path) -> None:
    results = json.loads((ROOT / "benchmarks" / "results" / "h200.json").read_text())
    copyBandwidth.plot_bandwidth(results, tmp_path / "plot.svg")
    drawn = (tmp_path / "plot.svg").read_text()
    names = set(results["bandwidth"][0]["contenders"])
    for text in (*names, "64 KiB", "4 GiB", "(GB/s)"):
        assert f"{text} -->" in drawn, text
    # The textbook kernel is left out where it was not measured, and nothing else.
    for row in results["bandwidth"]:
        del row["contenders"]["textbook TMA"]
    copyBandwidth.plot_bandwidth(results, tmp_path / "plot.svg")
    drawn = (tmp_path / "plot.svg").read_text()
    assert {name for name in names if f"{name} -->" in drawn} == names - {"textbook TMA"}


@pytest.mark.gpu
def test_quick(tmp_path: Path) -> None:
    target = tmp_path / "results.json"
    process = run([sys.executable, SCRIPT, "--quick", "--json", target], timeout=120)
    assert process.returncode == 0, process
    assert process.stderr == ""  # no progress bar, since standard output is no terminal
    results = json.loads(target.read_text())
    assert [row["bytes"] for row in results["bandwidth"]] == copyBandwidth.QUICK_SIZES
    for row in results["bandwidth"]:
        wanted = {"this sample", "cudaMemcpyAsync", "textbook TMA", "plain loads", "CuPy copyto"}
        assert wanted <= set(row["contenders"])
        for entry in row["contenders"].values():
            assert 0 < entry["p10"] <= entry["median"] <= entry["p90"]
    # No copy is faster than the memory, or bytes are counted that were not moved.
    peak = results["machine"]["memory_peak_gb_s"]
    assert all(e["median"] < peak for e in results["bandwidth"][-1]["contenders"].values())
    for heading in ("1 MiB, device time", "1 GiB, single copies", "Host cost of a call"):
        assert heading in process.stdout


@pytest.mark.gpu
def test_wrong_copy_is_not_timed() -> None:
    code = f"""
import sys
sys.path[:0] = [{str(ROOT)!r}, {str(SCRIPT.parent)!r}]
import copyBandwidth
copyBandwidth.bind_cupy = lambda: lambda source, target: lambda: target.fill(0)
sys.exit(copyBandwidth.main(["--quick"]))
"""
    process = run([sys.executable, "-c", code], timeout=120)
    assert process.returncode == 1, process
    assert process.stderr.startswith("copyBandwidth.py: error: CuPy copyto: ")
    assert "elements differ" in process.stderr
