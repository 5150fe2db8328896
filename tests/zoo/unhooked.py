"""Trains entries of the zoo in a TensorFlow without a trace hook.

    python -m tests.zoo.unhooked GROUP...

Prints one line of JSON for each entry: its name, what differs, and what the reports say.
"""

from __future__ import annotations

import json
import sys

from tests.support import unhooked


def main(wanted: list[str]) -> None:
    """Train the entries of these groups, or those named GROUP-NAME, plain and rewritten."""
    from tests.zoo import alone, groups

    alone.prepare()
    for entry in groups.ENTRIES:
        name = f"{entry.group}-{entry.name}"
        if entry.group in wanted or name in wanted:
            print(json.dumps([name, *alone.compare(entry)]), flush=True)


if __name__ == "__main__":
    unhooked.take_away(unhooked.MISSING)
    main(sys.argv[1:])
