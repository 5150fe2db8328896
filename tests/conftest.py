"""Settings that TensorFlow reads when it is imported. Nothing here imports TensorFlow."""

from __future__ import annotations

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
# the tests say what the CPU's kernels and its allocator do, on every machine
os.environ["CUDA_VISIBLE_DEVICES"] = ""
