"""What kernels that want their operands in another order copy, on the executor.

`rearranged_bytes`: what Einsum takes besides its result.

`kernel_workspace`: what a convolution or a product takes. On a GPU, measured on an H100 with cuDNN
9.14, TensorFlow 2.21 and networks of float32, of all temporary requests of convolutions
(docs/limits.md): cuDNN's kernels want channels last. Where images lie in memory channels first,
what is read is copied for them, and what is written for some; TensorFlow copies images that lie
channels last, and has cuDNN copy them back. A convolution by single pixels is a product, and needs
no copies. The gradient of an input is always computed in memory of its own before it is written,
and kernels are rearranged. This is the most that was seen, up to a fifth of a kernel gradient's
copies; forward convolutions take between nothing and that. In half precision Grappler leaves
channels last: convolutions of the forward compute so, gradients on copies with channels first, also
those of single pixels. One op by itself takes up to twice that, as cuDNN chooses another kernel
(`python -m benchmarks.kernel_workspaces`).

On a CPU Eigen computes gradients of convolutions in float16 and float64 as products, and in other
types where oneDNN is switched off: it lays out the windows of as many images as have room in 30 MiB
with the operands, of the input's gradient those of one image where its product is large. It counts
images that a batch may not have. Products in float16, and in bfloat16 where oneDNN is switched off,
it computes in float32, of copies. Measured with TensorFlow 2.21: to the byte what its kernels ask
the allocator for (`tests/tf/test_cost.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from tfckpt.ir.graph import Graph, Op, Tensor
from tfckpt.ir.target import CUDNN, EIGEN, EIGEN_ALONE
from tfckpt.ops import record

_HALF = ("float16", "bfloat16")
_BY_EIGEN = {EIGEN: {"float16": 2, "float64": 8},
             EIGEN_ALONE: {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}}
"""Bytes of an element, of what Eigen computes."""
_WINDOWS, _LARGE = 30 << 20, 512 << 10
"""Bytes of the operands of Eigen's products, and from which one image's are a product by itself."""


def rearranged_bytes(graph: Graph, op: Op) -> int:
    """Return the bytes of the copies of operands and result that an op's kernel makes.

    Args:
      graph: the captured step.
      op: of any type; 0 bytes where it computes with its operands as they are.
    """
    copies = record(op.type).copies
    if copies is None:
        return 0
    shapes = (graph.ops[source].outputs[slot].shape for source, slot in op.inputs)
    operands, product = copies(op.attrs, [len(shape or ()) for shape in shapes])
    sources = [op.inputs[place] for place in operands if place < len(op.inputs)]
    return sum(graph.ops[source].outputs[slot].bytes or 0 for source, slot in sources) + (
        product * (op.outputs[0].bytes or 0))


def kernel_workspace(graph: Graph, op: Op, kernels_by: str) -> int:
    """Return the bytes that a convolution or a product takes besides its result while it runs.

    Args:
      graph: the captured step.
      op: of any type; 0 bytes where it is neither.
      kernels_by: whose kernels compute it (`Target.kernels_by`); 0 bytes where that is not known.
    """
    known = record(op.type)
    if not known.multiplies_matrices:
        return convolution_workspace(graph, op, kernels_by)
    kind = op.outputs[0].dtype
    if known.copies is not None or kind not in _HALF or kind not in _BY_EIGEN.get(kernels_by, {}):
        return 0
    operands = [graph.ops[source].outputs[slot] for source, slot in op.inputs[:2]]
    return 2 * sum(tensor.bytes or 0 for tensor in (*operands, op.outputs[0]))


def convolution_workspace(graph: Graph, op: Op, kernels_by: str) -> int:
    """Return the bytes that a convolution may take besides its result while it runs.

    Args:
      graph: the captured step.
      op: of any type; 0 bytes where it is no convolution.
      kernels_by: whose kernels compute it; as `kernel_workspace`.
    """
    known = record(op.type).convolves
    if known is None or not kernels_by:
        return 0

    def tensor(place: int | None) -> Tensor:
        if place is None:
            return op.outputs[0]
        source, slot = op.inputs[place]
        return graph.ops[source].outputs[slot]

    kernel, images = tensor(known.kernel), [tensor(place) for place in known.data]
    if kernel.shape is None or len(kernel.shape) < 3:
        return 0
    if kernels_by != CUDNN:
        size = _BY_EIGEN[kernels_by].get(op.outputs[0].dtype, 0)
        return 0 if known.data[1] is None else _windows(
            kernel, images, size, of_input=known.twice)
    last = op.attrs.get("data_format") in (b"NHWC", b"NDHWC")
    if last and op.outputs[0].dtype in _HALF:
        is_copied = known.data[1] is not None
    else:
        is_copied = not _by_pixels(kernel, images)
    moved = is_copied * sum(image.bytes or 0 for image in images)
    return moved + (kernel.bytes or 0) + known.twice * (op.outputs[0].bytes or 0)


def _windows(kernel: Tensor, images: Sequence[Tensor], size: int, of_input: bool) -> int:
    """Return the bytes of the windows that Eigen lays out for a gradient of a convolution.

    Args:
      kernel: its shape is height, width, channels of the input and of the output.
      images: the input and the output.
      size: bytes of an element; 0 where oneDNN computes it.
      of_input: whether it is the gradient of the input.
    """
    shape = images[1].shape
    if not size or shape is None or None in shape or len(shape) != 4:
        return 0
    *window, inner, outer = (d or 1 for d in kernel.shape or ())
    pixels, filters = (shape[1] or 1) * (shape[2] or 1), math.prod(window) * inner
    together = pixels * filters + pixels * outer + filters * outer
    alone = of_input and (shape[0] == 1 or together * size >= _LARGE)
    return size * pixels * filters * (1 if alone else -(-(_WINDOWS // size) // together))


def _by_pixels(kernel: Tensor, images: list[Tensor]) -> bool:
    """Return whether each pixel is computed of one, in the same place."""
    *window, inner, outer = kernel.shape or ()
    pixels = {math.prod(d or 1 for d in image.shape or ()) / (channels or 1)
              for image, channels in zip(images, (inner, outer), strict=True)}
    return all(d == 1 for d in window) and len(pixels) == 1
