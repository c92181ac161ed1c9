# SPDX-FileCopyrightText: The tmaTensorMap contributors
# SPDX-License-Identifier: BSD-3-Clause
"""Packages that are missing, too old or in each other's way end in one line with the remedy."""

from __future__ import annotations

import importlib.util
import inspect
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from conftest import (
    ROOT,
    SCRIPT,
    assert_as_usual,
    assert_fails,
    copy_sample,
    environment,
    run,
    run_code,
)

from tmaTensorMap import utils

HAS_PIP = importlib.util.find_spec("pip") is not None  # uv makes environments without
# As the process that runs it names it, without links and dots.
PYTHON = run([sys.executable, "-c", "import sys; print(sys.executable)"]).stdout.strip()
REQUIREMENTS = [
    line
    for line in (ROOT / "requirements.txt").read_text().splitlines()
    if not line.startswith("#")
]


def run_with(site_packages: Path) -> subprocess.CompletedProcess[str]:
    variables = environment(PYTHONPATH=str(site_packages))
    return run([sys.executable, "-S", SCRIPT], env=variables)


def remedy(distribution: str, pip: bool = HAS_PIP, reinstall: bool = False) -> str:
    """Return what is said to be needed, and the command that installs everything."""
    needed = next(r for r in REQUIREMENTS if r.startswith(distribution))
    everything = " ".join(f'"{r}"' for r in REQUIREMENTS)
    first = "" if pip else f'"{PYTHON}" -m ensurepip && '
    options = "--force-reinstall " if reinstall else ""
    return f'{needed} is needed: {first}"{PYTHON}" -m pip install {options}{everything}'


def add_records(site_packages: Path, distribution: str) -> None:
    """Let a package seem to be installed."""
    folder = site_packages / f"{distribution.replace('-', '_')}-13.6.0.dist-info"
    folder.mkdir()
    text = f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 13.6.0\n"
    (folder / "METADATA").write_text(text)


def test_no_package_at_all() -> None:
    process = run([sys.executable, "-S", SCRIPT])
    assert_fails(process, "numpy is not installed", remedy("numpy", pip=False))
    assert process.stdout == ""


@pytest.mark.parametrize(
    ("module", "distribution"),
    [
        ("numpy", "numpy"),
        ("cupy", "cupy-cuda13x"),
        ("cuda/bindings", "cuda-python"),
        ("cuda/core", "cuda-core"),
        ("cuda/pathfinder", "cuda-pathfinder"),
    ],
)
@pytest.mark.parametrize("state", ["not installed", "incomplete"])
def test_one_package_missing(
    site_packages: Path, module: str, distribution: str, state: str
) -> None:
    (site_packages / module).unlink()
    for records in site_packages.glob(f"{distribution.replace('-', '_')}-*.dist-info"):
        records.unlink()
    if state == "incomplete":  # pip leaves alone what its records name, also without its files
        add_records(site_packages, distribution)
    assert_fails(
        run_with(site_packages),
        f"{distribution} is {state} (no module named {module.replace('/', '.')}",
        remedy(distribution, reinstall=state == "incomplete"),
    )


@pytest.mark.parametrize(
    ("module", "version", "distribution"),
    [
        ("cuda/core", "0.6.0", "cuda-core"),  # the last one without tensor maps
        ("cuda/bindings", "12.9.4", "cuda-python"),
        ("cuda/bindings", "14.0.0", "cuda-python"),
        ("cuda/pathfinder", "1.4.4", "cuda-pathfinder"),
        ("cupy", "13.5.1", "cupy-cuda13x"),
        ("numpy", "1.23.5", "numpy"),
    ],
)
def test_package_of_another_version(
    site_packages: Path, module: str, version: str, distribution: str
) -> None:
    (site_packages / module).unlink()
    (site_packages / module).mkdir()
    (site_packages / module / "__init__.py").write_text(f"__version__ = {version!r}\n")
    assert_fails(
        run_with(site_packages), f"{distribution} is of version {version}", remedy(distribution)
    )


@pytest.mark.parametrize("error", ["ImportError", "OSError", "ValueError"])
def test_broken_package(site_packages: Path, error: str) -> None:
    (site_packages / "cupy").unlink()
    (site_packages / "cupy.py").write_text(f"raise {error}('libfoo.so.1:\\n not found')\n")
    assert_fails(
        run_with(site_packages),
        "cupy-cuda13x cannot be imported (libfoo.so.1: not found)",
        remedy("cupy-cuda13x", reinstall=True),
    )


def test_package_without_files(site_packages: Path) -> None:
    """An empty folder can be imported too."""
    (site_packages / "cupy").unlink()
    (site_packages / "cupy").mkdir()
    assert_fails(
        run_with(site_packages),
        "cupy-cuda13x cannot be imported (module 'cupy' has no attribute '__version__')",
        remedy("cupy-cuda13x", reinstall=True),
    )


@pytest.mark.parametrize("other", ["cupy-cuda11x", "cupy-cuda12x"])
def test_cupy_for_another_cuda(site_packages: Path, other: str) -> None:
    add_records(site_packages, other)
    assert_fails(
        run_with(site_packages),
        f"{other} is installed",
        f'" -m pip uninstall -y {other} cupy-cuda13x',
        '" -m pip install "cupy-cuda13x"',
    )


@pytest.mark.parametrize(
    "other", [None, "def print_gpu_info(device):\n    pass\n", "def cut_off(", "<!DOCTYPE html>"]
)
def test_helper_missing_or_another(tmp_path: Path, other: str | None) -> None:
    """Only the script was downloaded, perhaps into a tree with a helper module of its own."""
    alone = shutil.copy(SCRIPT, tmp_path)
    if other:
        (tmp_path / "Utilities").mkdir()
        (tmp_path / "Utilities" / "cuda_samples_utils.py").write_text(other)
    assert_fails(
        run([sys.executable, alone]), "Utilities/cuda_samples_utils.py is missing, damaged"
    )


def test_other_files_beside_the_helper_are_not_imported(tmp_path: Path) -> None:
    """Two folders up, where the sample looks for its helper, anything may lie."""
    script = copy_sample(tmp_path / "samples" / "tma")
    other = tmp_path / "Utilities"
    other.mkdir()
    (other / "numpy.py").write_text("raise SystemExit('the wrong numpy')\n")
    assert_as_usual(run([sys.executable, script]))


def test_remedy_for_the_python_of_a_distribution(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pip refuses to install beside it. No test can be sure to find such a Python."""
    (tmp_path / "EXTERNALLY-MANAGED").touch()
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    assert utils.pip_install("numpy").endswith(f'"{sys.executable}" -m pip install "numpy"')
    monkeypatch.setattr(sys, "executable", "/usr/bin/python3")  # in no virtual environment
    assert utils.pip_install("numpy") == (
        '"/usr/bin/python3" -m venv .venv && .venv/bin/python -m pip install "numpy"'
    )


def test_cuda_core_has_tensor_maps() -> None:
    """Also where no GPU shows that they work. The options and enums are those in README.md."""
    import cuda.core
    from cuda.core import TensorMapDescriptor
    from cuda.core.utils import StridedMemoryView

    assert callable(TensorMapDescriptor.replace_address)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    options = re.search(r"`as_tensor_map\(\)` also takes (.+?) \(", readme, re.DOTALL)[1]
    wanted = {"box_dim", *re.findall(r"`(\w+)`", options)}
    assert len(wanted) == 5
    assert wanted <= set(inspect.signature(StridedMemoryView.as_tensor_map).parameters)
    enums = set(re.findall(r"`(?:cuda\.core\._tensor_map\.)?(TensorMap(?!Desc)\w+)[.`]", readme))
    assert len(enums) == 4
    assert enums <= set(dir(importlib.import_module("cuda.core._tensor_map")))
    assert not enums & {*dir(cuda.core), *dir(cuda.core.utils)}, "README.md: they are public now"


# The finders of cuda.pathfinder are replaced below: no variable hides a toolkit from them.
NO_HEADERS = """
import cuda.pathfinder
cuda.pathfinder.find_nvidia_header_directory = lambda name: None
cuda.pathfinder.get_cuda_path_or_home = lambda: {toolkit!r}
sample.utils.open_device = lambda *_: (_ for _ in ()).throw(sample.utils.NoUsableGpu("no GPU"))
"""


@pytest.mark.parametrize("toolkit", [None, "/nowhere"])
def test_no_headers(toolkit: str | None) -> None:
    process = run_code(NO_HEADERS.format(toolkit=toolkit))
    assert_fails(
        process,
        "the header cuda/barrier was not found in the installed packages",
        '" -m pip install --force-reinstall "cuda-toolkit[cccl,cudart,nvrtc]>=13,<14"',
    )


def make_toolkit(folder: Path) -> Path:
    """Lay out the headers of this environment as a CUDA toolkit does, as links."""
    import tmaTensorMap as sample

    cccl, cudart = map(Path, sample.include_directories())
    include = folder / "include"
    include.mkdir(parents=True)
    for entry in cudart.iterdir():
        if entry.name != "cccl":
            (include / entry.name).symlink_to(entry)
    (include / "cccl").symlink_to(cccl)
    return folder


def test_headers_of_a_toolkit_folder_alone(tmp_path: Path) -> None:
    toolkit = make_toolkit(tmp_path / "toolkit")
    process = run_code(NO_HEADERS.format(toolkit=str(toolkit)))
    assert_fails(process, "no GPU")
    assert re.fullmatch(r"Kernel compiled for sm_90: a CUBIN of \d+ bytes. .*\n", process.stdout)


def test_headers_of_another_cuda(tmp_path: Path) -> None:
    toolkit = make_toolkit(tmp_path / "toolkit")
    header = toolkit / "include" / "cuda_runtime_api.h"
    text = re.sub(r"(#define CUDART_VERSION +)\d+", r"\g<1>12090", header.read_text())
    header.unlink()
    header.write_text(text)
    process = run_code(NO_HEADERS.format(toolkit=str(toolkit)))
    assert_fails(process, f"the headers in {toolkit}/include are of CUDA 12, and 13 is needed")


def test_no_nvrtc() -> None:
    process = run_code("""
import cuda.pathfinder
load = cuda.pathfinder.load_nvidia_dynamic_lib
def without_nvrtc(name):
    if name == "nvrtc":
        raise cuda.pathfinder.DynamicLibNotFoundError("no libnvrtc.so.13: nvrtc was not found")
    return load(name)
cuda.pathfinder.load_nvidia_dynamic_lib = without_nvrtc
sample.utils.open_device = lambda *_: (_ for _ in ()).throw(sample.utils.NoUsableGpu("no GPU"))
""")
    assert_fails(
        process,
        "NVRTC, the compiler, was not found (libnvrtc of CUDA 13",
        '" -m pip install --force-reinstall "cuda-toolkit[cccl,cudart,nvrtc]>=13,<14"',
    )
