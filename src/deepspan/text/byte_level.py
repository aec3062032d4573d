"""The byte-level alphabet of BPE vocabularies: one printable character per byte.

Owns the two-way mapping. A token's string is its bytes in this alphabet, which is how decoding works on bytes and
never on text that may be cut inside a character. Called by `text.tokenizer` and `text.tiny_tokenizer`.
"""

# Bytes that are printable in Latin-1 stand for themselves, in this order; the others follow as U+0100, U+0101, ...
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]

BYTE_ORDER = (*_PRINTABLE, *_OTHERS)  # order of the byte tokens in a vocabulary
CHAR_OF_BYTE = {byte: chr(byte) for byte in _PRINTABLE} | {byte: chr(256 + n) for n, byte in enumerate(_OTHERS)}
BYTE_OF_CHAR = {char: byte for byte, char in CHAR_OF_BYTE.items()}


def token_bytes(token: str) -> bytes:
    """Bytes of a vocabulary entry; an entry with a character outside the alphabet (an added token) is its own UTF-8."""
    try:
        return bytes([BYTE_OF_CHAR[char] for char in token])
    except KeyError:
        return token.encode("utf-8")
