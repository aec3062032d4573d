"""Looks at a checkpoint by its headers: what it holds, and everything that is wrong with it, not only the first.

The loader refuses what does not fit; this says it all, also of a folder that is still being downloaded. Invariants:
nothing is named twice (what an absent file lacks is that file's), data is never read, and a checkpoint without problems
is one that the loader's checks of headers accept. Called by `deepspan inspect weights`.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from deepspan.config.model import ModelConfig, load_model_config
from deepspan.errors import ConfigError, WeightsError
from deepspan.weights.description import Description, read_description
from deepspan.weights.folder import Headers
from deepspan.weights.forms import canonical_scales, find_forms
from deepspan.weights.inventory import (
    PartCount,
    count_parts,
    expected_headers,
    expected_table,
    holds_weights,
)
from deepspan.weights.load import check_block_scales, differences
from deepspan.weights.names import Place
from deepspan.weights.placing import Naming, expected, likely_cause, naming_of, places_of
from deepspan.weights.table import Table, backbone_tensors

Source = Literal["files", "index", "configuration"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    """source: whether headers were read, an index, or only the configuration; of the latter two, parts are expected.

    files, missing_files: names of those that belong to the checkpoint, and of those that are not there.
    parts: what is there. expected: (tensors, bytes) of the release of this configuration, or None if it is not said.
    problems: messages by kind. remarks: what is no fault. left_out: how many tensors are not loaded, by reason.
    """

    config: ModelConfig
    source: Source
    files: tuple[str, ...]
    missing_files: tuple[str, ...]
    parts: Mapping[str, PartCount]
    expected: tuple[int, int] | None
    problems: Mapping[str, list[str]]
    remarks: tuple[str, ...]
    left_out: Mapping[str, int]


def examine(model: Path) -> Examination:
    """model: checkpoint folder, or a `config.json` alone. Raises ConfigError if the configuration cannot be read."""
    config = load_model_config(model)
    if not holds_weights(model):
        return _of_configuration(config, model)
    headers = Headers(model)
    if headers.index and len(headers.missing) == len(headers.files) and not headers.described:
        return _of_index(config, headers)
    return _of_files(config, headers)


def _of_configuration(config: ModelConfig, model: Path) -> Examination:
    stored = expected_headers(config, model)
    parts = count_parts(stored.tensors, {key: (key,) for key in stored}, expected_table(config))
    return Examination(
        config=config,
        source="configuration",
        files=(),
        missing_files=(),
        parts=parts,
        expected=_totals(parts),
        problems={},
        remarks=(f"there are no weights at {model}: this is what its configuration lets expect",),
        left_out={},
    )


def _of_index(config: ModelConfig, headers: Headers) -> Examination:
    """Of a folder whose files are all missing: names can be compared, and the size that the index states."""
    assert headers.index is not None
    found = _of_configuration(config, headers.folder)
    names, unknown = _names_under(headers.index, config, naming_of(headers.index, described=False))
    listed = {_block_scale(name) for name in names}
    wanted = set(expected_headers(config, headers.folder))
    if not any(name.startswith("mtp.") for name in listed):  # draft stages may be left out, all together
        wanted = {name for name in wanted if not name.startswith("mtp.")}
    problems = {
        "files": [
            f"none of the {len(headers.files)} files that {headers.index_file} names is in {headers.folder}: names are "
            "compared, shapes cannot be"
        ],
        "missing": sorted(wanted - listed),
        "unexpected": unknown + sorted(listed - wanted),
    }
    remarks = []
    if headers.total_size is not None and found.expected is not None and headers.total_size != found.expected[1]:
        remarks.append(_other_size(headers, found.expected[1], "the configuration lets expect"))
    return replace(
        found,
        source="index",
        files=tuple(file.name for file in headers.files),
        missing_files=tuple(file.name for file in headers.missing),
        problems={kind: messages for kind, messages in problems.items() if messages},
        remarks=tuple(remarks),
    )


def _of_files(config: ModelConfig, headers: Headers) -> Examination:
    naming = naming_of([*headers, *(headers.index or ())], described=headers.described)
    places, unknown = _names_under(headers, config, naming)
    # What the index places in a file that is absent or broken has been said of that file.
    absent, _ = _names_under([key for key in headers.index or () if key not in headers.tensors], config, naming)
    announced = frozenset(_block_scale(name) for name in absent)
    problems: dict[str, list[str]] = {"files": list(headers.problems), "unexpected": unknown}
    table, left_out, dropped = _compare(config, headers, places, announced, problems)
    names: dict[str, list[str]] = {}
    for name, place in places.items():
        names.setdefault(place.key, []).append(name)
    parts = count_parts(headers.tensors, names, table)
    remarks = []
    if cause := likely_cause(problems.get("missing", ()), (text.split(" (")[0] for text in problems["unexpected"])):
        remarks.append(cause)
    remarks += [f"{file.name} is not named by {headers.index_file} and is not read" for file in headers.extras]
    num_bytes = _totals(parts)[1]
    if headers.total_size not in (None, num_bytes) and not headers.problems:
        remarks.append(_other_size(headers, num_bytes, "the files hold"))
    return Examination(
        config=config,
        source="files",
        files=tuple(file.name for file in headers.files),
        missing_files=tuple(file.name for file in headers.missing),
        parts=parts,
        expected=_expected_totals(config, headers),
        problems={kind: messages for kind, messages in problems.items() if messages},
        remarks=tuple(remarks),
        left_out=Counter(reason for name, reason in (left_out | dropped).items() if name in places),
    )


def _compare(
    config: ModelConfig,
    headers: Headers,
    places: Mapping[str, Place],
    announced: Collection[str],
    problems: dict[str, list[str]],
) -> tuple[Table, dict[str, str], dict[str, str]]:
    """What fits the configuration; adds to `problems` what does not. Returns the plain table, and what is left out.

    announced: of files that are not there, which is missing by file and not by name.
    """
    table: Table = backbone_tensors(config)
    left_out: dict[str, str] = {}
    stages_are_known = True
    try:
        table, left_out = expected(config, [*places, *announced], None)
    except WeightsError as error:
        problems["formats"] = [str(error)]
        stages_are_known = False
    try:
        known = places if stages_are_known else {n: p for n, p in places.items() if not n.startswith("mtp.")}
        scaled = canonical_scales(headers, known)
        description = _described(headers, config, announced)
        forms = find_forms(headers, table, scaled, left_out, config, description)
    except WeightsError as error:
        problems.setdefault("formats", []).append(str(error))
        problems["missing"] = [name for name in table if name not in places and name not in announced]
        return table, left_out, {}
    lists = differences(headers, forms.table, scaled, config.n_routed_experts)
    lists["missing"] = [name for name in lists["missing"] if name not in announced]
    lists["unexpected"] = problems["unexpected"] + lists["unexpected"]
    problems |= lists
    if not any(problems.values()):
        try:
            check_block_scales(headers, scaled, forms)
        except WeightsError as error:
            problems["formats"] = [str(error)]
    return table, left_out, dict(forms.left_out)


def _described(headers: Headers, config: ModelConfig, announced: Collection[str]) -> Description | None:
    """The description of an export, without what it says of absent files."""
    found = read_description(headers.folder, config.num_hidden_layers)
    if found is None:
        return None
    return replace(found, labels={name: label for name, label in found.labels.items() if name not in announced})


def _names_under(keys: Iterable[str], config: ModelConfig, naming: Naming) -> tuple[dict[str, Place], list[str]]:
    """Original name -> place of what lies under stored names; and a message for each that is no name of this model."""
    places: dict[str, Place] = {}
    unknown: list[str] = []
    for key in keys:
        try:
            found = places_of(key, naming, config.n_routed_experts, config.num_hidden_layers)
        except WeightsError as error:
            unknown.append(str(error))
            continue
        for name, place in found.items():
            if name in places:
                unknown.append(f"tensors {places[name].key} and {key} both hold {name}")
            else:
                places[name] = place
    return places, unknown


def _block_scale(name: str) -> str:
    """Name in the table of what only an index names: without a dtype, only this ending tells a scale of blocks."""
    return f"{name.removesuffix('.weight_scale_inv')}.scale" if name.endswith(".weight_scale_inv") else name


def _expected_totals(config: ModelConfig, headers: Headers) -> tuple[int, int] | None:
    """None for exports: what they hold is said by their own description."""
    if headers.described:
        return None
    try:
        stored = expected_headers(config, headers.folder)
    except ConfigError:
        return None
    return len(stored.tensors), sum(tensor.num_bytes for tensor in stored.tensors.values())


def _other_size(headers: Headers, num_bytes: int, who: str) -> str:
    return f"{headers.index_file} states {headers.total_size:,} bytes in all, {who} {num_bytes:,}"


def _totals(parts: Mapping[str, PartCount]) -> tuple[int, int]:
    return sum(count.num_tensors for count in parts.values()), sum(count.num_bytes for count in parts.values())
