"""The tokens that stand for pictures and videos."""

from __future__ import annotations

from models.interfaces.errors import CheckpointError
from models.text.placeholders import MediaTokens, join, plain
from models.text.tokenizer import Tokenizer

_AROUND = ("<image>", "</image>", "<slice>", "</slice>")
_AROUND_NUMBER = ("<image_id>", "</image_id>")


class PictureTokens:
    """Tokens of pictures: the overview, then the grid of crops, row by row.

    They begin and end with special tokens, and the tokenizer encodes each text between two special tokens separately,
    so the text around an item does not change its ids. as_2_5: <slice> is around the whole grid, whose crops have the
    overview's tokens, and there are no numbers. structural: ids of the tokens that are no placeholders.
    """

    def __init__(self, tokenizer: Tokenizer, *, as_2_5: bool = False) -> None:
        names = _AROUND if as_2_5 else (*_AROUND, *_AROUND_NUMBER)
        if missing := [name for name in names if name not in tokenizer.special_ids]:
            raise CheckpointError(f"tokenizer.json: no added tokens {', '.join(missing)}")
        self._as_2_5 = as_2_5
        self._encode = tokenizer.encode_plain
        self._markers = {name: plain([tokenizer.special_ids[name]]) for name in names}
        self._line_break = plain(self._encode("\n"))
        around = [self._line_break, *(self._markers[name] for name in _AROUND)]
        self.structural = {int(part.token_ids[0]) for part in around}

    def picture(self, overview: MediaTokens, crop: MediaTokens, grid: tuple[int, int]) -> MediaTokens:
        """overview, crop: their placeholders. grid: (columns, rows) of crops, (0, 0) for the overview alone."""
        image, (columns, rows) = self._between("<image>", overview, "</image>"), grid
        if not columns:
            return image
        if self._as_2_5:
            return join([image, self._between("<slice>", self.lines(join([image] * columns), rows), "</slice>")])
        return join([image, self.lines(join([self._between("<slice>", crop, "</slice>")] * columns), rows)])

    def number(self, number: int) -> MediaTokens:
        """What is written in front of a numbered picture."""
        return self._between("<image_id>", plain(self._encode(str(number))), "</image_id>")

    def lines(self, line: MediaTokens, count: int) -> MediaTokens:
        return join([line, *(self._line_break, line) * (count - 1)])

    def _between(self, opening: str, tokens: MediaTokens, closing: str) -> MediaTokens:
        return join([self._markers[opening], tokens, self._markers[closing]])
