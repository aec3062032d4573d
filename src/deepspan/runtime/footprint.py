"""What a device holds while a model is served: weights, caches, work space; worked out without any of it being there.

The network, its caches and its buffers are built as a run builds them, on the meta device, and measured: so the numbers
are those of the run, whatever the checkpoint's format. Invariant: nothing of the checkpoint but headers is read. Only
what a step needs while it runs is an estimate, from below: kernels add to it, and a run on an accelerator measures it.
Called by `deepspan inspect memory`.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from deepspan.config.engine import EngineConfig
from deepspan.config.model import ModelConfig
from deepspan.errors import ConfigError
from deepspan.kv.capacity import (
    Capacity,
    decoding_blocks,
    in_flight_tokens,
    plan_capacity,
    request_blocks,
    reserved_tokens,
)
from deepspan.kv.families import Family, cache_families
from deepspan.model.mtp import Mtp
from deepspan.ops.registry import reference_ops
from deepspan.runtime.caches import Caches
from deepspan.runtime.device import cache_share
from deepspan.runtime.mtp_drafting import drafting_for
from deepspan.runtime.step_builder import StepBuilder
from deepspan.weights.folder import StoredTensors
from deepspan.weights.inventory import DRAFT_EXPERTS, EXPERTS, PARTS, part_of
from deepspan.weights.load import Fit, build, drafts_to_load, fit_headers

_META = torch.device("meta")


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyUse:
    """Bytes of one cache family. per_token: what every token adds for good; 0 where rows slide out of sight.

    decoding, prefilling: what a request of full length holds at most while it decodes, and while whole steps are its.
    """

    family: Family
    per_token: float
    decoding: int
    prefilling: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Bytes of one device.

    engine: with the drafts it would have. weights: by part, in the order of the network. read: of the files, what is
    loaded of them. caches: tensors and block tables. buffers: indices of a step. encoder_rows: outputs of images that
    are kept. step: activations of the largest step, at least.
    """

    engine: EngineConfig
    weights: Mapping[str, int]
    read: int
    caches: int
    buffers: int
    encoder_rows: int
    step: int
    families: tuple[FamilyUse, ...]
    capacity: Capacity

    @property
    def total(self) -> int:
        return sum(self.weights.values()) + self.caches + self.buffers + self.encoder_rows + self.step


def footprint(
    stored: StoredTensors,
    config: ModelConfig,
    engine: EngineConfig,
    *,
    dtype: torch.dtype,
    num_ranks: int = 1,
    cache_bytes: int | None = None,
    device_bytes: int | None = None,
) -> Footprint:
    """dtype: of activations, and of rows with kv_dtype auto.

    num_ranks: devices among which routed experts are divided; all else is on each. cache_bytes: memory for caches, or
    device_bytes: of which caches take what a run would give them. Raises ConfigError or WeightsError naming what does
    not fit.
    """
    if num_ranks < 1 or config.n_routed_experts % num_ranks:
        raise ConfigError(f"{num_ranks} ranks do not divide n_routed_experts {config.n_routed_experts}")
    fit = fit_headers(stored, config, drafts_to_load(engine.draft_method))
    engine = engine.with_drafts(config, fit.drafts.value if fit.drafts is not None else None).checked(config)
    network, drafter = build(stored, config, fit, dtype=dtype, ops=reference_ops(), drafts=fit.drafts)
    weights = _per_rank(_weight_bytes([network, *([drafter] if drafter is not None else [])]), num_ranks)
    row_dtype = dtype if engine.kv_dtype == "auto" else torch.bfloat16
    families = cache_families(
        config,
        engine.block_tokens,
        row_dtype.itemsize,
        engine.num_drafts,
        drafter.num_stages if drafter is not None else 0,
        is_packed=engine.kv_dtype == "fp8",
        is_mtp=isinstance(drafter, Mtp),
    )
    step = _step_bytes(config, engine, dtype)
    if device_bytes is not None:
        cache_bytes = _left_for_caches(device_bytes, sum(weights.values()), step)
    assert cache_bytes is not None, "caches take so many bytes, or what a device has left"
    capacity = plan_capacity(families, engine, cache_bytes)
    caches = Caches(config, engine, families, capacity.num_blocks, row_dtype, _META)
    buffers = StepBuilder(config, engine, families, caches, _META).num_bytes
    if drafter is not None:
        buffers += drafting_for(drafter, network, config, engine, caches, _META).num_bytes
    return Footprint(
        engine=engine,
        weights=weights,
        read=sum(_per_rank(_read_bytes(stored, fit), num_ranks).values()),
        caches=caches.num_bytes,
        buffers=buffers,
        encoder_rows=engine.encoder_rows * config.hidden_size * dtype.itemsize if config.vision is not None else 0,
        step=step,
        families=tuple(_use(family, engine) for family in families),
        capacity=capacity,
    )


def _left_for_caches(device_bytes: int, weights: int, step: int) -> int:
    if device_bytes <= weights + step:
        raise ConfigError(
            f"weights take {weights:,} bytes and the largest step {step:,}, the device has {device_bytes:,}: nothing "
            "is left for caches"
        )
    return cache_share(device_bytes - weights, step)


def _step_bytes(config: ModelConfig, engine: EngineConfig, dtype: torch.dtype) -> int:
    """What any implementation holds at once: streams before and behind a layer with its queries, or fp32 logits."""
    streams = engine.max_batched_tokens * config.hc_mult * config.hidden_size * dtype.itemsize
    queries = engine.max_batched_tokens * config.num_attention_heads * config.head_dim * dtype.itemsize
    logits = engine.max_num_seqs * (1 + engine.num_drafts) * config.vocab_size * torch.float32.itemsize
    return streams + max(streams + queries, logits)


def _read_bytes(stored: StoredTensors, fit: Fit) -> Counter[str]:
    """By part, of the tensors that are loaded; of a stack, the share of each."""
    found = Counter[str]()
    for name, place in fit.places.items():
        if name not in fit.forms.left_out:
            tensor = stored.tensors[place.key]
            shares = tensor.shape[0] * place.num_parts if place.expert is not None else 1
            found[part_of(name)] += tensor.num_bytes // shares
    return found


def _weight_bytes(modules: Sequence[torch.nn.Module]) -> Counter[str]:
    found = Counter[str]()
    for name, value in {name: value for module in modules for name, value in module.state_dict().items()}.items():
        found[part_of(name)] += value.nbytes
    return found


def _per_rank(num_bytes: Mapping[str, int], num_ranks: int) -> dict[str, int]:
    """By part, in the order of the network; experts are as large as each other."""
    return {
        part: num_bytes[part] // (num_ranks if part in (EXPERTS, DRAFT_EXPERTS) else 1)
        for part in PARTS
        if part in num_bytes
    }


def _use(family: Family, engine: EngineConfig) -> FamilyUse:
    length, is_kept = reserved_tokens(engine.max_model_len, engine), family.kind == "rows"
    most = request_blocks(family, length, in_flight_tokens(engine))
    return FamilyUse(
        family=family,
        per_token=family.block_bytes / family.block_tokens if is_kept else 0,
        decoding=(most if is_kept else min(most, decoding_blocks(family, engine))) * family.block_bytes,
        prefilling=most * family.block_bytes,
    )
