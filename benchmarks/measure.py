# SPDX-FileCopyrightText: The tmaTensorMap contributors
# SPDX-License-Identifier: BSD-3-Clause
"""Measure the sample's kernel, its calls on the host, and the recipes. Options are NVBench's."""

import functools
import signal
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "recipes"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import tmaTensorMap as sample  # first: it reports missing packages

# isort: split
import cupy
from cuda import core
from cuda.core.utils import StridedMemoryView
from gemm import matmul
from numpy import int32, uint32
from stencil import box_sum
from transpose import transpose

try:
    from cuda import bench
except ImportError as error:
    sample.utils.fail(f'{error}: pip install -r "{Path(__file__).with_name("requirements.txt")}"')

OURS, REFERENCE = "this sample", "cudaMemcpyAsync"
COPIES = [OURS, REFERENCE, "CuPy copyto", "torch copy_", "plain loads", "Triton TMA"]
COPIES += ["Gluon TMA 512", "Gluon TMA 256", "one tile per block"]
WITHOUT_TMA = Path(__file__).with_name("without_tma.cu").read_text()
FAILED = []


def register(name: str, bind: Callable, axes: dict[str, list[str]]) -> None:
    """Register a benchmark. bind(kernel, *sides) returns what starts it, and the right result."""

    def run(state: "bench.State") -> None:
        core.Device(state.get_device()).set_current()
        cupy.get_default_memory_pool().free_all_blocks()  # of the last state's stream
        kernel_name, size = (state.get_string(axis) for axis in axes)
        try:
            with cupy.cuda.Stream.from_external(state.get_stream()):
                start, expected = bind(kernel_name, *map(int, size.split("x")))
                if not (cupy.asarray(start()) == expected).all():
                    raise ValueError(f"{name}, {kernel_name}, {size}: the result is wrong")
                if name != "gemm":  # whose speed memory does not bound
                    state.add_global_memory_reads(expected.nbytes)
                    state.add_global_memory_writes(expected.nbytes)
                # A batch would measure how fast Python launches.
                state.exec(lambda launch: start(), batched=False)
        except (ImportError, cupy.cuda.memory.OutOfMemoryError) as error:
            state.skip(" ".join(str(error).split()))
        except Exception as error:  # NVBench prints it, and goes on with the next state
            FAILED.append(str(error))  # the error itself would keep arrays alive
            raise

    benchmark = bench.register(run).set_name(name)
    for axis, values in axes.items():
        benchmark.add_string_axis(axis, values)


@functools.cache
def kernel(name: str, source: str, tiles_per_box: int = sample.TILES_PER_BOX) -> core.Kernel:
    macros = sample.MACROS | {"TILES_PER_BOX": tiles_per_box}
    return sample.compile_kernel(f"sm_{core.Device().arch}", source, macros).get_kernel(name)


def launch(function: core.Kernel, grid: object, block: object, *arguments: object) -> None:
    config = core.LaunchConfig(grid=grid, block=block)
    core.launch(sample.utils.current_stream(), config, function, *arguments)


def torch_on_stream() -> object:
    """Return torch with CuPy's current stream as its own, which Triton uses too."""
    import torch

    torch.cuda.set_stream(torch.cuda.ExternalStream(cupy.cuda.get_current_stream().ptr))
    return torch


def bind_copy(name: str, source: cupy.ndarray, target: cupy.ndarray) -> Callable:
    if name == OURS:
        tma_copy, tensor_map = kernel("tma_copy", sample.KERNEL), sample.build_tensor_map(source)
        return lambda: sample.launch_copy(tma_copy, tensor_map, target)
    if name == "one tile per block":  # the sample's kernel: only the box is another
        tiles = source.reshape(-1, sample.TILE_ELEMENTS)
        view = StridedMemoryView.from_any_interface(tiles, stream_ptr=-1)
        arguments = view.as_tensor_map(box_dim=(1, sample.TILE_ELEMENTS)), target.data.ptr
        tma_copy, count = kernel("tma_copy", sample.KERNEL, 1), uint32(len(tiles))
        return lambda: launch(tma_copy, len(tiles), sample.CHUNKS_PER_TILE, *arguments, count)
    if name == "plain loads":  # as many threads as the sample has, as many bytes per thread
        plain, chunks = kernel("plain_copy", WITHOUT_TMA), source.size // sample.CHUNK_ELEMENTS
        grid, block = -(-chunks // sample.BLOCK_THREADS), sample.BLOCK_THREADS
        return lambda: launch(plain, grid, block, source.data.ptr, target.data.ptr, uint32(chunks))
    if name == REFERENCE:
        return lambda: target.data.copy_from_device_async(source.data, source.nbytes)
    if name == "CuPy copyto":
        return lambda: cupy.copyto(target, source)
    pair = [torch_on_stream().from_dlpack(array) for array in (source, target)]
    if name == "torch copy_":
        return lambda: pair[1].copy_(pair[0])
    import triton_copies

    return triton_copies.bind(name, *pair)


def copies(name: str, size: int) -> tuple:
    source, target = integers(1, size // 4, 2**20), integers(1, size // 4, 0)
    target.fill(0)
    start = bind_copy(name, source, target)
    return lambda: (start(), target)[1], source


@functools.lru_cache(2)  # where an array is in memory can matter: all kernels have the same
def integers(rows: int, columns: int, limit: int) -> cupy.ndarray:
    """Return hashed integers from -limit to limit."""
    hashed = cupy.arange(rows * columns, dtype=uint32) * uint32(2654435761)
    return (hashed % uint32(2 * limit + 1)).reshape(rows, columns).astype(cupy.float32) - limit


def stencils(name: str, rows: int, columns: int) -> tuple:
    if name == REFERENCE:
        return copies(name, 4 * rows * columns)
    x = integers(rows, columns, 2**20)  # whose sums are exact
    padded = cupy.pad(x, 1)
    sums = sum(padded[i : i + rows, j : j + columns] for i in range(3) for j in range(3))
    if name == OURS:
        return lambda: box_sum(x), sums
    output, side = cupy.empty_like(x), 4 if name == "registers" else 1
    function, grid = kernel(name, WITHOUT_TMA), (-(-columns // (32 * side)), -(-rows // (8 * side)))
    arguments = x.data.ptr, output.data.ptr, int32(rows), int32(columns)
    return lambda: launch(function, grid, (32, 8), *arguments) or output, sums


def transposes(name: str, rows: int, columns: int) -> tuple:
    if name == REFERENCE:
        return copies(name, 4 * rows * columns)
    x = integers(rows, columns, 2**20)
    if name == "torch":
        return torch_on_stream().from_dlpack(x).T.contiguous, x.T
    return lambda: transpose(x) if name == OURS else cupy.ascontiguousarray(x.T), x.T


def products(name: str, m: int, n: int, k: int) -> tuple:
    torch = torch_on_stream()
    torch.backends.cuda.matmul.allow_tf32 = False
    # The bfloat16 of a small integer is the upper half of its float32.
    a, b = (integers(side, k, 8).view(cupy.uint16)[:, 1::2].copy() for side in (m, n))
    x, y = (torch.from_dlpack(side.view(cupy.int16)).view(torch.bfloat16) for side in (a, b))
    # All sums stay below 2^24: float32 adds them exactly in any order.
    expected = cupy.asarray((x.float() @ y.float().T).to(torch.bfloat16).view(torch.int16))
    if name == OURS:
        return lambda: matmul(a, b).view(cupy.int16), expected
    return lambda: torch.matmul(x, y.T).view(torch.int16), expected


def calls() -> dict[str, Callable]:
    first, second, output = sample.allocate(1024)
    tensor_map, tma_copy = sample.build_tensor_map(first), kernel("tma_copy", sample.KERNEL)
    view = StridedMemoryView.from_any_interface(second, stream_ptr=-1)
    return {
        "build_tensor_map": lambda: sample.build_tensor_map(first),
        "replace_address(array)": lambda: tensor_map.replace_address(second),
        "replace_address(view)": lambda: tensor_map.replace_address(view),
        "launch_copy": lambda: sample.launch_copy(tma_copy, tensor_map, output),
    }


def host(state: "bench.State") -> None:
    call = calls()[state.get_string("Call")]
    # 100 times, since NVBench's call into Python takes time too.
    state.exec(lambda launch: [call() for _ in range(100)], batched=False)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if problem := sample.utils.gpu_problem():
        sample.utils.fail(problem)
    core.Device(0).set_current()
    sample.utils.require_tma(core.Device())
    register("copies", copies, {"Copy": COPIES, "Bytes": [str(2**n) for n in range(16, 33, 2)]})
    bench.register(host).set_is_cpu_only(True).add_string_axis("Call", list(calls()))
    names, shapes = [OURS, REFERENCE, "naive", "registers"], ["4096x4096", "16384x16384"]
    register("stencil", stencils, {"Kernel": names, "Shape": shapes})
    names, shapes = [OURS, REFERENCE, "CuPy", "torch"], ["8192x8192", "16384x16384", "8200x12004"]
    register("transpose", transposes, {"Kernel": names, "Shape": shapes})
    shapes = [*(f"{n}x{n}x{n}" for n in (4096, 8192, 16384)), "8000x8200x8072"]
    register("gemm", products, {"Kernel": [OURS, "torch"], "Shape": shapes})
    options = ["--stopping-criterion", "sample-count", "--target-samples", "4000", "--timeout", "1"]
    bench.run_all_benchmarks([Path(sys.argv[0]).name, *options, *sys.argv[1:]])
    sys.exit(1 if FAILED else 0)


if __name__ == "__main__":
    main()
