"""XLA's compiler for GPUs, as jaxlib has it: compiles for one that is described, and not here.

This file imports JAX and neither TensorFlow nor the rest of tfckpt, for the two do not belong in
one process: run as a program it answers the process that started it
(`tfckpt.verify.asking.elsewhere`).

    python gpu_compiler.py h100

It reads serialized HLO modules from its input and writes an HloProto, with the buffer assignment,
to its output for each: 8 bytes of length (little-endian, signed) and as many bytes. A negative
length is that of a text which says why there is none. The first that it writes is its greeting.

Private interfaces of jaxlib: there is no public way from HLO. Tried with 0.10.2.
"""

from __future__ import annotations

import os
import pathlib
import struct
import sys
import tempfile
from collections.abc import Sequence
from typing import Any, BinaryIO

_OPTIMIZED = "gpu_after_optimizations.hlo.pb"
LENGTH = struct.Struct("<q")

# What XLA asks of a GPU, from the published figures (bytes, bytes per second, GHz).
TARGETS = {"h100": """
gpu_device_info {
  cuda_compute_capability { major: 9 }
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
  threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  shared_memory_per_core: 233472 shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  l2_cache_size: 52428800 memory_bandwidth: 3352320000000 device_memory_size: 85899345920
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
runtime_version { major: 12 minor: 8 }
device_description_str: "NVIDIA H100 80GB"
"""}
WITHOUT_TRIALS = [("xla_gpu_autotune_level", 0), ("xla_gpu_enable_triton_gemm", False)]
"""Kernels cannot be tried out on what is not here."""


def stablehlo(module: bytes) -> Any:
    """Return a serialized HLO module as JAX hands modules to compilers.

    The copies in it are taken out: XLA for GPUs is a plugin and reads StableHLO only, which has
    none, and it makes those that it needs.

    Args:
      module: a serialized HloModuleProto.

    Returns:
      An `ir.Module` of StableHLO.
    """
    from jax.extend import mlir
    from jax.extend.mlir import ir
    from jax.interpreters.mlir import make_ir_context

    copies: list[ir.Operation] = []

    def note(op: ir.Operation) -> ir.WalkResult:
        if op.name == "mhlo.copy":
            copies.append(op)
        return ir.WalkResult.ADVANCE

    with make_ir_context():
        parsed = ir.Module.parse(mlir.hlo_to_stablehlo(module))
        parsed.operation.walk(note)
        for copy in copies:
            copy.results[0].replace_all_uses_with(copy.operands[0])
            copy.erase()
    return parsed


def described(target: str) -> Any:
    """Return a device that modules can be compiled for, without one.

    Args:
      target: a key of `TARGETS`.

    Returns:
      A device as JAX describes it.

    Raises:
      RuntimeError: JAX has no compiler for GPUs here.
    """
    import jax
    from jax.experimental import topologies

    jax.config.update("jax_platforms", "cpu")  # else the plugin wants to see a driver
    try:
        return topologies.get_topology_desc(platform="cuda", target_config=TARGETS[target],
                                            topology="1x1x1").devices[0]
    except (NotImplementedError, RuntimeError) as e:
        raise RuntimeError(f"it has no compiler of XLA's for GPUs, which jax[cuda12] brings: {e}"
                           ) from e


def executable(module: Any, device: Any, options: Sequence[tuple[str, Any]] = ()) -> Any:
    """Compile a StableHLO module for a device that `described` returned.

    Args:
      module: of StableHLO, as `stablehlo` returns it.
      device: to compile for; nothing of it is here.
      options: XLA's, beside `WITHOUT_TRIALS`.
    """
    from jaxlib import xla_client

    settings = xla_client.CompileOptions()
    settings.env_option_overrides = [*WITHOUT_TRIALS, *options]
    return device.client.compile(module, xla_client._xla.DeviceList((device,)), settings)


def answer(module: bytes, device: Any) -> bytes:
    """Return the HloProto of a compiled module.

    XLA writes it into a folder for this: what is compiled for a device that is not here has no
    buffer assignment to be asked for.

    Args:
      module: a serialized HloModuleProto.
      device: to compile for; nothing of it is here.

    Returns:
      The serialized HloProto, with the buffer assignment.

    Raises:
      RuntimeError: XLA wrote none.
    """
    with tempfile.TemporaryDirectory() as folder:
        executable(stablehlo(module), device, [("xla_dump_to", folder),
                                               ("xla_dump_hlo_as_proto", True)])
        for found in sorted(pathlib.Path(folder).glob(f"*{_OPTIMIZED}")):
            return found.read_bytes()
    raise RuntimeError(f"XLA wrote no file *{_OPTIMIZED}")


def read(stream: BinaryIO) -> bytes | None:
    """Return the next message of a stream; None at its end.

    Args:
      stream: open for reading bytes; read up to the end of the message.

    Raises:
      RuntimeError: the message says why there is no answer.
    """
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    length = LENGTH.unpack(head)[0]
    data = stream.read(abs(length))
    if length < 0:
        raise RuntimeError(data.decode(errors="replace"))
    return data


def write(stream: BinaryIO, data: bytes, failed: bool = False) -> None:
    """Write a message; of one that says what failed the length is negative.

    Args:
      stream: open for writing bytes; flushed.
      data: the message, without its length.
      failed: whether the message says why there is no answer.
    """
    stream.write(LENGTH.pack(-len(data) if failed else len(data)) + data)
    stream.flush()


def main(target: str) -> None:
    """Answer until nobody asks any more.

    Args:
      target: a key of `TARGETS`.
    """
    questions, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print must not get among the answers
    try:
        import jax

        jax.config.update("jax_enable_x64", True)  # seeds and counters are 64-bit integers
        device = described(target)
    except ImportError as error:
        write(answers, f"the interpreter to compile with has no JAX: {error}".encode(),
              failed=True)
        return
    except Exception as error:
        write(answers, _said(error), failed=True)
        return
    write(answers, b"ready")
    while (module := read(questions)) is not None:
        try:
            write(answers, answer(module, device))
        except Exception as error:
            write(answers, _said(error), failed=True)


def _said(error: Exception) -> bytes:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].encode()


if __name__ == "__main__":
    main(sys.argv[1])
