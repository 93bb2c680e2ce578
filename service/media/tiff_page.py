"""The first page of a TIFF, before a library reads it: bounds on its tags, strips and tiles, and nothing but pixels."""

from __future__ import annotations

from PIL.TiffImagePlugin import COMPRESSION_INFO, TiffImageFile

from models.interfaces.errors import InputError

LITTLE_ENDIAN = b"II"
ENTRY_BYTES = 12
NEW_SUBFILE_TYPE, COMPRESSION, TILE_WIDTH, TILE_LENGTH, DNG_VERSION = 254, 259, 322, 323, 50706
NEEDED = frozenset(
    [256, 257, 258, COMPRESSION, 262, 266, 273, 274, 277, 278, 279, 284, 292, 293, 317, 320, TILE_WIDTH, TILE_LENGTH]
) | {324, 325, 338, 339, 347, 529, 530, 531, 532}
"""Tags that make the pixels or turn them. Others (EXIF, XMP, further pages) would cost time alone."""
MAX_VALUES = 65_536
"""Of a tag: offsets of strips or tiles above all, each of which Pillow keeps as an object and reads on its own."""
COMPRESSIONS = {1: "none", 2: "CCITT", 3: "CCITT", 4: "CCITT", 5: "LZW", 7: "JPEG", 8: "Deflate"} | {
    32773: "PackBits",
    32946: "Deflate",
}
"""Others of libtiff are rare, and further decoders: old JPEG, LZMA, Zstandard, WebP and more."""
MODES = frozenset({"1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "I;16", "I;16B"})
BITS, PHOTOMETRIC, WHITE_IS_ZERO = 258, 262, 0


def first_page(data: bytes, field: str) -> bytes:
    """The TIFF with its first page alone and the NEEDED tags of it. InputError for what is not read."""
    order = "little" if data.startswith(LITTLE_ENDIAN) else "big"

    def number(place: int, size: int) -> int:
        return int.from_bytes(data[place : place + size], order)  # type: ignore[arg-type]

    begin = number(4, 4) + 2
    end = begin + ENTRY_BYTES * number(begin - 2, 2)
    entries: dict[int, bytes] = {}
    for place in range(begin, min(end, len(data)), ENTRY_BYTES):
        tag, count = number(place, 2), number(place + 4, 4)
        if tag == DNG_VERSION or (tag == NEW_SUBFILE_TYPE and number(place + 8, 4) & 1):
            raise InputError(field, "the image is a camera's raw file; convert it to PNG or JPEG")
        if tag in NEEDED:
            if count > MAX_VALUES:
                raise InputError(field, f"the TIFF has {count} values in tag {tag}: at most {MAX_VALUES} allowed")
            entries.setdefault(tag, data[place : place + ENTRY_BYTES])
    entry = entries.get(COMPRESSION)
    compression = 1 if entry is None else int.from_bytes(entry[8:10], order)  # type: ignore[arg-type]
    if compression not in COMPRESSIONS:
        names = ", ".join(dict.fromkeys(COMPRESSIONS.values()))
        given = COMPRESSION_INFO.get(compression, "unknown").removeprefix("tiff_")
        raise InputError(field, f"the TIFF has the compression {given} ({compression}); {names} are supported")
    head = data[:4] + len(data).to_bytes(4, order) + data[8:]  # type: ignore[arg-type]
    return head + len(entries).to_bytes(2, order) + b"".join(entries.values()) + bytes(4)  # type: ignore[arg-type]


def check_tiff(image: TiffImageFile, max_pixels: int, field: str) -> None:
    """InputError for kinds of samples that would get wrong colours, and for strips or tiles beyond the picture."""
    tags, mode = image.tag_v2, image.mode
    bits = max(tags.get(BITS, (1,)))
    if mode not in MODES or (mode.startswith("I") and (bits != 16 or tags.get(PHOTOMETRIC) == WHITE_IS_ZERO)):
        raise InputError(field, f"the TIFF has samples of {bits} bits in mode {mode}; convert it to PNG or JPEG")
    if tags.get(TILE_WIDTH, 0) * tags.get(TILE_LENGTH, 0) > max_pixels:
        raise InputError(field, f"the TIFF has too large tiles: at most {max_pixels} pixels allowed")
    extents = (tile.extents for tile in image.tile if tile.extents)
    covered = sum((right - left) * (lower - upper) for left, upper, right, lower in extents)
    if covered > (4 * image.width * image.height):  # planes of their own
        raise InputError(field, "the TIFF has more strips or tiles than its size needs")
