"""What a server tells about its model and its prompts, without running it.

Called by `server.app`. Token counts are those of the prompts that the engine would run, images included.
"""

import time
from typing import Any

from deepspan.core.request import Request
from deepspan.server.answers import text_of
from deepspan.server.errors import ApiError
from deepspan.server.fields import ChatFields, DetokenizeFields, TokenizeFields
from deepspan.server.jobs import Service

_STARTED = int(time.time())


def model_object(service: Service, name: str) -> dict[str, Any]:
    """One entry of `/v1/models`."""
    permission = {
        "id": f"modelperm-{name}",
        "object": "model_permission",
        "created": _STARTED,
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": True,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }
    return {
        "id": name,
        "object": "model",
        "created": _STARTED,
        "owned_by": "deepspan",
        "root": service.settings.names[0],
        "parent": None,
        "max_model_len": service.llm.llm.engine.max_model_len,
        "permission": [permission],
    }


async def tokenize(service: Service, fields: TokenizeFields) -> dict[str, Any]:
    """Ids of a raw prompt, or of a whole chat request with its images expanded."""
    service.check_model(fields.model)
    llm = service.llm.llm
    if (fields.prompt is None) == (fields.messages is None):
        raise ApiError(status=400, message="give either prompt or messages", param="prompt")
    if fields.prompt is not None:
        if fields.add_special_tokens:
            raise ApiError(
                status=400,
                message="add_special_tokens is not supported: this tokenizer adds none, write them into the prompt",
                param="add_special_tokens",
            )
        ids = await service.llm.in_worker(llm.encode_raw, fields.prompt)
    else:
        body = fields.model_dump(exclude={"prompt", "add_special_tokens", "return_token_strs"}, exclude_none=True)
        request = await _chat_request(service, ChatFields.model_validate(body))
        ids = request.token_ids.tolist()
    answer = {"count": len(ids), "max_model_len": llm.engine.max_model_len, "tokens": ids}
    if fields.return_token_strs:
        answer["token_strs"] = [text_of(llm.tokenizer, token_id) for token_id in ids]
    return answer


async def detokenize(service: Service, fields: DetokenizeFields) -> dict[str, Any]:
    """Text of ids, special tokens as their strings."""
    service.check_model(fields.model)
    tokenizer = service.llm.llm.tokenizer
    for token_id in fields.tokens:
        if not tokenizer.has_id(token_id):
            raise ApiError(status=400, message=f"tokens: {token_id} is not in the vocabulary", param="tokens")

    def decode() -> str:
        return tokenizer.decode(fields.tokens, keep_special=True)

    return {"prompt": await service.llm.in_worker(decode)}


async def render(service: Service, fields: ChatFields) -> dict[str, Any]:
    """What the engine would be given for a chat request: ids, images and parameters."""
    model = service.check_model(fields.model)
    request = await _chat_request(service, fields)
    images = [
        {
            "hash": image.digest,
            "offset": span.offset,
            "length": span.last + 1 - span.offset,
            "start": span.first,
            "grid": [image.grid_rows, image.grid_cols],
        }
        for span, image in zip(request.spans, request.images, strict=True)
    ]
    return {
        "model": model,
        "token_ids": request.token_ids.tolist(),
        "features": images,
        "sampling_params": {
            "temperature": request.params.temperature,
            "top_p": request.params.top_p,
            "top_k": request.params.top_k,
            "max_tokens": request.params.max_tokens,
            "n": request.params.n,
        },
        "stream": bool(fields.stream),
    }


async def _chat_request(service: Service, fields: ChatFields) -> Request:
    return (await service.chat_job(fields)).requests[0]
