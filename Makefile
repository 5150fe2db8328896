# Two commands are meant for users: `make demo` and `make test`.
# The rest is for people who work on tfckpt.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.tfckpt-installed

# One test process a core, four at most: each that runs TensorFlow takes a gigabyte or two.
WORKERS := --numprocesses=auto --maxprocesses=4 --dist

# 2 = warnings of TensorFlow's C++ side are hidden, errors are shown.
export TF_CPP_MIN_LOG_LEVEL ?= 2

# TensorFlow versions that `make test-matrix` tests, and what it runs on each. Every version has an
# environment of its own, .venv-VERSION, with the Keras that pip installs beside it.
VERSIONS := 2.18 2.19 2.20 2.21
MATRIX   := tests/tf/test_adapter.py tests/e2e/test_bit_identity.py tests/e2e/test_front_end.py \
            tests/e2e/test_keras_fit.py tests/e2e/test_xla.py tests/e2e/test_xla_trials.py

.PHONY: help demo test test-matrix lint types docs bench nightly snapshot third-party \
        keras-tests tensorflow-tests mutants sanitize clean

help:
	@echo "make demo     train two networks with and without tfckpt, print a table, draw a plot"
	@echo "make test     run the tests"
	@echo
	@echo "make test-matrix | test-tf-2.18 | lint | types | docs | bench | nightly | snapshot | third-party | keras-tests | tensorflow-tests | mutants | sanitize | clean"

demo: $(STAMP)
	$(BIN)/python -m examples.demo

# Apart: OR-tools, which pure tests use, crashes in a process that has loaded TensorFlow, and the zoo
# asks for several logical CPUs before TensorFlow starts.
test: $(STAMP)
	$(BIN)/python -m pytest $(WORKERS)=worksteal tests/pure
	$(BIN)/python -m pytest $(WORKERS)=loadfile tests/tf tests/e2e
	$(BIN)/python -m pytest $(WORKERS)=worksteal tests/zoo

test-matrix: $(VERSIONS:%=test-tf-%)

test-tf-%: .venv-%/.tfckpt-installed
	@.venv-$*/bin/python -c 'import keras, tensorflow as tf; \
	    print("TensorFlow", tf.__version__, "with Keras", keras.__version__)'
	.venv-$*/bin/python -m pytest $(WORKERS)=loadfile $(MATRIX)
	.venv-$*/bin/python -m pytest $(WORKERS)=worksteal tests/zoo

lint: $(STAMP)
	$(BIN)/python -m ruff check .

types: $(STAMP)
	$(BIN)/python -m mypy

docs: $(STAMP)
	$(BIN)/python docs/build_api.py
	$(BIN)/python docs/draw_pictures.py

bench: $(STAMP)
	$(BIN)/python -m benchmarks.memory --all
	$(BIN)/python -m benchmarks.planning_time

nightly: $(STAMP)
	$(BIN)/python -m pytest -m nightly $(WORKERS)=worksteal tests/pure
	$(BIN)/python -m pytest -m nightly $(WORKERS)=loadfile tests/tf tests/e2e
	$(BIN)/python -m pytest -m nightly $(WORKERS)=worksteal tests/zoo
	$(BIN)/python -m tests.keras_layer_tests

# What tfckpt makes of every step of the zoo and of 200 random models, against what is recorded.
snapshot: $(STAMP)
	$(BIN)/python -m tests.zoo.snapshot

# Training steps of packages that we did not write; they have an environment of their own.
third-party: .venv-third-party/.tfckpt-installed
	.venv-third-party/bin/python -m tests.third_party $(STEPS)

# Keras' own tests, plain and with a plan forced on every step; KERAS="--only layers/rnn" takes some.
keras-tests: $(STAMP)
	$(BIN)/python -m tests.keras_layer_tests $(KERAS)

# TensorFlow's own tests likewise. They are not in its wheel:
#   git clone --depth 1 --branch v2.21.0 https://github.com/tensorflow/tensorflow ~/tensorflow
#   make tensorflow-tests TENSORFLOW="~/tensorflow --only control_flow"
TENSORFLOW ?= ../tensorflow
tensorflow-tests: $(STAMP)
	$(BIN)/python -m tests.tensorflow_tests $(TENSORFLOW)

# MUTANTS="--all --module plan/allocator" tries every one of a module; see tests/mutation.py.
mutants: $(STAMP)
	$(BIN)/python -m tests.mutation $(MUTANTS)

sanitize: $(STAMP)
	$(BIN)/python -m tests.support.sanitizers

define CHECK_PYTHON
@command -v $(PYTHON) >/dev/null 2>&1 || { \
    echo "error: '$(PYTHON)' was not found; tfckpt needs Python 3.11 or newer." >&2; \
    echo "       Name another interpreter like this: make PYTHON=python3.11 test" >&2; \
    exit 1; }
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
    echo "error: '$(PYTHON)' is $$($(PYTHON) --version 2>&1); tfckpt needs Python 3.11 or newer." >&2; \
    echo "       Name another interpreter like this: make PYTHON=python3.11 test" >&2; \
    exit 1; }
endef

# An environment of its own, with the packages that $(1) names.
define MAKE_VENV
$(CHECK_PYTHON)
$(PYTHON) -m venv $(@D)
$(@D)/bin/python -m pip install --quiet --disable-pip-version-check $(1)
@touch $@
endef

$(STAMP): pyproject.toml
	$(call MAKE_VENV,-e ".[dev]")

.venv-third-party/.tfckpt-installed: pyproject.toml tests/third_party/requirements.txt
	$(call MAKE_VENV,-e ".[test]" "tensorflow==2.21.*" -r tests/third_party/requirements.txt)

.PRECIOUS: .venv-%/.tfckpt-installed
.venv-%/.tfckpt-installed: pyproject.toml
	$(call MAKE_VENV,-e ".[test]" "tensorflow==$*.*")

clean:
	rm -rf $(VENV) $(VERSIONS:%=.venv-%) .venv-third-party build dist *.egg-info demo_memory.png benchmarks/results
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
