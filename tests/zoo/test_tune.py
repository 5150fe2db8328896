"""Tuning an entry of the zoo leaves every bit as it was, and it trains as without us."""

from __future__ import annotations

import pytest
import tensorflow as tf

import tfckpt
from tests.zoo import distribution, groups
from tests.zoo import entry as zoo
from tfckpt.capture import tf_adapter

EVERY_DAY = {"moving_average_and_counter", "batch_normalization_fit", "dropout", "generator_object",
             "prints"}


class Tuning(zoo.Wrap):
    """Tunes a step when it is first called, and compares what it changes with what was there.

    Attributes:
      state: of the training, once it is built.
      outcome: what came of tuning: "tuned", why it was refused, or "" where nothing could be tuned.
    """

    def __init__(self):
        super().__init__(True)
        self.state = list
        self.outcome = ""

    def step(self, fn):
        step = super().step(fn)
        return self._tuned(step) if tf_adapter.is_tf_function(fn) else step

    def model(self, model):
        if not self.rewrite:
            return model
        tfckpt.keras.checkpoint(model, budget="min", tune=True)
        self._reports.append(lambda: [r for r in [tfckpt.keras.report(model)] if r])
        self.outcome = "by fit"
        return model

    def _tuned(self, step):
        def call(*args, **kwargs):
            if not self.outcome and tf.executing_eagerly():  # else another function calls it
                self._tune(step, args, kwargs)
            return step(*args, **kwargs)
        return call

    def _tune(self, step, args, kwargs):
        before = zoo.arrays(self.state())
        try:
            tfckpt.tune(step, *args, steps=1, **kwargs)
            self.outcome = "tuned"
        except tfckpt.PlanError as error:
            self.outcome = str(error)
        after = zoo.arrays(self.state())
        if len(before) == len(after):  # else slots were made: losses and states tell
            for old, new in zip(before, after, strict=True):
                assert old.tobytes() == new.tobytes(), "tuning has changed a variable"


def _tuned(entry) -> str:
    """Train an entry plain and tuned; return what came of tuning.

    Raises:
      AssertionError: it trains differently, or tuning has changed a variable.
    """
    with zoo.conditions(entry):
        wanted = zoo.train(entry, False)
        zoo.process.fresh()
        wrap = Tuning()
        training = entry.build(wrap)
        wrap.state = training.state
        found = zoo.run(training, wrap)
    different = zoo.differences(found, wanted, entry.xla)
    assert not different, f"{wrap.outcome}: {len(different)} differ: " + "; ".join(different[:6])
    return wrap.outcome


HERE = [e for e in groups.ENTRIES if not (e.alone or e.large)]


@pytest.mark.parametrize("entry", [
    pytest.param(e, id=f"{e.group}-{e.name}",
                 marks=() if e.name in EVERY_DAY else pytest.mark.nightly) for e in HERE])
def test_every_bit_is_put_back(entry):
    if entry.group == "distribution" and not distribution.available():
        pytest.skip("TensorFlow ran in this process before the zoo could ask for logical CPUs")
    try:
        print(_tuned(entry))  # shown by -s
    except tfckpt.PlanError as error:  # of `fit`, which raises what tuning raises
        assert "several replicas train this model" in str(error)
