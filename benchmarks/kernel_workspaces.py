"""What kernels for images take beside their results on a GPU, against what tfckpt counts.

    python -m benchmarks.kernel_workspaces [--dtypes=float32,bfloat16]

For users with a GPU and TensorFlow alone; on a CPU the numbers say nothing. Each op runs by itself,
on images of the sizes that ResNet-50, MobileNetV2 and a U-Net have, in the layout that Grappler has
it run there: channels first in float32, channels last in half precision. `extra` is the median of
what TensorFlow's allocator counts above what an op starts with and its result; `counted` is what
`tfckpt.cost` adds for it.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator
from typing import Any

from absl import app, flags

from benchmarks.rows import head, line

FLAGS = flags.FLAGS
flags.DEFINE_list("dtypes", ["float32", "bfloat16", "float16"], "Dtypes of images.")
flags.DEFINE_integer("batch", 64, "Images.", lower_bound=1)
flags.DEFINE_integer("calls", 4, "Measured calls of each op, after two.", lower_bound=1)

MB = 1e6
CONVOLUTIONS = ((56, 64, 256, 1, 1), (56, 64, 64, 3, 1), (28, 128, 128, 3, 1), (56, 256, 128, 1, 2),
                (224, 3, 64, 7, 2), (7, 512, 512, 3, 1), (128, 32, 64, 3, 1), (112, 32, 32, 3, 2))
"""Pixels of a side, channels, filters, side of the kernel, stride."""
DEPTHWISE = ((56, 144, 3, 1), (112, 96, 3, 2))
"""Pixels of a side, channels, side of the kernel, stride."""
POOLS = ((112, 64, 3, 2), (128, 32, 2, 2))
"""Pixels of a side, channels, side of the window, stride."""

Case = tuple[str, Callable[..., Any], list[Any]]


def cases(dtype: str) -> Iterator[Case]:
    """Yield a name, a function that runs one op, and what it is called with."""
    import tensorflow as tf

    raw, first = tf.raw_ops, dtype == "float32"
    form = "NCHW" if first else "NHWC"

    def image(side: int, channels: int) -> Any:
        shape = (channels, side, side) if first else (side, side, channels)
        return tf.cast(tf.random.stateless_normal((FLAGS.batch, *shape), (1, 2)), dtype)

    def around(n: int) -> list[int]:
        return [1, 1, n, n] if first else [1, n, n, 1]

    def filters(*shape: int) -> Any:
        return tf.cast(tf.random.stateless_normal(shape, (3, 4)), dtype)

    for side, inner, outer, window, stride in CONVOLUTIONS:
        name = f"{side}x{side}x{inner} by {window}x{window}/{stride} to {outer}"
        x, dy = image(side, inner), image(-(-side // stride), outer)
        kernel = filters(window, window, inner, outer)
        how = {"strides": around(stride), "padding": "SAME", "data_format": form}
        yield from _three(name, "Conv2D", x, kernel, dy, how, raw.Conv2D,
                          raw.Conv2DBackpropInput, raw.Conv2DBackpropFilter)
    for side, channels, window, stride in DEPTHWISE:
        name = f"{side}x{side}x{channels} by {window}x{window}/{stride}"
        x, dy = image(side, channels), image(-(-side // stride), channels)
        how = {"strides": around(stride), "padding": "SAME", "data_format": form}
        yield from _three(name, "Depthwise", x, filters(window, window, channels, 1), dy, how,
                          raw.DepthwiseConv2dNative, raw.DepthwiseConv2dNativeBackpropInput,
                          raw.DepthwiseConv2dNativeBackpropFilter)
    for side, channels, window, stride in POOLS:
        name = f"{side}x{side}x{channels} by {window}x{window}/{stride}"
        how = {"ksize": around(window), "strides": around(stride), "padding": "SAME",
               "data_format": form}
        x, y = image(side, channels), image(-(-side // stride), channels)
        yield f"MaxPool {name}", lambda x, how=how: raw.MaxPool(input=x, **how), [x]
        yield f"MaxPoolGrad {name}", lambda x, y, dy, how=how: raw.MaxPoolGrad(
            orig_input=x, orig_output=y, grad=dy, **how), [x, y, y]
        yield f"AvgPool {name}", lambda x, how=how: raw.AvgPool(value=x, **how), [x]
        yield f"AvgPoolGrad {name}", lambda dy, how=how, shape=x.shape: raw.AvgPoolGrad(
            orig_input_shape=shape, grad=dy, **how), [y]


def _three(name: str, kind: str, x: Any, kernel: Any, dy: Any, how: dict[str, Any],
           forward: Callable, to_input: Callable, to_filter: Callable) -> Iterator[Case]:
    """Yield a convolution and its two gradients."""
    yield f"{kind} {name}", lambda x, k: forward(input=x, filter=k, **how), [x, kernel]
    yield f"{kind}BackpropInput {name}", lambda k, dy: to_input(
        input_sizes=x.shape, filter=k, out_backprop=dy, **how), [kernel, dy]
    yield f"{kind}BackpropFilter {name}", lambda x, dy: to_filter(
        input=x, filter_sizes=kernel.shape, out_backprop=dy, **how), [x, dy]


def row(dtype: str, case: Case) -> str:
    """Measure one op."""
    import tensorflow as tf

    from tfckpt.capture.tfgraph import capture
    from tfckpt.cost.kernel_copies import convolution_workspace
    from tfckpt.ir.target import CUDNN
    from tfckpt.verify.memory import default_device, peak_of_call

    name, run, read = case
    function, device = tf.function(run, autograph=False), default_device()
    found = capture(function.get_concrete_function(*read).graph)
    counted = sum(convolution_workspace(found, op, CUDNN) for op in found.ops)
    try:
        result = function(*read)
    except (tf.errors.OpError, ValueError) as error:
        return line([dtype, name, "", str(error).splitlines()[0][:60], "", ""])
    made = result.shape.num_elements() * result.dtype.size
    function(*read)
    peaks = [peak_of_call(function, read, {}, device) for _ in range(FLAGS.calls)]
    extra = statistics.median(peaks) - made
    sizes = [t.shape.num_elements() * t.dtype.size / MB for t in (*read, result)]
    return line([dtype, name, " ".join(f"{size:.1f}" for size in sizes), f"{extra / MB:.1f}",
                 f"{counted / MB:.1f}", f"{extra / counted:.2f}" if counted else "-"])


def main(_: list[str]) -> int:
    """Print the table, and what it was measured on."""
    import tensorflow as tf

    from benchmarks.measure import device_name

    print(f"{device_name('a CPU')}, TensorFlow {tf.__version__}, {FLAGS.batch} images\n")
    print(head(("dtype", "op", "read, made: MB", "extra MB", "counted MB", "extra / counted")))
    for dtype in FLAGS.dtypes:
        for case in cases(dtype):
            print(row(dtype, case), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(app.run(main))
