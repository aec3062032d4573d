"""The tiny tokenizer, written once."""

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
