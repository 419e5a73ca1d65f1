"""Meshes, layouts, and where arrays end up."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from sharding.layouts import LAYOUTS
from sharding.mesh import AXES, make_mesh
from sharding.place import Distribution, Placement, random_params


def mesh(tensor=1, data=1, expert=1, devices=None):
    return make_mesh(SimpleNamespace(data=data, expert=expert, tensor=tensor), devices)


def test_mesh_has_three_axes_over_the_first_devices():
    made = mesh(tensor=4)
    assert made.axis_names == AXES
    assert dict(made.shape) == {"data": 1, "expert": 1, "tensor": 4}
    assert list(made.devices.flat) == jax.devices()[:4]


def test_too_few_devices_are_counted():
    with pytest.raises(ValueError, match=r"tensor 16\) needs 16 devices; there are 8"):
        mesh(tensor=16)
    with pytest.raises(ValueError, match="needs 2 devices; there are 1"):
        mesh(tensor=2, devices=jax.devices()[:1])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_name_axes_of_the_mesh_once(layout):
    assert set(LAYOUTS[layout].values()) <= set(AXES)
    placement = Placement(mesh(tensor=2), layout)
    weight = placement.sharding(("kv_heads", "group", "head", "embed"))
    assert weight.spec == PartitionSpec("tensor")
    assert placement.ways("embed") == 1


def test_unknown_layout_is_refused():
    with pytest.raises(ValueError, match="layout is 'rows'; allowed: tensor, tensor-whole-vocab"):
        Placement(mesh(), "rows")


def test_constrain_splits_an_activation_inside_jit():
    placement = Placement(mesh(tensor=8))
    hold = jax.jit(lambda x: placement.constrain(x, ("tokens", "mlp")))
    assert hold(jnp.ones((3, 16))).addressable_shards[0].data.shape == (3, 2)


def test_random_params_are_made_where_they_live():
    placement = Placement(mesh(tensor=8))
    sharding = placement.sharding(("mlp", "embed"))
    abstract = {"w": jax.ShapeDtypeStruct((64, 512), jnp.bfloat16, sharding=sharding)}
    (made,) = random_params(abstract, {"w": Distribution(0.0, 0.5)}, seed=1).values()
    assert made.sharding == sharding
    assert made.dtype == jnp.bfloat16
    values = np.asarray(made, np.float32)
    assert abs(values.mean()) < 0.02
    assert abs(values.std() - 0.5) < 0.02
    # no pattern along rows or columns
    assert abs(np.corrcoef(values[0], values[1])[0, 1]) < 0.2
    assert abs(np.corrcoef(values[:, 0], values[:, 1])[0, 1]) < 0.5
