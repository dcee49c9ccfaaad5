import jax
import jax.numpy as jnp
import numpy as np

from sakanajax.core import trees


def test_counts_and_bytes():
  tree = {"a": jnp.zeros((3, 4)), "b": [jnp.zeros((), jnp.int32), jnp.zeros((0, 5), jnp.bfloat16)]}
  assert trees.count_params(tree) == 13
  assert trees.tree_bytes(tree) == 52
  abstract = jax.eval_shape(lambda: tree)
  assert trees.count_params(abstract) == 13 and trees.tree_bytes(abstract) == 52
  assert trees.count_params({}) == 0


def test_global_norm_is_the_norm_of_the_concatenation():
  rng = np.random.default_rng(0)
  tree = {"a": rng.normal(size=(3, 4)), "b": rng.normal(size=5)}
  flat = np.concatenate([tree["a"].ravel(), tree["b"]])
  np.testing.assert_allclose(trees.global_norm(tree), np.linalg.norm(flat), rtol=1e-6)


def test_cast_touches_floats_only():
  tree = {"w": jnp.ones(2), "n": jnp.arange(2), "m": jnp.ones(2, bool), "k": jax.random.key(0)}
  cast = trees.cast(tree, jnp.bfloat16)
  assert cast["w"].dtype == jnp.bfloat16
  assert all(cast[name].dtype == tree[name].dtype for name in "nmk")
