"""Asks for the certificates of random steps, and compares them with the numbers that they train.

    python -m tests.certificates --count 60
    TFCKPT_OPTIMIZED=off python -m tests.certificates --seed 60 --count 60

A line for each step that is not certified though its numbers agree, or whose numbers differ; at the
end how many there were of each kind. A step that is left as it is, or that XLA compiles, does not
count. The exit status is 1 where a certificate says "the same" of numbers that differ.
"""

from __future__ import annotations

import argparse
import collections
import sys
import warnings
from typing import Any

import tests.conftest  # noqa: F401 (settings that TensorFlow reads when it is imported)
from tests.support import process


def compared(seed: int) -> tuple[Any, bool] | None:
    """Return the certificate of a random step, and whether it trains as the plain one.

    Returns:
      None where the step is left as it is, or refused.
    """
    import tfckpt
    from tests.support.random_steps import trial
    from tests.support.random_steps.assembly import draw_spec
    from tests.zoo import entry as zoo
    from tfckpt.verify import same_arithmetic

    made, wanted = trial._plain(draw_spec(seed))
    steps = []

    def train(options):
        def decorated(_, function):
            steps.append(tfckpt.checkpoint(function, **options))
            return steps[-1]
        return trial._trained(made.spec, decorated)[1]
    found, refusal = trial._within_budget(made.spec, train, dict(made.spec.options))
    if refusal or made.spec.compiled or not (steps[-1].report and steps[-1].report.applied):
        return None
    return (same_arithmetic(steps[-1], *made.batches[0]),
            not zoo.differences(found, wanted, made.spec.compiled))


def main(arguments: list[str]) -> int:
    """Ask for certificates; return the exit status."""
    import keras

    from tests.support.random_steps import trial

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=60)
    asked = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    process.prepare()
    counts: collections.Counter[tuple[str, object]] = collections.Counter()
    for seed in range(asked.seed, asked.seed + asked.count):
        try:
            found = compared(seed)
        except trial.Failed as error:
            print(f"{seed}: {error.kind}", flush=True)
            continue
        if found is not None:
            certificate, alike = found
            counts["agree" if alike else "differ", certificate.same] += 1
            if not (alike and certificate.same):
                numbers = "agree" if alike else "differ"
                print(f"{seed}: numbers {numbers}; {certificate}", flush=True)
        keras.backend.clear_session()
    for (numbers, same), count in sorted(counts.items(), key=str):
        print(f"numbers {numbers}, certificate {same}: {count}")
    return int(counts["differ", True] > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
