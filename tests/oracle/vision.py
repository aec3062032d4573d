"""The vision tower and the aligner for one image, in float64.

Shape suffixes: P patches (row-major over Hv x Wv), D tower width, K head width, Q tiles (row-major over Hl x Wl).
The tower's norms have their own epsilon, which is not the text network's.
"""

import math
from collections.abc import Mapping

import numpy as np

from oracle.layout import image_block
from oracle.network import Weight, rms_norm, scope, silu, softmax

NORM_EPS = 1e-6

erf = np.vectorize(math.erf, otypes=[np.float64])


def gelu(x: np.ndarray) -> np.ndarray:
    """x * Phi(x) with the exact normal distribution function."""
    return 0.5 * x * (1 + erf(x / math.sqrt(2)))


def grid_size(config: Mapping, height: int, width: int) -> tuple[int, int]:
    """(Hl, Wl): the patch grid in tiles, rounded up."""
    side = config["vision_downsample_ratio"]
    return math.ceil(height / side), math.ceil(width / side)


def rope_angles(height: int, width: int, head_dim: int, theta: float) -> np.ndarray:
    """[P, head_dim/2] = [row * f_j ..., column * f_j ...], f_j = theta^(-2j / (head_dim/2)), j < head_dim/4."""
    half = head_dim // 2
    f = theta ** (-2 * np.arange(half // 2, dtype=np.float64) / half)
    return np.array([[*(row * f), *(column * f)] for row in range(height) for column in range(width)])


def rotate_halves(x_PK: np.ndarray, angle: np.ndarray) -> np.ndarray:
    """Turn the pair (d, d + K/2) by angle d."""
    first, second = np.split(x_PK, 2, axis=-1)
    cos, sin = np.cos(angle), np.sin(angle)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def attention(x_PD: np.ndarray, w: Weight, num_heads: int, angle: np.ndarray) -> np.ndarray:
    """Every patch sees every patch; scale K^(-1/2); rotary positions on queries and keys only."""
    q, k, v = np.split(x_PD @ w("wqkv.weight").T + w("wqkv.bias"), 3, axis=1)
    head_dim = q.shape[1] // num_heads
    heads = []
    for h in range(num_heads):
        columns = slice(h * head_dim, (h + 1) * head_dim)
        q_PK, k_PK = rotate_halves(q[:, columns], angle), rotate_halves(k[:, columns], angle)
        heads.append(softmax(q_PK @ k_PK.T * head_dim**-0.5, axis=1) @ v[:, columns])
    return np.concatenate(heads, axis=1) @ w("wo.weight").T + w("wo.bias")


def mlp(x_PD: np.ndarray, w: Weight) -> np.ndarray:
    """w2(silu(gate) * up), gate the first and up the second half of w1's rows."""
    gate, up = np.split(x_PD @ w("w1.weight").T, 2, axis=1)
    return (silu(gate) * up) @ w("w2.weight").T


def tower(
    config: Mapping, weights: Mapping[str, np.ndarray], patches: np.ndarray, height: int, width: int
) -> np.ndarray:
    """[P, D]: linear patch embedding, pre-norm blocks with residuals, a last norm."""
    num_heads, dim = config["vision_n_heads"], config["vision_dim"]
    flat = np.asarray(patches, dtype=np.float64).reshape(height * width, -1)
    w = scope(weights, "vision.")
    angle = rope_angles(height, width, dim // num_heads, float(config["vision_rope_theta"]))
    x = flat @ w("patch_embed.proj.weight").T + w("patch_embed.proj.bias")
    for layer in range(config["vision_n_layers"]):
        name = f"vision.blocks.{layer}."
        w1, w2 = scope(weights, name)("norm1.weight"), scope(weights, name)("norm2.weight")
        x = x + attention(rms_norm(x, NORM_EPS) * w1, scope(weights, name + "attn."), num_heads, angle)
        x = x + mlp(rms_norm(x, NORM_EPS) * w2, scope(weights, name + "mlp."))
    return rms_norm(x, NORM_EPS) * w("norm.weight")


def unfold(x_PD: np.ndarray, height: int, width: int, side: int) -> np.ndarray:
    """[Q, D * side * side]: tiles of side x side patches, zeros beyond right and bottom, channel-major features."""
    grid = x_PD.reshape(height, width, -1)
    tiles = []
    for top in range(0, height, side):
        for left in range(0, width, side):
            tile = np.zeros((grid.shape[2], side, side))
            for dy in range(min(side, height - top)):
                for dx in range(min(side, width - left)):
                    tile[:, dy, dx] = grid[top + dy, left + dx]
            tiles.append(tile.reshape(-1))
    return np.array(tiles)


def encode_image(
    config: Mapping, weights: Mapping[str, np.ndarray], patches: np.ndarray, height: int, width: int
) -> np.ndarray:
    """[Hl*Wl, D] in raster order: tower, tiles, linear, exact GELU, linear."""
    w = scope(weights, "aligner.")
    x = unfold(tower(config, weights, patches, height, width), height, width, config["vision_downsample_ratio"])
    x = gelu(x @ w("w1.weight").T + w("w1.bias"))
    return x @ w("w2.weight").T + w("w2.bias")


def to_emission_order(raster: np.ndarray, height: int, width: int) -> np.ndarray:
    """Rows of a Hl x Wl image in the order in which its block emits the IMAGE tokens."""
    _, order = image_block(height, width, position=0)
    return raster[order]
