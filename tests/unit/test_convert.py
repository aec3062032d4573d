"""Conversions between all formats: values against decoders of their own, bytes where a format stays, what loads."""

import json
import logging

import pytest
import torch
from quantised_helpers import decoded_tensors, stored_tensors
from safetensors.torch import save_file

from deepspan.errors import ConfigError, WeightsError
from deepspan.ops.formats import Format
from deepspan.weights.convert import Calibration, convert
from deepspan.weights.folder import DESCRIPTION_FILE, INDEX_FILE, Headers
from deepspan.weights.load import load_model
from deepspan.weights.plan import FORMATS, plan
from deepspan.weights.quantise import InputRange
from deepspan.weights.source import Source
from deepspan.weights.table import DraftKind, Storage, backbone_tensors, draft_tensors
from deepspan.weights.tiny import write_tiny

QUANTISED = ["fp8-fp4", "fp8", "w8a8", "w4a8"]
BLOCKS = ["fp8-fp4", "fp8"]
INDEX_OF_EXPORTS = "quant_model_weights.safetensors.index.json"
PLAIN_IN_EXPORTS = (".wo_a", ".wo_b", "main_proj")
STATIC = {"layers.1.attn.wq_b": InputRange(low=-3.0, high=5.0), "mtp.0.attn.wq_b": InputRange(low=0.5, high=2.0)}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """One model with vision and draft stages in every format, converted from the plain one."""
    root = tmp_path_factory.mktemp("convert")
    made = {"bf16": write_tiny(root / "bf16", ratios=(0, 4, 128), draft_stages=2, num_shards=2)}
    for to in QUANTISED:
        convert(made["bf16"], root / to, to)
        made[to] = root / to
    convert(made["bf16"], root / "static", "w8a8", calibration=Calibration(digest="x", inputs=STATIC))
    return made | {"static": root / "static"}


@pytest.fixture(scope="module")
def table(folders):
    config = load_model(folders["bf16"], dtype=torch.float32).config
    return backbone_tensors(config) | draft_tensors(config, 2, DraftKind.DSPARK)


def _bits(tensor):
    return tensor.contiguous().view(torch.uint8) if tensor.dim() else tensor


def _same(found, expected):
    assert found.keys() == expected.keys()
    differ = [
        name
        for name in expected
        if found[name].dtype != expected[name].dtype or not torch.equal(_bits(found[name]), _bits(expected[name]))
    ]
    assert differ == []


def _decoded(folder):
    """Plain fp32 or stored tensors of any format, by statements of the tests' own."""
    if not (folder / DESCRIPTION_FILE).exists():
        return decoded_tensors(folder)
    stored = stored_tensors(folder)
    labels = json.loads((folder / DESCRIPTION_FILE).read_text())
    plain = {}
    for name, tensor in stored.items():
        module = name.removesuffix(".weight")
        if name.rpartition(".")[2] in ("weight_scale", "weight_offset", "scale_bias", "input_scale", "input_offset"):
            continue
        if labels[name] == "FLOAT":
            plain[name] = tensor
        elif labels[name] == "W8A8_DYNAMIC":
            plain[name] = tensor.float() * stored[f"{module}.weight_scale"]
        elif labels[name] == "W4A8_DYNAMIC":
            low, high = (tensor << 4) >> 4, tensor >> 4
            rows = torch.stack((low, high), dim=1).flatten(0, 1)
            plain[name] = rows.float() * stored[f"{module}.weight_scale"]
        elif name.endswith(".weight"):
            scale = stored[f"{module}.deq_scale"] / stored[f"{module}.input_scale"]
            plain[name] = tensor.float() * scale[:, None]
    return plain


def _states(folder):
    loaded = load_model(folder, dtype=torch.float32, drafts=DraftKind.DSPARK)
    return loaded.network.state_dict() | loaded.drafter.state_dict()


# --- values


@pytest.mark.parametrize("source", [*QUANTISED, "static"])
def test_plain_form_holds_what_the_quantised_one_decodes_to(folders, table, tmp_path, source):
    """Block formats with scales of powers of two are exact in bf16; all others are rounded to it once."""
    convert(folders[source], tmp_path / "out", "bf16")
    found, expected = stored_tensors(tmp_path / "out"), _decoded(folders[source])
    differ = [name for name, value in found.items() if not torch.equal(value, expected[name].to(value.dtype))]
    assert differ == []
    assert found.keys() == expected.keys() == table.keys()
    if source == "fp8-fp4":
        assert all(torch.equal(found[name].float(), value.float()) for name, value in expected.items())
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert not {"quantization_config", "expert_dtype"} & set(config)
    assert config == json.loads((folders["bf16"] / "config.json").read_text())


@pytest.mark.parametrize("to", QUANTISED)
def test_quantised_form_is_near_the_plain_one_and_leaves_the_rest_alone(folders, table, to):
    plain, found = stored_tensors(folders["bf16"]), _decoded(folders[to])
    assert found.keys() == plain.keys()
    recipe = FORMATS[to]
    errors = {Format.FP8: 0.03, Format.FP4: 0.14, Format.INT8: 0.012, Format.INT4: 0.2}
    for name, spec in table.items():
        form = {Storage.FP8: recipe.dense, Storage.FP4: recipe.experts}.get(spec.storage)
        if form is None or (recipe.is_described and name.removesuffix(".weight").endswith(PLAIN_IN_EXPORTS)):
            assert torch.equal(found[name], plain[name]), name
        else:
            weight = plain[name].float()
            error = float((found[name] - weight).norm() / weight.norm())
            assert errors[form] / 4 < error < errors[form], (name, error)


@pytest.mark.parametrize("to", QUANTISED)
@pytest.mark.parametrize("source", QUANTISED)
def test_one_quantised_form_becomes_another_by_its_decoded_numbers(folders, table, tmp_path, source, to):
    """As from a plain checkpoint in fp32 of what the source decodes to; what has the form already stays as it is."""
    convert(folders[source], tmp_path / "direct", to)
    decoded = _decoded(folders[source])
    convert(folders[source], tmp_path / "wide", "bf16")
    _widen(tmp_path / "wide", decoded)
    convert(tmp_path / "wide", tmp_path / "around", to)
    found, around = _decoded(tmp_path / "direct"), _decoded(tmp_path / "around")
    for name, spec in table.items():
        expected = decoded if _stays(spec.storage, FORMATS[source], FORMATS[to]) else around
        torch.testing.assert_close(found[name].float(), expected[name].float(), rtol=1e-6, atol=1e-7)


def _stays(storage, source, to):
    """Whether layers keep their form; scales of any size are no powers of two."""
    form, new = ({Storage.FP8: recipe.dense, Storage.FP4: recipe.experts}.get(storage) for recipe in (source, to))
    is_narrowed = source.block_scale == torch.float32 and to.block_scale != torch.float32
    return form is new and not (form is Format.FP8 and is_narrowed)


def _widen(folder, tensors):
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


@pytest.mark.parametrize("to", BLOCKS)
def test_second_round_trip_changes_no_number(folders, tmp_path, to):
    convert(folders[to], tmp_path / "plain", "bf16")
    convert(tmp_path / "plain", tmp_path / "again", to)
    convert(tmp_path / "again", tmp_path / "twice", "bf16")
    _same(stored_tensors(tmp_path / "twice"), stored_tensors(tmp_path / "plain"))


# --- bytes


@pytest.mark.parametrize("to", ["bf16", *QUANTISED, "static"])
def test_format_that_is_there_already_is_copied_byte_by_byte(folders, tmp_path, to):
    done = convert(folders[to], tmp_path / "out", "w8a8" if to == "static" else to)
    _same(stored_tensors(tmp_path / "out"), stored_tensors(folders[to]))
    assert done.kept == done.tensors == len(stored_tensors(folders[to]))
    names = ["config.json", "tokenizer.json", *([DESCRIPTION_FILE] if to in ("w8a8", "w4a8", "static") else [])]
    for name in names:
        assert json.loads((tmp_path / "out" / name).read_text()) == json.loads((folders[to] / name).read_text())


def test_layers_that_have_the_format_already_are_kept_beside_others(folders, tmp_path):
    done = convert(folders["fp8-fp4"], tmp_path / "out", "fp8")
    before, after = stored_tensors(folders["fp8-fp4"]), stored_tensors(tmp_path / "out")
    name = "layers.1.attn.wq_b"
    _same({name: after[f"{name}.weight"]}, {name: before[f"{name}.weight"]})
    assert torch.equal(after[f"{name}.scale"], before[f"{name}.scale"].float())
    assert 0 < done.kept < done.tensors


def test_transformers_names_become_original_ones(tmp_path):
    made = [
        write_tiny(tmp_path / str(renamed), ratios=(0, 4), seed=5, transformers_names=renamed) for renamed in (0, 1)
    ]
    for to in ("bf16", "fp8-fp4"):
        outs = [tmp_path / f"{to}-{number}" for number in range(2)]
        for source, out in zip(made, outs, strict=True):
            convert(source, out, to)
        _same(stored_tensors(outs[1]), stored_tensors(outs[0]))


def test_same_source_gives_the_same_bytes(folders, tmp_path):
    for name in ("a", "b"):
        convert(folders["bf16"], tmp_path / name, "w4a8", shard_bytes=10**6)
    files = sorted(file.name for file in (tmp_path / "a").iterdir())
    assert files == sorted(file.name for file in (tmp_path / "b").iterdir())
    assert all((tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes() for name in files)


# --- what is written loads


@pytest.mark.parametrize("to", ["bf16", *QUANTISED, "static"])
def test_every_form_loads_with_its_draft_stages(folders, to, caplog):
    with caplog.at_level(logging.WARNING):
        state = _states(folders[to])
    assert not caplog.records
    stored = stored_tensors(folders[to])
    assert {name for name in state if name not in stored} == set()


def test_layers_with_a_range_become_static_and_only_they(folders):
    loaded = load_model(folders["static"], dtype=torch.float32, drafts=DraftKind.DSPARK)
    modules = dict(loaded.network.named_modules()) | dict(loaded.drafter.named_modules())
    static = {name for name, module in modules.items() if getattr(module, "format", None) is Format.INT8_STATIC}
    assert static == set(STATIC)
    layer = modules["layers.1.attn.wq_b"]
    assert float(layer.input_scale) == pytest.approx(8 / 255)
    assert float(layer.input_offset) == round(-128 + 3 * 255 / 8)
    assert float(modules["mtp.0.attn.wq_b"].input_offset) == -128  # 0 is always inside


def test_range_turns_a_dynamic_layer_of_an_export_static_and_keeps_the_rest(folders, tmp_path):
    convert(folders["w8a8"], tmp_path / "out", "w8a8", calibration=Calibration(digest="x", inputs=STATIC))
    found, expected = stored_tensors(tmp_path / "out"), stored_tensors(folders["static"])
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-6, atol=0)


def test_static_layer_becomes_dynamic_where_the_format_changes(folders, tmp_path):
    convert(folders["static"], tmp_path / "out", "w4a8")
    labels = json.loads((tmp_path / "out" / DESCRIPTION_FILE).read_text())
    assert labels["layers.1.attn.wq_b.weight"] == "W8A8_DYNAMIC"
    assert "layers.1.attn.wq_b.deq_scale" not in labels


# --- files


def test_output_is_cut_into_files_of_a_size_with_an_index(folders, tmp_path):
    limit = 200_000
    done = convert(folders["bf16"], tmp_path / "out", "fp8-fp4", shard_bytes=limit)
    headers = Headers(tmp_path / "out")
    assert (headers.problems, headers.extras) == ([], [])
    sizes = {
        file: sum(stored.num_bytes for stored in headers.tensors.values() if stored.file == file)
        for file in headers.files
    }
    assert len(sizes) == done.files > 3
    assert all(size <= limit for size in sizes.values())
    assert sum(sizes.values()) == headers.total_size == done.bytes
    assert headers.files[0].name == f"model-00001-of-{done.files:05d}.safetensors"
    for name, stored in headers.tensors.items():  # a weight and its companions lie in one file
        if name.endswith(".scale"):
            assert headers.tensors[name.removesuffix("scale") + "weight"].file == stored.file


def test_tensor_larger_than_the_limit_has_a_file_to_itself(folders, tmp_path):
    planned = plan(Source(folders["bf16"]), "bf16", shard_bytes=1)
    assert {len(parts) for parts in planned.files.values()} == {1}


def test_index_of_an_export_has_its_own_name(folders):
    assert (folders["w8a8"] / INDEX_OF_EXPORTS).exists()
    assert not (folders["w8a8"] / INDEX_FILE).exists()
    assert all(file.name.startswith("quant_model_weights-") for file in folders["w8a8"].glob("*.safetensors"))


def test_small_files_come_along_and_what_does_not_is_told(folders, tmp_path, monkeypatch):
    monkeypatch.setattr("deepspan.weights.plan.MAX_COPIED", 10**6)
    source = tmp_path / "source"
    convert(folders["bf16"], source, "bf16")
    (source / "README.md").write_text("a card")
    (source / "video.mp4").write_bytes(bytes(10**6 + 1))
    (source / "inference").mkdir()
    done = convert(source, tmp_path / "out", "w8a8")
    assert list(done.not_copied) == ["inference", "video.mp4"]
    assert (tmp_path / "out" / "README.md").read_text() == "a card"
    assert not (tmp_path / "out" / "video.mp4").exists()


def test_rotation_of_an_export_stays_described_and_is_told_where_it_cannot_be(tmp_path):
    plain = write_tiny(tmp_path / "plain", ratios=(0, 4), vision=False)
    convert(plain, tmp_path / "source", "w8a8")
    described = tmp_path / "source" / DESCRIPTION_FILE
    rotation = {"quarot": {"rotation_map": {"global_rotation": "optional/quarot.safetensors"}}}
    described.write_text(json.dumps(json.loads(described.read_text()) | {"optional": rotation}))
    (tmp_path / "source" / "optional").mkdir()
    (tmp_path / "source" / "optional" / "quarot.safetensors").write_bytes(b"as it is")
    for to in ("w8a8", "w4a8"):
        convert(tmp_path / "source", tmp_path / to, to)
        assert json.loads((tmp_path / to / DESCRIPTION_FILE).read_text())["optional"] == rotation
        assert (tmp_path / to / "optional" / "quarot.safetensors").read_bytes() == b"as it is"
        load_model(tmp_path / to, dtype=torch.float32)
    done = convert(tmp_path / "source", tmp_path / "bf16", "bf16")
    assert "rotated" in done.remarks[0]
    assert list(done.not_copied) == ["optional"]


def test_progress_counts_every_byte_once(folders, tmp_path):
    seen = []
    done = convert(
        folders["bf16"], tmp_path / "out", "bf16", shard_bytes=10**6, progress=lambda *step: seen.append(step)
    )
    assert [step[0] for step in seen] == sorted({step[0] for step in seen})
    assert seen[-1] == (done.bytes, done.bytes)


# --- what is refused


def _refused(error, source, folder, *parts, to="bf16", **options):
    with pytest.raises(error) as caught:
        convert(source, folder, to, **options)
    for part in parts:
        assert str(part) in str(caught.value)


def test_source_is_never_written_over(folders, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(folders["bf16"])
    before = {file: file.stat().st_mtime_ns for file in folders["bf16"].iterdir()}
    for folder in (folders["bf16"], link, folders["bf16"] / "." / "x" / ".."):
        _refused(WeightsError, folders["bf16"], folder, "is the checkpoint to convert")
    assert {file: file.stat().st_mtime_ns for file in folders["bf16"].iterdir()} == before


@pytest.mark.parametrize("name", ["thesis.txt", "config.json"])
def test_folder_that_holds_something_is_refused(folders, tmp_path, name):
    (tmp_path / name).write_text("mine")
    _refused(WeightsError, folders["bf16"], tmp_path, tmp_path, "not empty", name)
    assert [file.name for file in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"to": "int3"}, ["--to must be one of bf16, fp8-fp4, fp8, w8a8, w4a8, tiny-subset", "'int3'"]),
        ({"shard_bytes": 0}, ["--shard-size must be at least 1 byte, found 0"]),
        ({"to": "tiny-subset"}, ["--to tiny-subset needs --layers and --experts"]),
        ({"calibration": Calibration(digest="x", inputs={})}, ["--calibrate is for int8 layers", "found --to bf16"]),
    ],
)
def test_options_that_cannot_be_are_refused_by_name(folders, tmp_path, options, parts):
    _refused(ConfigError, folders["bf16"], tmp_path / "out", *parts, **options)
    assert not (tmp_path / "out").exists()


def test_source_without_configuration_is_refused_by_path(tmp_path):
    _refused(ConfigError, tmp_path / "nowhere", tmp_path / "out", f"no config.json at {tmp_path / 'nowhere'}")


def _edited(source, folder, edit):
    """A copy of a checkpoint after `edit` of its tensors, in one file."""
    convert(source, folder, "bf16")
    tensors = stored_tensors(folder)
    edit(tensors)
    _widen(folder, tensors)
    (folder / INDEX_FILE).unlink(missing_ok=True)
    return folder


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("to", ["bf16", "fp8-fp4", "w8a8"])
def test_number_that_is_not_finite_is_refused_by_tensor_and_place(folders, tmp_path, value, to):
    def spoil(tensors):
        tensors["layers.1.attn.wq_b.weight"][3, 5] = value

    source = _edited(folders["bf16"], tmp_path / "source", spoil)
    _refused(
        WeightsError, source, tmp_path / "out", "layers.1.attn.wq_b.weight (model.safetensors) holds", value, "[3, 5]",
        to=to,
    )  # fmt: skip
    assert not (tmp_path / "out" / "config.json").exists()


def test_numbers_that_nobody_reads_may_be_anything(folders, tmp_path):
    def spoil(tensors):
        tensors["layers.0.ffn.gate.bias"][0] = float("nan")

    source = _edited(folders["bf16"], tmp_path / "source", spoil)
    convert(source, tmp_path / "out", "fp8-fp4")
    _same(
        {"x": stored_tensors(tmp_path / "out")["layers.0.ffn.gate.bias"]},
        {"x": stored_tensors(source)["layers.0.ffn.gate.bias"]},
    )


@pytest.mark.parametrize("name", ["layers.1.attn.wkv.weight", "vision.norm.weight", "mtp.0.attn_norm.weight"])
def test_tensor_that_is_missing_is_refused_before_anything_is_written(folders, tmp_path, name):
    source = _edited(folders["bf16"], tmp_path / "source", lambda tensors: tensors.pop(name))
    _refused(WeightsError, source, tmp_path / "out", f"missing: {name}")
    assert not (tmp_path / "out").exists()


def test_shape_that_a_format_cannot_hold_is_refused_by_tensor(tmp_path):
    source = write_tiny(tmp_path / "plain", ratios=(0,), overrides={"moe_intermediate_size": 24})
    _refused(WeightsError, source, tmp_path / "out", "experts.0.w2.weight has shape [64, 24], which fp4 cannot hold",
             to="fp8-fp4")  # fmt: skip


def test_static_layer_with_a_bias_is_refused(folders, tmp_path):
    source = tmp_path / "source"
    convert(folders["static"], source, "w8a8")
    (file,) = source.glob("*.safetensors")
    tensors = stored_tensors(source)
    tensors["layers.1.attn.wq_b.quant_bias"][2] += 3
    save_file(tensors, file)
    _refused(WeightsError, source, tmp_path / "out", "layers.1.attn.wq_b.quant_bias holds a bias (1 rows)")


def test_offset_that_is_not_zero_is_refused(folders, tmp_path):
    source = tmp_path / "source"
    convert(folders["w8a8"], source, "w8a8")
    (file,) = source.glob("*.safetensors")
    tensors = stored_tensors(source)
    tensors["mtp.0.attn.wq_b.weight_offset"][2] = 1
    save_file(tensors, file)
    _refused(WeightsError, source, tmp_path / "out", "mtp.0.attn.wq_b.weight_offset", "expected 0 everywhere")
