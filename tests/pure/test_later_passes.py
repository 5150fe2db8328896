"""Steps that take several gradients: what later backward passes have as their forward."""

from __future__ import annotations

import pytest

from tfckpt.capture.later_passes import with_later_passes
from tfckpt.ir.graph import BACKWARD, FORWARD, OTHER, UPDATE


def regions(text: str) -> dict[str, str]:
    """Return the regions of ops by name.

    One op a word, `name:inputs`, both of single letters. Capitals stand in a gradient scope. A star
    says that it multiplies, an exclamation mark that it writes. Small letters before the first
    capital are forward; what follows from a capital is backward, or an update where it writes.
    """
    names, inputs, multiplies, writes, region = [], [], [], [], []
    for word in text.split():
        name, _, read = word.rstrip("*!").partition(":")
        names.append(name)
        inputs.append([names.index(letter) for letter in read])
        multiplies.append("*" in word)
        writes.append("!" in word)
        follows = name.isupper() or any(region[i] in (BACKWARD, UPDATE) for i in inputs[-1])
        region.append((UPDATE if writes[-1] else BACKWARD) if follows else FORWARD)
    found = with_later_passes(region, inputs, [int(n.isupper()) for n in names], multiplies, writes)
    return dict(zip(names, found, strict=True))


def forward(text: str) -> str:
    return "".join(name for name, region in regions(text).items() if region == FORWARD)


# w, x: a weight and the batch; a, b: activations; l: the loss
ONE = "w x a:wx b:wa l:b S:l B:Sb* C:Bw* A:Ca* V:Bb* W:Ax*"


@pytest.mark.parametrize("more", [
    "", " s:VW u:s!",  # the weight is shared: its gradients are added outside of a scope
    " m:A n:mA M:nx*",  # a custom gradient in the middle
    " N:AB O:NA",  # the gradient of a mean is subtracted from the gradient
    " N:a P:Na* O:AP*"])  # a factor is computed from the forward, in a gradient scope
def test_one_backward_pass_is_left_as_it_is(more):
    assert forward(ONE + more) == "wxabl"


def test_weights_that_a_gradient_has_moved():
    """As in SAM: v is the weight moved by V, and c, d, e the second forward, ending in f."""
    text = ONE + " v:wV c:vx d:vc e:d f:e T:f D:Te* E:Dd* F:Ev* G:Fc* H:Gx* u:H!"
    assert forward(text) == "wxabl" + "vcdef"
    assert regions(text)["u"] == UPDATE


def test_sums_of_the_pass_before_stay_in_it():
    """s adds two gradients of the first pass, which goes on from there."""
    text = ("w x a:wx b:wa l:ab S:l B:Sb* C:Bw* s:CS A:sa* V:Ax* "
            "v:wV c:vx d:vc e:d T:e D:Td* F:Dv* G:Fc* H:Gx*")
    found = regions(text)
    assert found["s"] == found["A"] == BACKWARD
    assert found["v"] == found["c"] == found["d"] == FORWARD


def test_a_gradient_within_a_loss():
    """As in a gradient penalty: B, C, A lead to the gradient P of the batch; p, q to the loss."""
    text = ("w x a:wx b:wa S:b B:Sb* C:Bw* A:Ca* P:Aw* p:P q:pp T:q Q:Tp* "
            "D:Qw* E:DC* F:Da* G:FB* H:Ew* I:Hb*")
    found = forward(text)
    assert set("BCp") <= set(found), found  # read again by G, E and Q, or between these
    assert not set("TQDEFGHI") & set(found)


def test_what_writes_is_no_forward():
    text = ONE + " v:wV! c:vx d:vc T:d D:Td* E:Dv* F:Ec* G:Fx*"
    found = regions(text)
    assert found["v"] == UPDATE and found["c"] == found["d"] == FORWARD


def test_regions_but_backward_and_update_stay():
    assert with_later_passes([OTHER, FORWARD], [[], [0]], [0, 0], [False] * 2, [False] * 2
                             ) == [OTHER, FORWARD]
