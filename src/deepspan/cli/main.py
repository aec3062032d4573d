"""The `deepspan` command: verbs and their options; each verb's work is imported when it runs.

Invariant: parsing options and `--version` never import torch (checked), so that the command answers at once. A user's
error is one line on stderr and exit code 2.
"""

import sys
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from deepspan.cli.options import DraftOptions, takes_drafts
from deepspan.errors import DeepspanError
from deepspan.version import __version__

app = typer.Typer(
    name="deepspan",
    help="Serve DeepSeek-V4 Vision: text and images, on any device PyTorch runs on.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
eval_app = typer.Typer(help="Measure how well a model answers.", no_args_is_help=True)
inspect_app = typer.Typer(help="Look at what deepspan would do, without doing it.", no_args_is_help=True)
bench_app = typer.Typer(help="Measure how fast a server answers.", no_args_is_help=True)
app.add_typer(eval_app, name="eval")
app.add_typer(bench_app, name="bench")
app.add_typer(inspect_app, name="inspect")

Model = Annotated[
    Path | None, typer.Option("--model", "-m", help="Checkpoint folder; the bundled deepspan-tiny if not given.")
]
ModelArgument = Annotated[
    Path | None,
    typer.Argument(help="Checkpoint folder or config.json; deepspan-tiny if not given.", show_default=False),
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, npu, ... (any PyTorch device).")]
Dtype = Annotated[str, typer.Option(help="auto, float32 or bfloat16.")]
KvDtype = Annotated[
    str, typer.Option(help="Cached rows: auto (as computed), bfloat16, or fp8 (as the release rounds them).")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print as JSON.")]


def main() -> None:
    """Entry point of the console script."""
    try:
        app()
    except DeepspanError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def _verb(module: str, function: str, **arguments: Any) -> None:
    """Run a verb; by string, so that its imports (torch above all) happen only now."""
    getattr(import_module(f"deepspan.cli.{module}"), function)(**arguments)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"deepspan {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


@app.command()
@takes_drafts
def generate(
    question: Annotated[str, typer.Argument(help="What to ask.", show_default=False)],
    model: Model = None,
    image: Annotated[
        list[Path] | None,
        typer.Option("--image", "-i", help="Picture to ask about; repeat for more, in order.", show_default=False),
    ] = None,
    system: Annotated[str, typer.Option(help="System message.", show_default=False)] = "",
    effort: Annotated[str, typer.Option(help="Thinking: none, low, high or max.")] = "none",
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without the chat format.")] = False,
    max_tokens: Annotated[int, typer.Option(help="New tokens at most.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token each time.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Draw from the likeliest tokens that reach this mass.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Draw from this many likeliest tokens; 0 for all.")] = 0,
    min_p: Annotated[float, typer.Option(help="Drop tokens below this share of the likeliest.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Same seed, same text.", show_default=False)] = None,
    image_mode: Annotated[
        str, typer.Option(help="serving: pictures as a person sees them; reference: the release's RGB conversion.")
    ] = "serving",
    device: Device = "auto",
    dtype: Dtype = "auto",
    *,
    drafts: DraftOptions,
) -> None:
    """Answer one question, about pictures if any are given, streaming to the terminal."""
    _verb(
        "generate", "run",
        question=question, model=model, images=image or [], system=system, effort=effort, raw=raw,
        max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=seed,
        image_mode=image_mode, device=device, dtype=dtype, drafts=drafts,
    )  # fmt: skip


@app.command()
@takes_drafts
def chat(
    model: Model = None,
    image: Annotated[
        list[Path] | None,
        typer.Option("--image", "-i", help="Picture for the first question; repeat for more.", show_default=False),
    ] = None,
    system: Annotated[str, typer.Option(help="System message.", show_default=False)] = "",
    effort: Annotated[str, typer.Option(help="Thinking: none, low, high or max.")] = "none",
    max_tokens: Annotated[int, typer.Option(help="New tokens of an answer at most.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token each time.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Same seed, same text.", show_default=False)] = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    *,
    drafts: DraftOptions,
) -> None:
    """Talk with a model in the terminal, about pictures too; lines beginning with / are commands, /help lists them."""
    _verb(
        "chat", "run",
        model=model, images=image or [], system=system, effort=effort, max_tokens=max_tokens, temperature=temperature,
        seed=seed, device=device, dtype=dtype, drafts=drafts,
    )  # fmt: skip


@app.command()
@takes_drafts
def serve(
    model: Model = None,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 8000,
    served_name: Annotated[
        list[str] | None, typer.Option(help="Name of the model in the API; repeat for more.", show_default=False)
    ] = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    kv_dtype: KvDtype = "auto",
    cache_memory: Annotated[
        str | None, typer.Option(help="Memory for caches, such as 8GiB.", show_default=False)
    ] = None,
    max_model_len: Annotated[int, typer.Option(min=1, help="Tokens of one request, prompt and output.")] = 131_072,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Requests running at once.")] = 32,
    max_batched_tokens: Annotated[int, typer.Option(min=1, help="Tokens of one step.")] = 2048,
    max_queued: Annotated[int, typer.Option(min=1, help="Requests that may wait; more get 429.")] = 256,
    prefix_caching: Annotated[bool, typer.Option(help="Reuse what earlier requests computed.")] = True,
    default_effort: Annotated[
        str, typer.Option(help="Thinking where a request says nothing: none, low, high, max.")
    ] = "high",
    api_key: Annotated[
        list[str] | None,
        typer.Option(help="Key that clients must send; repeat for more. Also DEEPSPAN_API_KEYS.", show_default=False),
    ] = None,
    cors_origin: Annotated[
        list[str] | None, typer.Option(help="Origin of web pages that may call.", show_default=False)
    ] = None,
    remote_images: Annotated[bool, typer.Option(help="Fetch images from public http(s) addresses.")] = False,
    image_domain: Annotated[
        list[str] | None, typer.Option(help="Fetch from this domain only; repeat for more.", show_default=False)
    ] = None,
    private_images: Annotated[
        bool, typer.Option(help="Fetch from private networks too (closed networks only).")
    ] = False,
    image_folder: Annotated[
        Path | None, typer.Option(help="Folder that file: addresses may read.", show_default=False)
    ] = None,
    max_images: Annotated[int, typer.Option(min=1, help="Images of one request.")] = 64,
    max_image_mib: Annotated[int, typer.Option(min=1, help="MiB of one image file.")] = 32,
    max_body_mib: Annotated[int, typer.Option(min=1, help="MiB of one request.")] = 64,
    request_timeout: Annotated[
        float | None, typer.Option(min=0.1, help="Seconds that one request may take.", show_default=False)
    ] = None,
    drain_timeout: Annotated[float, typer.Option(min=0, help="Seconds that running requests get at the end.")] = 30.0,
    strict: Annotated[bool, typer.Option(help="Refuse fields that nobody knows.")] = False,
    guard_metrics: Annotated[bool, typer.Option(help="Ask for the key at /metrics too.")] = False,
    *,
    drafts: DraftOptions,
) -> None:
    """Serve the OpenAI- and Anthropic-compatible API over HTTP."""
    _verb(
        "serve", "run",
        model=model, host=host, port=port, served_name=served_name or [], device=device, dtype=dtype,
        kv_dtype=kv_dtype, cache_memory=cache_memory, max_model_len=max_model_len, max_num_seqs=max_num_seqs,
        max_batched_tokens=max_batched_tokens, max_queued=max_queued, prefix_caching=prefix_caching,
        default_effort=default_effort, api_key=api_key or [], cors_origin=cors_origin or [],
        remote_images=remote_images, image_domain=image_domain or [], private_images=private_images,
        image_folder=image_folder, max_images=max_images, max_image_mib=max_image_mib, max_body_mib=max_body_mib,
        request_timeout=request_timeout, drain_timeout=drain_timeout, strict=strict, guard_metrics=guard_metrics,
        drafts=drafts,
    )  # fmt: skip


@app.command()
def tiny(
    out: Annotated[Path, typer.Argument(help="Folder to write.", show_default=False)],
    layers: Annotated[int, typer.Option(min=1, help="Number of layers; the ratios are repeated to fill them.")] = 4,
    ratios: Annotated[str, typer.Option(help="Compress ratios of the layers, comma-separated: 0, 4, 128, ...")] = (
        "0,4,128,4"
    ),
    vision: Annotated[bool, typer.Option(help="With the vision tower and image tokens.")] = True,
    draft_stages: Annotated[int, typer.Option(min=0, help="Number of draft stages (mtp.*).")] = 0,
    draft_kind: Annotated[str, typer.Option(help="What draft stages are: dspark, or mtp (one stage).")] = "dspark",
    shards: Annotated[int, typer.Option(min=1, help="Number of safetensors files.")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="Same seed, same bytes.")] = 0,
    weights: Annotated[str, typer.Option(help="plain, or quantised: fp8-fp4, fp8, w8a8, w4a8.")] = "plain",
) -> None:
    """Write a tiny random checkpoint in the released format (config, weights, tokenizer)."""
    _verb(
        "tiny", "run",
        out=out, layers=layers, ratios=ratios, vision=vision, draft_stages=draft_stages, draft_kind=draft_kind,
        shards=shards, seed=seed, weights=weights,
    )  # fmt: skip


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(help="Checkpoint folder to read.", show_default=False)],
    out: Annotated[
        Path,
        typer.Argument(help="Folder to write: new, empty, or left by the same command.", show_default=False),
    ],
    to: Annotated[
        str,
        typer.Option(
            help="bf16, fp8-fp4 (as released), fp8 (as the base model), w8a8 or w4a8 (ModelSlim), or tiny-subset.",
            show_default=False,
        ),
    ],
    shard_size: Annotated[str, typer.Option(help="Data of one file at most, such as 5GB.")] = "5GB",
    layers: Annotated[
        int | None, typer.Option(help="tiny-subset: how many of the first layers.", show_default=False)
    ] = None,
    experts: Annotated[
        int | None, typer.Option(help="tiny-subset: how many of the first experts.", show_default=False)
    ] = None,
    keep_drafts: Annotated[bool, typer.Option("--keep-drafts", help="tiny-subset: with its draft stages.")] = False,
    calibrate: Annotated[
        Path | None,
        typer.Option(
            help='w8a8, w4a8: fixed input scales for dense layers, from lines of {"text": ..., "images": [...]}.',
            show_default=False,
        ),
    ] = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> None:
    """Write a checkpoint in another format, or a small part of it. The same command goes on after an interruption."""
    _verb(
        "convert", "run",
        source=source, out=out, to=to, shard_size=shard_size, layers=layers, experts=experts, keep_drafts=keep_drafts,
        calibrate=calibrate, device=device, dtype=dtype,
    )  # fmt: skip


@eval_app.command("tiny")
@takes_drafts
def eval_tiny(
    model: Model = None,
    questions: Annotated[int, typer.Option(min=1, help="Questions per skill (fewer of the long ones).")] = 100,
    skills: Annotated[
        str | None, typer.Option(help="Skills to ask for, separated by commas; all if not given.", show_default=False)
    ] = None,
    formats: Annotated[
        str | None,
        typer.Option(
            help="Formats to compare, such as bf16,fp8-fp4,w8a8: the checkpoint as it is (bf16), and quantised copies.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print counts as JSON.")] = False,
    failures: Annotated[bool, typer.Option("--failures", help="Show the first wrong answers of each skill.")] = False,
    device: Device = "auto",
    dtype: Dtype = "auto",
    *,
    drafts: DraftOptions,
) -> None:
    """Accuracy of deepspan-tiny's skills on held-out pictures and texts."""
    _verb("eval", "run", model=model, questions=questions, skills=skills, formats=formats, as_json=as_json,
          failures=failures, device=device, dtype=dtype, drafts=drafts)  # fmt: skip


@bench_app.command("serve")
def bench_serve(
    url: Annotated[str, typer.Option(help="Address of an OpenAI-compatible API.")] = "http://127.0.0.1:8000/v1",
    model: Annotated[
        str | None, typer.Option(help="Name of the model; the first that the server lists.", show_default=False)
    ] = None,
    api_key: Annotated[str | None, typer.Option(help="Key to send.", show_default=False)] = None,
    requests: Annotated[int, typer.Option(min=1, help="Requests to measure.")] = 64,
    concurrency: Annotated[
        int | None,
        typer.Option(min=1, help="Requests at once (closed loop); 8 if no rate is given.", show_default=False),
    ] = None,
    rate: Annotated[
        float | None, typer.Option(help="Requests per second, at random times (open loop).", show_default=False)
    ] = None,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a prompt's text, about.")] = 256,
    output_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 64,
    images: Annotated[int, typer.Option(min=0, help="Pictures of a request, all different.")] = 0,
    image_size: Annotated[str, typer.Option(help="Size of pictures, WIDTHxHEIGHT.")] = "560x560",
    shared_prefix: Annotated[
        int, typer.Option(min=0, help="Tokens at the beginning that all prompts share, about.")
    ] = 0,
    seed: Annotated[int, typer.Option(help="Same seed, same prompts (which the server may remember).")] = 0,
    warmup: Annotated[int, typer.Option(min=0, help="Requests before the measured ones.")] = 4,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds without a byte that make a request fail.")] = 600.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Put a load on a server: throughput, and how long answers take. Exit code 1 if a request fails."""
    _verb(
        "bench", "run",
        url=url, model=model, api_key=api_key, requests=requests, concurrency=concurrency, rate=rate,
        prompt_tokens=prompt_tokens, output_tokens=output_tokens, images=images, image_size=image_size,
        shared_prefix=shared_prefix, seed=seed, warmup=warmup, timeout=timeout, as_json=as_json,
    )  # fmt: skip


@inspect_app.command("ops")
def inspect_ops(device: Device = "auto", dtype: Dtype = "auto") -> None:
    """Show which implementation serves each operation."""
    _verb("inspect", "show_ops", device=device, dtype=dtype)


@inspect_app.command("weights")
def inspect_weights(
    model: ModelArgument = None,
    as_json: AsJson = False,
    all_problems: Annotated[bool, typer.Option("--all", help="List every problem, not some of each kind.")] = False,
) -> None:
    """Show what a checkpoint holds and all that is wrong with it, from headers, an index or config.json alone.

    Exit code 1 if something is wrong.
    """
    _verb("inspect_weights", "show_weights", model=model, as_json=as_json, all_problems=all_problems)


@inspect_app.command("config")
def inspect_config(model: ModelArgument = None, as_json: AsJson = False) -> None:
    """Show what the configuration of a model says: layers, experts, vision, drafts, formats."""
    _verb("inspect_config", "show_config", model=model, as_json=as_json)


@inspect_app.command("memory")
@inspect_app.command("cache", hidden=True)  # its name while it told of caches only
@takes_drafts
def inspect_memory(
    model: ModelArgument = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    kv_dtype: KvDtype = "auto",
    num_devices: Annotated[
        int, typer.Option(min=1, help="Devices that share the routed experts; all else is on each.")
    ] = 1,
    cache_memory: Annotated[
        str | None, typer.Option(help="Memory for caches; 8GiB if nothing is said.", show_default=False)
    ] = None,
    device_memory: Annotated[
        str | None, typer.Option(help="Memory of a device, such as 96GiB; caches get what is left.", show_default=False)
    ] = None,
    max_model_len: Annotated[int, typer.Option(help="Tokens of one request, prompt and output.")] = 131_072,
    max_num_seqs: Annotated[int, typer.Option(help="Requests running at once.")] = 32,
    max_batched_tokens: Annotated[int, typer.Option(help="Tokens of one step.")] = 2048,
    read_rate: Annotated[
        str | None,
        typer.Option(help="Bytes a second that files come at, such as 2GB; measured if not given.", show_default=False),
    ] = None,
    as_json: AsJson = False,
    *,
    drafts: DraftOptions,
) -> None:
    """Show what a device would hold, what requests cost, how many fit at once, and how long loading takes."""
    _verb(
        "inspect_memory", "show_memory",
        model=model, device=device, dtype=dtype, kv_dtype=kv_dtype, num_devices=num_devices,
        cache_memory=cache_memory, device_memory=device_memory, max_model_len=max_model_len,
        max_num_seqs=max_num_seqs, max_batched_tokens=max_batched_tokens, read_rate=read_rate, as_json=as_json,
        drafts=drafts,
    )  # fmt: skip
