"""A tiny tokenizer with the model's special tokens: one token per byte, no merges.

Owns the file that tests and tiny checkpoints use in place of the released tokenizer. Byte ids, and BOS, EOS and PAD,
equal those of the release; the other special tokens follow the bytes. Special flags are those of the release, where
only BOS, EOS, PAD and the span placeholders are flagged. The same files are written every time.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deepspan.text import special
from deepspan.text.byte_level import BYTE_ORDER, CHAR_OF_BYTE

BYTES_ONLY = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
FLAGGED = (special.BOS, special.EOS, special.PAD, *special.SPANS)


def write_tiny_tokenizer(folder: Path | str, learnt: str | None = None) -> int:
    """Write `tokenizer.json` and `tokenizer_config.json` into `folder`, made if missing; return the vocabulary size.

    learnt: JSON of a byte-level BPE tokenizer without added tokens, whose merges and way of splitting are taken over;
    its merged tokens follow the bytes.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer_json(json.loads(learnt) if learnt is not None else {})
    for name, value in (("tokenizer.json", tokenizer), ("tokenizer_config.json", _config_json())):
        (folder / name).write_text(json.dumps(value, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    return 1 + max(entry["id"] for entry in tokenizer["added_tokens"])


def _tokenizer_json(learnt: Mapping[str, Any]) -> dict[str, Any]:
    first = (special.BOS, special.EOS, special.PAD)
    merges: list[list[str]] = learnt["model"]["merges"] if learnt else []
    model_tokens = [*first, *(CHAR_OF_BYTE[byte] for byte in BYTE_ORDER), *("".join(merge) for merge in merges)]
    later = [string for string in special.GRAMMAR if string not in first]
    added = [*enumerate(first), *enumerate([*later, *special.SPANS, special.IMAGE], start=len(model_tokens))]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": token_id,
                "content": string,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": string in FLAGGED,
            }
            for token_id, string in added
        ],
        "normalizer": None,
        "pre_tokenizer": learnt["pre_tokenizer"] if learnt else dict(BYTES_ONLY),
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: token_id for token_id, token in enumerate(model_tokens)},
            "merges": merges,
        },
    }


def _config_json() -> dict[str, Any]:
    return {
        "add_bos_token": False,
        "add_eos_token": False,
        "bos_token": special.BOS,
        "clean_up_tokenization_spaces": False,
        "eos_token": special.EOS,
        "pad_token": special.PAD,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": None,
    }
