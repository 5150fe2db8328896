"""The workspace of convolutions on a GPU's executor, against what an H100 was asked for.

Bytes of all temporary requests of one operation, read off the allocator's events of TensorFlow's
profiler on an H100 with cuDNN 9.14 (2026-11-26), in plain steps of `benchmarks.measured`: a U-Net
of 32 images, ResNet-50 of 128.
"""

from __future__ import annotations

import math

import pytest

from tfckpt.cost.build import cost_of
from tfckpt.cost.kernel_copies import convolution_workspace
from tfckpt.ir.graph import BACKWARD, FORWARD, Graph, Op, Tensor
from tfckpt.ir.target import CPU, CUDNN, GPU, Target

FIRST, LAST = b"NCHW", b"NHWC"
FORWARDS, OF_INPUT, OF_KERNEL = "Conv2D", "Conv2DBackpropInput", "Conv2DBackpropFilter"


def tensor(shape, dtype="float32"):
    return Tensor(dtype, shape, math.prod(shape) * (4 if dtype == "float32" else 2))


def convolution(kind, images, kernel, results, layout=FIRST, dtype="float32"):
    """Return a graph whose last op is a convolution between these images, or one of its gradients.
    """
    x, k, y = (tensor(shape, dtype) for shape in (images, kernel, results))
    sizes = Tensor("int32", (4,), 16)
    reads, made = {FORWARDS: ((x, k), y), "_FusedConv2D": ((x, k), y),
                   "DepthwiseConv2dNative": ((x, k), y),
                   OF_INPUT: ((sizes, k, y), x), OF_KERNEL: ((x, sizes, y), k)}[kind]
    given = tuple(Op(f"given{i}", "Sub", (), (), (t,), FORWARD, False)
                  for i, t in enumerate(reads))
    attrs = {} if kind.startswith("Depthwise") else {"data_format": layout}
    last = Op("convolution", kind, tuple((i, 0) for i in range(len(given))), (), (made,), BACKWARD,
              False, attrs=attrs)
    return Graph("step", (*given, last), ((len(given), 0),), ())


@pytest.mark.parametrize("kind, images, kernel, results, asked", [
    ("_FusedConv2D", (32, 64, 128, 128), (3, 3, 64, 32), (32, 32, 128, 128), 201_474_195),
    (OF_KERNEL, (32, 64, 128, 128), (3, 3, 64, 32), (32, 32, 128, 128), 203_539_111),
    (OF_INPUT, (32, 64, 128, 128), (3, 3, 64, 32), (32, 32, 128, 128), 335_691_923),
    (OF_INPUT, (32, 32, 64, 64), (3, 3, 32, 64), (32, 64, 64, 64), 67_330_000),
    (OF_INPUT, (32, 32, 128, 128), (1, 1, 32, 4), (32, 4, 128, 128), 67_100_000),
    (FORWARDS, (128, 512, 6, 6), (1, 1, 512, 1024), (128, 1024, 6, 6), 100_000),
    (OF_INPUT, (128, 256, 24, 24), (1, 1, 256, 64), (128, 64, 24, 24), 75_600_000),
    (FORWARDS, (128, 512, 12, 12), (1, 1, 512, 1024), (128, 1024, 6, 6), 58_700_000),
    (OF_INPUT, (128, 512, 12, 12), (1, 1, 512, 1024), (128, 1024, 6, 6), 96_500_000),
])
def test_it_is_what_an_h100_was_asked_for(kind, images, kernel, results, asked):
    graph = convolution(kind, images, kernel, results)
    found = convolution_workspace(graph, graph.ops[-1], CUDNN)
    assert 0.98 * asked <= found <= 1.07 * asked + 4 * math.prod(kernel)


@pytest.mark.parametrize("kind, images, kernel, results, asked", [
    (FORWARDS, (32, 32, 64, 64), (3, 3, 32, 64), (32, 64, 64, 64), 16_900_000),  # what it reads
    ("_FusedConv2D", (32, 3, 128, 128), (3, 3, 3, 32), (32, 32, 128, 128), 0)])
def test_or_more_for_a_kernel_that_writes_channels_first(kind, images, kernel, results, asked):
    graph = convolution(kind, images, kernel, results)
    found = convolution_workspace(graph, graph.ops[-1], CUDNN)
    assert found == 4 * sum(map(math.prod, (images, kernel, results))) > asked


@pytest.mark.parametrize("layout, dtype, kind, copied", [
    (LAST, "float16", FORWARDS, False), (LAST, "bfloat16", FORWARDS, False),
    (FIRST, "bfloat16", FORWARDS, True), (LAST, "float32", FORWARDS, True),
    (LAST, "bfloat16", OF_KERNEL, True), (LAST, "float16", OF_INPUT, True)])
def test_half_precision_with_channels_last_is_copied_for_gradients_alone(
        layout, dtype, kind, copied):
    shapes = (32, 128, 128, 64), (3, 3, 64, 32), (32, 128, 128, 32)
    graph = convolution(kind, *shapes, layout, dtype)
    images = graph.ops[-1].outputs[0].bytes + graph.ops[0].outputs[0].bytes
    found = convolution_workspace(graph, graph.ops[-1], CUDNN)
    assert (found > images // 2) is copied


@pytest.mark.parametrize("kind, images, kernel, results, asked", [
    (OF_KERNEL, (64, 56, 56, 64), (3, 3, 64, 64), (64, 56, 56, 64), 104_800_000),
    (OF_KERNEL, (64, 128, 128, 32), (3, 3, 32, 64), (64, 128, 128, 64), 405_900_000),
    (OF_KERNEL, (64, 56, 56, 64), (1, 1, 64, 256), (64, 56, 56, 256), 148_400_000),
    (OF_INPUT, (64, 56, 56, 64), (3, 3, 64, 64), (64, 56, 56, 64), 118_600_000),
    (OF_INPUT, (64, 128, 128, 32), (3, 3, 32, 64), (64, 128, 128, 64), 469_800_000),
    (OF_INPUT, (64, 56, 56, 64), (1, 1, 64, 256), (64, 56, 56, 256), 144_200_000)])
def test_half_precision_copies_up_to_twice_where_an_op_runs_alone(
        kind, images, kernel, results, asked):
    """In bfloat16, by `benchmarks.kernel_workspaces` on the H100; in a U-Net's step it is once."""
    graph = convolution(kind, images, kernel, results, LAST, "bfloat16")
    found = convolution_workspace(graph, graph.ops[-1], CUDNN)
    assert 0.49 * asked <= found <= 1.1 * asked


def test_it_is_priced_on_the_executor_of_a_gpu_alone():
    graph = convolution(FORWARDS, (8, 16, 64, 64), (3, 3, 16, 16), (8, 16, 64, 64))
    asked = [cost_of(graph, target).vertices[-1].workspace for target in (
        Target(device=GPU), Target(device=CPU), Target(device=GPU).compiled())]
    assert asked == [2 * 8 * 16 * 64 * 64 * 4 + 3 * 3 * 16 * 16 * 4, 0, 0]
    depthwise = convolution("DepthwiseConv2dNative", (8, 16, 64, 64), (3, 3, 16, 1),
                            (8, 16, 64, 64))
    assert cost_of(depthwise, Target(device=GPU)).vertices[-1].workspace == 0
