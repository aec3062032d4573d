"""Text exercises: repeat, look up, add, go on with a series, and recall a fact stated long ago.

Owns their small language. Answers are one to six characters or a few words; only those of `series` are long. `recall`
is the one that needs more than the sliding window: its fact lies hundreds or thousands of tokens before the question.
Listed in `skills.suite`.
"""

import re

import numpy as np

from deepspan.skills.pictures import COLOURS
from deepspan.skills.placing import chance, pick, pick_some
from deepspan.skills.records import Sample, Turn
from deepspan.skills.tasks import random_string

WORDS = tuple(
    "apple bear boat bread cat chair cloud cow deer dog door duck fish fox goat hat horse house key lamp lion moon "
    "mouse owl pear plum rain ring rose sheep ship shoe snow star sun swan table tiger tree wolf".split()
)
HOLDERS = tuple("box bag cup jar drum chest crate tin pot basket bottle drawer".split())
ALPHABET = tuple("ABCDEFGHIJKLMNOPQRSTUVWXYZ")
MAX_ADDEND = 49

_WHO = (
    "farmer teacher baker sailor doctor painter writer singer gardener driver child girl boy king queen miller".split()
)
_HOW = "old young tall quiet happy tired kind busy clever brave".split()
_DOES = "walks runs comes goes looks points returns rides turns hurries".split()
_WHERE = "river village market forest bridge garden school harbour station valley field hill mill tower square".split()
_WHEN = (
    "in the morning|in the evening|at noon|before dinner|after the rain|every day|on Monday|in spring|once more".split(
        "|"
    )
)
_SAYS = (
    "The weather is fine today.",
    "The wind blows from the sea.",
    "It is warm in the kitchen.",
    "The streets are empty now.",
    "Nobody knows the reason.",
    "The train is late again.",
    "The children laugh loudly.",
    "All the lights are on.",
)


def repeat(rng: np.random.Generator) -> Sample:
    """Repeat short strings or lists of words, two or three times over."""
    turns = []
    for _ in range(int(rng.integers(2, 4))):
        words = pick_some(rng, WORDS, int(rng.integers(1, 6)))
        answer = random_string(rng, 6) if chance(rng, 0.5) else " ".join(words)
        turns.append(Turn(question=pick(rng, ("Repeat: ", "Say this again: ")) + answer, answer=answer, skill="repeat"))
    return Sample(images=(), turns=tuple(turns))


def lookup(rng: np.random.Generator) -> Sample:
    """Find keys in a list of four to twelve pairs."""
    count = int(rng.integers(4, 13))
    keys = pick_some(rng, WORDS, count)
    values = [value(rng) for _ in keys]
    pairs = ", ".join(f"{key}: {value}" for key, value in zip(keys, values, strict=True))
    turns = []
    for index in rng.permutation(count)[:4]:
        question = pick(rng, ("What does the list give for {}?", "Look up {}.")).format(keys[int(index)])
        turns.append(Turn(question=question, answer=values[int(index)], skill="lookup"))
    return Sample(images=(), turns=_after(pairs + ".", turns))


def adding(rng: np.random.Generator) -> Sample:
    """Four sums of two numbers from 0 to 49."""
    turns = []
    for _ in range(4):
        first, second = (int(n) for n in rng.integers(0, MAX_ADDEND + 1, size=2))
        question = pick(rng, ("What is {} plus {}?", "{} + {} =")).format(first, second)
        turns.append(Turn(question=question, answer=str(first + second), skill="adding"))
    return Sample(images=(), turns=tuple(turns))


def series(rng: np.random.Generator) -> Sample:
    """Say numbers or letters in order, up or down: long answers, every part of which follows from the one before."""
    turns = []
    for _ in range(2):
        things, noun = (ALPHABET, "letters") if chance(rng, 0.4) else (tuple(map(str, range(100))), "numbers")
        count = int(rng.integers(4, 13))
        first = int(rng.integers(len(things) - count + 1))
        said = things[first : first + count][:: pick(rng, (1, 1, -1))]
        question = pick(rng, ("Say the {} from {} to {}.", "List all {} from {} to {}."))
        turns.append(Turn(question=question.format(noun, said[0], said[-1]), answer=", ".join(said), skill="series"))
    return Sample(images=(), turns=tuple(turns))


def recall(rng: np.random.Generator, *, distance: int, skill: str = "recall") -> Sample:
    """Look up facts stated long ago.

    The first question asks for a fact that ends about `distance` tokens (see `approximate_tokens`) before it; up to two
    more ask for facts stated near that one. Facts of other keys stand around it and all over the text.
    """
    facts = _facts(rng, 4 + int(rng.integers(3)) + min(10, distance // 150))
    target, (others, strewn) = facts[0], (facts[1:4], facts[4:])
    before = [_filler(rng) for _ in range(int(rng.integers(4)))]
    around = [_statement(fact) for fact in others]
    early = int(rng.integers(len(around) + 1))
    story = [*before, *around[:early], _statement(target)]
    after = _mixed(rng, around[early:], [_filler(rng) for _ in range(3)])
    room = distance - sum(approximate_tokens(sentence) for sentence in after)
    room -= sum(approximate_tokens(_statement(fact)) for fact in strewn)
    story += after + _mixed(rng, [_statement(fact) for fact in strewn], _filler_for(rng, room))
    asked = [target, *pick_some(rng, others, int(rng.integers(3)))]
    turns = [Turn(question=f"What is the {key}?", answer=value, skill=skill) for key, value in asked]
    return Sample(images=(), turns=_after(" ".join(story), turns))


def recall_near(rng: np.random.Generator) -> Sample:
    """Recall over a random distance of up to about 700 tokens, short ones more often."""
    return recall(rng, distance=int(30 + 670 * float(rng.random()) ** 2))


def approximate_tokens(text: str) -> int:
    """Number of words, digits and punctuation marks: what a small tokenizer trained on this language comes close to."""
    return len(re.findall(r"[A-Za-z]+|\d|[^\w\s]", text))


def value(rng: np.random.Generator) -> str:
    """What a list gives for a key: a word or a number."""
    if chance(rng, 0.5):
        return pick(rng, WORDS)
    return str(int(rng.integers(10, 1000)))


def _after(text: str, turns: list[Turn]) -> tuple[Turn, ...]:
    """The turns, with the material in front of the first question."""
    first = turns[0]
    return (Turn(question=f"{text} {first.question}", answer=first.answer, skill=first.skill), *turns[1:])


def _facts(rng: np.random.Generator, count: int) -> list[tuple[str, str]]:
    """Different keys with their values; they share colours and things, so that a part of the key is not enough."""
    colours, holders = pick_some(rng, tuple(COLOURS), 5), pick_some(rng, HOLDERS, 5)
    facts: dict[str, str] = {}
    while len(facts) < count:
        kind, value = ("code", str(int(rng.integers(10, 10_000)))) if chance(rng, 0.6) else ("word", pick(rng, WORDS))
        facts[f"{kind} of the {pick(rng, colours)} {pick(rng, holders)}"] = value
    return list(facts.items())


def _statement(fact: tuple[str, str]) -> str:
    return f"The {fact[0]} is {fact[1]}."


def _filler(rng: np.random.Generator) -> str:
    if chance(rng, 0.2):
        return pick(rng, _SAYS)
    way = pick(rng, ("to", "from", "past"))
    end = f" {pick(rng, _WHEN)}" if chance(rng, 0.4) else ""
    return f"The {pick(rng, _HOW)} {pick(rng, _WHO)} {pick(rng, _DOES)} {way} the {pick(rng, _WHERE)}{end}."


def _filler_for(rng: np.random.Generator, tokens: int) -> list[str]:
    sentences: list[str] = []
    while tokens > 0:
        sentences.append(_filler(rng))
        tokens -= approximate_tokens(sentences[-1])
    return sentences


def _mixed(rng: np.random.Generator, some: list[str], many: list[str]) -> list[str]:
    """Both lists together, `some` at random places of `many`."""
    mixed = list(many)
    for sentence in some:
        mixed.insert(int(rng.integers(len(mixed) + 1)), sentence)
    return mixed
