"""Training jobs and measurements from which the numbers in the documentation come."""

import os

# the default on CPUs with AVX-512; the CPU's other allocator keeps no statistics
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")
os.environ["TFCKPT_CACHE"] = "off"  # what is measured is planned; `plan_store` switches it on
