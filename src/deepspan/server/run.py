"""A server process: one socket, one event loop, and an orderly end.

On SIGTERM or SIGINT the server stops accepting, lets running requests end for a while, aborts the rest and leaves.
Called by `cli.serve` and by tests.
"""

import asyncio
import logging
import signal
import socket
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import uvicorn

from deepspan.async_llm import AsyncLLM
from deepspan.server.app import create_app
from deepspan.server.jobs import ServerSettings, Service
from deepspan.server.media import MediaLoader, MediaPolicy
from deepspan.server.params import SamplingDefaults

log = logging.getLogger(__name__)

MAX_HEADER_BYTES = 65_536


class Server:
    """Serves a model until it is told to stop."""

    def __init__(
        self, llm: AsyncLLM, settings: ServerSettings, policy: MediaPolicy, defaults: SamplingDefaults
    ) -> None:
        self.service = Service(llm, settings, MediaLoader(policy), defaults)
        self._stop = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    async def serve(self, listener: socket.socket, started: Callable[[], None] = lambda: None) -> None:
        """Answer on a bound socket. started: called when requests are taken."""
        self._loop = asyncio.get_running_loop()
        config = uvicorn.Config(
            create_app(self.service),
            log_config=None,
            access_log=False,
            lifespan="on",
            h11_max_incomplete_event_size=MAX_HEADER_BYTES,
            timeout_graceful_shutdown=1,
        )
        server = _Uvicorn(config)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started and not serving.done():
            await asyncio.sleep(0.01)
        started()
        stopping = asyncio.create_task(self._stop.wait())
        await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
        await self._drain()
        server.should_exit = True
        await serving
        stopping.cancel()

    def stop(self) -> None:
        """Begin the orderly end; from any thread."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._stop.set)

    def stop_on_signals(self) -> None:
        """End on SIGTERM and SIGINT. From the loop's own thread, which must be the main one."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)

    async def _drain(self) -> None:
        service = self.service
        service.draining = True
        try:
            async with asyncio.timeout(service.settings.drain_timeout):
                while service.num_active:
                    await asyncio.sleep(0.02)
        except TimeoutError:
            log.warning("%d requests did not end in time and are aborted", service.num_active)
        await asyncio.to_thread(service.llm.stop)


class _Uvicorn(uvicorn.Server):
    """uvicorn without its own signal handlers: they would end requests that may still be answered."""

    def capture_signals(self) -> AbstractContextManager[None]:  # type: ignore[override]
        return nullcontext()


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, port))
    listener.listen(2048)
    listener.set_inheritable(True)
    return listener
