"""The C++ path against numpy and against the specification; building it, and doing without it."""

import functools
import os
import pathlib
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.twell import bench_cpu, cpu, formats, shapes
from pallas_kernels.twell.formats import Packed
from tests.pallas_kernels import twell_problems as problems

ROOT = pathlib.Path(__file__).resolve().parents[2]
needs_compiler = pytest.mark.skipif(cpu.compiler() is None, reason="no C++ compiler here")
FORMS = pytest.mark.parametrize("gated", [True, False])


@functools.partial(jax.jit, static_argnums=0)
def ffn(gated, h, x, w_up, w_down):
  return cpu.ffn(h, x, w_up if gated else None, w_down)


@functools.partial(jax.jit, static_argnums=(0, 1))
def packed_ffn(gated, compression, x, w_gate, w_up, w_down):
  with problems.exact():
    packed = cpu.gate_pack(x, w_gate, compression)
    y = cpu.gated_ffn(x, packed, w_up, w_down) if gated else cpu.plain_ffn(packed, w_down)
  return packed, y


@needs_compiler
@FORMS
def test_bad_rows(gated):
  h = problems.adversarial_rows(subnormals=False)
  x, w_gate, w_up, w_down = problems.layer_of(h)
  expected = problems.ffn(h, x, w_up if gated else None, w_down)
  assert problems.relative_error(ffn(gated, h, x, w_up, w_down), expected) < 1e-6
  for compression in formats.COMPRESSIONS:
    packed, y = packed_ffn(gated, compression, x, w_gate, w_up, w_down)
    np.testing.assert_array_equal(packed.words, problems.pack(h, compression))
    expected = problems.ffn(problems.stored(h, compression), x, w_up if gated else None, w_down)
    assert problems.relative_error(y, expected) < 1e-6


@needs_compiler
@FORMS
@pytest.mark.parametrize("shape", [*shapes.ODD, shapes.Shape(300, 300, 700, 200)])  # the last: several blocks
def test_shapes(gated, shape):
  x, w_gate, w_up, w_down = problems.layer(*shape)
  h = (x @ w_gate).astype(np.float32)
  expected = problems.ffn(h, x, w_up if gated else None, w_down)
  assert problems.relative_error(ffn(gated, h, x, w_up, w_down), expected) < 1e-5


@needs_compiler
@pytest.mark.parametrize("compression", formats.COMPRESSIONS)
def test_packing_is_bit_for_bit_that_of_the_specification(compression):
  h = problems.adversarial_rows()
  h[10, :4] = np.nan, np.inf, -np.inf, 3.4e38
  h[11, 5] = np.uint32(0xFF800001).view(np.float32)
  words = np.asarray(jax.jit(cpu.pack, static_argnums=1)(h, compression).words)
  np.testing.assert_array_equal(words, jax.jit(formats.pack, static_argnums=1)(h, compression).words)
  assert words.reshape(16, 3, -1)[7, :, 0].tolist() == [1, 1, 1]  # subnormals count


@needs_compiler
@FORMS
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_gate_that_is_not_finite_spoils_its_row_only(gated, value):
  x, w_gate, w_up, w_down = problems.layer(3, 8, 300, 20)
  h = (x @ w_gate).astype(np.float32)
  h[1, 200] = value
  y = np.asarray(ffn(gated, h, x, w_up, w_down))
  np.testing.assert_allclose(y, problems.ffn(h, x, w_up if gated else None, w_down), rtol=1e-4, atol=1e-5)
  assert not np.isfinite(y[1]).any() and np.isfinite(y[[0, 2]]).all()


@needs_compiler
def test_weights_of_neurons_that_are_off_are_not_read():
  h = problems.adversarial_rows(subnormals=False)[8:9]
  x, _, w_up, w_down = problems.layer_of(h)
  expected = problems.ffn(h, x, w_up, w_down)
  w_up[:-1], w_down[:-1] = np.nan, np.inf
  np.testing.assert_allclose(ffn(True, h, x, w_up, w_down), expected, rtol=1e-5)


@needs_compiler
def test_equal_inputs_give_equal_bits_whoever_computes_them():
  x, w_gate, w_up, w_down = problems.layer(200, 300, 700, 260)
  h = (x @ w_gate).astype(np.float32)
  first = ffn(True, h, x, w_up, w_down)
  for _ in range(3):
    problems.same_bits(ffn(True, h, x, w_up, w_down), first)
  problems.same_bits(ffn(True, h[:1], x[:1], w_up, w_down), first[:1])  # a row does not depend on its neighbours


@needs_compiler
def test_words_that_packing_never_makes_are_not_followed():
  words = np.zeros((1, 64), np.uint32)
  words[0, :4] = 2**32 - 1, 299 | 0x3F80 << 16, 65535 | 0x3F80 << 16, 7 | 0x4000 << 16
  w_down = np.random.default_rng(0).normal(size=(300, 5)).astype(np.float32)
  y = jax.jit(cpu.plain_ffn)(Packed(words, 300, 8), w_down)
  assert np.isfinite(y).all()
  np.testing.assert_allclose(y[0], 2 * w_down[7], rtol=1e-6)


@needs_compiler
def test_vmap_is_a_loop():
  x, w_gate, w_up, w_down = problems.layer(6, 8, 300, 20)
  h = (x @ w_gate).astype(np.float32)
  many = jax.jit(jax.vmap(cpu.ffn, (0, 0, None, None)))(h.reshape(2, 3, 300), x.reshape(2, 3, 8), w_up, w_down)
  problems.same_bits(many.reshape(6, 20), ffn(True, h, x, w_up, w_down))


@needs_compiler
def test_what_does_not_fit_is_refused_before_it_reaches_the_library():
  x, w_gate, w_up, w_down = problems.layer(3, 8, 300, 20)
  h = (x @ w_gate).astype(np.float32)
  packed = cpu.pack(jnp.asarray(h))
  with pytest.raises(ValueError, match="w_up"):
    cpu.ffn(h, x, w_up.T, w_down)
  with pytest.raises(ValueError, match="rows"):
    cpu.ffn(h[:2], x, w_up, w_down)
  with pytest.raises(ValueError, match="w_down"):
    cpu.plain_ffn(packed, w_down[1:])
  with pytest.raises(ValueError, match="packed words"):
    cpu.gated_ffn(x[:2], packed, w_up, w_down)
  with pytest.raises(NotImplementedError, match="bfloat16"):
    cpu.ffn(jnp.asarray(h, jnp.bfloat16), x, w_up, w_down)


def test_without_a_compiler_the_reason_is_one_line(monkeypatch):
  monkeypatch.setenv("CXX", "no-such-compiler")
  assert cpu.compiler() is None
  with pytest.raises(RuntimeError, match="no C.. compiler") as caught:
    cpu.build()
  assert "\n" not in str(caught.value)


def test_a_compiler_that_fails_leaves_nothing_behind(monkeypatch, tmp_path):
  broken = tmp_path / "c++"
  broken.write_text("#!/bin/sh\necho 'cpu.cc:1: error: no such luck' >&2\nexit 1\n")
  broken.chmod(0o755)
  monkeypatch.setenv("CXX", str(broken))
  monkeypatch.setenv("SAKANAJAX_CACHE", str(tmp_path / "cache"))
  with pytest.raises(RuntimeError, match="no such luck"):
    cpu.build()
  assert not list((tmp_path / "cache" / "native").iterdir())


@needs_compiler
def test_the_library_is_named_by_what_it_was_made_from(monkeypatch):
  cxx = cpu.compiler()
  first = cpu.library(cxx)
  assert cpu.library(cxx) == first == cpu.build()
  monkeypatch.setattr(cpu, "FLAGS", (*cpu.FLAGS, "-DOTHER"))
  assert cpu.library(cxx) != first


@needs_compiler
def test_a_damaged_library_is_built_again(monkeypatch, tmp_path):
  monkeypatch.setenv("SAKANAJAX_CACHE", str(tmp_path))
  whole = cpu.build().read_bytes()
  cpu.build().write_bytes(whole[:1000])
  assert cpu.build().read_bytes()[:4] == whole[:4] and len(cpu.build().read_bytes()) > 1000
  assert sorted(path.suffix for path in cpu.cache_folder().iterdir()) == [".sha256", ".so"]


@needs_compiler
def test_a_compiler_may_be_named_with_options(monkeypatch):
  monkeypatch.setenv("CXX", "g++ -m64")
  assert cpu.compiler() == ("g++ -m64" if shutil.which("g++") else None)


def test_the_command_says_what_it_did():
  environment = {**os.environ, "CXX": "no-such-compiler"}
  command = [sys.executable, "-m", "pallas_kernels.twell.cpu"]
  done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
  assert done.returncode == 1 and "no C++ compiler" in done.stderr and len(done.stderr.splitlines()) == 1


@needs_compiler
def test_the_benchmark_compares_equal_results():
  row = bench_cpu.compare(8, 0.05, True, 2, None, shapes.Shape(8, 32, 512, 32))
  assert row["error"] < 1e-5 and not row["switched"] and row["speedup"] > 0 and 0.03 < row["density"] < 0.07
  x, w_gate, _, _ = bench_cpu.problem(200, 64, 512, 1, 0.02)
  assert 0.017 < (x @ w_gate > 0).mean() < 0.023
