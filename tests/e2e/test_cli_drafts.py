"""Drafting from the command line: the same answers with it and without, and clear words where it cannot be."""

import re
import sys

import pytest

from deepspan.cli.main import main

OPTIONS = ("--spec", "--num-drafts", "--draft-rule", "--draft-sampling")
COMMANDS = {"generate": ("generate", "hi"), "chat": ("chat",), "serve": ("serve",), "eval": ("eval", "tiny")}


@pytest.fixture
def run(monkeypatch, capsys):
    """Run one command; its exit code, stdout and stderr, without colours."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("NO_COLOR", "1")

    def command(*arguments):
        monkeypatch.setattr(sys, "argv", ["deepspan", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            main()
        out, err = capsys.readouterr()
        return caught.value.code or 0, out, re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", err)

    return command


def _refused(result, part):
    code, out, err = result
    assert (code, out) == (2, "")
    (line,) = [line for line in err.splitlines() if line.strip()]
    assert line.startswith("error: ")
    assert part in line


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_that_loads_a_model_offers_drafting(run, command):
    code, out, _ = run(*COMMANDS[command], "--help")
    assert code == 0
    assert [option for option in OPTIONS if option not in out] == []


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("options", "part"),
    [
        (("--spec", "medusa"), "--spec must be one of auto, off, dspark, mtp"),
        (("--num-drafts", "9"), "--num-drafts must be auto or a number from 1 to 8"),
        (("--spec", "off", "--num-drafts", "1"), "--num-drafts 1 and --spec off exclude each other"),
    ],
    ids=str,
)
def test_options_that_cannot_be_are_refused_before_loading(run, command, options, part):
    _refused(run(*COMMANDS[command], "--model", "/nowhere", *options), part)


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (("--spec", "dspark"), "dspark drafting was asked for, and the checkpoint has no draft stages"),
        (("--num-drafts", "2"), "num_drafts is 2, the checkpoint has no draft stages"),
    ],
    ids=str,
)
def test_checkpoint_without_stages_is_refused_where_drafting_was_asked_for(run, model_folder, options, part):
    _refused(run("generate", "hi", "--model", model_folder, *options), part)


def test_plain_mtp_is_written_found_and_changes_no_answer(run, tmp_path):
    out = tmp_path / "mtp"
    assert run("tiny", out, "--layers", 2, "--draft-stages", 1, "--draft-kind", "mtp")[0] == 0
    asked = ("generate", "one two three", "--model", out, "--max-tokens", 8)
    plain = run(*asked, "--spec", "off")
    assert run(*asked) == run(*asked, "--spec", "mtp", "--num-drafts", 3) == plain
    assert plain[0] == 0
    _refused(run(*asked, "--spec", "dspark"), "dspark drafting was asked for, the checkpoint's draft stages are mtp")
    _refused(run("tiny", tmp_path / "no", "--draft-kind", "eagle"), "--draft-kind must be one of dspark, mtp")


def test_kind_of_stages_that_is_not_there_is_refused(run, draft_folder):
    result = run("generate", "hi", "--model", draft_folder, "--spec", "mtp")
    _refused(result, "mtp drafting was asked for, the checkpoint's draft stages are dspark")


@pytest.mark.parametrize(
    "options", [(), ("--spec", "dspark"), ("--num-drafts", "3"), ("--draft-rule", "block")], ids=str
)
def test_answer_is_the_same_with_drafts_and_without(run, draft_folder, options):
    asked = ("generate", "one two three", "--model", draft_folder, "--max-tokens", 12)
    assert run(*asked, *options) == run(*asked, "--spec", "off")
