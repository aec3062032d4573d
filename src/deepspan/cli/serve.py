"""`deepspan serve`: load a model, answer on a port, stop in an orderly way."""

import asyncio
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, get_args

from rich.logging import RichHandler

from deepspan.async_llm import AsyncLLM
from deepspan.bundled import bundled_model
from deepspan.cli.options import DraftOptions
from deepspan.cli.progress import counting, notes
from deepspan.cli.sizes import parse_bytes
from deepspan.config.engine import EngineConfig
from deepspan.errors import ConfigError
from deepspan.image.decode import ImageLimits
from deepspan.llm import LLM
from deepspan.server.jobs import ServerSettings
from deepspan.server.media import MediaPolicy
from deepspan.server.params import SamplingDefaults
from deepspan.server.run import Server, bind
from deepspan.text.switches import Effort

KEYS_VARIABLE = "DEEPSPAN_API_KEYS"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Options of the command, as they were given."""

    model: Path | None
    host: str
    port: int
    served_name: list[str]
    device: str
    dtype: str
    drafts: DraftOptions
    kv_dtype: str
    cache_memory: str | None
    max_model_len: int
    max_num_seqs: int
    max_batched_tokens: int
    max_queued: int
    prefix_caching: bool
    default_effort: str
    api_key: list[str]
    cors_origin: list[str]
    remote_images: bool
    image_domain: list[str]
    private_images: bool
    image_folder: Path | None
    max_images: int
    max_image_mib: int
    max_body_mib: int
    request_timeout: float | None
    drain_timeout: float
    strict: bool
    guard_metrics: bool


def run(**given: Any) -> None:
    """Serve until SIGTERM or SIGINT. Raises DeepspanError for anything the user can mend."""
    options = ServeOptions(**given)
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s", handlers=[RichHandler(console=notes)])
    logging.getLogger("httpx").setLevel(logging.WARNING)
    settings, policy = _settings(options), _policy(options)
    folder = options.model or bundled_model()
    engine = EngineConfig(
        kv_dtype=options.kv_dtype,  # type: ignore[arg-type]  # checked there
        max_model_len=options.max_model_len,
        max_num_seqs=options.max_num_seqs,
        max_batched_tokens=options.max_batched_tokens,
        prefix_caching=options.prefix_caching,
        **options.drafts.engine_fields(),
    )
    try:
        listener = bind(options.host, options.port)
    except OSError as error:
        raise ConfigError(f"cannot listen on {options.host}:{options.port}: {error.strerror}") from error
    defaults = SamplingDefaults.of_checkpoint(folder)
    with counting("loading", "tensors") as progress:
        llm = LLM(
            folder,
            device=options.device,
            dtype=options.dtype,
            image_limits=ImageLimits(max_bytes=policy.max_bytes),
            engine=engine,
            cache_bytes=parse_bytes(options.cache_memory) if options.cache_memory else None,
            progress=progress,
        )
    host, port = listener.getsockname()[:2]
    if (limits := llm.engine).num_drafts:
        count = f"up to {limits.num_drafts}" if limits.draft_depth == "auto" else str(limits.num_drafts)
        notes.print(f"guessing {count} tokens ahead with {limits.draft_method} stages", markup=False)

    async def main() -> None:
        server = Server(AsyncLLM(llm, max_queued=options.max_queued), settings, policy, defaults)
        server.stop_on_signals()
        shown = f"[{host}]" if ":" in host else host
        line = f"serving {settings.names[0]} on http://{shown}:{port}/v1"
        await server.serve(listener, lambda: notes.print(line, markup=False))

    asyncio.run(main())


def _settings(options: ServeOptions) -> ServerSettings:
    if options.default_effort not in get_args(Effort):
        raise ConfigError(f"--default-effort must be one of {', '.join(get_args(Effort))}")
    keys = [*options.api_key, *os.environ.get(KEYS_VARIABLE, "").split(",")]
    name = "deepspan-tiny" if options.model is None else options.model.resolve().name
    return ServerSettings(
        names=tuple(options.served_name) or (name,),
        api_keys=tuple(key for key in keys if key),
        cors_origins=tuple(options.cors_origin),
        max_body_bytes=options.max_body_mib * 2**20,
        request_timeout=options.request_timeout,
        drain_timeout=options.drain_timeout,
        default_effort=cast(Effort, options.default_effort),
        strict=options.strict,
        guard_metrics=options.guard_metrics,
    )


def _policy(options: ServeOptions) -> MediaPolicy:
    if options.image_folder is not None and not options.image_folder.is_dir():
        raise ConfigError(f"--image-folder: there is no folder at {options.image_folder}")
    return MediaPolicy(
        remote=options.remote_images or bool(options.image_domain),
        domains=tuple(options.image_domain),
        allow_private=options.private_images,
        file_root=options.image_folder,
        max_images=options.max_images,
        max_bytes=options.max_image_mib * 2**20,
        max_total_bytes=2 * options.max_image_mib * 2**20,
    )
