"""Runs the steps that the scheduler plans: encodes images, fills caches, chooses tokens.

Owns what a running request is to the device: its row of the block tables, the tokens that sampling looks at, and the
encoder rows of images by digest. Invariants: a request that fails in any part of a step is reported alone, with the
tokens of all others unchanged; nothing is decided here that the plan has not decided. Called by `engine.core`.
"""

import logging
from collections.abc import Generator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from deepspan.config.engine import EngineConfig
from deepspan.core.media import PreparedImage, TokenKind
from deepspan.core.output import PromptLogprobs
from deepspan.core.step import Chunk, EncoderJob, StepPlan, StepResult
from deepspan.errors import InputError
from deepspan.kv.families import Family
from deepspan.runtime.caches import Caches
from deepspan.runtime.choosing import Chosen, Drafts, RunningRow
from deepspan.runtime.drafting import Anchor, Followed
from deepspan.runtime.guidance import Guide
from deepspan.runtime.mtp_drafting import AnyDrafting, drafting_for
from deepspan.runtime.sampler import token_logprobs
from deepspan.runtime.step_builder import ChunkInput, StepBuilder
from deepspan.runtime.visibility import check_chunk
from deepspan.weights.load import LoadedModel

log = logging.getLogger(__name__)


class Runner:
    """One model on one device, with its caches."""

    def __init__(
        self,
        model: LoadedModel,
        engine: EngineConfig,
        families: Sequence[Family],
        caches: Caches,
        device: torch.device,
        forbidden_V: Tensor,
        eos: int,
    ) -> None:
        """forbidden_V: bool, tokens that are never generated."""
        self._network, self._device, self._caches = model.network, device, caches
        self._longest_span = model.config.vision.max_n_token if model.config.vision is not None else 0
        self._builder = StepBuilder(model.config, engine, families, caches, device)
        self._forbidden, self._eos = forbidden_V.to(device), eos
        self._in_blocks = engine.draft_rule == "block"
        self._drafting: AnyDrafting | None = None
        if model.drafter is not None:
            self._drafting = drafting_for(model.drafter, model.network, model.config, engine, caches, device)
        self._rows: dict[int, RunningRow] = {}
        self._features: dict[str, Tensor] = {}

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """One step. Requests that fail are named in the result; for the others it is as if they had not been there."""
        for digest in plan.dropped:
            self._features.pop(digest, None)
        failed: dict[int, str] = {}
        for chunk in plan.chunks:
            self._begin(chunk, failed)
        self._encode(plan.encoder_jobs, failed)
        inputs: list[tuple[Chunk, ChunkInput]] = []
        for chunk in plan.chunks:
            if chunk.request_id not in failed:
                with _alone(chunk.request_id, failed):
                    inputs.append((chunk, self._input(chunk)))
        chosen: dict[int, Chosen] = {}
        prompt_logprobs: dict[int, PromptLogprobs] = {}
        for chunk, logits in self._forward(inputs, failed):
            with _alone(chunk.request_id, failed):
                if (prompt := self._prompt_logprobs(chunk, logits)) is not None:
                    prompt_logprobs[chunk.request_id] = prompt
                if chunk.samples:
                    row = self._rows[chunk.row]
                    drafts = row.drafts.first(chunk.num_drafts)
                    rows = logits[len(logits) - 1 - chunk.num_drafts :]
                    chosen[chunk.request_id] = row.choose(rows, drafts, in_blocks=self._in_blocks)
        self._follow(inputs, failed)
        chosen = {request_id: found for request_id, found in chosen.items() if request_id not in failed}
        drafts = self._propose([chunk for chunk, _ in inputs if chunk.request_id not in failed])
        return StepResult(
            tokens={request_id: found.tokens for request_id, found in chosen.items()},
            failed=failed,
            accepted={request_id: found.num_accepted for request_id, found in chosen.items()},
            invalid={request_id: found.num_invalid for request_id, found in chosen.items() if found.num_invalid},
            drafts=drafts,
            logprobs={request_id: found.logprobs for request_id, found in chosen.items() if found.logprobs},
            prompt_logprobs=prompt_logprobs,
        )

    def _begin(self, chunk: Chunk, failed: dict[int, str]) -> None:
        self._caches.update(chunk.row, chunk.blocks, begins=chunk.begins is not None)
        if chunk.begins is not None:
            request, generated = chunk.begins.request, list(chunk.begins.generated)
            row = RunningRow(request=request, generated=generated, eos=self._eos, forbidden=self._forbidden)
            self._rows[chunk.row] = row
            with _alone(chunk.request_id, failed):
                row.guide = Guide.of(request, generated, self._forbidden)

    def _encode(self, jobs: Sequence[EncoderJob], failed: dict[int, str]) -> None:
        """Encode the step's images together; if that fails, one by one, so that only the faulty ones are missing."""
        try:
            self._encode_together(jobs)
        except Exception:
            log.exception("encoding %d images together failed", len(jobs))
            for job in jobs:
                with _alone(job.request_id, failed):
                    self._encode_together([job])

    def _encode_together(self, jobs: Sequence[EncoderJob]) -> None:
        if not jobs:
            return
        images = [job.image for job in jobs]
        patches = torch.from_numpy(np.concatenate([image.patches for image in images])).to(self._device)
        rows = self._network.encode_images(patches, [(image.grid_rows, image.grid_cols) for image in images])
        counts = [len(image.block.encoder_rows) for image in images]
        ordered = emission_order(rows, images).split(counts)
        self._features |= {job.image.digest: part for job, part in zip(jobs, ordered, strict=True)}

    def _input(self, chunk: Chunk) -> ChunkInput:
        """Raises InputError if the chunk cuts an image, or an image was not encoded."""
        request, (start, end) = self._rows[chunk.row].request, (chunk.start, chunk.end)
        check_chunk(start, end, request.spans, self._longest_span)
        own = request.kinds[start:end]
        kinds = np.concatenate((own, np.full(end - start - len(own), TokenKind.TEXT, dtype=np.int8)))
        inside = [
            image
            for span, image in zip(request.spans, request.images, strict=True)
            if start <= span.offset and span.last < end
        ]
        for image in inside:
            if image.digest not in self._features:
                raise InputError("an image of the request could not be encoded")
        scored = min(end, len(request.token_ids) - 1)
        if request.params.prompt_logprobs is None or start >= scored:
            wanted = range(end - 1 - chunk.num_drafts, end) if chunk.samples else range(0)
        else:
            wanted = range(start, end if chunk.samples else scored)
        return ChunkInput(
            row=chunk.row,
            start=start,
            token_ids=np.asarray(chunk.token_ids, dtype=np.int64),
            kinds=kinds,
            spans=request.spans,
            features=torch.cat([self._features[image.digest] for image in inside]) if inside else None,
            wanted=wanted,
        )

    def _forward(
        self, inputs: Sequence[tuple[Chunk, ChunkInput]], failed: dict[int, str]
    ) -> list[tuple[Chunk, Tensor]]:
        """Logits of each chunk's wanted rows: fp32 [rows, V]. If all together fail, each is tried alone."""
        if not inputs:
            return []
        counts = [len(given.wanted) for _, given in inputs]
        try:
            batch = self._builder.build([given for _, given in inputs])
            output = self._network(batch, self._drafting.taps if self._drafting is not None else ())
            logits = output.logits
            if self._drafting is not None:
                self._drafting.keep_context(batch, output.streams)
        except Exception as error:
            if len(inputs) > 1:
                log.exception("a step of %d requests failed; each runs alone now", len(inputs))
                return [found for one in inputs for found in self._forward([one], failed)]
            log.exception("request %d failed", inputs[0][0].request_id)
            failed[inputs[0][0].request_id] = f"{type(error).__name__}: {error}"
            return []
        return [(chunk, rows) for (chunk, _), rows in zip(inputs, logits.split(counts), strict=True)]

    def _prompt_logprobs(self, chunk: Chunk, logits: Tensor) -> PromptLogprobs | None:
        request = self._rows[chunk.row].request
        count = request.params.prompt_logprobs
        last = min(chunk.end, len(request.token_ids) - 1)
        if count is None or chunk.start >= last:
            return None
        following = request.token_ids[chunk.start + 1 : last + 1].tolist()
        found = (token_logprobs(row, token, count) for row, token in zip(logits, following, strict=False))
        return PromptLogprobs(first=chunk.start + 1, tokens=tuple(found))

    def _follow(self, inputs: Sequence[tuple[Chunk, ChunkInput]], failed: dict[int, str]) -> None:
        """Let draft stages take in what is computed for good. If all together fail, each is tried alone.

        One that fails ends: its blocks would be shared, and hold nothing.
        """
        if self._drafting is None:
            return
        followed: dict[int, Followed] = {}
        for chunk, given in inputs:
            if chunk.request_id in failed:
                continue
            row = self._rows[chunk.row]
            known = len(row.request.token_ids) + len(row.generated)
            end = known - 1 if chunk.samples else chunk.end
            one = Followed(row=row, place=chunk.row, start=chunk.start, end=end, features=given.features)
            followed[chunk.request_id] = one
        try:
            self._drafting.follow(list(followed.values()))
        except Exception:
            log.exception("draft stages failed for %d requests; each is tried alone", len(followed))
            for request_id, one in followed.items():
                with _alone(request_id, failed):
                    self._drafting.follow([one])

    def _propose(self, chunks: Sequence[Chunk]) -> dict[int, tuple[int, ...]]:
        """Guesses for what comes next, by request id; none where the drafter fails, which costs time alone."""
        if self._drafting is None:
            return {}
        anchors, ids = [], []
        for chunk in chunks:
            row = self._rows[chunk.row]
            left = row.request.params.max_tokens - len(row.generated) - 1
            if (count := min(chunk.wanted_drafts, left)) > 0 and not row.is_over:
                # The newest token stands behind those that were computed and kept.
                position = len(row.request.token_ids) + len(row.generated) - 1
                anchors.append(Anchor(row=row, place=chunk.row, position=position, count=count))
                ids.append(chunk.request_id)
        for anchor, drafts in zip(anchors, self._guess(self._drafting, anchors), strict=True):
            anchor.row.drafts = drafts
        return {
            request_id: anchor.row.drafts.tokens
            for request_id, anchor in zip(ids, anchors, strict=True)
            if anchor.row.drafts.tokens
        }

    def _guess(self, drafting: AnyDrafting, anchors: Sequence[Anchor]) -> list[Drafts]:
        """Guesses of each anchor. If all together fail, each is tried alone: what one lacks must not tell on others."""
        try:
            return drafting.propose(anchors)
        except Exception:
            if len(anchors) > 1:
                log.exception("drafting for %d requests failed; each is tried alone now", len(anchors))
                return [drafts for one in anchors for drafts in self._guess(drafting, [one])]
            log.exception("drafting failed; the request goes on without")
            return [Drafts()]


@contextmanager
def _alone(request_id: int, failed: dict[int, str]) -> Generator[None]:
    """Whatever goes wrong inside belongs to one request."""
    try:
        yield
    except InputError as error:
        failed[request_id] = str(error)
    except Exception as error:
        log.exception("request %d failed", request_id)
        failed[request_id] = f"{type(error).__name__}: {error}"


def emission_order(rows: Tensor, images: Sequence[PreparedImage]) -> Tensor:
    """Encoder rows of images, raster order inside each -> the order in which their IMAGE tokens take them: [F, D]."""
    counts = [len(image.block.encoder_rows) for image in images]
    parts = [
        part[torch.from_numpy(image.block.encoder_rows.astype(np.int64)).to(rows.device)]
        for part, image in zip(rows.split(counts), images, strict=True)
    ]
    return torch.cat(parts)
