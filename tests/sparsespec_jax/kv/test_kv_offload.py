"""Moves carried out on arrays: what leaves comes back bit by bit, and nothing else changes."""

from __future__ import annotations

import functools
import gc
import threading
import weakref
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.lowering import lower_for_cuda
from sparsespec_jax.kv import offload as offload_module
from sparsespec_jax.kv.offload import KvOffload, chunk_tokens
from sparsespec_jax.kv.space import Evict, Forget, Map, Restore
from sparsespec_jax.parallel.sharding import Placement

SLOTS, HEADS, HEAD_DIM, LAYERS = 40, 2, 8, 2
ROWS, WIDTH, CHUNK = 3, 24, 8
SHAPE = (SLOTS, HEADS, HEAD_DIM)


def make_pools(dtype, seed=0, shape=SHAPE):
    rng = np.random.default_rng(seed)
    return tuple(
        tuple(jnp.asarray(rng.normal(size=shape), dtype) for _ in range(2)) for _ in range(LAYERS)
    )


def make_table():
    return jnp.zeros((ROWS, WIDTH), jnp.int32)


def on_host(tree):
    return [np.array(leaf) for leaf in jax.tree.leaves(tree)]


@pytest.fixture(scope="module")
def shared():
    """For tests that leave it empty: its functions are compiled once."""
    offload = KvOffload(Placement.single_device(), CHUNK)
    yield offload
    offload.close()


@pytest.fixture
def offload():
    made = KvOffload(Placement.single_device(), CHUNK)
    yield made
    made.close()


def slots(*numbers) -> np.ndarray:
    return np.array(numbers, np.int32)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("count", [1, 5, CHUNK])
def test_a_chunk_comes_back_exactly_to_other_slots_and_nothing_else_changes(shared, dtype, count):
    """But for the trash slot, where the padding of a chunk that is not full goes."""
    order = np.random.default_rng(count).permutation(np.arange(1, SLOTS)).astype(np.int32)
    old, new = order[:count], order[count : 2 * count]
    before = on_host(make_pools(dtype))
    pools, table = shared.move([Evict(old, 0)], make_pools(dtype), make_table())
    for found, expected in zip(on_host(pools), before, strict=True):
        assert found.tobytes() == expected.tobytes()
    pools, table = shared.move([Restore(0, new)], pools, table)
    for found, expected in zip(on_host(pools), before, strict=True):
        assert found.dtype == dtype
        expected[new] = expected[old]
        assert found[1:].tobytes() == expected[1:].tobytes()
        if count == CHUNK:
            assert found[0].tobytes() == expected[0].tobytes()
    assert not np.asarray(table).any()


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_order_of_moves_does_what_it_says(shared, data):
    """In order: slots that a chunk leaves may be written by the next move, or by a step."""
    pools, table = make_pools(jnp.float32), make_table()
    expected, expected_table = on_host(pools), np.zeros((ROWS, WIDTH), np.int32)
    chunks, number, moves = {}, 0, []
    for _ in range(data.draw(st.integers(1, 12))):
        some = data.draw(st.integers(1, CHUNK))
        free = st.permutations(range(1, SLOTS)).map(lambda order: slots(*order))
        kinds = ["evict", "map", *(["restore", "forget"] if chunks else [])]
        kind = data.draw(st.sampled_from(kinds))
        chosen = data.draw(free)[:some]
        known = data.draw(st.sampled_from(sorted(chunks))) if chunks else None
        if kind == "evict":
            moves.append(Evict(chosen, number))
            chunks[number] = [pool[chosen] for pool in expected]
            number += 1
        elif kind == "restore":
            values = chunks.pop(known)
            chosen = data.draw(free)[: len(values[0])]
            moves.append(Restore(known, chosen))
            for pool, value in zip(expected, values, strict=True):
                pool[chosen] = value
        elif kind == "forget":
            moves.append(Forget(known))
            del chunks[known]
        else:
            row = data.draw(st.integers(0, ROWS - 1))
            position = data.draw(st.integers(0, WIDTH - some))
            moves.append(Map(row, position, chosen))
            expected_table[row, position : position + some] = chosen
        if data.draw(st.booleans()):
            pools, table = shared.move(moves, pools, table)
            moves = []
    moves += [Forget(chunk) for chunk in chunks]
    pools, table = shared.move(moves, pools, table)
    for found, wanted in zip(on_host(pools), expected, strict=True):
        np.testing.assert_array_equal(found[1:], wanted[1:])
    np.testing.assert_array_equal(table, expected_table)


def test_a_mapping_at_the_edge_of_the_page_table_stays_within_it_and_its_row(shared):
    moves = [Map(1, WIDTH - 2, slots(5, 6)), Map(2, 0, slots(7))]
    _, table = shared.move(moves, make_pools(jnp.float32), make_table())
    expected = np.zeros((ROWS, WIDTH), np.int32)
    expected[1, -2:] = 5, 6
    expected[2, 0] = 7
    np.testing.assert_array_equal(table, expected)


def test_a_chunk_is_what_the_pool_held_before_the_step_that_comes_next(shared):
    """The copy goes on while the step, which the pools are donated to, writes to the slots."""
    step = jax.jit(lambda pools: jax.tree.map(lambda pool: pool * 0 + 7, pools), donate_argnums=0)
    before = on_host(make_pools(jnp.float32))
    pools, table = make_pools(jnp.float32), make_table()
    for chunk in range(20):
        old = slots(*range(1 + chunk, 1 + chunk + CHUNK))
        pools = make_pools(jnp.float32)
        pools, table = shared.move([Evict(old, chunk)], pools, table)
        pools = step(pools)
    for chunk in range(20):
        pools, table = shared.move([Restore(chunk, slots(*range(1, 9)))], pools, table)
        for found, expected in zip(on_host(pools), before, strict=True):
            np.testing.assert_array_equal(found[1:9], expected[1 + chunk : 1 + chunk + CHUNK])


def test_pools_and_page_table_are_changed_in_place(offload):
    """A copy of even one layer's keys would take more than all temporary memory."""
    shape = (1 << 15, HEADS, HEAD_DIM)
    pools = jax.eval_shape(lambda: make_pools(jnp.float32, shape=(1, 1, 1)))
    pools = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(shape, leaf.dtype), pools)
    layer_keys = 4 * np.prod(shape)
    packed = jax.ShapeDtypeStruct((LAYERS, 2, CHUNK, HEADS, HEAD_DIM), jnp.float32)
    chunks = jax.ShapeDtypeStruct((2 * CHUNK,), jnp.int32)
    pack = offload._pack.lower(pools, chunks).compile().memory_analysis()
    assert pack.temp_size_in_bytes + pack.output_size_in_bytes < layer_keys / 2
    unpack = offload._unpack.lower(pools, (packed, packed), chunks).compile().memory_analysis()
    assert unpack.temp_size_in_bytes < layer_keys / 2
    assert unpack.alias_size_in_bytes >= 2 * LAYERS * layer_keys
    table = jax.ShapeDtypeStruct((512, 4096), jnp.int32)
    places = jax.ShapeDtypeStruct((2, 2), jnp.int32)
    mapping = offload._map.lower(table, chunks, places).compile().memory_analysis()
    assert mapping.temp_size_in_bytes < 512 * 4096
    assert mapping.alias_size_in_bytes >= 4 * 512 * 4096


def test_moving_consumes_the_pools_and_makes_no_copy_of_them(shared):
    pools, table = make_pools(jnp.float32), make_table()
    pools, table = shared.move([Evict(slots(1, 2), 0)], pools, table)
    old = jax.tree.leaves(pools)
    pools, new_table = shared.move([Restore(0, slots(3, 4)), Map(0, 0, slots(3))], pools, table)
    assert all(leaf.is_deleted() for leaf in old)
    assert table.is_deleted()
    assert not new_table.is_deleted()


@pytest.mark.parametrize(("chunks", "calls"), [(1, 1), (4, 1), (7, 3), (8, 2)])
def test_chunks_that_move_together_share_calls(offload, monkeypatch, chunks, calls):
    """The plan names each chunk's mapping after it."""
    pools, table = make_pools(jnp.float32), make_table()
    before, counts = on_host(pools), Counter()
    for name in ("_pack", "_unpack", "_map"):
        call = getattr(offload, name)
        counted = functools.partial(lambda n, f, *args: counts.update([n]) or f(*args), name, call)
        monkeypatch.setattr(offload, name, counted)
    away = [Evict(slots(1 + number), number) for number in range(chunks)]
    back = [
        move
        for number in range(chunks)
        for move in (Restore(number, slots(20 + number)), Map(1, number, slots(20 + number)))
    ]
    pools, table = offload.move([*away, *back], pools, table)
    assert counts == {"_pack": calls, "_unpack": calls, "_map": calls}
    for after, old in zip(on_host(pools), before, strict=True):
        np.testing.assert_array_equal(after[20 : 20 + chunks], old[1 : 1 + chunks])
    np.testing.assert_array_equal(table[1, :chunks], range(20, 20 + chunks))


@pytest.mark.parametrize("gone", [Restore(1, slots(20)), Forget(1)], ids=["back", "forgotten"])
def test_what_left_together_does_not_stay_in_host_memory_together(offload, gone):
    pools, table = make_pools(jnp.float32), make_table()
    away = [Evict(slots(1 + number), number) for number in range(4)]
    pools, table = offload.move(away, pools, table)
    on_host = {number: weakref.ref(copy.result()) for number, copy in offload._chunks.items()}
    pools, table = offload.move([gone], pools, table)
    jax.block_until_ready(pools)
    gc.collect()
    assert [number for number, chunk in on_host.items() if chunk() is not None] == [0, 2, 3]


def test_a_chunk_that_came_back_can_leave_again_at_once(offload):
    pools, table = make_pools(jnp.float32), make_table()
    before = on_host(pools)
    moves = [Evict(slots(1, 2), 0), Restore(0, slots(3, 4)), Evict(slots(3), 1)]
    pools, table = offload.move([*moves, Restore(1, slots(5))], pools, table)
    for after, old in zip(on_host(pools), before, strict=True):
        np.testing.assert_array_equal(after[5], old[1])


def test_a_warm_up_leaves_all_but_the_trash_slot_and_compiles_what_moves(offload):
    pools, table = make_pools(jnp.float32), make_table()
    before, mapped = on_host(pools), np.asarray(table)
    for _ in range(2):
        pools, table = offload.warmup(pools, table, chunks=3)
    np.testing.assert_array_equal(table, mapped)
    for after, old in zip(on_host(pools), before, strict=True):
        np.testing.assert_array_equal(after[1:], old[1:])
    compiled = [f._cache_size() for f in (offload._pack, offload._unpack, offload._map)]
    moves = [Evict(slots(1, 2), 0), Restore(0, slots(3, 4)), Map(0, 0, slots(3))]
    offload.move(moves, pools, table)
    assert [f._cache_size() for f in (offload._pack, offload._unpack, offload._map)] == compiled


def lowered(offload: KvOffload) -> dict[str, str]:
    """Each function's program for an NVIDIA GPU, at the sizes of a real model."""
    pool = jax.ShapeDtypeStruct((200_000, 8, 128), jnp.bfloat16)
    slots = jax.ShapeDtypeStruct((2 * 256,), jnp.int32)
    packed = jax.ShapeDtypeStruct((LAYERS, 2, 256, 8, 128), jnp.bfloat16)
    table = jax.ShapeDtypeStruct((129, 8320), jnp.int32)
    places = jax.ShapeDtypeStruct((2, 2), jnp.int32)
    pools = ((pool, pool),) * LAYERS
    calls = {
        "pack": (offload._pack, (pools, slots)),
        "unpack": (offload._unpack, (pools, (packed, packed), slots)),
        "map": (offload._map, (table, slots, places)),
    }
    return {
        name: lower_for_cuda(function, *arguments).as_text()
        for name, (function, arguments) in calls.items()
    }


@pytest.mark.parametrize("kernels", [False, True])
def test_the_moves_lower_for_a_gpu_and_index_device_memory_only(offload, monkeypatch, kernels):
    """Host memory is seen by whole-array copies alone: indexing it in a program is undefined."""
    if kernels:
        monkeypatch.setattr(jax, "default_backend", lambda: "gpu")  # "auto" means the kernels
    texts = lowered(offload)
    for name in ("pack", "unpack"):
        assert texts[name].count("__gpu$xla.gpu.triton") == kernels
    assert kernels or "gather" in texts["pack"]
    assert kernels or "scatter" in texts["unpack"]
    assert "scatter" in texts["map"]
    for text in texts.values():
        for memory in ("pinned_host", "unpinned_host", "annotate_device_placement", "S(5)"):
            assert memory not in text


def test_shards_of_the_pools_are_moved_by_the_kernels_too():
    """Each device moves its own KV heads, and keeps its share of a chunk."""
    placement = Placement.over(2)
    offload = KvOffload(placement, CHUNK, "pallas")
    sharding = placement.of(None, "kv_heads", None)
    before = on_host(make_pools(jnp.bfloat16))
    pools = jax.device_put(make_pools(jnp.bfloat16), sharding)
    table = jax.device_put(make_table(), placement.replicated)
    pools, table = offload.move([Evict(slots(5, 7, 9), 0), Evict(slots(2), 1)], pools, table)
    chunk = offload._chunks[0].result()
    assert chunk.sharding.shard_shape(chunk.shape) == (LAYERS, 2, CHUNK, HEADS // 2, HEAD_DIM)
    pools, table = offload.move([Restore(0, slots(1, 3, 4)), Restore(1, slots(8))], pools, table)
    offload.close()
    assert {leaf.sharding for leaf in jax.tree.leaves(pools)} == {sharding}
    for found, expected in zip(on_host(pools), before, strict=True):
        expected[[1, 3, 4, 8]] = expected[[5, 7, 9, 2]]
        assert found[1:].tobytes() == expected[1:].tobytes()


def test_what_is_away_lies_in_pinned_host_memory(offload):
    pools, table = offload.move([Evict(slots(1, 2), 0)], make_pools(jnp.float32), make_table())
    chunk = offload._chunks[0].result()
    assert chunk.sharding.memory_kind == "pinned_host"
    assert chunk.shape == (LAYERS, 2, CHUNK, HEADS, HEAD_DIM)
    assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(pools)} == {"device"}
    pools, _ = offload.move([Restore(0, slots(3, 4))], pools, table)
    assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(pools)} == {"device"}


def fail_once(monkeypatch) -> None:
    device_put = jax.device_put

    def failing(*arguments, **options):
        monkeypatch.setattr(jax, "device_put", device_put)
        raise RuntimeError("host memory is on fire")

    monkeypatch.setattr(jax, "device_put", failing)


def test_a_copy_that_fails_is_an_error_when_the_chunk_is_to_come_back(offload, monkeypatch):
    fail_once(monkeypatch)
    pools, table = offload.move([Evict(slots(1, 2), 0)], make_pools(jnp.float32), make_table())
    with pytest.raises(RuntimeError, match="host memory is on fire"):
        offload.move([Restore(0, slots(3, 4))], pools, table)


def test_a_copy_that_fails_is_nothing_to_a_chunk_that_nobody_needs(offload, monkeypatch):
    """And those behind it are copied: it takes nobody's place."""
    fail_once(monkeypatch)
    pools, table = make_pools(jnp.float32), make_table()
    before = on_host(pools)
    moves = [Evict(slots(number), number) for number in range(1, 21)]
    pools, table = offload.move([*moves, Forget(1), Restore(20, slots(30))], pools, table)
    np.testing.assert_array_equal(on_host(pools)[0][30], before[0][20])


@pytest.fixture
def gate(monkeypatch):
    """Holds the copies to host memory until it is set."""
    gate, device_put = threading.Event(), jax.device_put

    def waiting(*arguments, **options):
        if threading.current_thread().name.startswith("kv-offload"):
            assert gate.wait(60)
        return device_put(*arguments, **options)

    monkeypatch.setattr(jax, "device_put", waiting)
    yield gate
    gate.set()


def test_closing_waits_for_copies_under_way_and_forgets_all_chunks(offload, gate):
    offload.move([Evict(slots(1, 2), 0)], make_pools(jnp.float32), make_table())
    copy = offload._chunks[0]
    closing = threading.Thread(target=offload.close)
    closing.start()
    closing.join(0.2)
    assert closing.is_alive()
    assert not copy.done()
    gate.set()
    closing.join(60)
    assert not closing.is_alive()
    assert copy.done()
    assert not offload._chunks


def test_closing_what_was_never_used_is_nothing(offload):
    offload.close()
    offload.close()


def test_leaving_does_not_wait_for_the_copy_while_few_are_under_way(offload, gate):
    """A step behind it starts at once; what waits on the device to be copied is bounded."""
    pools, table = make_pools(jnp.float32), make_table()
    most = offload_module._IN_FLIGHT
    moves = [Evict(slots(1 + number), number) for number in range(most)]
    pools, table = offload.move(moves, pools, table)
    assert not any(copy.done() for copy in offload._chunks.values())

    another = threading.Thread(target=offload.move, args=([Evict(slots(9), most)], pools, table))
    another.start()
    another.join(0.2)
    assert another.is_alive()
    gate.set()
    another.join(60)
    assert not another.is_alive()
    assert len(offload._chunks) == most + 1


@pytest.mark.parametrize(
    ("token_bytes", "tokens"),
    [(144 * 1024, 128), (16 * 1024, 256), (1, 256), (2**25, 16), (2**30, 16)],
)
def test_chunks_are_a_power_of_two_of_tokens_and_about_32_mib(token_bytes, tokens):
    assert chunk_tokens(token_bytes) == tokens
