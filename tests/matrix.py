# SPDX-FileCopyrightText: The tmaTensorMap contributors
# SPDX-License-Identifier: BSD-3-Clause
"""Run the tests on each Python that is installed, and with each minor release of cuda-core.

    python tests/matrix.py

Needs uv and a package index, and takes about 15 minutes on two cores. Each Python runs the tests
with the newest packages, 3.10 also with the lowest that requirements.txt allows, and the last
Python with each cuda-core. Releases that the sample does not accept are tried too: it must say so.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests" / "requirements.txt"
CUDA_CORES = ["0.7.*", "1.0.*", "1.1.*", "1.2.*"]
# What the sample says of releases that it does not accept.
REFUSED = {
    "cuda-core==0.6.0": "cuda-core is of version 0.6.0; cuda-core>=0.7.0 is needed",
    "cuda-bindings==12.9.*": "cuda-python is of version 12.9",
    "cupy-cuda12x": "cupy-cuda12x is installed, for another CUDA",
}
RESOLVE_FOR = ["3.14"]  # where it is not installed


def uv(*arguments: object) -> str:
    """Run uv, which is to see all of pyenv's Pythons and to download none."""
    environment = os.environ | {"UV_PYTHON_DOWNLOADS": "never"}
    if shutil.which("pyenv"):
        listed = subprocess.run(["pyenv", "versions", "--bare"], capture_output=True, text=True)
        environment["PYENV_VERSION"] = ":".join(listed.stdout.split())
    process = subprocess.run(
        ["uv", *map(str, arguments)], env=environment, capture_output=True, text=True
    )
    if process.returncode != 0:
        sys.exit(f"uv {' '.join(map(str, arguments))} failed:\n{process.stderr}")
    return process.stdout


def pythons() -> dict[str, str]:
    """Return the path of one interpreter for each minor version from 3.10 on, the oldest first."""
    found = {}
    listed = uv("python", "list", "--only-installed", "--output-format", "json", ">=3.10")
    for entry in json.loads(listed):
        parts = entry["version_parts"]
        found.setdefault((parts["major"], parts["minor"]), entry["path"])
    return {f"{major}.{minor}": found[major, minor] for major, minor in sorted(found)}


def make_environment(folder: Path, python: str, *install: object) -> Path:
    """Make a virtual environment with these packages, and return its Python."""
    uv("venv", "--python", python, folder)
    executable = folder / "bin" / "python"
    uv("pip", "install", "--python", executable, *install)
    return executable


def tests_pass(name: str, python: str, *install: object) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        executable = make_environment(Path(folder, "venv"), python, "-r", TESTS, *install)
        process = subprocess.run(
            [executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", ROOT],
            capture_output=True,
            text=True,
        )
    print(f"{name:44} {process.stdout.rstrip().rpartition(chr(10))[2]}", flush=True)
    if process.returncode != 0:
        print(process.stdout)
    return process.returncode == 0


def refuses(requirement: str, message: str, python: str) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        executable = make_environment(Path(folder, "venv"), python, "-r", TESTS)
        # Without its needs, which contradict those of the others.
        uv("pip", "install", "--python", executable, "--no-deps", requirement)
        command = [executable, ROOT / "tmaTensorMap.py"]
        process = subprocess.run(command, capture_output=True, text=True)
    told = process.returncode == 1 and process.stderr.count("\n") == 1 and message in process.stderr
    print(f"{requirement:44} {'refused' if told else process}", flush=True)
    return told


def main() -> int:
    if len(sys.argv) > 1:
        print(__doc__)
        return 0 if sys.argv[1] in ("-h", "--help") else 2
    if not shutil.which("uv"):
        sys.exit("matrix.py: error: uv is not installed: python -m pip install uv")
    found = pythons()
    last = list(found)[-1]
    results = [tests_pass(f"Python {v}, newest packages", path) for v, path in found.items()]
    if "3.10" in found:
        lowest = ("--resolution", "lowest-direct")
        results.append(tests_pass("Python 3.10, lowest packages", found["3.10"], *lowest))
    else:
        print("Python 3.10 is not installed, so the lowest packages are not tried")
    for release in CUDA_CORES:
        name = f"Python {last}, cuda-core {release}"
        results.append(tests_pass(name, found[last], f"cuda-core=={release}"))
    results += [refuses(each, message, found[last]) for each, message in REFUSED.items()]
    for version in RESOLVE_FOR:
        if version not in found:
            uv("pip", "compile", "--python-version", version, ROOT / "requirements.txt")
            print(f"{f'Python {version}':44} the packages resolve")
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
