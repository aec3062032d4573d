"""The list of all skills, and how samples are drawn from it.

Owns names, weights and seeds. A sample depends on (seed, index, skill) alone. Training and evaluation use different
seeds, so they never share a random stream. Called by the training scripts and by the evaluation.
"""

import re
from functools import partial
from types import MappingProxyType
from zlib import crc32

import numpy as np

from deepspan.skills import tasks, text_tasks
from deepspan.skills.records import Sample, Skill

TRAIN_SEED = 1
EVAL_SEED = 2
RECALL_DISTANCES = MappingProxyType({"recall_600": 600, "recall_2k": 2048, "recall_4k": 4096, "recall_8k": 8192})

PICTURE_SKILLS: MappingProxyType[str, Skill] = MappingProxyType(
    {
        "reading": tasks.reading,
        "colour": tasks.colour,
        "shape": tasks.shape_of,
        "position": tasks.position,
        "counting": tasks.counting,
        "which": tasks.which,
        "scene": tasks.scene,
        "sentence": tasks.sentence,
    }
)
TEXT_SKILLS: MappingProxyType[str, Skill] = MappingProxyType(
    {
        "repeat": text_tasks.repeat,
        "lookup": text_tasks.lookup,
        "adding": text_tasks.adding,
        "series": text_tasks.series,
        "recall": text_tasks.recall_near,
        **{
            name: partial(text_tasks.recall, distance=distance, skill=name)
            for name, distance in RECALL_DISTANCES.items()
        },
    }
)
SKILLS: MappingProxyType[str, Skill] = MappingProxyType({**PICTURE_SKILLS, **TEXT_SKILLS})

# How often each skill is drawn when none is named. `sentence` and `series` came later and are only drawn by name, so
# that samples, and the tokenizer learnt from them, stay what they were.
WEIGHTS = MappingProxyType(
    {
        "reading": 5,
        "colour": 1,
        "shape": 1,
        "position": 3,
        "counting": 3,
        "which": 3,
        "scene": 6,
        "repeat": 1,
        "lookup": 2,
        "adding": 2,
        "recall": 2,
        "recall_600": 1,
    }
)


def sample(seed: int, index: int, skill: str | None = None) -> Sample:
    """Sample number `index` of a seed: of the named skill, or of one drawn by `WEIGHTS`.

    seed, index: not negative. Raises KeyError for an unknown skill.
    """
    if skill is not None:
        return SKILLS[skill](np.random.default_rng((seed, index, crc32(skill.encode()))))
    rng = np.random.default_rng((seed, index))
    names = tuple(WEIGHTS)
    bounds = np.cumsum([WEIGHTS[name] for name in names])
    drawn = names[int(np.searchsorted(bounds, rng.integers(bounds[-1]), side="right"))]
    return SKILLS[drawn](rng)


def vocabulary_text(num_samples: int = 2000) -> str:
    """All the language of the skills, one question or answer a line, to train a small tokenizer on.

    Strings that are to be read, and numbers, are broken into lines of one character each, so that no two of their
    characters are learnt as one token.
    """
    lines = []
    for index in range(num_samples):
        for turn in sample(TRAIN_SEED, index).turns:
            lines += [_spelt(turn.question), _spelt(turn.answer)]
    return "\n".join(lines)


def _spelt(text: str) -> str:
    return re.sub(r"\b[A-Z0-9]{2,}\b", lambda found: "\n".join(found.group()), text)
