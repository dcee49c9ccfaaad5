"""JAX for the tests: four CPU devices, and compiled programs kept between runs."""

import os
import pathlib

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault(
    "JAX_COMPILATION_CACHE_DIR", str(pathlib.Path("~/.cache/sakanajax/xla").expanduser())
)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.3")

import jax  # pylint: disable=wrong-import-position

if os.environ["JAX_PLATFORMS"] == "cpu":
  jax.config.update("jax_num_cpu_devices", 4)
