"""Nested forward AD: what each element-wise region could keep instead of its intermediates.

Source: Guo et al., Nesting Forward Automatic Differentiation for Memory-Efficient Deep Neural
Network Training. Nothing here imports TensorFlow, and nothing here decides.
"""
