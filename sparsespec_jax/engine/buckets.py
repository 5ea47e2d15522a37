"""The static shapes that steps are compiled for: few, and derived from the configuration."""

from __future__ import annotations

from typing import NamedTuple

from sparsespec_jax.engine.plan import Bucket, PlanLayout, ResultLayout
from sparsespec_jax.sampling.params import SamplingParams

LOGPROB_WIDTHS = (0, 5, 20)
ROW_MULTIPLE = 8  # matmuls of any other number of rows are padded to it: six more kernels a layer


class Features(NamedTuple):
    """What a step must be able to do for its rows' sampling parameters."""

    filters: bool = False
    penalties: bool = False
    logprobs: int = -1

    def including(self, params: SamplingParams) -> Features:
        logprobs = self.logprobs
        if params.logprobs is not None:
            logprobs = max(logprobs, _at_least(LOGPROB_WIDTHS, params.logprobs))
        return Features(
            self.filters or params.uses_filters,
            self.penalties or params.uses_penalties,
            logprobs,
        )


class Buckets:
    """Picks the bucket of a step.

    Decoding rows come in a few batch sizes. Since rows are spread over the phases of the cycle, a
    batch of b rows has room for about b / (k + 1) verifications and k b / (k + 1) drafts. One of up
    to k rows often verifies nothing, and has a bucket for that, with room for b drafts; a lone row
    drafts or verifies.
    """

    def __init__(
        self,
        *,
        max_batch: int,
        max_context: int,
        k: int,
        chunk: int,
        prefill_rows: int,
        batch_buckets: tuple[int, ...] | None = None,
        context_buckets: tuple[int, ...] | None = None,
    ):
        self.max_batch = max_batch
        self.k = k
        self.chunk = chunk
        self.prefill_rows = prefill_rows
        self._batches = _up_to(max_batch, batch_buckets or _quarters(max_batch, 1, 1))
        # Drafts of a full-length row sit up to k positions past the longest context.
        self.width = -(-(max_context + k + 1) // 128) * 128
        contexts = context_buckets or _quarters(self.width, 1024, 128)
        self._contexts = _up_to(self.width, contexts)

    def most_verifies(self, rows: int) -> int:
        """Verify rows that a step of `rows` decoding rows has room for."""
        if rows == 0:
            return 0
        batch = _at_least(self._batches, rows)
        return batch if self.k == 0 else -(-batch // (self.k + 1))

    def most_drafts(self, batch: int, verifies: int) -> int:
        """Draft rows that a step of `batch` decoding rows has room for beside `verifies`.

        All that are due while the phases are spread evenly, and as many more as round the step up
        to a multiple of ROW_MULTIPLE queries.
        """
        if self.k == 0 or batch <= self.k:
            return batch if self.k else 0
        due = batch - batch // (self.k + 1)
        return due + -(due + verifies * (self.k + 1)) % ROW_MULTIPLE

    def smallest(
        self, drafts: int, verifies: int, prefill: bool, context: int, features: Features
    ) -> Bucket:
        """The bucket for so many rows, positions below `context`, and their sampling parameters."""
        rows = drafts + verifies
        batch = _at_least(self._batches, rows) if rows else 0
        verifies = 0 if batch <= self.k and not verifies else self.most_verifies(rows)
        chunks = self.prefill_rows if prefill else 0
        if not (verifies or chunks):
            features = features._replace(logprobs=-1)  # drafts report nothing
        return Bucket(
            drafts=0 if batch == 1 and not drafts else self.most_drafts(batch, verifies),
            verifies=verifies,
            chunks=chunks,
            context=_at_least(self._contexts, context),
            **features._asdict(),
        )

    def main(self) -> list[Bucket]:
        """What ordinary traffic uses, for warming up: without filters, penalties and logprobs."""
        decoding = {Bucket(0, 0, 0, 0)}
        for batch in self._batches:
            if batch <= self.k:
                decoding.add(Bucket(batch, 0, 0, 0))
            verifies = self.most_verifies(batch)
            drafts = 0 if batch == 1 else self.most_drafts(batch, verifies)
            decoding.add(Bucket(drafts, verifies, 0, 0))
        return sorted(
            bucket._replace(chunks=chunks, context=context)
            for bucket in decoding
            for chunks in (0, self.prefill_rows)
            for context in self._contexts
            if chunks or bucket.drafts or bucket.verifies
        )

    def layout(self, bucket: Bucket) -> PlanLayout:
        return PlanLayout(bucket, self.k + 1, self.chunk, self.max_batch)

    def result_layout(self, bucket: Bucket) -> ResultLayout:
        return ResultLayout(self.k + 1, bucket.logprobs)


def _quarters(largest: int, least: int, multiple: int) -> tuple[int, ...]:
    """`largest`, a quarter of it and so on while that is `least` or more; rounded up."""
    sizes = [largest]
    while (quarter := -(-sizes[0] // (4 * multiple)) * multiple) >= least and quarter < sizes[0]:
        sizes.insert(0, quarter)
    return tuple(sizes)


def _up_to(largest: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """`sizes` below `largest`, and `largest` itself."""
    return (*(size for size in sizes if size < largest), largest)


def _at_least(sizes: tuple[int, ...], size: int) -> int:
    return next(candidate for candidate in sizes if candidate >= size)
