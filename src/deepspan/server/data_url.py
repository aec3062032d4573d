"""From a data: URL to bytes.

Owns which spellings of a data: URL are accepted. Base64 bodies follow the forgiving rules of browsers (whitespace
anywhere, padding left out) and may use the URL-safe alphabet; bodies without ";base64" are percent-encoded bytes.
Invariants: the size is known and checked before anything is decoded; an error never quotes the data; no step that
holds the interpreter runs over a whole large body, so a worker thread that decodes does not stall the event loop.

The media type must be an image's but is not believed: the decoder looks at the bytes. Called by `server.media`.
"""

import binascii
import re
from collections.abc import Iterator

import numpy as np

from deepspan.errors import ImageError

EXAMPLE = "data:image/png;base64,<data>"
MAX_HEADER = 1024
SLICE = 2**18  # bytes handled at once; a multiple of 4, so that base64 can be cut there

IMAGE_TYPE = re.compile(r"image/[a-z0-9][a-z0-9.+_-]*")
TEXT_WHITESPACE = " \t\n\r\f\v"
WHITESPACE = TEXT_WHITESPACE.encode()
LINE_BREAKS = b"\t\n\r"  # what a URL parser drops; a space can be a byte of the picture
URL_SAFE = bytes.maketrans(b"-_", b"+/")

PERCENT = ord("%")
NO_DIGIT = 255
HEX_DIGITS = np.full(256, NO_DIGIT, dtype=np.uint8)
for _value, _digits in enumerate(zip(b"0123456789abcdef", b"0123456789ABCDEF", strict=True)):
    HEX_DIGITS[list(_digits)] = _value


def decode_data_url(address: str, where: str, max_bytes: int) -> bytes:
    """Contents of the data: URL `address`, which stands at `where` in the request.

    Raises ImageError if the type is no image's, the body is malformed, or it holds more than `max_bytes`.
    """
    header, comma, body = address.partition(",")
    if not comma or len(header) > MAX_HEADER:
        raise ImageError(f"{where}: a data: URL needs a comma between its type and its data, as in {EXAMPLE}")
    kind, *params = (part.strip(TEXT_WHITESPACE).lower() for part in header.partition(":")[2].split(";"))
    if not IMAGE_TYPE.fullmatch(kind):
        raise ImageError(f"{where}: the type of a data: URL must be image/..., as in {EXAMPLE}")

    body = body.partition("#")[0]  # a fragment is no part of the data
    if not body.isascii():
        raise ImageError(f"{where}: the data of a data: URL must be ASCII, as in {EXAMPLE}")
    decode = _decode_base64 if "base64" in params else _decode_percent
    return decode(body.encode("ascii"), where, max_bytes)


def _decode_base64(body: bytes, where: str, max_bytes: int) -> bytes:
    if b"%" in body:
        body = _unescape(body, where)
    body = _without(body, WHITESPACE)
    symbols = body.rstrip(b"=")
    _check_size(len(symbols) * 3 // 4, where, max_bytes)

    padding = len(body) - len(symbols)
    padded_right = padding == 0 or (padding <= 2 and len(body) % 4 == 0)
    url_safe = b"-" in symbols or b"_" in symbols
    mixed = url_safe and (b"+" in symbols or b"/" in symbols)
    if mixed or not padded_right:
        raise _malformed_base64(where)

    data = bytearray()
    for start in range(0, len(symbols), SLICE):
        piece = symbols[start : start + SLICE]
        if url_safe:
            piece = piece.translate(URL_SAFE)
        try:
            data += binascii.a2b_base64(piece + b"=" * (-len(piece) % 4), strict_mode=True)
        except binascii.Error:
            raise _malformed_base64(where) from None
    return bytes(data)


def _decode_percent(body: bytes, where: str, max_bytes: int) -> bytes:
    body = _without(body, LINE_BREAKS)
    _check_size(len(body) - 2 * body.count(b"%"), where, max_bytes)
    return _unescape(body, where)


def _unescape(body: bytes, where: str) -> bytes:
    """Replace every %XX by its byte.

    In arrays: a loop over the escapes of a whole picture would take seconds and gigabytes.
    """
    return b"".join(_unescape_piece(piece, where) for piece in _pieces(body))


def _pieces(body: bytes) -> Iterator[bytes]:
    """Cut `body` in pieces of about SLICE bytes, never inside of an escape."""
    start = 0
    while start < len(body):
        stop = start + SLICE
        escape = body.rfind(b"%", stop - 2, stop)
        if escape >= 0:
            stop = escape + 3
        yield body[start:stop]
        start = stop


def _unescape_piece(piece: bytes, where: str) -> bytes:
    codes = np.frombuffer(piece, dtype=np.uint8)
    starts = np.flatnonzero(codes == PERCENT)
    if not len(starts):
        return piece
    if starts[-1] + 2 >= len(codes):
        raise _malformed_escape(where)
    high, low = HEX_DIGITS[codes[starts + 1]], HEX_DIGITS[codes[starts + 2]]
    if (high == NO_DIGIT).any() or (low == NO_DIGIT).any():
        raise _malformed_escape(where)
    plain = codes.copy()
    plain[starts] = high * 16 + low
    keep = np.ones(len(codes), dtype=bool)
    keep[starts + 1] = keep[starts + 2] = False
    return plain[keep].tobytes()


def _without(body: bytes, unwanted: bytes) -> bytes:
    # Looking is many times faster than dropping, and most bodies have nothing to drop.
    return body.translate(None, unwanted) if any(code in body for code in unwanted) else body


def _check_size(num_bytes: int, where: str, max_bytes: int) -> None:
    if num_bytes > max_bytes:
        raise ImageError(f"{where}: the image has {num_bytes} bytes, at most {max_bytes} are allowed")


def _malformed_base64(where: str) -> ImageError:
    return ImageError(f"{where}: the data is not valid base64; a data: URL must look like {EXAMPLE}")


def _malformed_escape(where: str) -> ImageError:
    return ImageError(f"{where}: the data has a % that is not followed by two hexadecimal digits")
