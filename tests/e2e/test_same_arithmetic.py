"""`verify.same_arithmetic` against the numbers that steps really train with."""

from __future__ import annotations

import pytest
import tensorflow as tf

import tfckpt
from tests.certificates import compared
from tests.support import process
from tests.support.gelu_steps import gelu_step
from tfckpt.verify import same_arithmetic
from tfckpt.verify.arithmetic.same import COMPILED, UNCHANGED


@pytest.mark.parametrize("seed", [1, 14, 22, 61, 65, 7012, 7021, 7149])
def test_steps_that_train_alike_are_certified(seed):
    certificate, alike = compared(seed)
    assert alike and certificate.same, certificate


@pytest.mark.parametrize("seed", [120, 367])
def test_steps_that_do_not_are_named(seed, monkeypatch):
    """Where all numbers agree once, remove the seed: what made them differ is mended."""
    monkeypatch.setenv("TFCKPT_OPTIMIZED", "off")
    certificate, alike = compared(seed)
    assert not alike and certificate.same is False and certificate.differences


@pytest.mark.parametrize("seed", [120, 312])
def test_steps_made_of_what_grappler_makes_of_them_are_certified(seed):
    certificate, alike = compared(seed)
    assert alike and certificate.same, certificate


def decorated(layers=4, width=64, rows=512, compiled=False, **options):
    step, x, variables = gelu_step(layers, width, rows)
    process.fresh()
    options.setdefault("budget", "min")
    return tfckpt.checkpoint(tf.function(step, jit_compile=compiled), **options), x, variables


def test_nothing_runs():
    step, x, variables = decorated()
    before = [v.numpy().tobytes() for v in variables]
    certificate = same_arithmetic(step, x)
    assert certificate.same and str(certificate) == "the same arithmetic"
    assert [v.numpy().tobytes() for v in variables] == before
    assert len(step.reports) == 1


def test_an_optimizer_that_rearranges_one_of_the_two_is_noticed():
    """Grappler's arithmetic optimizer, for the plain step alone, stands for another TensorFlow."""
    from tfckpt.capture import tf_adapter
    from tfckpt.verify.arithmetic import instantiated, same

    step, x, _ = decorated()
    ours = step.get_concrete_function(x)
    plain = step.plain.get_concrete_function(x)
    tf.config.optimizer.set_experimental_options({"arithmetic_optimization": False})
    try:
        with_less = instantiated.computation_of(plain, (x,), {}, called := {})
    finally:
        tf.config.optimizer.set_experimental_options({"arithmetic_optimization": True})
    found = same.certificate_of(*same.terms_of(
        [with_less, instantiated.computation_of(ours, (x,), {}, called)]))
    assert found.same is False and found.differences
    assert "computed otherwise, from" in str(found) and "-tfckpt" not in str(found)
    assert tf_adapter.is_tf_function(step.plain)


def test_what_is_not_rewritten_is_the_same():
    step, x, _ = decorated(budget="4GiB")
    certificate = same_arithmetic(step, x)
    assert certificate.same and certificate.reason == UNCHANGED and UNCHANGED in str(certificate)


def test_what_xla_compiles_is_not_known():
    step, x, _ = decorated(compiled=True)
    certificate = same_arithmetic(step, x)
    assert certificate.same is None and certificate.reason == COMPILED and "XLA" in str(certificate)


def test_what_is_no_decorated_step_is_refused():
    with pytest.raises(tfckpt.VerificationError, match="takes what tfckpt.checkpoint made"):
        same_arithmetic(tf.function(lambda x: x), tf.constant(1.0))
