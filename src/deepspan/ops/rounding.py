"""Rounding that the release applies to activations, to cached rows and to the indexer's vectors.

The release was trained with these roundings: groups share a power-of-two scale, numbers go to the nearest of the format
and straight back. Pure functions; the layout of an 8-bit cache row is here too, so that what is stored and what is
computed cannot differ. Used by `ops.rows`, `model` and kernels' tests.

Shapes: T rows, K width; a row's last dims are rotary and are kept as bf16.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from deepspan.config.engine import KV_GROUP, SCALES_ALIGNED
from deepspan.ops.formats import decode_e2m1, encode_e2m1, encode_fp8, fp4_scale, fp8_scale, pack_nibbles

INPUT_GROUP, INDEX_GROUP = 128, 32


def round_inputs(x_TK: Tensor) -> Tensor:
    """Inputs of quantised linear layers: e4m3, a scale per token and 128 columns. Same shape and dtype."""
    values, scale = _to_fp8(x_TK, INPUT_GROUP)
    return _from_fp8(values, scale, INPUT_GROUP).to(x_TK.dtype)


def round_kv_rows(x_TK: Tensor, rope_dims: int) -> Tensor:
    """Rows of the key-value cache: all but the rotary dims e4m3, a scale per 64. Same shape and dtype.

    The rotary dims are left as they are: the release keeps them in bf16.
    """
    plain, rotary = x_TK[..., :-rope_dims], x_TK[..., -rope_dims:]
    values, scale = _to_fp8(plain, KV_GROUP)
    return torch.cat((_from_fp8(values, scale, KV_GROUP).to(x_TK.dtype), rotary), dim=-1)


def round_index_rows(x_TK: Tensor) -> Tensor:
    """Queries and keys of the indexer, once turned by `hadamard`: e2m1, a scale per 32. Same shape and dtype."""
    groups = x_TK.float().unflatten(-1, (-1, INDEX_GROUP))
    scale = fp4_scale(groups.abs().amax(dim=-1, keepdim=True))
    return (decode_e2m1(pack_nibbles(encode_e2m1(groups / scale))) * scale).flatten(-2).to(x_TK.dtype)


def hadamard(x_TK: Tensor) -> Tensor:
    """Walsh-Hadamard transform over the last dim, scaled to keep lengths, in fp32. K: a power of two.

    Its own inverse. Spreads outliers over all dims, so that four bits lose less; dot products do not change.
    """
    width = x_TK.shape[-1]
    assert width & (width - 1) == 0, f"{width} is no power of two"
    x = x_TK.float()
    step = 1
    while step < width:
        a, b = x.unflatten(-1, (-1, 2, step)).unbind(-2)
        x = torch.stack((a + b, a - b), dim=-2).flatten(-3)
        step *= 2
    return x * width**-0.5


# --- rows of an 8-bit cache


def pack_kv_rows(x_TK: Tensor, rope_dims: int) -> Tensor:
    """Rows as bytes, uint8 [T, `config.engine.packed_row_bytes`]: e4m3, bf16 rotary dims, e8m0 scales, zeros."""
    values, scale = _to_fp8(x_TK[..., :-rope_dims], KV_GROUP)
    rotary = x_TK[..., -rope_dims:].to(torch.bfloat16).contiguous()
    scales = scale.to(torch.float8_e8m0fnu).view(torch.uint8)
    padded = F.pad(scales, (0, -scales.shape[-1] % SCALES_ALIGNED))
    return torch.cat((values.view(torch.uint8), rotary.view(torch.uint8), padded), dim=-1)


def unpack_kv_rows(rows_TB: Tensor, width: int, rope_dims: int) -> Tensor:
    """What `pack_kv_rows` has kept, fp32 [..., width]: `round_kv_rows` of the row, its rotary dims rounded to bf16."""
    plain = width - rope_dims
    groups = -(-plain // KV_GROUP)
    values, rotary, scales = rows_TB.split((plain, 2 * rope_dims, rows_TB.shape[-1] - plain - 2 * rope_dims), dim=-1)
    scale = scales[..., :groups].contiguous().view(torch.float8_e8m0fnu).float()
    numbers = _from_fp8(values.contiguous().view(torch.float8_e4m3fn), scale, KV_GROUP)
    return torch.cat((numbers, rotary.contiguous().view(torch.bfloat16).float()), dim=-1)


def _to_fp8(x_TK: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """e4m3 [..., K] and fp32 scales [..., ceil(K / group)]; the last group may be smaller."""
    x = x_TK.float()
    groups = F.pad(x, (0, -x.shape[-1] % group)).unflatten(-1, (-1, group))
    scale = fp8_scale(groups.abs().amax(dim=-1))
    return encode_fp8(groups / scale[..., None]).flatten(-2)[..., : x.shape[-1]].contiguous(), scale


def _from_fp8(values_TK: Tensor, scale: Tensor, group: int) -> Tensor:
    return values_TK.float() * scale.repeat_interleave(group, dim=-1)[..., : values_TK.shape[-1]]
