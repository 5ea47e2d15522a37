"""Contract and dispatch of `rank_positions`."""

import jax.numpy as jnp
from jax import Array

from pallas_kernels.dispatch import Implementation, check, resolve
from pallas_kernels.fused_attention.scores import AttentionScores, CodedScores
from pallas_kernels.rank_positions import reference


def rank_positions(
    scores: AttentionScores,
    end: Array,
    here: Array,
    ahead: Array | None,
    committed: Array,
    *,
    group: int,
    lists: int,
    drafts: int,
    context: int,
    ages: int = 2,
    implementation: Implementation = "auto",
    interpret: bool | None = None,
) -> Array:
    """One number per position, from what each query gave it and what it gave those before it.

    Every layer has a ranking for each of its `lists`, which KV heads share in equal parts, those
    next to each other. With P_q[n] the probability of position n for query q, the mean over the
    heads that share the list (0 unless 0 <= n < end):

        ranking[n] = sum_q here[q] P_q[n]
                     + mean_{j < drafts} sum_q ahead[q] P_q[n - (committed - q) - j]

    The second sum expects attention to move on with the text: draft j of the next cycle is
    `committed - q + j` tokens past query q. It reaches back `ages` queries: q counts if
    committed - ages <= q < committed, whatever `ahead` holds for the others. The scores of a query
    without weight may be anything, NaN too. So may those from `end` on, and those of a row that
    has only queries without weight. The factor of a coded score counts as 0 where it is no
    number, or beyond 2^8.

    Args:
        scores: `DenseScores` or `CodedScores` of L layers, R rows, Q queries. (Codes may have
            more layers than factors: the rest is not looked at.)
        end: [R] int32 <= context; positions from it on have no score, and rank 0.
        here: [R, Q] float32 weights >= 0, 0 for queries that do not exist.
        ahead: like `here`, or None.
        committed: [R] int32 in 0..Q.
        group: query heads of a KV head.
        lists: rankings of a layer, a divisor of Hkv.
        drafts: drafts of a cycle.
        context: number of positions to rank.
        ages: queries before `committed` that `ahead` may weigh.

    Returns:
        [L, R, lists, context] float32, or float16 for coded scores.
    """
    pallas, interpret = resolve(implementation, interpret)
    coded = isinstance(scores, CodedScores)
    _check_coded(scores, group, context) if coded else _check_dense(scores, context)
    array = scores.codes if coded else scores.probabilities
    check(
        lists >= 1 and array.shape[2] % lists == 0,
        f"lists={lists}, but must divide Hkv={array.shape[2]}",
    )
    check(drafts >= 1, f"drafts={drafts}, but must be at least 1")
    check(ages >= 1, f"ages={ages}, but must be at least 1")
    n_rows = (scores.factor if coded else scores.probabilities).shape[1]
    n_queries = scores.n_queries(group)
    for name, value in (("end", end), ("committed", committed)):
        check(
            value.shape == (n_rows,) and value.dtype == jnp.int32,
            f"{name} is {value.dtype}{list(value.shape)}, but must be int32[R] = int32[{n_rows}]",
        )
    for name, value in (("here", here), ("ahead", ahead)):
        check(
            value is None or (value.shape == (n_rows, n_queries) and value.dtype == jnp.float32),
            f"{name} is {value if value is None else f'{value.dtype}{list(value.shape)}'}, "
            f"but must be float32[R, Q] = float32[{n_rows}, {n_queries}]",
        )
    statics = {
        "group": group,
        "lists": lists,
        "drafts": drafts,
        "context": context,
        "ages": ages,
    }
    if not (pallas and coded):
        return reference.rank_positions(scores, end, here, ahead, committed, **statics)
    from pallas_kernels.rank_positions import pallas_triton

    return pallas_triton.rank_positions(
        scores, end, here, ahead, committed, **statics, interpret=interpret
    )


def _check_dense(scores: AttentionScores, context: int) -> None:
    p = scores.probabilities
    check(
        p.ndim == 5 and p.shape[4] == context and p.dtype == jnp.float32,
        f"probabilities is {p.dtype}{list(p.shape)}, but must be float32[L, R, Hkv, Q, C] "
        f"with C=context={context}",
    )


def _check_coded(scores: CodedScores, group: int, context: int) -> None:
    codes, factor = scores
    check(
        codes.ndim == 5
        and codes.dtype == jnp.uint8
        and codes.shape[4] >= context
        and codes.shape[4] % 32 == 0,
        f"codes is {codes.dtype}{list(codes.shape)}, but must be uint8[L, R, Hkv, P, C] "
        f"with C a multiple of 32, at least context={context}",
    )
    check(
        factor.ndim == 4
        and factor.dtype == jnp.float32
        and factor.shape[0] <= codes.shape[0]
        and factor.shape[1:] == codes.shape[1:4],
        f"factor is {factor.dtype}{list(factor.shape)}, but must be float32[L, R, Hkv, P], "
        f"for codes of shape {list(codes.shape)}",
    )
    check(
        group >= 1 and codes.shape[3] % group == 0,
        f"group={group}, but must divide P={codes.shape[3]}, the packed queries of the codes",
    )
