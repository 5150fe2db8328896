"""Compares our steps with jax.checkpoint's policies at the same temporary bytes.

    python -m benchmarks.xla_peers --json=PEERS                  (in an environment with JAX)
    python -m benchmarks.xla_policies PEERS --device=H100-80GB [--networks=decoder,unet]
        [--policies=blocks_dots,model_dots] [--trials=2] [--precision=mixed_bfloat16] [--json=FILE]

For each network and each variant of `benchmarks.xla_peers` that recomputes, our step is planned
with that variant's temporary bytes as its budget. A row for each: temporary bytes, matrix products
and convolutions of both, and whether ours has no more of these at no more bytes. A variant that
takes as much as our plain step cannot be a budget; its row says so. Flags are those of
`benchmarks.xla_budgets`. Nothing is run.
"""

from __future__ import annotations

import json
from typing import Any

from absl import app, flags

from benchmarks import rows, xla_budgets

FLAGS = flags.FLAGS
flags.DEFINE_list("policies", [], "Variants of benchmarks.xla_peers; all that recompute if none.")
COLUMNS = ("network", "policy", "jax.checkpoint, MB", "ours, MB", "heavy calls, jax.checkpoint",
           "ours", "no more at no more bytes")
PLAIN = "plain"


def asked(plain: xla_budgets.Plain, allowed: int) -> dict[str, Any]:
    """Return the figures of our step within as many bytes; none if the plain step needs no more."""
    taken = plain.compiled.temp_bytes
    return xla_budgets.ours(plain, allowed / taken, FLAGS.trials) if allowed < taken else {}


def cells(policy: dict[str, int], of: dict[str, Any]) -> list[str]:
    """Return the cells of a row for a policy and our step."""
    megabytes, heavy = f"{policy['temp_bytes'] / 1e6:.1f}", str(policy["heavy"])
    if not of:
        return [megabytes, "as much as our plain step", heavy, "", ""]
    if "refused" in of:
        return [megabytes, "refused", heavy, "", "no"]
    return [megabytes, f"{of['temp_bytes'] / 1e6:.1f}", heavy, str(of["heavy"]),
            "yes" if as_good(policy, of) else "no"]


def as_good(policy: dict[str, int], of: dict[str, Any]) -> bool:
    """Return whether ours has no more heavy calls at no more bytes."""
    return all(of.get(what, float("inf")) <= policy[what] for what in ("temp_bytes", "heavy"))


def compare(name: str, peers: dict[str, dict[str, int]]) -> dict[str, dict[str, Any]]:
    """Print the rows of a network, and return our figures by policy; asked once for equal bytes."""
    plain = xla_budgets.plain_of(name)
    by_bytes: dict[int, dict[str, Any]] = {}
    found = {}
    for policy in FLAGS.policies or [variant for variant in peers if variant != PLAIN]:
        allowed = peers[policy]["temp_bytes"]
        if allowed not in by_bytes:
            by_bytes[allowed] = asked(plain, allowed)
        found[policy] = by_bytes[allowed]
        print(rows.line([name, policy, *cells(peers[policy], found[policy])]), flush=True)
    return found


def main(argv: list[str]) -> None:
    """Print the table, and how often ours is as good."""
    if len(argv) != 2:
        raise app.UsageError("name the file of benchmarks.xla_peers")
    with open(argv[1], encoding="utf-8") as file:
        peers = json.load(file)
    print(rows.head(COLUMNS), flush=True)
    found = {name: compare(name, peers[name]) for name in FLAGS.networks if name in peers}
    told = [as_good(peers[name][policy], of) for name, policies in found.items()
            for policy, of in policies.items() if of]
    print(f"\nno more heavy calls at no more bytes: {sum(told)} of {len(told)}")
    if FLAGS.json:
        with open(FLAGS.json, "w", encoding="utf-8") as file:
            json.dump(found, file, indent=1)


if __name__ == "__main__":
    app.run(main)
