"""`/v1/completions`: raw prompts, continued.

Called by `server.app`. Choices of prompt i have the indices from i * n on.
"""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from deepspan.core.output import RequestOutput, TokenLogprobs
from deepspan.server.answers import finite, prompt_logprobs, text_of, usage
from deepspan.server.fields import CompletionFields
from deepspan.server.jobs import Job, Service, served
from deepspan.server.transport import DONE, data_event


class CompletionAnswer:
    """Answer to one completion request."""

    def __init__(self, service: Service, fields: CompletionFields, job: Job, model: str) -> None:
        self._service, self._fields, self._job = service, fields, job
        self._tokenizer = service.llm.llm.tokenizer
        self._num_choices = job.requests[0].params.n
        self._head = {"id": f"cmpl-{job.id}", "object": "text_completion", "created": job.created, "model": model}

    async def whole(self) -> dict[str, Any]:
        """The `text_completion` object."""
        outputs = await self._service.finish(self._job)
        choices = [self._choice(index, output) for index, output in enumerate(outputs)]
        return {**self._head, "choices": choices, "usage": self._usage(outputs), "system_fingerprint": None}

    async def chunks(self) -> AsyncGenerator[str]:
        """Server-sent events; usage if asked for; `[DONE]`."""
        options = self._fields.stream_options
        waiting: dict[int, list[TokenLogprobs]] = {}
        offsets: dict[int, int] = {}
        if self._fields.echo:
            for index in range(len(self._job.requests) * self._num_choices):
                text = self._prompt_text(index)
                offsets[index] = len(text)
                yield self._chunk(index, text)
        async with aclosing(self._service.events(self._job)) as events:
            async for event in events:
                index = event.request
                held = waiting.setdefault(index, [])
                if event.logprobs is not None:
                    held.append(event.logprobs)
                text = "" if self._only_echoes else event.text
                if event.finish_reason is None and not text:
                    continue
                fields: dict[str, Any] = {}
                if held and not self._only_echoes:
                    fields["logprobs"] = self._logprobs(held, offsets.get(index, 0))
                if event.finish_reason is not None:
                    output = served(self._job.streams[index].output)
                    fields |= {"finish_reason": self._reason(output), "stop_reason": output.stop}
                offsets[index] = offsets.get(index, 0) + len(text)
                waiting[index] = []
                yield self._chunk(index, text, **fields)
        if options and options.include_usage:
            yield data_event({**self._head, "choices": [], "usage": self._usage(self._job.outputs)})
        yield DONE

    @property
    def _only_echoes(self) -> bool:
        return self._fields.max_tokens == 0

    def _chunk(self, index: int, text: str, **fields: Any) -> str:
        choice = {"index": index, "text": text, "logprobs": None, "finish_reason": None, **fields}
        return data_event({**self._head, "choices": [choice]})

    def _choice(self, index: int, output: RequestOutput) -> dict[str, Any]:
        before = self._prompt_text(index) if self._fields.echo else ""
        choice: dict[str, Any] = {
            "index": index,
            "text": before + ("" if self._only_echoes else output.text),
            "logprobs": None,
            "finish_reason": self._reason(output),
            "stop_reason": output.stop,
        }
        if output.logprobs is not None:
            generated = () if self._only_echoes else output.logprobs
            choice["logprobs"] = self._logprobs(
                [*(output.prompt_logprobs or ()), *generated] if self._fields.echo else generated,
                0,
                first=int(self._request(index).token_ids[0]) if self._fields.echo else None,
            )
        if self._fields.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(self._tokenizer, output)
        if self._fields.return_token_ids:
            choice["token_ids"] = [] if self._only_echoes else list(output.token_ids)
            choice["prompt_token_ids"] = self._request(index).token_ids.tolist()
        return choice

    def _request(self, index: int) -> Any:
        return self._job.requests[index // self._num_choices]

    def _prompt_text(self, index: int) -> str:
        return self._tokenizer.decode(self._request(index).token_ids.tolist(), keep_special=True)

    def _reason(self, output: RequestOutput) -> str:
        return "length" if self._only_echoes else output.finish_reason

    def _usage(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        counted = usage(outputs, self._num_choices)
        if self._only_echoes:
            counted |= {"completion_tokens": 0, "total_tokens": counted["prompt_tokens"]}
        return counted

    def _logprobs(self, found: Sequence[TokenLogprobs], offset: int, *, first: int | None = None) -> dict[str, Any]:
        """first: token that nothing precedes, whose log-probability is null. offset: of the first text."""
        names = [text_of(self._tokenizer, one.token_id) for one in found]
        values: list[float | None] = [finite(one.logprob) for one in found]
        tops: list[dict[str, float] | None] = [
            {text_of(self._tokenizer, token_id): finite(logprob) for token_id, logprob in one.top} for one in found
        ]
        if first is not None:
            names, values, tops = [text_of(self._tokenizer, first), *names], [None, *values], [None, *tops]
        offsets = [offset]
        for name in names:
            offsets.append(offsets[-1] + len(name))
        return {"text_offset": offsets[:-1], "token_logprobs": values, "tokens": names, "top_logprobs": tops}
