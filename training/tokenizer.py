"""The tokenizer of deepspan-tiny: the tiny byte tokenizer plus a few hundred merges learnt from the skills' language.

Letters A-Z and digits are never merged: what is read from a picture comes out character by character.
"""

from pathlib import Path

from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

from deepspan.skills.suite import vocabulary_text
from deepspan.text.tiny_tokenizer import write_tiny_tokenizer

NUM_MERGES = 360


def write_tokenizer(folder: Path) -> int:
    """Train the merges (deterministic) and write tokenizer.json; returns the vocabulary size."""
    splits = [
        pre_tokenizers.Split(Regex("[A-Z0-9\\n]"), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
    ]
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.Sequence(splits)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=len(alphabet) + NUM_MERGES, initial_alphabet=alphabet, show_progress=False, special_tokens=[]
    )
    learner.train_from_iterator(vocabulary_text().splitlines(keepends=True), trainer)
    return write_tiny_tokenizer(folder, learner.to_str())
