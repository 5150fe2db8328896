"""The native pass under the address and undefined-behaviour sanitizers.

    python -m tests.support.sanitizers

Builds the pass instrumented, trains through it in a process that has the sanitizers' runtime
loaded, and fails upon a finding. A second process is made to read past a buffer and must fail:
otherwise nothing was watched. TensorFlow itself is not instrumented, only its allocations are
watched; leaks are not looked for, since Python exits without freeing all. Needs g++ (not clang).
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import tensorflow as tf

from grappler_ext import PASS, build
from grappler_ext.bridge import REWRITTEN, Bridge, Rewriter
from grappler_ext.item import Names
from tfckpt.capture import tf_adapter
from tfckpt.request.options import make_options

_OPTIONS = {"ASAN_OPTIONS": "detect_leaks=0:detect_odr_violation=0:abort_on_error=0:exitcode=66",
            "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1:exitcode=66",
            "PYTHONMALLOC": "malloc", "TF_CPP_MIN_LOG_LEVEL": "2"}
_SANITIZED = ("-O1", "-g", "-fno-omit-frame-pointer", "-fsanitize=address,undefined",
              "-fno-sanitize=vptr,null,nonnull-attribute,returns-nonnull-attribute")
"""TensorFlow comes without the types that `vptr` looks at, and with the checks for null g++
refuses Abseil's headers; a null that is used is found all the same."""
_PAST_THE_END = 1 << 20
_TRAIN, _BREAK = "train", "break"


def main() -> int:
    """Build, runs both processes and say what was found."""
    try:
        library = str(build.shared_object(flags=_SANITIZED))
    except build.BuildError as error:
        print(error, file=sys.stderr)
        return 1
    done = _run(_TRAIN, library)
    if done.returncode:
        print(f"grappler_ext: a finding, or a failure, under the sanitizers\n{done.stderr[-6000:]}",
              file=sys.stderr)
        return 1
    print(done.stdout.strip())
    broken = _run(_BREAK, library)
    if "AddressSanitizer" not in broken.stderr or "tfckpt_answer" not in broken.stderr:
        print("grappler_ext: a read past the end went unnoticed; the sanitizers do not watch\n"
              f"{broken.stderr[-2000:]}", file=sys.stderr)
        return 1
    print("sanitizers: no finding in training; a read past the end, made on purpose, was found")
    return 0


def _run(what: str, library: str) -> subprocess.CompletedProcess:
    compiler, _ = build.compiler()
    runtime = [subprocess.run([*compiler, f"-print-file-name={name}"], capture_output=True,
                              text=True, check=True).stdout.strip()
               for name in ("libasan.so", "libubsan.so")]
    return subprocess.run([sys.executable, "-m", "tests.support.sanitizers", what, library],
                          capture_output=True, text=True, check=False,
                          env={**os.environ, **_OPTIONS, "LD_PRELOAD": ":".join(runtime)})


def _train(library: str, break_it: bool) -> None:
    """Train in two threads, runs what has no gradient, and a step that is made to fail."""
    bridge = Bridge(library)
    rewriter = (_PastTheEnd if break_it else Rewriter)(make_options(), strict=False)
    _use(bridge, rewriter)

    def work() -> None:
        weights = [tf.Variable(tf.random.stateless_normal((64, 64), (1, i)) / 8) for i in range(6)]

        @tf.function
        def step(x):
            with tf.GradientTape() as tape:
                h = x
                for weight in weights:
                    h = tf.tanh(h @ weight)
                loss = tf.reduce_sum(h * h)
            for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
                weight.assign_sub(1e-4 * gradient)
            return loss

        for _ in range(2):
            step(tf.ones((4096, 64)))
        tf.function(lambda x: tf.tanh(tf.tanh(x) * 2.0) * 3.0 + x)(tf.ones((2, 2)))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(r.applied for r in rewriter.reports.values()) and rewriter.reports
    applied = len(rewriter.reports)
    _use(bridge, Rewriter(make_options(0.01), strict=True))  # its answer is a failing graph
    try:
        work()
    except tf.errors.InvalidArgumentError:
        print(f"{applied} kind of step rewritten in two threads, one made to fail, "
              f"{bridge.skips()[0]} graphs without gradients skipped")
    else:
        raise AssertionError("a strict rewriter's failure did not reach the caller")
    bridge.connect(None)


def _use(bridge: Bridge, rewriter: Rewriter) -> None:
    bridge.connect(rewriter)
    tf_adapter.set_custom_optimizer(PASS, rewriter.parameters)


class _PastTheEnd(Rewriter):
    """Answers with the item itself, and a length that is not its own."""

    def __call__(self, graph: bytes, item: Names) -> tuple[int, bytes]:
        return REWRITTEN, _Longer(graph)


class _Longer(bytes):
    """Bytes that claim to be more than they are."""

    def __len__(self) -> int:
        return super().__len__() + _PAST_THE_END


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1] in (_TRAIN, _BREAK):
        _train(sys.argv[2], sys.argv[1] == _BREAK)
        sys.exit(0)
    sys.exit(main())
