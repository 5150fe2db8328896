"""Op types are named in `tfckpt/ops/` alone, and TensorFlow has what is named there."""

from __future__ import annotations

import pytest
from tensorflow.python.framework import op_def_registry

from benchmarks.structure import ROOT, modules, op_literals, op_types
from tfckpt.ops import families, names, record, registered

NAMED = {
    "tfckpt/cli/comparing.py": "A and B head the columns of a table",
    "tfckpt/verify/arithmetic/op_labels.py": "what changes no bit of a result, of ops nobody plans",
    "tfckpt/rewrite/names.py": "_XlaCompile is an attribute as well",
    "tfckpt/rewrite/loops/segments.py": "what the functions of loops over segments are made of",
}
"""Modules that contain the name of an op type, and why; never more than four."""


def test_op_types_are_named_in_records_alone():
    types = op_types()
    found = {str(path.relative_to(ROOT)): named for path in modules()
             if (named := op_literals(path, types))}
    assert found.keys() == NAMED.keys(), {k: found[k] for k in found.keys() - NAMED.keys()}
    assert len(NAMED) <= 4


def test_the_test_itself_sees_what_it_should(tmp_path):
    module = tmp_path / "module.py"
    module.write_text('"""Conv2D"""\nKINDS = ("MatMul", "mat_mul")\nif kind.startswith("Nccl"): x\n'
                      '"""Adds of Add."""\n')
    assert op_literals(module, op_types()) == ["MatMul", "Nccl"]


@pytest.mark.parametrize("known", registered(), ids=lambda known: known.type)
def test_tensorflow_has_the_op(known):
    if known.type in (names.ELSEWHERE, names.LOOP, names.WRITING_LOOP):
        assert op_def_registry.get(known.type) is None
        return
    definition = op_def_registry.get(known.type)
    assert definition is not None
    attributes = {attr.name for attr in definition.attr}
    assert set(known.attrs) <= attributes
    if known.tangents and known.typed:  # what derivatives are made of
        assert "T" in attributes
    variadic = any(arg.number_attr or arg.type_list_attr for arg in definition.input_arg)
    if known.tangents:
        assert known.variadic == variadic
        assert known.variadic or len(known.tangents) == len(definition.input_arg)


@pytest.mark.parametrize("family", families(), ids=lambda family: family.type)
def test_tensorflow_has_ops_of_the_family(family):
    """One that is only called as the family begins would be a record of its own."""
    assert any(name.startswith(family.type) for name in op_types() - {family.type})


def test_what_edits_make_has_a_record_or_needs_none():
    made = {value for name, value in vars(names).items()
            if name.isupper() and isinstance(value, str)}
    unknown = {kind for kind in made if kind not in {known.type for known in registered()}}
    assert unknown == {"InfeedDequeue",  # a function's input, where Grappler is asked
                       "Pack",  # shapes of what lists hold, and gradients of slices
                       "ConcatV2",  # gradients of slices
                       "XlaOptimizationBarrier",  # only in guards
                       "TensorScatterAdd", "UnsortedSegmentSum"}  # one in the other's place
    assert all(record(kind).repeatable for kind in unknown)
