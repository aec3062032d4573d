"""A real server on a free port in a thread of its own, and pictures to send to it."""

import asyncio
import base64
import threading
from contextlib import contextmanager
from io import BytesIO

import numpy as np
from PIL import Image

from deepspan import LLM, AsyncLLM
from deepspan.server.jobs import ServerSettings
from deepspan.server.media import MediaPolicy
from deepspan.server.params import SamplingDefaults
from deepspan.server.run import Server, bind

NAME = "tiny"


class Running:
    """A server that answers. url: without /v1."""

    def __init__(self, server, url, thread):
        self.server, self.url, self._thread = server, url, thread
        self.service = server.service

    @property
    def stats(self):
        return self.service.llm.stats

    def stop(self):
        self.server.stop()
        self._thread.join(60)
        assert not self._thread.is_alive(), "the server ends when it is told to"

    def check_idle(self):
        """Nothing runs, nothing waits, nothing is held."""
        self.service.llm.llm.core.check()
        stats = self.stats
        assert (stats.num_running, stats.num_waiting, stats.cache_usage) == (0, 0, 0.0)


@contextmanager
def serving(folder, *, llm_options=None, policy=None, defaults=None, max_queued=256, **settings):
    """A server of the checkpoint in `folder`, stopped at the end. settings: of `ServerSettings`."""
    ready = threading.Event()
    made = []
    failed = []

    async def main():
        llm = AsyncLLM(LLM(folder, device="cpu", **(llm_options or {})), max_queued=max_queued)
        own = ServerSettings(**{"names": (NAME,), "default_effort": "none", "drain_timeout": 5.0, **settings})
        server = Server(llm, own, policy or MediaPolicy(), defaults or SamplingDefaults(temperature=0.0))
        listener = bind("127.0.0.1", 0)
        made.extend((server, f"http://127.0.0.1:{listener.getsockname()[1]}"))
        await server.serve(listener, ready.set)

    def work():
        try:
            asyncio.run(main())
        except BaseException as error:
            failed.append(error)
        finally:
            ready.set()

    thread = threading.Thread(target=work, name="test-server")
    thread.start()
    ready.wait(120)
    assert not failed, failed
    running = Running(*made, thread)
    try:
        yield running
    finally:
        if thread.is_alive():
            running.stop()


def picture(seed, size=(24, 18)):
    """PNG bytes of noise."""
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    out = BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


def data_url(data, kind="image/png"):
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def image_part(data):
    return {"type": "image_url", "image_url": {"url": data_url(data)}}
