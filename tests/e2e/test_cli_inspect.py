"""`deepspan inspect weights`, `config` and `memory` through the entry point: tables, JSON, and what is refused."""

import json
import re
import subprocess
import sys

import pytest
from header_helpers import write_release
from released import flash, flash_vision

from deepspan.bundled import bundled_model
from deepspan.cli.main import main
from deepspan.config.model import parse_model_config
from deepspan.weights.inventory import expected_headers

SMALL = ("--max-model-len", 4096, "--cache-memory", "512MiB")


@pytest.fixture
def run(monkeypatch, capsys):
    """Run one command; its exit code, stdout and stderr, without colours."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("NO_COLOR", "1")

    def command(*arguments):
        monkeypatch.setattr(sys, "argv", ["deepspan", "inspect", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            main()
        out, err = capsys.readouterr()
        return caught.value.code or 0, out, err

    return command


@pytest.fixture
def record(run):
    """The same, as the JSON that it prints."""

    def command(*arguments):
        code, out, err = run(*arguments, "--json")
        assert (code, err) == (0, "")
        return json.loads(out)

    return command


@pytest.fixture(scope="module")
def configurations(tmp_path_factory):
    """Released configurations without weights."""
    files = {}
    for name, raw in (("text", flash()), ("vision", flash_vision())):
        files[name] = tmp_path_factory.mktemp(name) / "config.json"
        files[name].write_text(json.dumps(raw))
    return files


# --- weights


def test_inspect_weights_of_a_configuration_tells_what_its_release_holds(record, configurations):
    found = record("weights", configurations["text"])
    assert found["source"] == "configuration"
    assert found["total"] == {
        "tensors": 69_187,
        "parameters": 290_942_289_362,
        "active_parameters": 13_799_632_471,
        "bytes": 159_609_485_896,
    }
    vision = record("weights", configurations["vision"])
    assert vision["total"]["bytes"] == 167_811_372_792
    assert vision["parts"]["vision tower"]["bytes"] == 823_685_120
    assert vision["parts"]["aligner"]["bytes_by_dtype"] == {"BF16": 109_068_288}


def test_inspect_weights_of_headers_alone_prints_parts_and_totals(run, tmp_path):
    raw = flash()
    folder = write_release(tmp_path / "text", raw, expected_headers(parse_model_config(raw), tmp_path).tensors)
    code, out, err = run("weights", folder)
    assert (code, err) == (0, "")
    assert re.search(r"all +│ +69,187 │ +290,942,289,362 │ +159,609,485,896 │ 148\.65 GiB", out)
    assert re.search(r"routed experts +│ +66,048 │ +277,025,390,592", out)
    assert "13,799,632,471 parameters compute a token" in out
    assert "no problems found" in out
    assert "tensors that are not loaded: 1,575 (drafting is off)" in out


def test_inspect_weights_of_a_partial_download_names_what_is_missing_and_exits_1(run, tmp_path):
    raw = flash()
    folder = write_release(tmp_path / "text", raw, expected_headers(parse_model_config(raw), tmp_path).tensors)
    gone = sorted(folder.glob("*.safetensors"))[:30]
    for file in gone:
        file.unlink()
    code, out, err = run("weights", folder)
    assert (code, err) == (1, "")
    assert "files: 45, 30 of them missing" in out
    assert "and 10 more: --all lists them" in out
    assert sum(file.name in out for file in gone) == 20
    code, out, _ = run("weights", folder, "--all")
    assert (code, sum(file.name in out for file in gone)) == (1, 30)
    code, out, _ = run("weights", folder, "--json")
    assert code == 1
    assert sorted(json.loads(out)["missing_files"]) == [file.name for file in gone]
    assert list(json.loads(out)["problems"]) == ["files"]


def test_inspect_weights_of_the_bundled_model_finds_nothing_wrong(record):
    found = record("weights")
    assert found["problems"] == {}
    assert found["expected"] == {name: found["total"][name] for name in ("tensors", "bytes")}


# --- config


def test_inspect_config_of_the_release_says_what_was_parsed(run, configurations):
    code, out, err = run("config", configurations["vision"])
    assert (code, err) == (0, "")
    for said in (
        "43: 2 window only, 21 ratio 4 with indexer, 20 ratio 128",
        "0 0 (4 128) x 20 4",
        "256 routed and 1 shared, width 2,048; 6 compute a token, weights times 1.5, gates cut at 10",
        "the first 3",
        "at most 384 tokens (387 with lead pads)",
        "DSpark, 3 stages: blocks of 5 from layers 40, 41, 42, Markov rank 256, noise token 128799",
        "FP8 in blocks of 128 x 128",
        "FP4",
    ):
        assert said in out, said


def test_inspect_config_of_a_text_model_has_no_vision_and_one_stage(run, configurations):
    code, out, _ = run("config", configurations["text"])
    assert code == 0
    assert "images are refused" in out
    assert "MTP, 1 stages" in out


def test_inspect_config_as_json_has_every_field(record, configurations):
    found = record("config", configurations["vision"])
    assert found["compress_ratios"] == flash_vision()["compress_ratios"][:43]
    assert found["quantisation"] == {"method": "fp8", "expert_dtype": "fp4"}
    assert found["vision"]["max_wh_ratio"] == 8
    assert found["draft"]["target_layer_ids"] == [40, 41, 42]


def test_inspect_config_never_imports_torch(configurations):
    code = (
        "import sys; from deepspan.cli.main import main; sys.argv = ['deepspan', 'inspect', 'config', sys.argv[1]]\n"
        "try: main()\nexcept SystemExit: pass\nassert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(configurations["text"])], check=True, capture_output=True)


# --- memory


def test_inspect_memory_of_the_release_from_its_configuration(record, configurations):
    options = (
        "--dtype",
        "bfloat16",
        "--cache-memory",
        "16GiB",
        "--read-rate",
        "2GB",
        "--spec",
        "dspark",
        "--num-drafts",
        "5",
    )
    found = record("memory", configurations["vision"], *options)
    assert found["request"]["bytes_per_token"] == 6880  # the sheet's growth of bf16 caches
    per_token = {name: family["bytes_per_token"] for name, family in found["families"].items()}
    assert (per_token["rows_4"], per_token["index_4"], per_token["rows_128"]) == (21 * 256, 21 * 64, 20 * 8)
    assert per_token["window"] == per_token["draft"] == 0
    # All of the files but the gate biases of the hash layers, which nobody uses.
    assert found["loading"]["bytes"] == 167_811_372_792 - 3 * 256 * 4
    assert found["loading"]["seconds"] == pytest.approx(167_811_369_720 / 2e9, abs=120)
    assert not found["loading"]["is_measured"]
    device = found["device"]
    assert device["weights"]["routed experts"] == 43 * 256 * 25_165_824 * 17 // 32  # 4 bits, and a byte for 32
    assert device["weights"]["head"] == 4 * 529_530_880  # fp32
    parts = ("caches", "buffers", "encoder_rows", "activations_at_least")
    assert device["total"] == sum(device["weights"].values()) + sum(device[part] for part in parts)
    assert found["capacity"]["requests"] == int(float(found["capacity"]["lengths"]))
    assert found["capacity"]["bytes"] <= 16 << 30


def test_inspect_memory_of_packed_rows_counts_584_bytes(record):
    found = record("memory", "--kv-dtype", "fp8", *SMALL)
    layers = json.loads((bundled_model() / "config.json").read_text())["num_hidden_layers"]
    assert found["families"]["window"]["block_bytes"] == layers * 128 * 584
    assert found["families"]["rows_4"]["bytes_per_token"] == 584 / 4 * found["families"]["rows_4"]["layers"]


def test_inspect_memory_prints_parts_families_and_whole_requests(run, text_folder):
    code, out, err = run("memory", text_folder, *SMALL, "--device", "cpu")
    assert (code, err) == (0, "")
    for part in ("routed experts", "caches", "buffers of a step", "activations, at least"):
        assert re.search(rf"{part} +│ +[\d,]+ │", out), part
    assert "encoder outputs" not in out
    for family in ("window", "rows_4", "index_4", "state_4"):
        assert re.search(rf"{family} .*\d", out)
    assert re.search(r"requests of 4,096 tokens at once: \d+, in whole blocks", out)
    assert re.search(r"loading reads [\d.]+ [KM]iB", out)


def test_inspect_memory_without_files_asks_for_a_rate(run, text_folder, tmp_path):
    (tmp_path / "config.json").write_bytes((text_folder / "config.json").read_bytes())
    code, out, _ = run("memory", tmp_path, *SMALL)
    assert code == 0
    assert "no files to measure their speed on: --read-rate" in out


def test_inspect_memory_shares_experts_between_devices(record, text_folder):
    alone, shared = (record("memory", text_folder, *SMALL, "--num-devices", n)["device"] for n in (1, 2))
    assert 2 * shared["weights"]["routed experts"] == alone["weights"]["routed experts"]
    assert shared["weights"]["attention"] == alone["weights"]["attention"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--cache-memory", "5 cats"), "memory must be a number"),
        (("--cache-memory", "1KB"), "the cache needs"),
        (("--device-memory", "1KB"), "nothing is left for caches"),
        (("--cache-memory", "1GB", "--device-memory", "2GB"), "exclude each other"),
        (("--read-rate", "0"), "must be above 0"),
        (("--dtype", "x"), "dtype must be"),
        (("--kv-dtype", "x"), "kv_dtype must be one of"),
        (("--spec", "x"), "--spec must be one of"),
        (("--spec", "dspark"), "no draft stages"),
        (("--num-devices", 3), "3 ranks do not divide"),
    ],
)
def test_inspect_memory_refuses_what_cannot_be(run, text_folder, options, message):
    code, out, err = run("memory", text_folder, *options)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert message in err


@pytest.mark.parametrize("what", ["weights", "config", "memory"])
def test_inspect_of_a_folder_without_configuration_is_one_line(run, tmp_path, what):
    code, out, err = run(what, tmp_path)
    assert (code, out) == (2, "")
    assert "no config.json" in err
