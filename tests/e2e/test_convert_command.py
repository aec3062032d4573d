"""`deepspan convert` as a user runs it: the result answers, what is said on the way, and what an error looks like."""

import json
import re
import shutil
import sys

import pytest
import torch
from quantised_helpers import stored_tensors

from deepspan.bundled import bundled_model
from deepspan.cli.main import main
from deepspan.config.model import load_model_config
from deepspan.ops.formats import Format
from deepspan.weights.load import load_model
from deepspan.weights.resume import JOURNAL
from deepspan.weights.tiny import write_tiny
from deepspan.weights.writer import ShardWriter

OPTIONS = "--to --shard-size --layers --experts --keep-drafts --calibrate --device --dtype".split()
PICTURE = "docs/images/demo.png"
QUESTION = ("--image", PICTURE, "What colour is the diamond?")


@pytest.fixture
def run(monkeypatch, capsys):
    """Run one command; its exit code, stdout and stderr, without colours."""
    monkeypatch.setenv("COLUMNS", "400")
    monkeypatch.setenv("NO_COLOR", "1")

    def command(*arguments):
        monkeypatch.setattr(sys, "argv", ["deepspan", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            main()
        plain = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text) for text in capsys.readouterr()]
        return caught.value.code or 0, *plain

    return command


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("tiny") / "plain", ratios=(0, 4, 128), draft_stages=2)


def _refused(result, *parts):
    code, out, err = result
    assert (code, out) == (2, "")
    (line,) = err.strip().splitlines()
    assert line.startswith("error: ")
    for part in parts:
        assert str(part) in line


def _converted(result, *parts):
    code, out, err = result
    assert (code, out) == (0, ""), err
    for part in parts:
        assert str(part) in err
    return err


# --- from conversion to answer


@pytest.mark.parametrize("to", ["bf16", "fp8-fp4", "w8a8"])
def test_converted_model_answers_about_a_picture(run, tmp_path, to):
    err = _converted(run("convert", bundled_model(), tmp_path / "out", "--to", to, "--shard-size", "2MB"), "wrote")
    assert re.search(r"wrote .*out: [\d,]+ tensors \([\d,]+ as they were\) in [2-9] files, [\d.]+ MB", err)
    assert run("generate", "--model", tmp_path / "out", *QUESTION)[:2] == (0, "yellow\n")


def test_way_back_to_plain_answers_too(run, tmp_path):
    _converted(run("convert", bundled_model(), tmp_path / "packed", "--to", "fp8-fp4"))
    _converted(run("convert", tmp_path / "packed", tmp_path / "plain", "--to", "bf16"))
    assert run("generate", "--model", tmp_path / "plain", *QUESTION)[:2] == (0, "yellow\n")


def test_calibrated_model_has_static_layers_and_answers(run, tmp_path):
    examples = [
        {"text": "What colour is the diamond?", "images": ["demo.png"]},
        {"text": "Repeat: owl moon"},
    ]
    shutil.copyfile(PICTURE, tmp_path / "demo.png")
    file = tmp_path / "examples.jsonl"
    file.write_text("\n".join(map(json.dumps, examples)))
    err = _converted(run("convert", bundled_model(), tmp_path / "out", "--to", "w8a8", "--calibrate", file), "wrote")
    network = load_model(tmp_path / "out", dtype=torch.float32).network
    formats = {name: getattr(module, "format", None) for name, module in network.named_modules()}
    static = {name for name, form in formats.items() if form is Format.INT8_STATIC}
    layers = load_model_config(tmp_path / "out").num_hidden_layers
    unseen = {name for name in formats if name.endswith("indexer.wq_b") and name not in static}
    assert len(static) >= 6 * layers
    assert ("note: no input was seen of" in err) == bool(unseen)
    assert run("generate", "--model", tmp_path / "out", *QUESTION)[:2] == (0, "yellow\n")


@pytest.mark.parametrize("to", ["bf16", "fp8-fp4", "w8a8"])
def test_part_of_a_model_generates(run, tmp_path, tiny, to):
    source = tiny
    if to != "bf16":
        source = tmp_path / "source"
        _converted(run("convert", tiny, source, "--to", to))
    cut = ("--to", "tiny-subset", "--layers", 3, "--experts", 3)
    _converted(
        run("convert", source, tmp_path / "out", *cut), "note: 2 draft stages (mtp.*) are left out; --keep-drafts"
    )
    code, out, _ = run("generate", "--model", tmp_path / "out", "--max-tokens", 4, "--image", PICTURE, "what?")
    assert code == 0
    assert out
    _converted(run("convert", source, tmp_path / "drafting", *cut, "--keep-drafts"))
    assert any(name.startswith("mtp.1.") for name in stored_tensors(tmp_path / "drafting"))


# --- on the way


def test_same_command_goes_on_after_an_interruption(run, tmp_path, tiny, monkeypatch):
    plain, count = ShardWriter.write, 0

    def write(self, name, tensor):
        nonlocal count
        count += 1
        if count == 200:
            raise KeyboardInterrupt
        plain(self, name, tensor)

    command = ("convert", tiny, tmp_path / "out", "--to", "fp8-fp4", "--shard-size", "100KB")
    with monkeypatch.context() as patch:
        patch.setattr(ShardWriter, "write", write)
        code, out, err = run(*command)
    assert (code != 0, out) == (True, "")
    assert "Traceback" not in err
    finished = len(list((tmp_path / "out").glob("*.safetensors")))
    assert finished >= 1
    assert (tmp_path / "out" / JOURNAL).exists()
    _refused(run("generate", "--model", tmp_path / "out", "hi"), "no config.json")
    _converted(run(*command), f"{finished} of them from an earlier run")
    assert run("generate", "--model", tmp_path / "out", "--max-tokens", 2, "hi")[0] == 0


def test_entries_that_stay_behind_are_told(run, tmp_path, tiny):
    _converted(run("convert", tiny, tmp_path / "source", "--to", "bf16"))
    (tmp_path / "source" / "inference").mkdir()
    _converted(run("convert", tmp_path / "source", tmp_path / "out", "--to", "w8a8"), "not copied: inference")


def test_help_mentions_every_option_and_format(run):
    code, out, err = run("convert", "--help")
    assert (code, err) == (0, "")
    shown = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", out)) - {"--help"}
    assert shown == set(OPTIONS)
    for to in ("bf16", "fp8-fp4", "fp8 ", "w8a8", "w4a8", "tiny-subset"):
        assert to in out


# --- errors


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--to", "int3"], ["--to must be one of bf16, fp8-fp4, fp8, w8a8, w4a8, tiny-subset, found 'int3'"]),
        (["--to", "bf16", "--shard-size", "big"], ["--shard-size must be a number", "'big'"]),
        (["--to", "bf16", "--shard-size", "0"], ["--shard-size must be at least 1 byte"]),
        (["--to", "tiny-subset"], ["--to tiny-subset needs --layers and --experts"]),
        (["--to", "tiny-subset", "--layers", "2"], ["--to tiny-subset needs --layers and --experts"]),
        (["--to", "tiny-subset", "--layers", "9", "--experts", "2"], ["--layers must be from 1 to 3", "found 9"]),
        (["--to", "bf16", "--layers", "2"], ["--layers belongs to --to tiny-subset, found --to bf16"]),
        (["--to", "w8a8", "--experts", "2"], ["--experts belongs to --to tiny-subset"]),
        (["--to", "w8a8", "--keep-drafts"], ["--keep-drafts belongs to --to tiny-subset"]),
        (["--to", "bf16", "--calibrate", "x"], ["--calibrate is for int8 layers (--to w8a8, w4a8), found --to bf16"]),
        (["--to", "w8a8", "--calibrate", "nowhere"], ["nowhere cannot be read"]),
    ],
    ids=str,
)
def test_option_that_cannot_be_is_refused_by_name_and_nothing_is_written(run, tmp_path, tiny, arguments, parts):
    _refused(run("convert", tiny, tmp_path / "out", *arguments), *parts)
    assert not (tmp_path / "out").exists()


def test_folders_that_cannot_be_are_refused_by_path(run, tmp_path, tiny):
    (tmp_path / "thesis.txt").write_text("mine")
    _refused(run("convert", tiny, tmp_path, "--to", "bf16"), tmp_path, "not empty (thesis.txt)")
    _refused(run("convert", tiny, tmp_path / "thesis.txt", "--to", "bf16"), "thesis.txt is a file")
    _refused(run("convert", tiny, tmp_path / "thesis.txt" / "out", "--to", "bf16"), tmp_path / "thesis.txt")
    _refused(run("convert", tiny, tiny, "--to", "bf16"), tiny, "is the checkpoint to convert")
    _refused(run("convert", tmp_path / "no", tmp_path / "out", "--to", "bf16"), f"no config.json at {tmp_path / 'no'}")
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.txt"]


def test_format_must_be_given(run, tmp_path, tiny):
    code, out, err = run("convert", tiny, tmp_path / "out")
    assert (code, out) == (2, "")
    assert "--to" in err
