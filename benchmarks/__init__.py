"""Training jobs and measurements behind the numbers in the documentation."""

import os

os.environ["TFCKPT_CACHE"] = "off"  # what is measured is planned; `plan_store` switches it on
