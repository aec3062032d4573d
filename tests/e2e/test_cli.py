"""The command line: what goes to stdout, what a user's error looks like, and that parsing never loads torch.

Commands run in this process through the entry point, except where a fresh interpreter is the point.
"""

import re
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from deepspan import ChatOptions, SamplingParams, __version__
from deepspan.cli.main import main
from deepspan.config.model import load_model_config
from deepspan.ops.registry import OPS
from deepspan.weights.checkpoint import INDEX_FILE, Checkpoint

GENERATE_OPTIONS = """--model --image --system --effort --raw --max-tokens --temperature --top-p --top-k --min-p --seed
    --image-mode --device --dtype --spec --num-drafts --draft-rule --draft-sampling""".split()
TINY_OPTIONS = "--layers --ratios --vision --no-vision --draft-stages --draft-kind --shards --seed --weights".split()


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
        return caught.value.code or 0, _plain(out), _plain(err)

    return command


@pytest.fixture(scope="module")
def picture(tmp_path_factory):
    file = tmp_path_factory.mktemp("picture") / "cat.png"
    pixels = np.random.default_rng(0).integers(0, 256, (18, 24, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(file)
    return file


def _plain(text):
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def _refused(result, *parts):
    """Exit code 2, nothing on stdout, and one line on stderr that names the thing."""
    code, out, err = result
    assert (code, out) == (2, "")
    lines = err.strip().splitlines()
    assert len(lines) == 1, err
    assert lines[0].startswith("error: ")
    for part in parts:
        assert str(part) in lines[0]


# --- without torch


LIGHT = """
import sys
from deepspan.cli.main import main
sys.argv = ["deepspan", *sys.argv[1:]]
try:
    main()
except SystemExit as end:
    code = end.code
heavy = {"torch", "numpy", "tokenizers", "safetensors", "PIL"} & set(sys.modules)
print(f"exit {code or 0}, heavy modules: {sorted(heavy)}")
"""


@pytest.mark.parametrize(
    ("arguments", "shown"), [(["--version"], f"deepspan {__version__}\n"), (["generate", "--help"], "--max-tokens")]
)
def test_command_that_needs_no_model_does_not_import_torch(arguments, shown):
    done = subprocess.run([sys.executable, "-c", LIGHT, *arguments], capture_output=True, text=True, check=True)
    out = _plain(done.stdout)
    assert shown in out
    assert out.splitlines()[-1] == "exit 0, heavy modules: []"


def test_version_is_one_line(run):
    assert run("--version") == (0, f"deepspan {__version__}\n", "")


# --- help


@pytest.mark.parametrize(
    ("command", "options"),
    [
        (("generate",), GENERATE_OPTIONS),
        (("tiny",), TINY_OPTIONS),
        (("inspect", "ops"), ["--device", "--dtype"]),
        ((), ["--version", "generate", "tiny", "inspect"]),
        (("inspect",), ["ops"]),
    ],
    ids=str,
)
def test_help_mentions_every_option(run, command, options):
    code, out, err = run(*command, "--help")
    assert (code, err) == (0, "")
    assert [option for option in options if option not in out] == []
    shown = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", out)) - {"--help"}
    assert shown == {option for option in options if option.startswith("--")}


# --- tiny


def test_tiny_writes_a_checkpoint_that_loads(run, tmp_path):
    code, out, err = run("tiny", tmp_path / "out", "--layers", 5, "--ratios", "0,4", "--shards", 2, "--draft-stages", 1)
    assert (code, out) == (0, "")
    assert "wrote" in err
    assert load_model_config(tmp_path / "out").compress_ratios == (0, 4, 0, 4, 0)
    assert (tmp_path / "out" / INDEX_FILE).exists()
    assert any(name.startswith("mtp.0.") for name in Checkpoint(tmp_path / "out"))


def test_tiny_without_vision_has_none_and_may_be_written_again(run, tmp_path):
    for seed in (1, 2):
        assert run("tiny", tmp_path / "out", "--no-vision", "--layers", 1, "--seed", seed)[0] == 0
    assert load_model_config(tmp_path / "out").vision is None


@pytest.mark.parametrize("ratios", ["", "a", "0,,4", "0;4", "0.5"])
def test_tiny_with_unreadable_ratios_is_refused(run, tmp_path, ratios):
    _refused(run("tiny", tmp_path / "out", "--ratios", ratios), "--ratios", repr(ratios))
    assert not (tmp_path / "out").exists()


def test_tiny_with_unserved_ratio_is_refused_and_can_be_tried_again(run, tmp_path):
    _refused(run("tiny", tmp_path / "out", "--ratios", "0,6"), "compress_ratios holds 6")
    assert run("tiny", tmp_path / "out", "--layers", 1, "--ratios", "0")[0] == 0


def test_tiny_over_something_else_is_refused_and_touches_nothing(run, tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    _refused(run("tiny", tmp_path), tmp_path, "not a checkpoint folder")
    _refused(run("tiny", tmp_path / "thesis.txt"), "thesis.txt", "not a checkpoint folder")
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.txt"]


def test_tiny_where_no_folder_can_be_is_refused(run, tmp_path):
    (tmp_path / "file").touch()
    _refused(run("tiny", tmp_path / "file" / "out", "--layers", 1), tmp_path / "file" / "out", "cannot be written")


# --- generate


def _generate(run, model, *arguments):
    return run("generate", "--model", model, "--max-tokens", 5, *arguments)


def test_generate_about_a_picture_writes_only_the_answer_to_stdout(run, llm, model_folder, picture):
    code, out, err = _generate(run, model_folder, "--image", picture, "what is this?")
    content = [{"type": "image", "image": picture}, {"type": "text", "text": "what is this?"}]
    output = llm.chat([{"role": "user", "content": content}], SamplingParams(max_tokens=5))
    assert code == 0
    assert out == output.text + "\n"
    assert ("stopped after 5 tokens" in err) == (output.finish_reason == "length")


def test_generate_with_every_option_equals_the_library(run, llm, model_folder, picture):
    code, out, _ = _generate(
        run, model_folder, "-i", picture, "-i", picture, "--system", "Be brief.", "--temperature", 0.8, "--top-p", 0.9,
        "--top-k", 40, "--min-p", 0.01, "--seed", 7, "--image-mode", "reference", "--device", "cpu",
        "--dtype", "float32", "both?",
    )  # fmt: skip
    content = [*[{"type": "image", "image": picture}] * 2, "both?"]
    params = SamplingParams(max_tokens=5, temperature=0.8, top_p=0.9, top_k=40, min_p=0.01, seed=7)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": content}]
    assert (code, out) == (0, llm.chat(messages, params).text + "\n")


def test_generate_raw_continues_the_text(run, llm, model_folder):
    code, out, err = _generate(run, model_folder, "--raw", "Once upon")
    assert (code, out) == (0, llm.generate("Once upon", SamplingParams(max_tokens=5))[0].text + "\n")
    assert "error" not in err


def test_generate_with_thinking_writes_reasoning_to_stderr(run, llm, model_folder):
    code, out, err = _generate(run, model_folder, "--effort", "high", "why?")
    output = llm.chat([{"role": "user", "content": "why?"}], SamplingParams(max_tokens=5), ChatOptions(effort="high"))
    assert (code, out) == (0, output.text + "\n")
    assert output.reasoning
    assert "stopped after 5 tokens" in err


def test_generate_without_a_model_folder_is_refused_by_path(run, tmp_path):
    _refused(_generate(run, tmp_path / "nowhere", "hi"), f"no config.json at {tmp_path / 'nowhere'}")


def test_generate_without_the_picture_is_refused_by_path_before_loading(run, tmp_path):
    _refused(
        _generate(run, tmp_path / "nowhere", "-i", tmp_path / "x.png", "hi"), f"no picture at {tmp_path / 'x.png'}"
    )


def test_generate_with_a_broken_picture_is_refused_by_part(run, model_folder, tmp_path):
    (tmp_path / "x.png").write_bytes(b"not a picture")
    _refused(_generate(run, model_folder, "-i", tmp_path / "x.png", "hi"), "messages[0].content[0]", "not JPEG, PNG")


def test_generate_with_a_picture_for_a_text_model_is_refused(run, text_folder, picture):
    _refused(_generate(run, text_folder, "-i", picture, "hi"), "no vision")


@pytest.mark.parametrize(
    ("option", "value", "parts"),
    [
        ("--effort", "huge", ("--effort must be one of", "'huge'")),
        ("--image-mode", "fancy", ("--image-mode must be one of serving, reference", "'fancy'")),
        ("--temperature", "-1", ("temperature must be", "-1")),
        ("--temperature", "nan", ("temperature must be", "nan")),
        ("--top-p", "0", ("top_p must be above 0",)),
        ("--top-k", "-2", ("top_k must be", "-2")),
        ("--min-p", "2", ("min_p must be", "2")),
        ("--max-tokens", "0", ("max_tokens must be", "0")),
        ("--seed", "-1", ("seed must be", "-1")),
        ("--device", "tpu9000", ("device 'tpu9000' cannot be used",)),
        ("--dtype", "int4", ("dtype must be", "'int4'")),
    ],
)
def test_generate_with_a_bad_value_is_refused_by_option(run, model_folder, option, value, parts):
    _refused(run("generate", "--model", model_folder, "hi", option, value), *parts)


@pytest.mark.parametrize("arguments", [("--image", "x.png"), ("--system", "Be brief.")])
def test_generate_raw_with_chat_parts_is_refused(run, model_folder, arguments):
    _refused(_generate(run, model_folder, "--raw", "hi", *arguments), "--raw")


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("generate", "--modle", "x", "hi"), "--modle"),
        (("generate", "--model", "x"), "question"),
        (("generate", "--model", "x", "hi", "--top-k", "many"), "--top-k"),
        (("tiny", "x", "--layers", "0"), "--layers"),
        (("genrate",), "genrate"),
    ],
)
def test_command_that_cannot_be_parsed_exits_2_and_names_the_part(run, arguments, part):
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert part in err.lower()
    assert "Traceback" not in err


# --- inspect


def test_inspect_ops_lists_every_operation_and_its_provider(run):
    code, out, err = run("inspect", "ops", "--device", "cpu")
    assert (code, err) == (0, "")
    assert [name for name in OPS if name not in out] == []
    assert "torch" in out
    assert "float32" in out


def test_inspect_ops_of_unknown_device_is_refused(run):
    _refused(run("inspect", "ops", "--device", "tpu9000"), "device 'tpu9000' cannot be used")
