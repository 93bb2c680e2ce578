"""Copies of pages of the cache, for streams whose voice ends within a page (service.engine.speech.voice_pages)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from service.engine.speech.stream import Stream
from service.graphs.buffers import upload_arrays


def make_copies(streams: Sequence[Stream], pages_of_layers: Sequence[Tensor]) -> None:
    """Makes the copies that these streams wait for. pages_of_layers: models.layers.kv_cache.allocate_together.

    All sources are read before a page is written: by now one may belong to a stream that gets a copy of another. So if
    memory runs out, no page has been written, and all copies are still to be made.
    """
    copies = [stream.page_copy for stream in streams if stream.page_copy is not None]
    if not copies:
        return
    pages = upload_arrays({"pages": np.array(copies, dtype=np.int64).T}, pages_of_layers[0].device)["pages"]
    sources = [layers.index_select(1, pages[0]) for layers in pages_of_layers]
    for layers, read in zip(pages_of_layers, sources, strict=True):
        layers.index_copy_(1, pages[1], read)
    for stream in streams:
        stream.page_copy = None
