"""How tensors of a published checkpoint map to our parameters; the loader applies the rules of a family."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Rule:
    """Where a published tensor goes.

    published, ours: names; {i} (a single letter) stands for a number and {rest} for anything, the same on both sides.
        A number that only `published` has is an index into the parameter's first axis (stacked experts).
    rows: the rows [start, stop) of the parameter that the tensor fills, for weights that are fused here; None: all.
    shape: the published shape, if it is not the shape of the parameter (flattened convolution kernels).
    transposed: the last two axes are published in the other order; files in our order are recognised by the shape.
    shared: another rule reads the same tensor (an embedding table that is also the weight of a tied head).
    """

    published: str
    ours: str
    rows: tuple[int, int] | None = None
    shape: tuple[int, ...] | None = None
    transposed: bool = False
    shared: bool = False
