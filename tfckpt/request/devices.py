"""GPUs that need not be there: presets from their makers' figures, and devices of one's own."""

from __future__ import annotations

import dataclasses
import re

from tfckpt.errors import PlanError
from tfckpt.ir.target import GPU, Rates, Target
from tfckpt.request.budget import parse_budget


@dataclasses.dataclass(frozen=True)
class Device:
    """A device to estimate for.

    Attributes:
      name: what it is called in results.
      memory_bytes: its memory.
      bandwidth: bytes per second between it and that memory.
      clock: Hz; the boost clock of a GPU.
      cores: lanes that finish one float32 multiply-add a cycle.
      reserved_bytes: of the memory, what TensorFlow leaves alone.
      kind: "GPU" or "CPU".
      source: where the figures are from.
      model: what XLA's compiler for GPUs calls it (`tfckpt.verify.asking.gpu_compiler`).
    """

    name: str
    memory_bytes: int
    bandwidth: float
    clock: float
    cores: int
    reserved_bytes: int = 0
    kind: str = GPU
    source: str = ""
    model: str = ""

    @property
    def flops_per_second(self) -> float:
        """Float32 operations per second; a multiply-add is two."""
        return 2 * self.cores * self.clock

    @property
    def usable_bytes(self) -> int:
        """Return what variables, inputs and a step's tensors may take together."""
        return self.memory_bytes - self.reserved_bytes

    def target(self, seconds: dict[str, float] | None = None) -> Target:
        """Return the device as the planner sees it.

        Args:
          seconds: by op name, what is known of this step.
        """
        return Target(Rates(self.flops_per_second, self.bandwidth, known=seconds or {}),
                      self.kind, model=self.model)


_MIB = 1 << 20
# What TensorFlow keeps back, by compute capability (7.x, 8.x, 9.x), says MinSystemMemory in its
# gpu_device.cc. The datasheets' gigabytes are taken as 10^9 bytes: some of what a device has
# beyond that goes to the driver, to CUDA's context and to libraries.
_VOLTA_TURING, _AMPERE_ADA, _HOPPER = 1050 * _MIB, 1536 * _MIB, 1800 * _MIB


def _gpu(name: str, gigabytes: int, gigabytes_per_second: float, megahertz: int, cores: int,
         reserved: int, source: str, model: str = "") -> Device:
    return Device(name, gigabytes * 10**9, gigabytes_per_second * 1e9, megahertz * 1e6, cores,
                  reserved, source=source, model=model)


PRESETS: tuple[Device, ...] = (
    _gpu("V100-16GB", 16, 900, 1530, 5120, _VOLTA_TURING,
         "NVIDIA V100 datasheet (SXM2); clock: Tesla V100 architecture whitepaper"),
    _gpu("V100-32GB", 32, 900, 1530, 5120, _VOLTA_TURING,
         "NVIDIA V100 datasheet (SXM2); clock: Tesla V100 architecture whitepaper"),
    _gpu("T4", 16, 300, 1590, 2560, _VOLTA_TURING,
         "NVIDIA T4 datasheet; clock: Tesla T4 product brief"),
    _gpu("A100-40GB", 40, 1555, 1410, 6912, _AMPERE_ADA,
         "NVIDIA A100 datasheet (SXM); clock, cores: A100 architecture whitepaper"),
    _gpu("A100-80GB", 80, 2039, 1410, 6912, _AMPERE_ADA,
         "NVIDIA A100 80GB datasheet (SXM); clock, cores: A100 architecture whitepaper"),
    _gpu("A10", 24, 600, 1695, 9216, _AMPERE_ADA,
         "NVIDIA A10 datasheet; clock, cores: A10 product brief"),
    _gpu("A10G", 24, 600, 1710, 10240, _AMPERE_ADA,
         "AWS EC2 G5 product page: 80 RT cores, one for each multiprocessor of 128 lanes; clock: "
         "what its 35 TFLOPS come to"),
    _gpu("RTX-3090", 24, 936, 1695, 10496, _AMPERE_ADA,
         "NVIDIA GeForce RTX 3090 specifications; bandwidth: Ampere GA102 whitepaper"),
    _gpu("L4", 24, 300, 2040, 7424, _AMPERE_ADA,
         "NVIDIA L4 datasheet; clock, cores: L4 product brief"),
    _gpu("L40S", 48, 864, 2520, 18176, _AMPERE_ADA,
         "NVIDIA L40S datasheet; clock: L40S product brief"),
    _gpu("RTX-4090", 24, 1008, 2520, 16384, _AMPERE_ADA,
         "NVIDIA GeForce RTX 4090 specifications; bandwidth: Ada architecture whitepaper"),
    _gpu("H100-80GB", 80, 3350, 1980, 16896, _HOPPER,
         "NVIDIA H100 datasheet (SXM); clock, cores: H100 architecture whitepaper", "h100"),
    _gpu("H200-141GB", 141, 4800, 1980, 16896, _HOPPER,
         "NVIDIA H200 datasheet (SXM); clock, cores: H100 architecture whitepaper (the same chip)"),
)

_ORDINARY = {GPU: next(preset for preset in PRESETS if preset.name == "A10").target()}
"""The preset used for a device of a kind that none of the presets describes."""


def described(kind: str, said: str) -> Target:
    """Return a device of this process as a target.

    Args:
      kind: as TensorFlow names kinds of devices.
      said: what its driver calls it; "" where that is not known.
    """
    found = preset_named(said)
    return found.target() if found is not None else _ORDINARY.get(kind, Target(device=kind))


def preset_named(said: str) -> Device | None:
    """Return the preset that a driver's name for a device describes; None where none does.

    "NVIDIA H100 80GB HBM3" is H100-80GB. Of several that fit, that with the longest name counts.

    Args:
      said: what the driver calls the device; case does not count.
    """
    words = re.split(r"[\s_-]+", said.upper())
    fitting = [preset for preset in PRESETS
               if all(word in words for word in preset.name.upper().split("-"))]
    return max(fitting, key=lambda preset: len(preset.name), default=None)


_KEYS = ("memory", "bandwidth", "clock", "cores")
_CLOCK = re.compile(r"^([0-9]+(?:\.[0-9]+)?)(MHz|GHz)$", re.IGNORECASE)


def find_device(device: str | Device) -> Device:
    """Return a device by name, or from figures.

    Args:
      device: a preset's name in any case; or "memory=24GB,bandwidth=600GB,clock=1.7GHz,cores=9216"
        (bandwidth by the second); or a `Device`, which is given back.

    Raises:
      PlanError: no such preset, or figures that cannot be read; lists what may be written.
    """
    if isinstance(device, Device):
        return device
    if "=" in device:
        return _custom(device)
    for preset in PRESETS:
        if preset.name.lower() == device.strip().lower():
            return preset
    raise PlanError(f"plan: unknown device {device!r}; choose one of "
                    f"{', '.join(preset.name for preset in PRESETS)}, or give its figures: "
                    "memory=24GB,bandwidth=600GB,clock=1.7GHz,cores=9216")


def _custom(text: str) -> Device:
    given = dict(entry.strip().partition("=")[::2] for entry in text.split(","))
    clock = _CLOCK.match(given.get("clock", ""))
    cores = given.get("cores", "")
    if (sorted(given) != sorted(_KEYS) or clock is None or not float(clock[1])
            or not cores.isdecimal() or not int(cores)):
        raise PlanError(f"plan: device {text!r} cannot be read; write "
                        "memory=24GB,bandwidth=600GB,clock=1.7GHz,cores=9216")
    memory, bandwidth = (_quantity(given[key]) for key in ("memory", "bandwidth"))
    hertz = float(clock[1]) * (1e9 if clock[2].lower() == "ghz" else 1e6)
    return Device(text, memory, bandwidth, hertz, int(cores))


def _quantity(text: str) -> int:
    try:
        found = parse_budget(text).device_bytes
    except PlanError:
        found = None
    if not found:
        raise PlanError(f"plan: device: {text!r} is no size; write one such as 24GB")
    return found
