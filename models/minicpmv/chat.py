"""The tokens that stand for pictures and videos."""

from __future__ import annotations

from functools import cache

from models.interfaces.errors import CheckpointError
from models.minicpmv.config import Version
from models.text.placeholders import MediaTokens, join, plain, repeated
from models.text.tokenizer import Tokenizer


class PictureTokens:
    """Tokens of pictures and videos: the overview of a picture, then its grid (columns, rows) of crops, row by row.

    They begin and end with special tokens, and the tokenizer encodes each text between two special tokens separately,
    so the text around an item does not change its ids.
    """

    def __init__(self, version: Version, tokenizer: Tokenizer, num_queries: int) -> None:
        def marker(name: str) -> int:
            try:
                return tokenizer.special_ids[name]
            except KeyError:
                raise CheckpointError(f"tokenizer.json: no added token {name!r}") from None

        self._encode = tokenizer.encode_plain
        placeholders = repeated(marker("<unk>"), num_queries)
        self._image = join([plain([marker("<image>")]), placeholders, plain([marker("</image>")])])
        self._slice = join([plain([marker("<slice>")]), placeholders, plain([marker("</slice>")])])
        self._line_break = plain(self._encode("\n"))
        # 2.5 has <slice> around the whole grid, crops with the overview's tokens, and no numbers.
        self._around_grid = None
        self._around_number = None
        if version == "2.5":
            self._around_grid = plain([marker("<slice>")]), plain([marker("</slice>")])
        else:
            self._around_number = plain([marker("<image_id>")]), plain([marker("</image_id>")])
        self._picture, self._number = cache(self._picture_of), cache(self._number_of)

    def image(self, grid: tuple[int, int], image_id: int | None) -> MediaTokens:
        """grid: (0, 0) for the overview alone. image_id: the number to write before it."""
        picture = self._picture(grid)
        return picture if image_id is None else join([self._number(image_id), picture])

    def video(self, frames: int) -> MediaTokens:
        """frames: or groups of fused frames; each is a picture on a line of its own."""
        return self._lines(self._image, frames)

    def _picture_of(self, grid: tuple[int, int]) -> MediaTokens:
        columns, rows = grid
        if columns == 0:
            return self._image
        if self._around_grid is None:
            return join([self._image, self._lines(join([self._slice] * columns), rows)])
        opening, closing = self._around_grid
        return join([self._image, opening, self._lines(join([self._image] * columns), rows), closing])

    def _number_of(self, image_id: int) -> MediaTokens:
        assert self._around_number is not None, "2.5 does not number pictures"
        opening, closing = self._around_number
        return join([opening, plain(self._encode(str(image_id))), closing])

    def _lines(self, line: MediaTokens, count: int) -> MediaTokens:
        return join([line, *(self._line_break, line) * (count - 1)])
