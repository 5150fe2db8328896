"""The part of the step that an op belongs to: forward, backward, update or other.

Rules (numbered; branches below cite them):
  1. Gradient scopes seed the backward: `gradient_tape/` (GradientTape) and `gradients/`,
     `gradients_1/` ... (tf.gradients, and the backward of nested functions). But for the empty
     lists that a loop's gradient makes there: the loop of the forward fills them. What hands such
     a list on within that loop, once it is lowered, has the list's name behind its own.
  2. What lies downstream of a gradient-scope op is backward too, also through a control edge
     from one (custom gradients leave ops outside any scope), up to the update.
  3. The update starts at the first collective, resource write, or op on the way to one that no
     gradient-scope op needs any more.
  4. Ops that feed only the update without a gradient (momentum * velocity) are update.
  5. Forward is what the backward needs and is neither.
  6. What waits for an update op or reads its result is update (a variable read back after its
     slot was written, then added to the weight).
  7. All else (metrics, BatchNorm statistics, counters) is other.
  8. What an op of the forward reads is no gradient, whatever it is called. Grappler merges equal
     ops of forward and backward (the square in tanh-GELU and in the derivative of its cube), or of
     forward and update (a size that the batch decides), under one of their names, and drops
     control edges that a custom gradient hangs by, so its graphs tell too little: which ops
     followed a gradient, and which none, is asked of the graph as it was before
     (`around_gradients`).
  9. An update reads no activation. What lies downstream of a gradient and reads one is backward,
     and so is what leads to it from there: the tail of a backward pass that custom gradients make
     has no scope, and no gradient follows it. An activation is computed from the batch and from
     variables, upstream of all gradients.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from tfckpt.ir.graph import BACKWARD, FORWARD, OTHER, UPDATE

_GRADIENT_SCOPE = re.compile(r"(?:^|/)(?:gradient_tape|gradients(?:_\d+)?)(?=/)")
_HANDED_ON = re.compile(r"_switch/_\d+$")
"""Ends the name of an op of a lowered loop; before that the loop's and the name of what it got."""


def is_gradient_scope(name: str) -> bool:
    """Return whether an op's name says that it computes a gradient (rule 1).

    Args:
      name: of an op, with the scopes before it.
    """
    return bool(_GRADIENT_SCOPE.search(name)) and not _HANDED_ON.search(name)


def gradient_scopes(name: str) -> int:
    """Return in how many gradient scopes an op stands, one in the other.

    Args:
      name: of an op, with the scopes before it.
    """
    return len(_GRADIENT_SCOPE.findall(name)) if is_gradient_scope(name) else 0


def regions(
    names: Sequence[str],
    inputs: Sequence[Sequence[int]],
    controls: Sequence[Sequence[int]],
    writes: Sequence[bool],
    empty_lists: Collection[int] = (),
    forward: Collection[int] = (),
    later: Collection[int] = (),
    fed: Collection[int] = (),
    variables: Collection[int] = (),
) -> list[str]:
    """Return the region of every op.

    Args:
      names: op names, topologically ordered.
      inputs: for each op the indices of the ops it reads.
      controls: for each op the indices of the ops it waits for.
      writes: for each op whether it writes a resource or is a collective.
      empty_lists: ops that make a list without entries.
      forward: ops that are known to follow no gradient.
      later: ops that are known to follow one.
      fed: ops that hand in what a call gives the step.
      variables: ops that read variables.
    """
    count = len(names)
    read_by_forward = ancestors([op in forward for op in range(count)], inputs)
    # rules 1, 8
    scoped = [is_gradient_scope(name) and op not in empty_lists and not read_by_forward[op]
              for op, name in enumerate(names)]
    followers = _followers(scoped, inputs, controls, empty_lists,
                           [op in later for op in range(count)], read_by_forward)
    downstream = [a or b for a, b in zip(scoped, followers, strict=True)]  # rules 1, 2
    read = _read_activations(inputs, downstream, fed, variables)  # rule 9
    needed_by_gradient = ancestors([a or b for a, b in zip(scoped, read, strict=True)], inputs)
    to_write = ancestors([w and d for w, d in zip(writes, downstream, strict=True)], inputs)
    # rule 2: also a gradient that is returned rather than applied
    backward = [scoped[op] or downstream[op] and (
        needed_by_gradient[op] or not (writes[op] or to_write[op])) for op in range(count)]
    needed_by_backward = ancestors(backward, inputs)
    result: list[str] = []
    for op in range(count):
        if backward[op]:
            result.append(BACKWARD)
        elif downstream[op]:
            result.append(UPDATE)  # rule 3
        elif needed_by_backward[op]:
            result.append(FORWARD)  # rule 5
        elif to_write[op]:
            result.append(UPDATE)  # rule 4
        elif any(result[i] == UPDATE for i in inputs[op]) or any(
                result[c] == UPDATE for c in controls[op]):
            result.append(UPDATE)  # rule 6
        else:
            result.append(OTHER)  # rule 7
    return result


def _read_activations(inputs: Sequence[Sequence[int]], downstream: Sequence[bool],
                      fed: Collection[int], variables: Collection[int]) -> list[bool]:
    """Return which ops downstream of a gradient read an activation (rule 9)."""
    from_batch = descendants([op in fed for op in range(len(inputs))], inputs)
    from_variables = descendants([op in variables for op in range(len(inputs))], inputs)
    return [downstream[op] and any(
        from_batch[source] and from_variables[source] and not downstream[source]
        for source in sources) for op, sources in enumerate(inputs)]


def around_gradients(
    names: Sequence[str],
    inputs: Sequence[Sequence[int]],
    controls: Sequence[Sequence[int]],
    empty_lists: Collection[int] = (),
) -> tuple[frozenset[str], frozenset[str]]:
    """Return the names of the ops that follow no gradient, and of those that do (rule 8).

    Ops in a gradient scope are in neither.

    Unlike for `regions` ops may be in any order, with cycles, if need be.

    Args:
      names: op names.
      inputs: for each op the indices of the ops it reads.
      controls: for each op the indices of the ops it waits for.
      empty_lists: ops that make a list without entries.
    """
    scoped = [is_gradient_scope(name) and op not in empty_lists for op, name in enumerate(names)]
    followers = _followers(scoped, inputs, controls, empty_lists)
    free = [op for op in range(len(names)) if not scoped[op] and op not in empty_lists]
    return (frozenset(names[op] for op in free if not followers[op]),
            frozenset(names[op] for op in free if followers[op]))


def _followers(scoped: Sequence[bool], inputs: Sequence[Sequence[int]],
               controls: Sequence[Sequence[int]], empty_lists: Collection[int],
               later: Sequence[bool] = (), never: Sequence[bool] = ()) -> list[bool]:
    """Return which ops are gradients that were computed, or lie downstream of one (rule 2).

    Those in `later` count as such, those in `never` do not. A constant leads nowhere: Grappler
    merges the backward's with equal ones of the forward.
    """
    later, never = (marked or [False] * len(scoped) for marked in (later, never))
    found = [bool(s and read) for s, read in zip(scoped, inputs, strict=True)]
    readers: list[list[int]] = [[] for _ in scoped]
    for op in range(len(scoped)):
        if not scoped[op] and op not in empty_lists:
            for source in inputs[op]:
                readers[source].append(op)
            found[op] = not never[op] and (
                later[op] or any(scoped[c] and inputs[c] for c in controls[op]))
    pending = [op for op, is_found in enumerate(found) if is_found]
    while pending:
        for reader in readers[pending.pop()]:
            if not (found[reader] or never[reader]):
                found[reader] = True
                pending.append(reader)
    return found


def descendants(marked: Sequence[bool], inputs: Sequence[Sequence[int]]) -> list[bool]:
    """Return which ops are marked or read, directly or not, a marked one.

    Args:
      marked: for each op whether it is; ops in topological order.
      inputs: for each op the indices of the ops it reads.
    """
    reached = list(marked)
    for op, sources in enumerate(inputs):
        reached[op] = reached[op] or any(reached[source] for source in sources)
    return reached


def ancestors(marked: Sequence[bool], inputs: Sequence[Sequence[int]]) -> list[bool]:
    """Return which ops are marked or are read, directly or not, by a marked one.

    Args:
      marked: for each op whether it is; ops in topological order.
      inputs: for each op the indices of the ops it reads.
    """
    reached = list(marked)
    for op in range(len(reached) - 1, -1, -1):
        if reached[op]:
            for source in inputs[op]:
                reached[source] = True
    return reached
