"""The memory of JAX's own recomputation: `jax.checkpoint` on the networks, compiled for an H100.

    KERAS_BACKEND=jax JAX_PLATFORMS=cpu python -m benchmarks.xla_peers
        [--networks=decoder,unet] [--precision=mixed_bfloat16] [--json=FILE] [--check]

The peer of `benchmarks.xla_budgets`: the same networks and the same training step, in Keras with
JAX, plain and with `jax.checkpoint` around each `Block` or around the forward pass with its loss,
by policies that JAX brings. XLA's GPU compiler compiles for a GPU that is described, not present,
as in `benchmarks.xla_gpu`, and nothing is run: `pip install 'jax[cuda12]' keras`, no driver and no
TensorFlow. Attention is Keras' own, as in TensorFlow, not cuDNN's.

A row for each variant: temporary bytes of XLA's buffer assignment, relative to the plain step,
matrix products and convolutions, also relative to the plain step, and the seconds of compiling.

With `--check` small networks are run instead, on JAX's own device, and the differences of losses,
gradients and the new state (statistics, seeds) from those of the plain step are printed.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import json
import pathlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jaxlib
import keras
import numpy as np
from jax.sharding import SingleDeviceSharding
from keras.src.backend.common.stateless_scope import get_stateless_scope

from benchmarks.networks import NETWORKS, Block, Network
from benchmarks.xla_gpu import WITHOUT_TRIALS, described, difference, heavy

SMALL: dict[str, dict[str, int]] = {  # for --check
    "decoder": {"batch": 2, "length": 16, "width": 32, "depth": 2, "vocabulary": 64},
    "encoder": {"batch": 2, "length": 16, "width": 32, "depth": 2},
    "wavenet": {"batch": 2, "length": 64, "filters": 8, "depth": 3},
    "mbconv": {"batch": 4, "side": 8, "channels": 8, "depth": 2},
    "convnext": {"batch": 2, "side": 8, "channels": 8, "depth": 2},
    "mixer": {"batch": 2, "patches": 16, "width": 16, "depth": 2},
    "unet": {"batch": 2, "side": 16, "filters": 8, "levels": 2},
    "lm_head": {"batch": 2, "length": 16, "width": 32, "depth": 2, "vocabulary": 64},
}


@dataclasses.dataclass(frozen=True)
class Variant:
    """How a step recomputes.

    Attributes:
      policy: name in `jax.checkpoint_policies` of what is kept, or none: nothing is recomputed.
      blocks: whether each `Block` is recomputed by itself, else forward pass and loss as a whole.
    """

    policy: str | None = None
    blocks: bool = False

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function under `jax.checkpoint`."""
        return jax.checkpoint(function, policy=getattr(jax.checkpoint_policies, str(self.policy)))


_POLICIES = {"nothing": "nothing_saveable", "dots": "dots_saveable",
             "dots_no_batch": "dots_with_no_batch_dims_saveable"}
VARIANTS = {
    "plain": Variant(),
    **{f"blocks_{name}": Variant(policy, blocks=True) for name, policy in _POLICIES.items()},
    **{f"model_{name}": Variant(policy) for name, policy in _POLICIES.items()},
}


def made(name: str, precision: str, **sizes: int) -> Network:
    """Return a fresh network of a precision."""
    keras.backend.clear_session()  # which forgets settings, too
    keras.mixed_precision.set_dtype_policy(precision)
    keras.config.disable_flash_attention()
    network = NETWORKS[name](**sizes)
    assert network.model.layers[-1].dtype_policy.name == precision
    return network


def checkpointed(block: Block, variant: Variant) -> Callable[..., Any]:
    """Return `call` of a block that is recomputed.

    Whatever `jax.checkpoint` traces must have its state passed in and out: what statistics and
    seeds are assigned inside may not outlive the trace. So variables are arguments, new values
    are results, and these are assigned outside.
    """
    call = type(block).call

    def call_recomputed(x: Any, training: bool | None = None) -> Any:
        variables = [*block.trainable_variables, *block.non_trainable_variables]
        changing = block.non_trainable_variables

        def pure(values: list[Any], x: Any) -> tuple[Any, list[Any]]:
            with keras.StatelessScope(zip(variables, values, strict=True)) as inside:
                result = call(block, x, training)
            return result, [inside.get_current_value(variable) for variable in changing]

        outside = get_stateless_scope()  # `variable.value` would be cast to the compute dtype
        values = [outside.get_current_value(variable) for variable in variables]
        result, changed = variant.around(pure)(values, x)
        for variable, value in zip(changing, changed, strict=True):
            variable.assign(value)
        return result

    return call_recomputed


@contextlib.contextmanager
def recomputed_blocks(model: Any, variant: Variant) -> Iterator[None]:
    """Have the blocks of a model recomputed where a variant says so."""
    blocks = [layer for layer in model.layers if isinstance(layer, Block) and variant.blocks]
    assert blocks or not variant.blocks
    for block in blocks:
        block.call = checkpointed(block, variant)
    try:
        yield
    finally:
        for block in blocks:
            del block.call


def gradients_of(model: Any, variant: Variant) -> Callable[..., Any]:
    """Return a function of variables and batch: loss, new state and gradients."""
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def forward(trained: list[Any], others: list[Any], x: Any, y: Any) -> tuple[Any, Any]:
        logits, others = model.stateless_call(trained, others, x, training=True)
        return loss(y, logits), others

    if variant.policy and not variant.blocks:
        forward = variant.around(forward)
    return jax.value_and_grad(forward, has_aux=True)


def step_of(model: Any, optimizer: Any, variant: Variant) -> Any:
    """Return a training step with Adam, jitted; old state is given up for the new."""
    gradients = gradients_of(model, variant)

    def step(state: Any, x: Any, y: Any) -> tuple[Any, Any]:
        trained, others, slots = state
        (value, others), slopes = gradients(trained, others, x, y)
        trained, slots = optimizer.stateless_apply(slots, slopes, trained)
        return (trained, others, slots), value

    return jax.jit(step, donate_argnums=0)


def shapes(values: Any, device: Any) -> Any:
    """Return shapes and dtypes in place of variables, as arguments on a device."""
    sharding = SingleDeviceSharding(device)
    return [jax.ShapeDtypeStruct(each.shape, each.dtype, sharding=sharding) for each in values]


@dataclasses.dataclass(frozen=True)
class Row:
    """The measures of a compiled step."""

    temp_bytes: int
    heavy: int
    seconds: float


def compiled(network: Network, variant: Variant, device: Any) -> Row:
    """Compile the training step of a network for a device that `described` returned."""
    model, optimizer = network.model, keras.optimizers.Adam(1e-3)
    optimizer.build(model.trainable_variables)
    state = tuple(shapes(each, device) for each in (
        model.trainable_variables, model.non_trainable_variables, optimizer.variables))
    sharding = SingleDeviceSharding(device)
    batch = [jax.ShapeDtypeStruct(*each, sharding=sharding) for each in (network.x, network.y)]
    with recomputed_blocks(model, variant):
        lowered = step_of(model, optimizer, variant).lower(state, *batch)
    started = time.perf_counter()
    executable = lowered.compile(compiler_options=dict(WITHOUT_TRIALS))
    seconds = time.perf_counter() - started
    return Row(executable.memory_analysis().temp_size_in_bytes, heavy(executable.as_text()),
               seconds)


def check(name: str, precision: str) -> list[str]:
    """Return lines on how far the variants of a small network are from the plain step."""
    keras.utils.set_random_seed(0)
    network = made(name, precision, **SMALL[name])
    model, generator = network.model, np.random.default_rng(0)
    batch = [generator.integers(network.classes, size=shape, dtype=dtype) if dtype == "int32"
             else generator.normal(size=shape).astype(dtype)
             for shape, dtype in (network.x, network.y)]
    values = [[each.value for each in variables] for variables in (
        model.trainable_variables, model.non_trainable_variables)]
    lines, wanted = [], None
    for kind, variant in VARIANTS.items():
        with recomputed_blocks(model, variant):
            (loss, others), slopes = jax.jit(gradients_of(model, variant))(*values, *batch)
        found = [[loss], slopes, others]
        wanted = wanted or found
        cells = [f"{difference(a, b):.1e}" if a else "none"
                 for a, b in zip(wanted, found, strict=True)]
        lines.append(f"| {name} | {kind} | {float(loss):.6f} | " + " | ".join(cells) + " |")
    return lines


def line(name: str, kind: str, row: Row, plain: Row) -> str:
    """Return one line of the table."""
    return (f"| {name} | {kind} | {row.temp_bytes / 1e6:.1f} | "
            f"{row.temp_bytes / plain.temp_bytes:.3f} | {row.heavy} | "
            f"{100 * (row.heavy / plain.heavy - 1):+.0f} % | {row.seconds:.1f} |")


def head(*columns: str) -> None:
    """Print the head of a table."""
    print("| " + " | ".join(columns) + " |\n" + "| --- " * len(columns) + "|", flush=True)


def compile_all(names: list[str], precision: str, file: pathlib.Path | None) -> None:
    """Print the table of compiled steps, and write it to a file where one is named."""
    device = described("h100")
    print(f"compiled for {device.device_kind}, not run\n")
    head("network", "step", "temp MB", "of plain", "products and convolutions", "of plain",
         "compiling, s")
    found: dict[str, dict[str, dict[str, int]]] = {}
    for name in names:
        network = made(name, precision)
        rows: dict[str, Row] = {}
        for kind, variant in VARIANTS.items():
            rows[kind] = compiled(network, variant, device)
            print(line(name, kind, rows[kind], rows["plain"]), flush=True)
        found[name] = {kind: {"temp_bytes": row.temp_bytes, "heavy": row.heavy}
                       for kind, row in rows.items()}
        if file:
            file.write_text(json.dumps(found, indent=1), encoding="utf-8")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="jax.checkpoint, compiled for a described GPU.")
    parser.add_argument("--networks", default=",".join(NETWORKS), help="names, with commas between")
    parser.add_argument("--precision", default="float32", help="a policy of keras.mixed_precision")
    parser.add_argument("--json", type=pathlib.Path, help="a file for the numbers")
    parser.add_argument("--check", action="store_true", help="run small ones, compare the numbers")
    arguments = parser.parse_args()
    if keras.backend.backend() != "jax":
        parser.error("set KERAS_BACKEND=jax")
    print(f"{datetime.date.today()}: jax {jax.__version__}, jaxlib {jaxlib.__version__}, "
          f"Keras {keras.__version__}, {arguments.precision}")
    names = arguments.networks.split(",")
    if arguments.check:
        print()
        head("network", "step", "loss", "difference of losses", "of gradients", "of state")
        for name in names:
            print("\n".join(check(name, arguments.precision)), flush=True)
    else:
        compile_all(names, arguments.precision, arguments.json)


if __name__ == "__main__":
    main()
