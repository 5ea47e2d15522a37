"""The static shapes that steps are compiled for: few, and derived from the configuration."""

from __future__ import annotations

from typing import NamedTuple

from sparsespec_jax.config import Phases
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

    A prompt's chunk has more queries than most batches have: steps have one chunk, or as many as
    there can be where more than half of them are needed. Batches beside one chunk come in half as
    many sizes, and beside many there is room for all rows that may decode.

    Where phases are not `balanced`, drafts and verifications have room for all rows, or none.

    delayed: the host verifies, so that a cycle is a step longer; the room suffices as it is.
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
        least_context: int = 1024,
        phases: Phases = "balanced",
        ks: tuple[int, ...] = (),
        delayed: bool = False,
    ):
        self.phases = phases
        self.delayed = delayed
        self.max_batch = max_batch
        self.k = k
        self.ks = tuple(sorted({k, *ks}))
        self.chunk = chunk
        self.prefill_rows = prefill_rows
        self._batches = _up_to(max_batch, batch_buckets or _batch_sizes(max_batch))
        self._batches_beside_a_chunk = self._batches[::-2][::-1]
        # Drafts of a full-length row sit up to k positions past the longest context.
        self.width = -(-(max_context + k + 1) // 128) * 128
        contexts = context_buckets or _quarters(self.width, least_context, 128)
        self._contexts = _up_to(self.width, contexts)

    def most_verifies(self, rows: int, k: int | None = None) -> int:
        """Verify rows that a step of `rows` decoding rows has room for, in cycles of `k` drafts."""
        if rows == 0:
            return 0
        return -(-_at_least(self._batches, rows) // ((self.k if k is None else k) + 1))

    def most_drafts(self, batch: int, verifies: int, k: int) -> int:
        """Draft rows that a step of `batch` decoding rows has room for beside `verifies`.

        All that are due while the phases are spread evenly, and as many more as round the step up
        to a multiple of ROW_MULTIPLE queries.
        """
        if k == 0 or batch <= k:
            return batch if k else 0
        due = batch - batch // (k + 1)
        return due + -(due + verifies * (k + 1)) % ROW_MULTIPLE

    def smallest(
        self,
        drafts: int,
        verifies: int,
        chunks: int,
        context: int,
        features: Features,
        k: int | None = None,
    ) -> Bucket:
        """The bucket for so many rows, positions below `context`, and their sampling parameters.

        `chunks`: of prompts, that there are to be done; a bucket may have room for fewer.
        `k`: drafts of a cycle, where that changes.
        """
        k = self.k if k is None else _at_least(self.ks, k)
        chunks = self._chunk_rows(chunks)
        drafts, verifies = self._rows(drafts, verifies, chunks, k)
        if not (verifies or chunks):
            features = features._replace(logprobs=-1)  # drafts report nothing
        return Bucket(
            drafts=drafts,
            verifies=verifies,
            chunks=chunks,
            context=_at_least(self._contexts, context),
            **features._asdict(),
            k=None if k == self.k else k,
        )

    def batch(self, rows: int) -> int:
        """Decoding rows that the bucket of `rows` is made for."""
        return _at_least(self._batches, rows)

    def queries_of(self, bucket: Bucket) -> int:
        """Queries of a verify row."""
        return (self.k if bucket.k is None else bucket.k) + 1

    def _chunk_rows(self, needed: int) -> int:
        most = self.prefill_rows
        return most if needed > most // 2 else min(needed, 1)

    def _rows(self, drafts: int, verifies: int, chunks: int, k: int) -> tuple[int, int]:
        """Draft and verify rows of the bucket for so many, beside its prefill rows."""
        if not (drafts or verifies):
            return 0, 0
        if chunks > 1:
            return self._all_rows(k)
        batches = self._batches_beside_a_chunk if chunks else self._batches
        batch = _at_least(batches, drafts + verifies)
        if self.phases != "balanced":
            due = self.most_verifies(batch, k)
            while self.phases == "random" and due < verifies:
                due *= 2
            due = min(batch, due if self.phases == "random" else batch)
            return batch * bool(drafts), due * bool(verifies)
        verifies = 0 if batch <= k and not verifies else self.most_verifies(batch, k)
        return 0 if batch == 1 and not drafts else self.most_drafts(batch, verifies, k), verifies

    def _all_rows(self, k: int) -> tuple[int, int]:
        """Draft and verify rows of the bucket for any that may decode."""
        if self.phases != "balanced":
            return self.max_batch if k else 0, self.max_batch
        verifies = self.most_verifies(self.max_batch, k)
        return self.most_drafts(self.max_batch, verifies, k), verifies

    def main(self) -> list[Bucket]:
        """What ordinary traffic uses, for warming up: without filters, penalties and logprobs."""
        buckets = set()
        for k in self.ks:
            decoding = {
                (*self._rows(batch - n, n, chunks, k), chunks)
                for chunks in (0, 1, self.prefill_rows)
                for batch in (0, *self._batches)
                for n in range(batch + 1)
            }
            buckets |= {
                Bucket(drafts, verifies, chunks, context, k=None if k == self.k else k)
                for drafts, verifies, chunks in decoding
                for context in self._contexts
                if chunks or drafts or verifies
            }
        return sorted(buckets, key=lambda bucket: (*bucket[:4], self.queries_of(bucket)))

    def scores_bytes(self, layers: int, heads: int) -> int:
        """Of the scores that the GPU's kernels write in one step, at most: its largest temporary.

        `layers`, `heads`: of the model, query heads of one device.
        """
        if self.k == 0:
            return 0
        rows = max(bucket.verifies + bucket.chunks for bucket in self.main())
        return rows * layers * heads * (self.k + 1) * self.width  # a byte each: see CodedScores

    def queries(self, bucket: Bucket) -> int:
        """Tokens of its steps, padding included."""
        verifies = bucket.verifies * self.queries_of(bucket)
        return bucket.drafts + verifies + bucket.chunks * self.chunk

    def layout(self, bucket: Bucket) -> PlanLayout:
        commits = self.max_batch if self.delayed else 0
        return PlanLayout(bucket, self.queries_of(bucket), self.chunk, self.max_batch, commits)

    def result_layout(self, bucket: Bucket) -> ResultLayout:
        queries = self.queries_of(bucket)
        return ResultLayout(queries, bucket.logprobs, queries - 1 if self.delayed else 0)


def _batch_sizes(largest: int) -> tuple[int, ...]:
    """`largest`, three quarters and half of it and so on; down by quarters from 16.

    Where steps take longest at most a third of one is padding, and there are not many to compile.
    """
    sizes = [largest]
    while sizes[0] > 1:
        if sizes[0] > 16:
            sizes = [-(-sizes[0] // 2), -(-3 * sizes[0] // 4), *sizes]
        else:
            sizes = [-(-sizes[0] // 4), *sizes]
    return tuple(sorted(set(sizes)))


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
