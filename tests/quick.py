"""Quick compilation: what runs for milliseconds is not worth XLA's optimisations, which take seconds."""

import contextlib

import jax
import pytest


@contextlib.contextmanager
def quick():
  """Compiles without most optimisations inside."""
  before = jax.config.read("jax_disable_most_optimizations")
  jax.config.update("jax_disable_most_optimizations", True)
  try:
    yield
  finally:
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture(autouse=True, scope="module")
def quick_compilation():
  """For all tests of a module that imports it."""
  with quick():
    yield
