"""The draft stages for one block of slots, in float64: what they guess behind a token whose past is known.

Stated for one sequence: the target has computed rows 0 .. P-1, the anchor stands at P. Nothing is cached; the keys of
the context are made anew from the target's streams. Shape suffixes as in `network`, and S slots, C context rows.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from oracle.layout import TEXT
from oracle.network import (
    attend,
    hc_head,
    hc_post,
    hc_pre,
    moe,
    output_projection,
    rms_norm,
    rope_frequencies,
    rotate,
    scope,
    sigmoid,
)


def context(config: Mapping, weights: Mapping[str, np.ndarray], streams: Sequence[np.ndarray]) -> np.ndarray:
    """main_x [T,D]: the mean of the streams after each target layer, side by side, projected and normed.

    streams: [T,n,D] after each layer of the target.
    """
    w = scope(weights, "mtp.0.")
    joined = np.concatenate([streams[layer].mean(axis=1) for layer in config["dspark_target_layer_ids"]], axis=1)
    return rms_norm(joined @ w("main_proj.weight").T, config["rms_norm_eps"]) * w("main_norm.weight")


def stage_attention(
    x_SD: np.ndarray, main_TD: np.ndarray, weights: Mapping, prefix: str, config: Mapping
) -> np.ndarray:
    """Attention of all slots over the last `sliding_window` context rows and over all slots, one softmax with the sink.

    Keys of context rows are this stage's own projection of main_x; of slots, of their normed input.
    """
    w, eps = scope(weights, prefix), config["rms_norm_eps"]
    anchor, num_slots, frequencies = len(main_TD), len(x_SD), rope_frequencies(config, 0)
    slots = anchor + np.arange(num_slots)
    qr = rms_norm(x_SD @ w("wq_a.weight").T, eps) * w("q_norm.weight")
    q_SHK = (qr @ w("wq_b.weight").T).reshape(num_slots, config["num_attention_heads"], config["head_dim"])
    q_SHK = rotate(rms_norm(q_SHK, eps), slots, frequencies)
    first = max(0, anchor - config["sliding_window"])
    rows = np.concatenate([main_TD[first:], x_SD])
    keys = rms_norm(rows @ w("wkv.weight").T, eps) * w("kv_norm.weight")
    keys = rotate(keys, np.arange(first, anchor + num_slots), frequencies)
    everything = np.ones((num_slots, len(keys)), dtype=bool)
    out = rotate(attend(q_SHK, keys, everything, w("attn_sink")), -slots, frequencies)
    return output_projection(out, w, config)


def draft(
    config: Mapping,
    weights: Mapping[str, np.ndarray],
    streams: Sequence[np.ndarray],
    anchor_token: int,
    num_slots: int,
) -> dict:
    """Guess `num_slots` tokens behind `anchor_token`, which stands behind the rows of `streams`.

    Returns base [S,V], logits before the Markov head; hidden [S,D], merged streams before the norm; tokens, the
    likeliest guess of each slot behind the one before; confidence [S], that each is accepted if those before it were;
    router_margins [stages][S].
    """
    eps, num_stages = config["rms_norm_eps"], len({name.split(".")[1] for name in weights if name.startswith("mtp.")})
    main = context(config, weights, streams)
    ids = [anchor_token] + [config["dspark_noise_token_id"]] * (num_slots - 1)
    top = scope(weights, "")
    x_SnD = np.repeat(top("embed.weight")[ids][:, None, :], config["hc_mult"], axis=1)
    margins = []
    for stage in range(num_stages):
        prefix = f"mtp.{stage}."
        w = scope(weights, prefix)
        a, post, m = hc_pre(x_SnD, w, "hc_attn", config)
        a = rms_norm(a, eps) * w("attn_norm.weight")
        x_SnD = hc_post(stage_attention(a, main, weights, prefix + "attn.", config), x_SnD, post, m)
        b, post, m = hc_pre(x_SnD, w, "hc_ffn", config)
        b = rms_norm(b, eps) * w("ffn_norm.weight")
        f, _, margin = moe(b, scope(weights, prefix + "ffn."), False, ids, [TEXT] * num_slots, config)
        x_SnD = hc_post(f, x_SnD, post, m)
        margins.append(margin)
    last = scope(weights, f"mtp.{num_stages - 1}.")
    hidden = hc_head(x_SnD, last, config)
    base = (rms_norm(hidden, eps) * last("norm.weight")) @ top("head.weight").T
    w1, w2 = last("markov_head.markov_w1.weight"), last("markov_head.markov_w2.weight")
    tokens, confidence, before = [], [], anchor_token
    for slot in range(num_slots):
        joined = np.concatenate([hidden[slot], w1[before]])
        confidence.append(float(sigmoid(last("confidence_head.proj.weight") @ joined)[0]))
        before = int(np.argmax(base[slot] + w2 @ w1[before]))
        tokens.append(before)
    return {
        "base": base,
        "hidden": hidden,
        "tokens": tokens,
        "confidence": np.array(confidence),
        "router_margins": np.array(margins),
    }
