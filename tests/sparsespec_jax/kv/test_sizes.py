"""How many slots and host chunks there is room for, on devices that need not exist."""

from types import SimpleNamespace

import jax.numpy as jnp
import pytest

from sparsespec_jax.config import EngineConfig
from sparsespec_jax.engine.buckets import Buckets
from sparsespec_jax.kv.sizes import kv_sizes
from sparsespec_jax.models.config import ModelConfig

GIB = 2**30
LLAMA_8B = ModelConfig(
    architecture="LlamaForCausalLM", vocab_size=128256, hidden_size=4096, intermediate_size=14336,
    num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128, max_position_embeddings=131072,
)  # fmt: skip
TOKEN = 2 * 32 * 8 * 128 * 2  # bytes
ALONE = SimpleNamespace(smallest=lambda name, value: value)


def gpus(count: int, *, limit: int = 130 * GIB, used: int = 16 * GIB) -> SimpleNamespace:
    """The placement of a model over so many GPUs, whose memory is used to a part."""
    stats = {"bytes_limit": limit, "bytes_in_use": used}
    device = SimpleNamespace(platform="gpu", memory_stats=lambda: stats)
    return SimpleNamespace(shards=count, mesh=SimpleNamespace(local_devices=[device] * count))


def sizes(placement=None, config=None, reserved=0, width=8192):
    config = config or EngineConfig(max_batch=256)
    placement = placement or gpus(1)
    return kv_sizes(LLAMA_8B, config, width, jnp.bfloat16, placement, ALONE, reserved)


def test_the_pool_takes_a_share_of_what_weights_and_steps_leave():
    assert sizes().slots == int(0.85 * 114 * GIB) // TOKEN
    assert sizes(reserved=20 * GIB).slots == int(0.85 * 94 * GIB) // TOKEN
    half = EngineConfig(max_batch=256, kv_cache_memory=0.5)
    assert sizes(config=half, reserved=14 * GIB).slots == 50 * GIB // TOKEN


def test_a_number_of_bytes_is_what_the_pool_takes_whatever_steps_need():
    config = EngineConfig(max_batch=256, kv_cache_memory=10 * GIB)
    assert sizes(config=config, reserved=20 * GIB).slots == 10 * GIB // TOKEN


def test_devices_share_a_token():
    assert sizes(gpus(2)).slots == int(0.85 * 114 * GIB) // (TOKEN // 2)


def test_no_more_than_the_batch_can_use():
    assert sizes(config=EngineConfig(max_batch=2)).slots == 2 * 8192 + 1


def test_too_little_memory_is_an_error_that_says_what_steps_need():
    with pytest.raises(ValueError, match=r"kv_cache_memory=None gives 0 bytes.*steps need 12"):
        sizes(reserved=120 * GIB)


def test_the_smallest_process_decides():
    several = SimpleNamespace(smallest=lambda name, value: min(value, 1000))
    config = EngineConfig(max_batch=256, max_host_kv_bytes=10**13)
    found = kv_sizes(LLAMA_8B, config, 8192, jnp.bfloat16, gpus(1), several)
    assert (found.slots, found.host_chunks) == (1000, 1000)


@pytest.mark.parametrize("phases", ["balanced", "random", "lockstep"])
def test_steps_over_long_contexts_leave_room_for_their_scores(phases):
    """At 128K they are tens of gigabytes: more than the pool leaves of itself."""
    buckets = Buckets(
        max_batch=64, max_context=131072, k=8, chunk=256, prefill_rows=8, phases=phases
    )
    rows = 8 + (8 if phases == "balanced" else 64)
    assert buckets.scores_bytes(32, 32) == rows * 32 * 32 * 9 * buckets.width
    plain = Buckets(max_batch=64, max_context=131072, k=0, chunk=256, prefill_rows=8)
    assert plain.scores_bytes(32, 32) == 0
