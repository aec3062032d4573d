"""Content of one chat message: a string or a list of parts, read into text and image slots in authored order.

Owns the accepted forms of parts and their refusals; every refusal names the part. Never changes what it reads.
Called by `text.chat`.
"""

from collections.abc import Mapping
from typing import Any

from deepspan.errors import InputError
from deepspan.text.segments import ImageSlot, Segment, Text, check_encodable

SEPARATOR = "\n\n"  # between parts of a message, between merged messages
DETAILS = ("auto", "low", "high")  # accepted and ignored: the model has one resolution plan


def read_content(content: Any, where: str, *, images: bool) -> list[Segment]:
    """Segments of `content`, parts joined by a blank line; an image that stands alone gets none.

    `where` is the place of the content in the request; `images` says whether this role may carry images.
    Raises InputError for null, for a part of an unknown form, and for an image where none may stand.
    """
    if isinstance(content, str):
        return [Text(text=check_encodable(content, where))]
    if content is None:
        raise InputError(f"{where} is missing or null")
    if not isinstance(content, list | tuple):
        raise InputError(f"{where} must be a string or a list of parts, found {type(content).__name__}")
    parts = [_read_part(part, f"{where}[{index}]", images=images) for index, part in enumerate(content)]
    return join([[part] for part in parts])


def join(groups: list[list[Segment]]) -> list[Segment]:
    """Concatenate with a blank line between groups; an empty group still takes its join."""
    joined: list[Segment] = []
    for index, group in enumerate(groups):
        if index:
            joined.append(Text(text=SEPARATOR))
        joined.extend(group)
    return joined


def _read_part(part: Any, where: str, *, images: bool) -> Segment:
    if isinstance(part, str):
        return Text(text=check_encodable(part, where))
    if not isinstance(part, Mapping):
        raise InputError(f"{where} must be an object or a string, found {type(part).__name__}")
    kind = _part_type(part, where)
    if kind == "text":
        text = part.get("text")
        if not isinstance(text, str):
            raise InputError(f"{where}.text must be a string")
        return Text(text=check_encodable(text, f"{where}.text"))
    if kind not in {"image_url", "input_image", "image"}:
        raise InputError(f"{where}: parts of type {kind!r} are not supported, only text and images")
    if not images:
        raise InputError(f"{where}: an image cannot stand here, only in user, tool and system messages")
    if kind == "image":
        return _object_slot(part, where)
    return ImageSlot(source=_image_address(part, where), where=where)


def _part_type(part: Mapping[str, Any], where: str) -> str:
    """The `type` of the part or, as some clients leave it out, the one field that tells it."""
    kind = part.get("type")
    if isinstance(kind, str):
        return kind
    if kind is not None:
        raise InputError(f"{where}.type must be a string")
    telling = [name for name in ("text", "image_url", "image") if name in part]
    if len(telling) != 1:
        raise InputError(f"{where} has no type")
    return telling[0]


def _image_address(part: Mapping[str, Any], where: str) -> str:
    field = part.get("image_url")
    where = f"{where}.image_url"
    details = [part.get("detail")]
    if isinstance(field, Mapping):
        details.append(field.get("detail"))
        field, where = field.get("url"), f"{where}.url"
    if not isinstance(field, str) or not field:
        raise InputError(f"{where} must be a non-empty string")
    for detail in details:
        if detail is not None and detail not in DETAILS:
            raise InputError(f"{where}: detail must be one of {', '.join(DETAILS)}")
    return check_encodable(field, where)


def _object_slot(part: Mapping[str, Any], where: str) -> ImageSlot:
    source = part.get("image")
    if source is None:
        raise InputError(f"{where}.image is missing or null")
    return ImageSlot(source=source, where=where)
