"""How tensors of a published checkpoint map to our parameters; the loader applies the rules of a family."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise


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


def renamed(published: str, ours: str, names: Mapping[str, str]) -> list[Rule]:
    """Rules for all tensors of modules, by their names behind the two prefixes, published: ours."""
    return [Rule(f"{published}{theirs}.{{rest}}", f"{ours}{name}.{{rest}}") for theirs, name in names.items()]


def qkv_rules(published: str, ours: str, rows: tuple[int, int, int]) -> list[Rule]:
    """Rules for the projections q_proj, k_proj and v_proj behind the prefix `published`, whose rows, so many of each,
    the module `ours` holds one after the other."""
    return [
        Rule(f"{published}{name}_proj.{kind}", f"{ours}.{kind}", rows=span)
        for name, span in zip("qkv", pairwise(accumulate(rows, initial=0)), strict=True)
        for kind in ("weight", "bias")
    ]
