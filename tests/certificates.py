"""Asks for the certificates of random steps, and compares them with the numbers that they train.

    python -m tests.certificates --count 60
    TFCKPT_OPTIMIZED=off python -m tests.certificates --seed 60 --count 60
    python -m tests.certificates --zoo [GROUP or GROUP-NAME ...]

A line for each step that is not certified though its numbers agree, or whose numbers differ; at the
end how many there were of each kind. A step that is left as it is, or that XLA compiles, does not
count. Of random steps the certificate is that of `verify.same_arithmetic`; of the entries of the
zoo it is the one that is made while they train. The exit status is 1 where a certificate says "the
same" of numbers that differ.
"""

from __future__ import annotations

import argparse
import collections
import os
import sys
import warnings
from collections.abc import Iterator
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


Found = tuple[str, bool, "bool | None", str]
"""A step, whether it trains as the plain one, and its certificate: as a value, and in words."""


def of_random_steps(seeds: range) -> Iterator[Found]:
    """Yield what becomes of random steps that are rewritten."""
    import keras

    from tests.support.random_steps import trial

    process.prepare()
    for seed in seeds:
        try:
            found = compared(seed)
        except trial.Failed as error:
            print(f"{seed}: {error.kind}", flush=True)
            continue
        if found is not None:
            certificate, alike = found
            yield str(seed), alike, certificate.same, str(certificate)
        keras.backend.clear_session()


def of_the_zoo(wanted: list[str]) -> Iterator[Found]:
    """Yield what becomes of entries of the zoo that are rewritten, and not compiled by XLA.

    Args:
      wanted: groups and entries; all where there are none.
    """
    os.environ["TFCKPT_CERTIFICATES"] = "on"
    from tests.zoo import alone, groups

    alone.prepare()
    for entry in groups.ENTRIES:
        name = f"{entry.group}-{entry.name}"
        if entry.xla or wanted and not {entry.group, name} & set(wanted):
            continue
        try:
            different, reports = (alone.compare_alone if entry.alone else alone.compare)(entry)
        except Exception as error:  # the others are looked at all the same
            print(f"{name}: {(str(error).splitlines() or [repr(error)])[-1]}", flush=True)
            continue
        said = {r["identical"]: r["certificate"] for r in reports if r["applied"]}
        if said:
            least = next(same for same in (False, None, True) if same in said)
            yield name, not different, least, said[least]


def main(arguments: list[str]) -> int:
    """Ask for certificates; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--zoo", nargs="*", metavar="NAME", help="entries of the zoo instead")
    asked = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    counts: collections.Counter[tuple[str, object]] = collections.Counter()
    for name, alike, same, text in (
            of_random_steps(range(asked.seed, asked.seed + asked.count)) if asked.zoo is None
            else of_the_zoo(asked.zoo)):
        numbers = "agree" if alike else "differ"
        counts[numbers, same] += 1
        if not (alike and same):
            print(f"{name}: numbers {numbers}; {text}", flush=True)
    for (numbers, same), count in sorted(counts.items(), key=str):
        print(f"numbers {numbers}, certificate {same}: {count}")
    return int(counts["differ", True] > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
