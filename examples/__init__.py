"""Runnable examples: `python -m examples.quickstart`, `python -m examples.demo`.

Importing this package loads TensorFlow quietly. TensorFlow writes its first messages (which CPU
instructions it uses, that it found no GPU) before it reads `TF_CPP_MIN_LOG_LEVEL`, so standard
error is set aside while it starts; should it fail to start, what it wrote is shown after all.
oneDNN is on by default on some CPUs only; it brings the allocator that keeps statistics.
"""

from __future__ import annotations

import os

from tfckpt.cli.quiet_import import load_tensorflow

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")
load_tensorflow()
