"""What a schedule holds and takes: liveness, orders of the executor, allocators. No TensorFlow."""
