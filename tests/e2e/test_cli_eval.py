"""`deepspan eval tiny` through the entry point: one checkpoint in several formats, and what is refused."""

import json
import re
import sys

import pytest

from deepspan import LLM
from deepspan.bundled import bundled_model
from deepspan.cli import eval as verb
from deepspan.cli.main import main
from deepspan.evaluate import Score, evaluate
from deepspan.weights.quantise import RECIPES, write_quantised

SKILLS = ("colour", "repeat")
FORMATS = ("bf16", "fp8-fp4", "w8a8")


@pytest.fixture
def run(monkeypatch, capsys):
    """Run one command; its exit code, stdout and stderr, without colours."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("NO_COLOR", "1")

    def command(*arguments):
        monkeypatch.setattr(sys, "argv", ["deepspan", "eval", "tiny", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            main()
        out, err = capsys.readouterr()
        return caught.value.code or 0, out, err

    return command


def test_eval_in_formats_loses_little_and_counts_as_the_library_does(run, tmp_path):
    """Of 25 questions one is 4 points: two fewer than plain are let pass, since one answer may go either way."""
    code, out, _ = run("--questions", 25, "--formats", ",".join(FORMATS), "--skills", ",".join(SKILLS), "--json")
    assert code == 0
    found = json.loads(out)
    assert list(found) == list(FORMATS)
    for name in FORMATS:
        assert {skill: counts["asked"] for skill, counts in found[name].items()} == dict.fromkeys(SKILLS, 25)
        lost = {skill: found["bf16"][skill]["right"] - found[name][skill]["right"] for skill in SKILLS}
        assert max(lost.values()) <= 2, (name, lost)
    packed = LLM(write_quantised(bundled_model(), tmp_path, RECIPES["w8a8"]), device="cpu")
    again = {score.skill: score.num_right for score in evaluate(packed, 25, skills=SKILLS)}
    assert {skill: counts["right"] for skill, counts in found["w8a8"].items()} == again


def _scores(right, asked=50):
    failures = (("what?", "red", "blue"),) if right < asked else ()
    return [Score(skill=s, num_right=right, num_asked=asked, failures=failures) for s in SKILLS]


@pytest.fixture
def counted(monkeypatch):
    """Formats are really written and loaded; answers are made up: each has five fewer right than the one before."""
    formats = []

    def answers(llm, questions, *, skills, progress):
        formats.append({type(m).__name__ for m in llm._runner._network.modules()})
        return _scores(51 - 5 * len(formats))

    monkeypatch.setattr(verb, "evaluate", answers)
    return formats


def test_eval_in_formats_prints_columns_and_points(run, counted):
    code, out, _ = run("--formats", "bf16, fp8-fp4,w8a8", "--skills", ",".join(SKILLS), "--failures")
    assert code == 0
    assert re.search(r"skill +┃ asked ┃ +bf16 ┃ +fp8-fp4 ┃ +w8a8", out)
    assert re.search(r"colour +│ +50 │ +92.0% │ +82.0% │ +72.0%", out)
    assert re.search(r"all +│ +100 │ +92.0% │ +82.0% │ +72.0%", out)
    assert "fp8-fp4: -10.0 points against bf16" in out
    assert "w8a8: -20.0 points against bf16" in out
    assert ["PackedLinear" in kinds for kinds in counted] == [False, True, True]


def test_eval_failures_say_their_format(run, counted):
    code, _, err = run("--formats", "bf16,w8a8", "--skills", "colour,repeat", "--failures")
    assert code == 0
    assert "bf16 colour: 'what?' is 'red', answered 'blue'" in err
    assert "w8a8 repeat: 'what?' is 'red', answered 'blue'" in err


def test_eval_without_formats_prints_one_model(run, counted):
    code, out, _ = run("--skills", ",".join(SKILLS))
    assert code == 0
    assert re.search(r"colour +│ +46 │ +50 │ +92.0%", out)
    assert "points" not in out
    code, out, _ = run("--skills", ",".join(SKILLS), "--json")
    assert (code, json.loads(out)) == (0, {skill: {"right": 41, "asked": 50} for skill in SKILLS})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--formats", "bf16,int3"), "--formats takes bf16, fp8-fp4"),
        (("--formats", "w8a8,w8a8"), "names w8a8 2 times"),
        (("--formats", ""), "found ''"),
        (("--skills", "colour,juggling"), "--skills takes reading, colour"),
        (("--skills", "colour,colour"), "names colour 2 times"),
    ],
)
def test_eval_refuses_what_does_not_exist(run, options, message):
    code, out, err = run(*options)
    assert (code, out) == (2, "")
    assert message in err


def test_eval_in_formats_of_a_quantised_checkpoint_is_refused_by_tensor(run, tmp_path):
    folder = write_quantised(bundled_model(), tmp_path, RECIPES["w8a8"])
    code, out, err = run("--model", folder, "--formats", "bf16,w8a8")
    assert (code, out) == (2, "")
    assert re.search(r"not quantised, \S+\.weight in .* is stored as I8", err)
