"""The text network for one sequence from position 0, in float64.

Shape suffixes: T tokens, n streams, D model width, H heads, K head width, R rotary width, N compressed entries,
E experts, A active experts, J indexer heads, I indexer head width, V vocabulary, C width of any row.
`config` is the raw config.json; `weights` has the checkpoint's own names. Rows are text where kind is -1.
Order of equal scores, in the indexer and in the router: the lowest index first.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from oracle.layout import IMAGE, TEXT, dense_mask, entries_visible, raw_visible

OVERLAP_RATIO = 4  # the ratio whose groups look back and whose entries are selected by the indexer
MARKER_NAMES = ("image_start", "image_pad", None, "image_newline", "image_end")  # by kind; IMAGE takes a feature

Weight = Callable[[str], np.ndarray]


def scope(weights: Mapping[str, np.ndarray], prefix: str) -> Weight:
    """Read weights below a prefix as float64."""
    return lambda name: np.asarray(weights[prefix + name], dtype=np.float64)


# --- elementary functions ---------------------------------------------------------------------------------------


def sigmoid(x: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-x)), written with tanh so that nothing overflows."""
    return 0.5 * (1.0 + np.tanh(0.5 * x))


def silu(x: np.ndarray) -> np.ndarray:
    """x * sigmoid(x)."""
    return x * sigmoid(x)


def softmax(x: np.ndarray, axis: int) -> np.ndarray:
    """exp(x) over its sum along the axis; -inf has weight 0."""
    weight = np.exp(x - x.max(axis=axis, keepdims=True))
    return weight / weight.sum(axis=axis, keepdims=True)


def rms_norm(x: np.ndarray, eps: float) -> np.ndarray:
    """x / sqrt(mean(x^2) + eps) over the last axis, without a weight."""
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)


# --- rotary positions -------------------------------------------------------------------------------------------


def yarn_bounds(rotary_dim: int, theta: float, scaling: Mapping) -> tuple[int, int]:
    """First and last index of the YaRN ramp: c(b) = R ln(L0 / (2 pi b)) / (2 ln theta), floor at fast, ceil at slow."""

    def crossing(beta: float) -> float:
        turns = scaling["original_max_position_embeddings"] / (2 * math.pi * beta)
        return rotary_dim * math.log(turns) / (2 * math.log(theta))

    low = max(math.floor(crossing(scaling["beta_fast"])), 0)
    high = min(math.ceil(crossing(scaling["beta_slow"])), rotary_dim - 1)
    return low, high


def rope_frequencies(config: Mapping, ratio: int) -> np.ndarray:
    """[R/2]: theta^(-2i/R); with compression the other theta, divided by `factor` along the YaRN ramp."""
    rotary_dim = config["qk_rope_head_dim"]
    i = np.arange(rotary_dim // 2, dtype=np.float64)
    if ratio == 0:
        return float(config["rope_theta"]) ** (-2 * i / rotary_dim)
    theta, scaling = float(config["compress_rope_theta"]), config["rope_scaling"]
    plain = theta ** (-2 * i / rotary_dim)
    low, high = yarn_bounds(rotary_dim, theta, scaling)
    ramp = np.clip((i - low) / ((high - low) or 0.001), 0, 1)
    return plain * (1 - ramp) + plain / scaling["factor"] * ramp


def rotate(x: np.ndarray, positions_T: np.ndarray, frequencies: np.ndarray) -> np.ndarray:
    """Turn the last R values of x [T, ..., C]: pair (2i, 2i+1) by angle position * f_i. Negative positions undo it."""
    rotary_dim = 2 * len(frequencies)
    angle = np.asarray(positions_T, dtype=np.float64)[:, None] * frequencies
    angle = angle.reshape(len(x), *([1] * (x.ndim - 2)), len(frequencies))
    even, odd = x[..., -rotary_dim::2], x[..., -rotary_dim + 1 :: 2]
    out = x.copy()
    out[..., -rotary_dim::2] = even * np.cos(angle) - odd * np.sin(angle)
    out[..., -rotary_dim + 1 :: 2] = odd * np.cos(angle) + even * np.sin(angle)
    return out


# --- hyper-connections ------------------------------------------------------------------------------------------


def hc_mix(x_TnD: np.ndarray, fn: np.ndarray, eps: float) -> np.ndarray:
    """Flatten the streams, divide by their common root mean square, project: [T, rows of fn]."""
    return rms_norm(x_TnD.reshape(len(x_TnD), -1), eps) @ fn.T


def sinkhorn(logits_Tnn: np.ndarray, iterations: int, eta: float) -> np.ndarray:
    """Softmax of each row plus eta; normalise columns; then iterations-1 times rows, columns."""
    m = softmax(logits_Tnn, axis=2) + eta
    m = m / (m.sum(axis=1, keepdims=True) + eta)
    for _ in range(iterations - 1):
        m = m / (m.sum(axis=2, keepdims=True) + eta)
        m = m / (m.sum(axis=1, keepdims=True) + eta)
    return m


def hc_pre(x_TnD: np.ndarray, w: Weight, name: str, config: Mapping) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Collapse the streams into the input of a sub-block: (a [T,D], post [T,n], M [T,n old,n new]).

    pre = sigmoid(.) + eta, post = 2 sigmoid(.), M = Sinkhorn of the n*n rest; a = sum_j pre_j X_j.
    """
    n, eta = config["hc_mult"], config["hc_eps"]
    mix = hc_mix(x_TnD, w(f"{name}_fn"), config["rms_norm_eps"])
    base, (scale_pre, scale_post, scale_comb) = w(f"{name}_base"), w(f"{name}_scale")
    pre = sigmoid(mix[:, :n] * scale_pre + base[:n]) + eta
    post = 2 * sigmoid(mix[:, n : 2 * n] * scale_post + base[n : 2 * n])
    logits = (mix[:, 2 * n :] * scale_comb + base[2 * n :]).reshape(-1, n, n)
    a_TD = np.einsum("tj,tjd->td", pre, x_TnD)
    return a_TD, post, sinkhorn(logits, config["hc_sinkhorn_iters"], eta)


def hc_post(f_TD: np.ndarray, x_TnD: np.ndarray, post_Tn: np.ndarray, m_Tnn: np.ndarray) -> np.ndarray:
    """Expand the output of a sub-block: Y_k = post_k f + sum_j M_jk X_j."""
    return post_Tn[:, :, None] * f_TD[:, None, :] + np.einsum("tjk,tjd->tkd", m_Tnn, x_TnD)


def hc_head(x_TnD: np.ndarray, w: Weight, config: Mapping) -> np.ndarray:
    """Merge the streams at the end: sum_j (sigmoid(m_j scale + base_j) + eta) X_j."""
    mix = hc_mix(x_TnD, w("hc_head_fn"), config["rms_norm_eps"])
    pre = sigmoid(mix * w("hc_head_scale") + w("hc_head_base")) + config["hc_eps"]
    return np.einsum("tj,tjd->td", pre, x_TnD)


# --- compressor and indexer -------------------------------------------------------------------------------------


def compress(x_TD: np.ndarray, w: Weight, ratio: int, config: Mapping, shift: int) -> np.ndarray:
    """Compressed entries [N, C] of all full groups of `ratio` tokens.

    Each channel of an entry is a softmax-weighted sum of its rows, the gate being raised by its position in the
    group. With overlap the row of a token has two halves: the first is pooled by the next group's entry, the second
    by its own. The pooled row is normalised and rotated at the position of the group's first token.
    """
    num_tokens = len(x_TD)
    kv, gate = x_TD @ w("wkv.weight").T, x_TD @ w("wgate.weight").T
    gate = gate + w("ape")[np.arange(num_tokens) % ratio]
    norm_weight = w("norm.weight")
    width = len(norm_weight)
    entries = []
    for i in range(num_tokens // ratio):
        group = slice(i * ratio, (i + 1) * ratio)
        kv_rows, gate_rows = kv[group, -width:], gate[group, -width:]
        if ratio == OVERLAP_RATIO and i > 0:
            before = slice((i - 1) * ratio, i * ratio)
            kv_rows = np.concatenate([kv[before, :width], kv_rows])
            gate_rows = np.concatenate([gate[before, :width], gate_rows])
        entries.append((softmax(gate_rows, axis=0) * kv_rows).sum(axis=0))
    pooled = np.array(entries).reshape(-1, width)
    normed = rms_norm(pooled, config["rms_norm_eps"]) * norm_weight
    return rotate(normed, shift + ratio * np.arange(len(pooled)), rope_frequencies(config, ratio))


def index_scores(x_TD: np.ndarray, qr_TC: np.ndarray, w: Weight, config: Mapping, shift: int) -> np.ndarray:
    """score [T, N] = sum_h w_h relu(q_h . k), w from x scaled by (head width * heads)^(-1/2)."""
    num_heads, width = config["index_n_heads"], config["index_head_dim"]
    positions = shift + np.arange(len(x_TD))
    q_TJI = (qr_TC @ w("wq_b.weight").T).reshape(-1, num_heads, width)
    q_TJI = rotate(q_TJI, positions, rope_frequencies(config, OVERLAP_RATIO))
    k_NI = compress(x_TD, lambda name: w("compressor." + name), OVERLAP_RATIO, config, shift)
    head_weight = x_TD @ w("weights_proj.weight").T * (width * num_heads) ** -0.5
    score = np.zeros((len(x_TD), len(k_NI)))
    for head in range(num_heads):
        score += head_weight[:, head, None] * np.maximum(q_TJI[:, head] @ k_NI.T, 0)
    return score


def best(scores: np.ndarray, candidates: set[int], count: int) -> tuple[list[int], float]:
    """The `count` best candidates, best first, and how far the last of them is above the best rejected one."""
    order = sorted(candidates, key=lambda i: (-scores[i], i))
    if len(order) <= count:
        return order, math.inf
    return order[:count], float(scores[order[count - 1]] - scores[order[count]])


# --- attention --------------------------------------------------------------------------------------------------


def attend(q_THK: np.ndarray, keys_SK: np.ndarray, mask_TS: np.ndarray, sinks_H: np.ndarray) -> np.ndarray:
    """Softmax over the visible keys and one sink without a value; keys are the values too. Returns [T,H,K]."""
    out = np.zeros_like(q_THK)
    for head, sink in enumerate(sinks_H):
        logits = q_THK[:, head] @ keys_SK.T * q_THK.shape[-1] ** -0.5
        logits = np.where(mask_TS, logits, -np.inf)
        with_sink = np.concatenate([logits, np.full((len(logits), 1), sink)], axis=1)
        out[:, head] = softmax(with_sink, axis=1)[:, :-1] @ keys_SK
    return out


def output_projection(o_THK: np.ndarray, w: Weight, config: Mapping) -> np.ndarray:
    """Each group of neighbouring heads has its own low-rank projection; the joined ranks are projected to D."""
    num_groups, rank = config["o_groups"], config["o_lora_rank"]
    o_TgC = o_THK.reshape(len(o_THK), num_groups, -1)
    wo_a = w("wo_a.weight").reshape(num_groups, rank, -1)
    z = [o_TgC[:, group] @ wo_a[group].T for group in range(num_groups)]
    return np.concatenate(z, axis=1) @ w("wo_b.weight").T


def attention(
    x_TD: np.ndarray, w: Weight, ratio: int, config: Mapping, spans: Sequence[tuple[int, int]], shift: int
) -> tuple[np.ndarray, list[set[int]] | None, np.ndarray | None]:
    """(output [T,D], entries selected by the indexer per query, index margins); the last two None without indexer.

    Queries come through a low rank with a norm after it and a weightless norm per head; one normed, rotated row per
    token is key and value of every head; the output is rotated back at the query's position.
    """
    num_tokens, eps = len(x_TD), config["rms_norm_eps"]
    positions, frequencies = shift + np.arange(num_tokens), rope_frequencies(config, ratio)
    qr_TC = rms_norm(x_TD @ w("wq_a.weight").T, eps) * w("q_norm.weight")
    q_THK = (qr_TC @ w("wq_b.weight").T).reshape(num_tokens, config["num_attention_heads"], config["head_dim"])
    q_THK = rotate(rms_norm(q_THK, eps), positions, frequencies)
    kv_TK = rms_norm(x_TD @ w("wkv.weight").T, eps) * w("kv_norm.weight")
    keys = rotate(kv_TK, positions, frequencies)
    mask = dense_mask([raw_visible(t, config["sliding_window"], spans) for t in range(num_tokens)], num_tokens)

    selected = margins = None
    if ratio != 0:
        entries = compress(x_TD, lambda name: w("compressor." + name), ratio, config, shift)
        visible = [entries_visible(t, ratio) for t in range(num_tokens)]
        if ratio == OVERLAP_RATIO:
            scores = index_scores(x_TD, qr_TC, lambda name: w("indexer." + name), config, shift)
            picks = [best(scores[t], visible[t], config["index_topk"]) for t in range(num_tokens)]
            visible = selected = [set(order) for order, _ in picks]
            margins = np.array([margin for _, margin in picks])
        keys = np.concatenate([keys, entries])
        mask = np.concatenate([mask, dense_mask(visible, len(entries))], axis=1)

    o_THK = rotate(attend(q_THK, keys, mask, w("attn_sink")), -positions, frequencies)
    return output_projection(o_THK, w, config), selected, margins


# --- mixture of experts -----------------------------------------------------------------------------------------


def expert(x_TD: np.ndarray, w: Weight, limit: float) -> np.ndarray:
    """w2(silu(min(w1 x, limit)) * clip(w3 x, -limit, limit)); no clamp at all for limit <= 0."""
    gate, up = x_TD @ w("w1.weight").T, x_TD @ w("w3.weight").T
    if limit > 0:
        gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    return (silu(gate) * up) @ w("w2.weight").T


def select_experts(
    scores_TE: np.ndarray, w: Weight, is_hash: bool, ids: Sequence[int], kinds: Sequence[int], count: int
) -> tuple[np.ndarray, np.ndarray]:
    """(experts [T,A], margins [T]). Image rows: best of score + bias_vl, in every layer. Text rows: the fixed table
    of the token id in a hash layer (margin inf), best of score + bias elsewhere."""
    table = w("gate.tid2eid").astype(int) if is_hash else None
    bias = None if is_hash else w("gate.bias")
    bias_vl = w("gate.bias_vl") if set(kinds) != {TEXT} else None
    chosen, margins = [], []
    for t, kind in enumerate(kinds):
        if kind == TEXT and is_hash:
            order, margin = list(table[ids[t]]), math.inf
        else:
            biased = scores_TE[t] + (bias if kind == TEXT else bias_vl)
            order, margin = best(biased, set(range(len(biased))), count)
        chosen.append(order)
        margins.append(margin)
    return np.array(chosen), np.array(margins)


def moe(
    x_TD: np.ndarray, w: Weight, is_hash: bool, ids: Sequence[int], kinds: Sequence[int], config: Mapping
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(output [T,D], experts [T,A], margins [T]).

    Score = sqrt(softplus(gate x)); weights = unbiased scores of the chosen experts, normalised to sum 1, times the
    routing scale; the shared expert is added with weight 1.
    """
    assert config["scoring_func"] == "sqrtsoftplus"
    scores = np.sqrt(np.logaddexp(0, x_TD @ w("gate.weight").T))
    experts, margins = select_experts(scores, w, is_hash, ids, kinds, config["num_experts_per_tok"])
    picked = np.take_along_axis(scores, experts, axis=1)
    shares = config["routed_scaling_factor"] * picked / picked.sum(axis=1, keepdims=True)
    limit = config["swiglu_limit"]
    out = expert(x_TD, lambda name: w("shared_experts." + name), limit)
    for e in range(config["n_routed_experts"]):
        tokens, slots = np.nonzero(experts == e)
        y = expert(x_TD[tokens], lambda name, e=e: w(f"experts.{e}.{name}"), limit)
        np.add.at(out, tokens, shares[tokens, slots, None] * y)
    return out, experts, margins


# --- the whole --------------------------------------------------------------------------------------------------


def embed(
    weights: Mapping[str, np.ndarray], ids: Sequence[int], kinds: Sequence[int], features: np.ndarray | None
) -> np.ndarray:
    """[T,D]: text by id, markers by kind, the j-th IMAGE token takes features[j]. No scaling."""
    num_images = list(kinds).count(IMAGE)
    assert num_images == (0 if features is None else len(features)), "one feature row per IMAGE token"
    w = scope(weights, "")
    table = w("embed.weight")
    rows, next_feature = [], 0
    for token, kind in zip(ids, kinds, strict=True):
        if kind == TEXT:
            rows.append(table[token])
        elif kind == IMAGE:
            rows.append(np.asarray(features[next_feature], dtype=np.float64))
            next_feature += 1
        else:
            rows.append(w(MARKER_NAMES[kind]))
    return np.array(rows)


def forward(
    config: Mapping,
    weights: Mapping[str, np.ndarray],
    ids: Sequence[int],
    kinds: Sequence[int],
    features: np.ndarray | None,
    spans: Sequence[tuple[int, int]],
    rotary_shift: int = 0,
) -> dict:
    """Run one sequence and return its logits and taps, all float64, lists being per layer:

    logits [T,V]; merged [T,D], the streams merged, before the last norm; hidden [T,D], after it; embeddings [T,D];
    streams [L] of [T,n,D], after each layer; experts [L] of [T,A]; router_margins [L] of [T]; selected [L] of one set
    of entries per query, or None without indexer; index_margins [L] of [T], or None. A margin is the distance
    between the last chosen and the first rejected (inf where nothing is rejected): small means a near tie.
    rotary_shift is added to every rotary position; attention is relative, so it must not matter.
    """
    taps: dict[str, list] = {name: [] for name in ("streams", "experts", "router_margins", "selected", "index_margins")}
    embeddings = embed(weights, ids, kinds, features)
    x_TnD = np.repeat(embeddings[:, None, :], config["hc_mult"], axis=1)
    eps = config["rms_norm_eps"]
    for layer in range(config["num_hidden_layers"]):
        w = scope(weights, f"layers.{layer}.")
        attn, ffn = scope(weights, f"layers.{layer}.attn."), scope(weights, f"layers.{layer}.ffn.")
        a, post, m = hc_pre(x_TnD, w, "hc_attn", config)
        a = rms_norm(a, eps) * w("attn_norm.weight")
        f, selected, index_margins = attention(a, attn, config["compress_ratios"][layer], config, spans, rotary_shift)
        x_TnD = hc_post(f, x_TnD, post, m)
        b, post, m = hc_pre(x_TnD, w, "hc_ffn", config)
        b = rms_norm(b, eps) * w("ffn_norm.weight")
        f, experts, router_margins = moe(b, ffn, layer < config["num_hash_layers"], ids, kinds, config)
        x_TnD = hc_post(f, x_TnD, post, m)
        row = (x_TnD, experts, router_margins, selected, index_margins)
        for name, value in zip(taps, row, strict=True):
            taps[name].append(value)
    top = scope(weights, "")
    merged = hc_head(x_TnD, top, config)
    hidden = rms_norm(merged, eps) * top("norm.weight")
    logits = hidden @ top("head.weight").T
    return {"logits": logits, "merged": merged, "hidden": hidden, "embeddings": embeddings, **taps}
