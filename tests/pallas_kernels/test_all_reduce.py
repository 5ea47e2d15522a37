"""`all_reduce`: XLA's sum on CPUs; a kernel for two GPUs that compiles, and runs where they are."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import (
    AbstractDevice,
    AbstractMesh,
    AxisType,
    Mesh,
    PartitionSpec,
    use_abstract_mesh,
)

from pallas_kernels.all_reduce import Peers, all_reduce, connect
from pallas_kernels.all_reduce.peers import EMPTY, Mailboxes, addresses
from tests.gpu_compiler import compile_for_h200

gpus = pytest.mark.skipif(
    jax.default_backend() != "gpu" or jax.device_count() < 2, reason="needs two NVIDIA GPUs"
)
new_jax = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="jax without this kernel")
SPLIT = PartitionSpec("tp")
ON_CPUS = """
import json
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from pallas_kernels import add_norm
from pallas_kernels.all_reduce import all_reduce, all_reduce_add_norm, connect

mesh = Mesh(np.array(jax.devices()), ("tp",))
split, everywhere = PartitionSpec("tp"), PartitionSpec()
rng = np.random.default_rng(0)
x, delta = rng.normal(size=(5, 32)), rng.normal(size=(4, 3, 5, 32))  # of 4 devices, in 3 parts
x, delta, scale = (jnp.asarray(a, jnp.float32) for a in (x, delta, rng.normal(size=32)))

def over_devices(f, in_specs):
    return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=split, check_vma=False))

result = {"devices": mesh.size, "peers": connect(mesh, "tp", rows=8, hidden=1024) is not None}
for implementation in ("auto", "pallas", "xla"):
    options = {"axis_name": "tp", "implementation": implementation}
    total = over_devices(lambda part: all_reduce(part[0, 0], **options)[None], split)(delta)
    sums, normed = over_devices(
        lambda x, parts, scale: tuple(
            out[None] for out in all_reduce_add_norm(x, parts[0], scale, **options)
        ),
        (everywhere, split, everywhere),
    )(x, delta, scale)
    wanted = add_norm(x, delta.sum((0, 1)), scale, implementation="xla")
    result[implementation] = [
        float(jnp.abs(total - delta[:, 0].sum(0)).max()),
        float(jnp.abs(sums - wanted[0]).max()),
        float(jnp.abs(normed - wanted[1]).max()),
    ]
print(json.dumps(result))
"""


def test_on_cpus_it_is_the_sum_of_xla():
    env = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
        "PYTHONPATH": ".",
    }
    command = [sys.executable, "-c", ON_CPUS]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result.pop("devices") == 4
    assert result.pop("peers") is False
    assert all(max(errors) < 1e-5 for errors in result.values()), result


def test_mailboxes_do_not_overlap():
    boxes = Mailboxes(devices=2, rows=3, hidden=1024)
    assert boxes.messages == 128 >= 3 * 4
    assert boxes.size == 128 + 2 * 2 * 3 * 2048
    memory = boxes.memory().view(np.uint32)
    assert memory.shape == (2, boxes.size // 4)
    assert (memory[:, : 128 // 4] == 0).all()
    assert (memory[:, 128 // 4 :] == EMPTY).all()


def test_every_device_finds_its_own_memory_first():
    pointers = [0x7F00_8000_0000, 0x7E00_0000_1000, 0x0000_FFFF_FF00]

    def shard(device, pointer):
        data = SimpleNamespace(unsafe_buffer_pointer=lambda: pointer)
        return SimpleNamespace(device=device, data=data)

    memory = SimpleNamespace(addressable_shards=[shard(i, pointers[i]) for i in (2, 0, 1)])
    table = addresses(memory, SimpleNamespace(devices=np.arange(3)))
    assert table.dtype == np.int32
    np.testing.assert_array_equal(table[:, 0], [0, 1, 2])
    found = np.ascontiguousarray(table[:, 1:]).view(np.uint64).tolist()
    a, b, c = pointers
    assert found == [[a, b, c], [b, c, a], [c, a, b]]


def lowered(f, x, devices=2, rows=64, hidden=2048):
    """The StableHLO of `f(peers, x)` for two GPUs, of which each has one `x`."""
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    types = (AxisType.Auto,)
    mesh = AbstractMesh((devices,), ("tp",), axis_types=types, abstract_device=device)
    boxes = Mailboxes(devices, rows, hidden)
    table = jax.ShapeDtypeStruct((devices, 1 + 2 * devices), jnp.int32)
    peers = Peers(table, jax.ShapeDtypeStruct((devices, boxes.size // 4), jnp.int32), boxes)
    x = jax.ShapeDtypeStruct((devices * x.shape[0], *x.shape[1:]), x.dtype)
    with use_abstract_mesh(mesh):
        sharded = jax.shard_map(f, mesh=mesh, in_specs=SPLIT, out_specs=SPLIT, check_vma=False)
        return jax.jit(sharded).trace(peers, x).lower(lowering_platforms=("cuda",)).as_text()


def of(shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


def sum_with(implementation):
    return lambda peers, x: all_reduce(x, "tp", peers=peers, implementation=implementation)


@new_jax
@pytest.mark.parametrize("x", [of((64, 2048)), of((1, 2048)), of((8, 4, 2048), jnp.float16)])
def test_the_kernel_asks_nothing_of_xla(x):
    text = lowered(sum_with("pallas"), x)
    assert "mosaic_gpu_v2" in text
    assert "uses_xla_collective_metadata = false" in text
    assert "stablehlo.all_reduce" not in text


@new_jax
@pytest.mark.parametrize(
    ("x", "implementation"),
    [
        (of((65, 2048)), "pallas"),  # more rows
        (of((64, 1024)), "pallas"),  # other width
        (of((64, 2048), jnp.float32), "pallas"),
        (of((64, 2048)), "xla"),
        (of((64, 2048)), "auto"),  # on a CPU
    ],
)
def test_the_rest_is_left_to_xla(x, implementation):
    text = lowered(sum_with(implementation), x)
    assert "stablehlo.all_reduce" in text
    assert "mosaic_gpu_v2" not in text


@new_jax
def test_peers_must_be_this_devices_shard():
    def sum_up(peers, x):
        two = jax.tree.map(lambda leaf: jnp.concatenate([leaf, leaf]), peers)
        return all_reduce(x, "tp", peers=two, implementation="pallas")

    with pytest.raises(ValueError, match="peers is of 2 devices, a shard of 2, but must be this"):
        lowered(sum_up, of((64, 2048)))


@pytest.mark.network
@pytest.mark.slow
@new_jax
@pytest.mark.parametrize("devices", [2, 4])
def test_kernels_compile_for_h200s(devices):
    temp = compile_for_h200(
        f"""
import functools
import jax.numpy as jnp
from pallas_kernels.all_reduce import Peers, mosaic_gpu
from pallas_kernels.all_reduce.peers import Mailboxes

mesh, split, result = Mesh(topology.devices, ("tp",)), PartitionSpec("tp"), {{}}

def temp_of_devices(f, *args):
    def split_up(x):
        shape = (len(mesh.devices) * x.shape[0], *x.shape[1:])
        return jax.ShapeDtypeStruct(shape, x.dtype, sharding=NamedSharding(mesh, split))
    sharded = jax.shard_map(f, mesh=mesh, in_specs=split, out_specs=split, check_vma=False)
    lowered = jax.jit(sharded).trace(*jax.tree.map(split_up, args)).lower(
        lowering_platforms=("cuda",)
    )
    return lowered.compile().memory_analysis().temp_size_in_bytes

def of(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)

for hidden in (4096, 5120):
    boxes = Mailboxes({devices}, 512, hidden)
    peers = Peers(
        of(1, 1 + 2 * {devices}, dtype=jnp.int32), of(1, boxes.size // 4, dtype=jnp.int32), boxes
    )
    with_norm = functools.partial(mosaic_gpu.all_reduce_add_norm, eps=1e-6)
    x = of(248, hidden)
    result[f"{{hidden}}"] = temp_of_devices(mosaic_gpu.all_reduce, x, peers)
    result[f"{{hidden}}, norm"] = temp_of_devices(
        with_norm, x, of(4, 248, hidden), of(hidden), peers
    )
""",
        mosaic=True,
        devices=devices,
    )
    assert len(temp) == 4
    assert max(temp.values()) < 1 << 20


@pytest.mark.gpu
@gpus
def test_compiled_kernels():
    """Calls of other numbers of rows in between; the same bits on all devices."""
    from pallas_kernels.all_reduce import mosaic_gpu

    mesh = Mesh(np.array(jax.devices()), ("tp",))
    peers = connect(mesh, "tp", rows=256, hidden=2048)
    if peers is None:
        pytest.skip("a kernel for Hopper GPUs of one process")

    def calls(peers, x):
        x = x + 0 * jax.lax.psum(x[:1, :1], "tp")
        for n_rows in (256, 3, 3, 100, 256, 1):
            total = mosaic_gpu.all_reduce(x[:n_rows], peers)
            x = jnp.concatenate([total / mesh.size + x[:n_rows], x[n_rows:]])
        zero, one = jnp.zeros_like(x), jnp.ones_like(x[0])
        call = mosaic_gpu.all_reduce_add_norm
        return x, *call(zero, x[None], one, peers, eps=1e-6)

    run = jax.jit(jax.shard_map(calls, mesh=mesh, in_specs=SPLIT, out_specs=SPLIT, check_vma=False))
    values = np.random.default_rng(0).normal(size=(mesh.size, 256, 2048)).astype(np.float32)
    wanted = values.astype(np.float64)
    for n_rows in (256, 3, 3, 100, 256, 1):
        wanted[:, :n_rows] += wanted[:, :n_rows].mean(0)
    x = jnp.asarray(values.reshape(-1, 2048), jnp.bfloat16)
    for _ in range(20):
        mine, total, normed = (np.asarray(out, np.float32) for out in run(peers, x))
        mine, total, normed = (out.reshape(values.shape) for out in (mine, total, normed))
        assert np.linalg.norm(mine - wanted) < 1e-2 * np.linalg.norm(wanted)
        exact = mine.astype(np.float64).sum(0)
        assert np.linalg.norm(total[0] - exact) < 4e-3 * np.linalg.norm(exact)
        assert (total == total[0]).all()
        assert (normed == normed[0]).all()
