"""Run-length encoded BMPs. Pillow's own decoder adds one pixel at a time, in Python: a file of a kilobyte, of 50
million pixels, took five seconds of a processor and of the interpreter. Here the work grows with the bytes of the file.
"""

from __future__ import annotations

from PIL import BmpImagePlugin, Image, ImageFile

END_OF_LINE, END_OF_PICTURE, DELTA = 0, 1, 2
"""Commands behind a count of 0; what is above is a count of pixels that follow as they are."""
FIRST = bytes(byte >> 4 for byte in range(256))
SECOND = bytes(byte & 15 for byte in range(256))
"""The two pixels of a byte, where they have 4 bits."""


class RunLengthDecoder(ImageFile.PyDecoder):
    """Makes the same pixels as Pillow's, also of files with faults."""

    _pulls_fd = True

    def decode(self, buffer: Image.DecoderInput) -> tuple[int, int]:
        assert self.fd is not None
        four_bits, direction = self.args[1], self.args[-1]
        pixels = self._pixels(four_bits)
        self.set_as_raw(bytes(pixels), "L" if self.mode in ("1", "L") else "P", (0, direction))
        return -1, 0

    def _pixels(self, four_bits: bool) -> bytearray:
        assert self.fd is not None
        start = self.fd.tell()
        file, place = self.fd.read(), 0
        width = self.state.xsize
        size, end = width * self.state.ysize, len(file) - 1
        unpacked = _two_pixels(file) if four_bits else bytearray()  # at once: files may have millions of short runs
        data = bytearray()
        x = 0
        while len(data) < size and place < end:
            count, value = file[place], file[place + 1]
            place += 2
            if count:
                count = min(count, width - x)
                if count > 0:
                    if four_bits:
                        data += (unpacked[2 * place - 2 : 2 * place] * ((count + 1) // 2))[:count]
                    else:
                        data += file[place - 1 : place] * count
                    x += count
            elif value == END_OF_LINE:
                if rest := len(data) % width:
                    data += bytes(width - rest)
                x = 0
            elif value == END_OF_PICTURE:
                break
            elif value == DELTA:
                if place >= end:
                    break
                right, up = file[place], file[place + 1]
                place += 2
                data += bytes(min(size - len(data), right + up * width))
                x = len(data) % width
            else:
                count = min(size - len(data), value)
                length = (count + 1) // 2 if four_bits else count
                complete = place + length <= len(file)
                data += unpacked[2 * place : 2 * place + count] if four_bits else file[place : place + length]
                place += length
                if not complete or len(data) == size:
                    break
                x += value
                place += (start + place) % 2  # literal pixels are padded to 16 bits
        return data


def _two_pixels(packed: bytes) -> bytearray:
    pixels = bytearray(2 * len(packed))
    pixels[::2], pixels[1::2] = packed.translate(FIRST), packed.translate(SECOND)
    return pixels


def use_for_bmp() -> None:
    """Replaces Pillow's decoder."""
    assert BmpImagePlugin  # registers its own when it is imported, which must be before
    Image.register_decoder("bmp_rle", RunLengthDecoder)
