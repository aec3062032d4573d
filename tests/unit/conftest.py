"""Tokenizers of the unit tests, each written once, and the grammar compiler on them."""

import pytest

from deepspan.text.tiny_tokenizer import write_tiny_tokenizer
from deepspan.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("tokenizer")
    write_tiny_tokenizer(made)
    return made


@pytest.fixture(scope="session")
def tokenizer(tokenizer_folder):
    return Tokenizer(tokenizer_folder, vision=True)


@pytest.fixture(scope="module", params=["bytes", "merged"])
def vocabulary(request, tokenizer, tmp_path_factory):
    """Tokenizers that grammars are tried on: one token a byte, and with merged tokens."""
    from grammar_helpers import learnt_tokenizer

    return tokenizer if request.param == "bytes" else learnt_tokenizer(tmp_path_factory.mktemp("merged"))


@pytest.fixture(scope="module")
def compiler(vocabulary):
    from deepspan.text.grammar import GrammarCompiler

    return GrammarCompiler(vocabulary)
