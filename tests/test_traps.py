# SPDX-FileCopyrightText: The tmaTensorMap contributors
# SPDX-License-Identifier: BSD-3-Clause
"""The pitfalls that README.md names are real. A test that fails says which one to mend there."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator

import pytest
from conftest import JAX_STREAM, MISALIGNED_COORDINATE, ROOT, WRONG_BYTE_COUNT, run

import tmaTensorMap as sample

TILE = sample.TILE_ELEMENTS

SWAPS_THE_POINTER = pytest.mark.pitfall("`replace_address()` swaps the pointer and nothing else.")
STRIDED_ROWS = pytest.mark.pitfall(
    "A view strided in its last dimension is encoded as if it were contiguous."
)
BARE_ERROR = pytest.mark.pitfall("`CUDA_ERROR_INVALID_VALUE` names no cause.")
CLEAR_ERROR = pytest.mark.pitfall("Other limits raise a `ValueError` that names them.")
GRAPH = pytest.mark.pitfall("A captured CUDA graph keeps the descriptor it was captured with.")
ENDS_AT_2_31 = pytest.mark.pitfall("A 1-D tensor map ends at 2^31 elements.")
SAME_VALUES = pytest.mark.pitfall("Test data that repeats hides misplaced tiles.")
NO_CUDA_H = pytest.mark.pitfall("NVRTC cannot include `<cuda.h>`.")
PTX_NEEDS_DRIVER = pytest.mark.pitfall('`Program.compile("ptx")` needs a driver.')


class Gpu:
    """The current GPU, a stream on it for CuPy and cuda.core, and the sample's kernel."""

    def __init__(self) -> None:
        import cupy
        from cuda.core import Device, Stream

        device = Device(0)
        device.set_current()
        self.cupy_stream = cupy.cuda.Stream(non_blocking=True)
        self.stream = Stream.from_handle(self.cupy_stream.ptr)
        self.arch = f"sm_{device.arch}"
        self.kernel = sample.compile_kernel(self.arch).get_kernel("tma_copy")

    def copy(self, tensor_map: object, elements: int) -> object:
        """Return the first `elements` of what the kernel reads through a descriptor."""
        import cupy

        output = cupy.zeros(elements, cupy.float32)
        sample.launch_copy(self.stream, self.kernel, tensor_map, output)
        return output


@pytest.fixture(scope="module")
def shared_gpu() -> Gpu:
    return Gpu()


@pytest.fixture
def gpu(shared_gpu: Gpu) -> Iterator[Gpu]:
    with shared_gpu.cupy_stream:
        yield shared_gpu
        shared_gpu.cupy_stream.synchronize()


def view_of(tensor: object) -> object:
    from cuda.core.utils import StridedMemoryView

    return StridedMemoryView.from_any_interface(tensor, stream_ptr=-1)


@SWAPS_THE_POINTER
@pytest.mark.gpu
@pytest.mark.parametrize("shape", ["shorter", "wider rows", "int32", "strided"])
def test_replace_address_takes_any_tensor(gpu: Gpu, shape: str) -> None:
    """All lie in one allocation, of which the kernel reads what the first tensor's shape says."""
    import cupy

    memory = cupy.arange(8192, dtype=cupy.float32)
    tensor_map = sample.build_tensor_map(memory[:2048])
    other = {
        "shorter": memory[4096 : 4096 + TILE],
        "wider rows": memory[4096:8192].reshape(-1, 256),
        "int32": memory.view(cupy.int32)[4096 : 4096 + 2048],
        "strided": memory[4096::2],
    }[shape]
    tensor_map.replace_address(other)
    assert cupy.array_equal(gpu.copy(tensor_map, 2048), memory[4096 : 4096 + 2048])


@SWAPS_THE_POINTER
@pytest.mark.gpu
def test_replace_address_checks_the_alignment(gpu: Gpu) -> None:
    import cupy

    memory = cupy.zeros(4096, cupy.float32)
    tensor_map = sample.build_tensor_map(memory[:1024])
    with pytest.raises(ValueError, match="16"):
        tensor_map.replace_address(memory[1025:2049])


@STRIDED_ROWS
@pytest.mark.gpu
def test_strided_1d_view(gpu: Gpu) -> None:
    import copyBandwidth
    import cupy

    bind = copyBandwidth.bind_textbook(gpu.stream, gpu.arch)  # its tensor map is 1-D
    memory = cupy.arange(2048, dtype=cupy.float32)
    output = cupy.zeros(1024, cupy.float32)
    bind(memory[::2], output)()
    assert cupy.array_equal(output, memory[:1024])
    assert not cupy.array_equal(output, memory[::2])


@STRIDED_ROWS
@pytest.mark.gpu
def test_strided_2d_view(gpu: Gpu) -> None:
    import cupy

    memory = cupy.arange(64 * 256, dtype=cupy.float32).reshape(64, 256)
    # A stride between the rows is taken as it is: TMA has one for each dimension but the last.
    for view, copied in (
        (memory[::2, :128], memory[::2, :128]),
        (memory[:, ::2], memory[:, :128]),
    ):
        tensor_map = view_of(view).as_tensor_map(box_dim=(sample.TILES_PER_BOX, TILE))
        output = gpu.copy(tensor_map, view.size).reshape(view.shape)
        assert cupy.array_equal(output, copied)
    assert not cupy.array_equal(output, memory[:, ::2])


def zeros(*shape: int, dtype: str = "float32") -> object:
    import cupy

    return cupy.zeros(shape, dtype)


@BARE_ERROR
@pytest.mark.gpu
@pytest.mark.parametrize(
    ("tensor", "box"),
    [
        (lambda: zeros(256, 128).T, (4, 128)),  # transposed
        (lambda: zeros(256, 128)[::-1], (4, 128)),  # negative stride
        (lambda: zeros(256, 130)[:, :128], (4, 128)),  # rows 520 bytes apart
        (lambda: zeros(256, 130), (4, 130)),  # likewise, contiguous
        (lambda: zeros(256, 128), (4, 3)),  # a box with rows of 12 bytes
        (lambda: zeros(0, 128), (4, 128)),  # empty
    ],
    ids=["transposed", "negative stride", "row pitch", "row length", "box rows", "empty"],
)
def test_refused_without_a_cause(
    gpu: Gpu, tensor: Callable[[], object], box: tuple[int, int]
) -> None:
    with pytest.raises(Exception, match="CUDA_ERROR_INVALID_VALUE") as raised:
        view_of(tensor()).as_tensor_map(box_dim=box)
    assert type(raised.value).__name__ == "CUDAError"


@BARE_ERROR
@pytest.mark.gpu
def test_rows_of_a_swizzled_box(gpu: Gpu) -> None:
    """They are at most as long as the swizzle. The tensor is bfloat16, held as 16-bit integers."""
    from cuda.core._tensor_map import TensorMapDataType, TensorMapSwizzle

    options = {
        "data_type": TensorMapDataType.BFLOAT16,
        "swizzle": TensorMapSwizzle.SWIZZLE_128B,
    }
    view = view_of(zeros(256, 128, dtype="uint16"))
    assert view.as_tensor_map(box_dim=(4, 64), **options)
    with pytest.raises(Exception, match="CUDA_ERROR_INVALID_VALUE"):
        view.as_tensor_map(box_dim=(4, 128), **options)


@CLEAR_ERROR
@pytest.mark.gpu
@pytest.mark.parametrize(
    ("tensor", "box"),
    [
        (lambda: zeros(256, 512), (4, 257)),
        (lambda: zeros(256, 128), (0, 128)),
        (lambda: zeros(256, 128), (128,)),  # wrong rank
        (lambda: zeros(256, 128, dtype="bool"), (4, 128)),
        (lambda: zeros(256, 128, dtype="int8"), (4, 128)),
        (lambda: zeros(256, 128, dtype="complex64"), (4, 128)),
        (lambda: zeros(256 * 128 + 4)[1:-3].reshape(256, 128), (4, 128)),  # misaligned base
    ],
    ids=["box over 256", "box of 0", "rank", "bool", "int8", "complex", "base"],
)
def test_refused_with_a_clear_error(
    gpu: Gpu, tensor: Callable[[], object], box: tuple[int, ...]
) -> None:
    with pytest.raises(ValueError):
        view_of(tensor()).as_tensor_map(box_dim=box)


TWO_LOADS = r"""
#include <cuda/barrier>
#include <cuda/ptx>

namespace ptx = cuda::ptx;
struct alignas(128) TensorMap { unsigned char bytes[128]; };
#pragma nv_diag_suppress static_var_with_dynamic_init

extern "C" __global__ void tma_copy(const __grid_constant__ TensorMap tensor_map, float* output)
{
    __shared__ alignas(128) float boxes[2][TILES_PER_BOX * TILE_ELEMENTS];
    __shared__ cuda::barrier<cuda::thread_scope_block> barrier;
    const int coordinates[2] = {0, 0};
    const auto load = [&](float* box) {
        ptx::cp_async_bulk_tensor(ptx::space_shared, ptx::space_global, box, &tensor_map,
                                  coordinates, cuda::device::barrier_native_handle(barrier));
    };
    boxes[1][threadIdx.x] = 0;
    ptx::fence_proxy_async(ptx::space_shared);
    if (threadIdx.x == 0) {
        init(&barrier, 1);
        ptx::fence_mbarrier_init(ptx::sem_release, ptx::scope_cluster);
        (void)cuda::device::barrier_arrive_tx(barrier, 1, sizeof(boxes[0]));
        load(boxes[0]);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        for (const long long begin = clock64(); clock64() - begin < 1000000;) {}
        load(boxes[1]);
    }
    barrier.wait_parity(false);
    output[threadIdx.x] = boxes[1][threadIdx.x];
    if (threadIdx.x == 0) {  // the block may not end before the second box has landed
        (void)cuda::device::barrier_arrive_tx(barrier, 1, sizeof(boxes[1]));
        barrier.wait_parity(true);
    }
}
"""


@pytest.mark.pitfall(WRONG_BYTE_COUNT)
@pytest.mark.gpu
def test_too_few_bytes_open_the_barrier_early(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two loads complete on a barrier that is told the bytes of one; the second comes late."""
    import cupy
    from cuda.core import LaunchConfig, launch

    monkeypatch.setattr(sample, "KERNEL_SOURCE", TWO_LOADS)
    kernel = sample.compile_kernel(gpu.arch).get_kernel("tma_copy")
    tensor = cupy.ones((sample.TILES_PER_BOX, TILE), cupy.float32)
    output = cupy.full(TILE, 2, cupy.float32)
    config = LaunchConfig(grid=1, block=TILE)
    launch(gpu.stream, config, kernel, sample.build_tensor_map(tensor), output.data.ptr)
    # Not looked at: the first warp, which may have waited for its thread that loads.
    assert output.tolist()[32:] == [0] * (TILE - 32)


@GRAPH
@pytest.mark.gpu
def test_graph_keeps_the_old_descriptor(gpu: Gpu) -> None:
    import cupy

    first, second = cupy.arange(1024, dtype=cupy.float32), cupy.full(1024, 7, cupy.float32)
    output = cupy.zeros(1024, cupy.float32)
    tensor_map = sample.build_tensor_map(first)
    gpu.cupy_stream.begin_capture()
    sample.launch_copy(gpu.stream, gpu.kernel, tensor_map, output)
    graph = gpu.cupy_stream.end_capture()
    tensor_map.replace_address(second)
    graph.launch(gpu.cupy_stream)
    assert cupy.array_equal(output, first)
    assert cupy.array_equal(gpu.copy(tensor_map, 1024), second)


@GRAPH
@pytest.mark.gpu
def test_replace_address_right_after_a_launch(gpu: Gpu) -> None:
    """The launch has copied the descriptor, also while it still waits for its turn."""
    import cupy

    first, second = cupy.arange(1024, dtype=cupy.float32), cupy.full(1024, 7, cupy.float32)
    busy = cupy.zeros(2**28, cupy.uint8)
    for _ in range(50):
        output = cupy.zeros(1024, cupy.float32)
        tensor_map = sample.build_tensor_map(first)
        busy += 1  # the launch is queued behind this
        sample.launch_copy(gpu.stream, gpu.kernel, tensor_map, output)
        tensor_map.replace_address(second)
        assert cupy.array_equal(output, first)


@ENDS_AT_2_31
@pytest.mark.gpu
@pytest.mark.parametrize("elements", [2**31, 2**31 + TILE])
def test_1d_tensor_map_ends(elements: int) -> None:
    """The next tile's coordinate does not fit into 32 bits, and the kernel faults.

    test_gpu.py runs the sample, whose tensor map is 2-D, beyond 2^32 elements.
    """
    code = f"""
import sys
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "benchmarks")!r}]
import copyBandwidth, cupy
from cuda.core import Device, Stream
device = Device(0)
device.set_current()
with cupy.cuda.Stream(non_blocking=True) as cupy_stream:
    stream = Stream.from_handle(cupy_stream.ptr)
    source, output = cupy.ones({elements}, "float32"), cupy.zeros({elements}, "float32")
    copyBandwidth.bind_textbook(stream, f"sm_{{device.arch}}")(source, output)()
    print(output[-{TILE}:].get().sum())
"""
    process = run([sys.executable, "-c", code])
    if elements == 2**31:
        assert process.stdout == f"{float(TILE)}\n", process
    else:
        assert process.returncode != 0, process
        assert "IllegalInstruction" in process.stderr, process


@SAME_VALUES
def test_float32_counts_to_2_24() -> None:
    import numpy

    below = numpy.arange(2**24 - 128, 2**24, dtype=numpy.float32)
    above = numpy.arange(2**24, 2**24 + 256, dtype=numpy.float32)
    assert numpy.unique(below).size == 128
    assert numpy.unique(above).size < 256


@NO_CUDA_H
def test_nvrtc_cannot_include_cuda_h(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample, "KERNEL_SOURCE", "#include <cuda.h>\n" + sample.KERNEL_SOURCE)
    with pytest.raises(sample.utils.SampleError, match=r"cannot open source file .stdlib\.h"):
        sample.compile_kernel("sm_90")


@PTX_NEEDS_DRIVER
@pytest.mark.no_driver
def test_compiling_to_ptx_asks_the_driver() -> None:
    from cuda.core import Program, ProgramOptions

    program = Program("__global__ void nothing() {}", "c++", ProgramOptions(arch="sm_90"))
    assert program.compile("cubin").code
    with pytest.raises(RuntimeError):
        program.compile("ptx")


def test_pitfalls_are_tested(pytestconfig: pytest.Config) -> None:
    """README.md names no pitfall that no test shows, and the other way round."""
    readme = (pytestconfig.rootpath / "README.md").read_text(encoding="utf-8")
    section = readme.split("\n## Pitfalls\n")[1].split("\n## ")[0]
    named = set(re.findall(r"^- \*\*(.+?)\*\*", section, re.MULTILINE))
    shown = {
        mark.args[0]
        for mark in globals().values()
        if isinstance(mark, pytest.MarkDecorator) and mark.name == "pitfall"
    }
    assert named == shown | {WRONG_BYTE_COUNT, MISALIGNED_COORDINATE, JAX_STREAM}
