"""Capture: reads a traced TensorFlow function or a GraphDef into a `tfckpt.ir.graph.Graph`."""
