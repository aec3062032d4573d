"""Images given as data: URLs: every spelling that is one, and what is none."""

import base64
import random
from urllib.parse import quote_from_bytes

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from media_helpers import PADDED, PICTURE, WHERE, load, refused

from deepspan.server import data_url
from deepspan.server.data_url import decode_data_url

# data: URLs


LINES = "\r\n".join(PADDED[start : start + 76] for start in range(0, len(PADDED), 76))
URL_SAFE = base64.urlsafe_b64encode(PICTURE).decode()
ACCEPTED = {
    "standard": f"data:image/png;base64,{PADDED}",
    "url-safe": f"data:image/png;base64,{URL_SAFE}",
    "url-safe without padding": f"data:image/png;base64,{URL_SAFE.rstrip('=')}",
    "without padding": f"data:image/png;base64,{PADDED.rstrip('=')}",
    "in lines": f"data:image/png;base64,{LINES}\n",
    "blanks at the ends": f" \n data:image/png;base64, {PADDED} ",
    "upper case": f"DATA:IMAGE/PNG;BASE64,{PADDED}",
    "charset": f"data:image/png;charset=utf-8;base64,{PADDED}",
    "other parameters": f"data:image/png; name=a.png ;;x=y; base64,{PADDED}",
    "base64 is not the last parameter": f"data:image/png;base64;charset=utf-8,{PADDED}",
    "type of another format": f"data:image/gif;base64,{PADDED}",
    "unknown image type": f"data:image/svg+xml;base64,{PADDED}",
    "special symbols escaped": f"data:image/png;base64,{quote_from_bytes(PADDED.encode(), safe='')}",
    "all symbols escaped": "data:image/png;base64," + "".join(f"%{code:02x}" for code in PADDED.encode()),
    "line breaks escaped": "data:image/png;base64," + LINES.replace("\r\n", "%0D%0a"),
    "escaped bytes": f"data:image/png,{quote_from_bytes(PICTURE)}",
    "escaped bytes but blanks": f"data:image/png,{quote_from_bytes(PICTURE, safe=' ')}",
    "escaped bytes with a charset": f"data:image/png;charset=binary,{quote_from_bytes(PICTURE)}",
    "escaped bytes in lower case, in lines": "data:image/png," + "\n".join(f"%{code:02x}" for code in PICTURE),
    "a fragment": f"data:image/png;base64,{PADDED}#top",
}
REFUSED = {
    "no comma": (f"data:image/png;base64;{PADDED}", "needs a comma"),
    "comma far away": (f"data:image/png;name={'a' * 2000};base64,{PADDED}", "needs a comma"),
    "no type": (f"data:;base64,{PADDED}", "must be image/"),
    "nothing but data": (f"data:,{PADDED}", "must be image/"),
    "other type": (f"data:application/octet-stream;base64,{PADDED}", "must be image/"),
    "half a type": (f"data:image/;base64,{PADDED}", "must be image/"),
    "like an http: URL": (f"data://image/png;base64,{PADDED}", "must be image/"),
    "foreign letter": (f"data:image/png;base64,{PADDED[:8]}é{PADDED[8:]}", "must be ASCII"),
    "foreign blank": (f"data:image/png;base64,{PADDED[:8]}\u00a0{PADDED[8:]}", "must be ASCII"),
    "zero byte": (f"data:image/png;base64,{PADDED[:8]}\0{PADDED[8:]}", "not valid base64"),
    "foreign symbol": (f"data:image/png;base64,{PADDED[:8]}!{PADDED[8:]}", "not valid base64"),
    "query": (f"data:image/png;base64,{PADDED}?x", "not valid base64"),
    "both alphabets": ("data:image/png;base64,+/-_", "not valid base64"),
    "half the padding": (f"data:image/png;base64,{PADDED[:-1]}", "not valid base64"),
    "too much padding": (f"data:image/png;base64,{PADDED}=", "not valid base64"),
    "padding inside": (f"data:image/png;base64,{PADDED}{PADDED}", "not valid base64"),
    "one symbol too many": ("data:image/png;base64,QUJDR", "not valid base64"),
    "escape cut off": (f"data:image/png;base64,{PADDED}%4", "two hexadecimal digits"),
    "escape of other digits": ("data:image/png,%89PN%G0", "two hexadecimal digits"),
    "escape of one digit": ("data:image/png,%89PN%0G", "two hexadecimal digits"),
    "escape in an escape": ("data:image/png,%%4141", "two hexadecimal digits"),
    "empty": ("data:image/png;base64,", "the image is empty"),
}


@pytest.mark.parametrize("address", ACCEPTED.values(), ids=ACCEPTED.keys())
def test_data_url_of_accepted_form_gives_its_bytes(address):
    assert load(address) == [PICTURE]


@pytest.mark.parametrize(("address", "text"), REFUSED.values(), ids=REFUSED.keys())
def test_data_url_of_broken_form_is_refused(address, text):
    with refused("slot[0]", text) as caught:
        load(address)
    assert PADDED[:8] not in str(caught.value)


@st.composite
def spellings(draw: st.DrawFn) -> tuple[bytes, str]:
    contents = draw(st.binary(min_size=1, max_size=64))
    coin = random.Random(draw(st.integers(0, 2**32)))
    if draw(st.booleans()):
        encode = draw(st.sampled_from([base64.b64encode, base64.urlsafe_b64encode]))
        plain, kind = encode(contents), ";base64"
        if draw(st.booleans()):
            plain = plain.rstrip(b"=")
        blanks = [" ", "\t", "\n", "\r", "\f", "%0A", "%20"]
    else:
        plain, kind, blanks = contents, "", ["\n", "\r", "\t"]
    must_escape = b"%#, \t\n\r\f\v"
    share = draw(st.sampled_from([0.0, 0.3, 1.0]))
    body = ""
    for code in plain:
        escape = code > 126 or code < 32 or code in must_escape or coin.random() < share
        body += coin.choice([f"%{code:02x}", f"%{code:02X}"]) if escape else chr(code)
        body += coin.choice(blanks) if coin.random() < 0.1 else ""
    head = draw(st.sampled_from(["data:image/png", "DATA:Image/WebP", "data:image/png;charset=utf-8", "data: image/x"]))
    return contents, f"{head}{draw(st.sampled_from([kind, kind.upper()]))},{body}"


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # both only measure how busy the machine is
@given(spellings())
def test_data_url_of_any_spelling_gives_its_bytes(case):
    contents, address = case
    assert decode_data_url(address, WHERE, len(contents)) == contents


@pytest.mark.parametrize("shift", range(4))
def test_data_url_longer_than_a_slice_gives_its_bytes(shift):
    contents = b"x" * shift + PICTURE * (2 * data_url.SLICE // len(PICTURE))
    escaped = "data:image/png," + "x" * shift + "".join(f"%{code:02x}" for code in contents[shift:])
    plain = "data:image/png;base64," + base64.urlsafe_b64encode(contents).decode()
    assert decode_data_url(escaped, WHERE, len(contents)) == contents
    assert decode_data_url(plain, WHERE, len(contents)) == contents


@pytest.mark.parametrize("name", ACCEPTED)
def test_data_url_over_the_limit_is_refused_before_it_is_decoded(name, monkeypatch):
    assert decode_data_url(ACCEPTED[name], WHERE, len(PICTURE)) == PICTURE
    monkeypatch.setattr(data_url.binascii, "a2b_base64", None)
    with refused(WHERE, "at most 768 are allowed"):
        decode_data_url(ACCEPTED[name], WHERE, len(PICTURE) - 1)
