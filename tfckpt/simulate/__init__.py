"""Memory and time of a schedule: liveness, the executor's orders, allocators. No TensorFlow."""
