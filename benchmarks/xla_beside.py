"""Our rewritten steps beside jax.checkpoint, both compiled for an H100: bytes and heavy calls.

    python -m benchmarks.xla_budgets --device=H100-80GB --budgets=min --json=OURS
    python -m benchmarks.xla_peers --json=PEERS                  (in an environment with JAX)
    python -m benchmarks.xla_beside OURS PEERS [--budget=min] [--peer=blocks_nothing]

The same Keras code on two backends. A row for each network: temporary bytes of both, their ratio,
and the matrix products and convolutions of both, with the geometric mean of the ratios below.
"""

from __future__ import annotations

import json
import math

from absl import app, flags

FLAGS = flags.FLAGS
flags.DEFINE_string("budget", "min", "Which of our budgets.")
flags.DEFINE_string("peer", "blocks_nothing", "Which variant of benchmarks.xla_peers.")


def main(argv: list[str]) -> None:
    """Print the table."""
    if len(argv) != 3:
        raise app.UsageError("name the file of xla_budgets and that of xla_peers")
    ours, peers = (json.load(open(path, encoding="utf-8")) for path in argv[1:])
    print(f"| network | jax.checkpoint, {FLAGS.peer}, MB | ours, {FLAGS.budget}, MB | ratio | "
          "heavy calls, jax.checkpoint | ours |\n" + "| --- " * 6 + "|")
    ratios = []
    for name, found in ours.items():
        one, other = found.get(FLAGS.budget, {}), peers.get(name, {}).get(FLAGS.peer)
        if "temp_bytes" not in one or other is None:
            continue
        ratios.append(one["temp_bytes"] / other["temp_bytes"])
        print(f"| {name} | {other['temp_bytes'] / 1e6:.1f} | {one['temp_bytes'] / 1e6:.1f} | "
              f"{ratios[-1]:.3f} | {other['heavy']} | {one['heavy']} |")
    mean = math.exp(sum(map(math.log, ratios)) / max(len(ratios), 1))
    print(f"\ngeometric mean {mean:.3f}")


if __name__ == "__main__":
    app.run(main)
