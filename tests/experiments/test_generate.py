"""The generate binary on a small model: text, speed, and every bad command line as one line."""

import pathlib
import subprocess
import sys

import numpy as np
import pytest

from experiments import generate
from sakanajax.core.errors import UserError
from sakanajax.nn import pretrained, tokenizers
from tests.nn import tiny_llama
from tests.quick import quick_compilation  # noqa: F401 (a fixture for all tests here)

pytest.importorskip("safetensors", reason="the extra [lm] is not installed")
pytest.importorskip("tokenizers", reason="the extra [lm] is not installed")
ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  return tiny_llama.write_folder(tmp_path_factory.mktemp("model") / "tiny", tiny_llama.tensors())


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
  monkeypatch.setenv("SAKANAJAX_CACHE", str(tmp_path))


def _main(capsys, *arguments):
  code = generate.main(["generate", *arguments])
  out, err = capsys.readouterr()
  return code, out, err


def test_text_is_what_the_model_would_write(folder, capsys):
  flags = (f"--model={folder}", "--prompt=hello caf\u00e9", "--temperature=0", "--max_tokens=8")
  code, out, err = _main(capsys, *flags)
  tokenizer = tokenizers.from_json(tiny_llama.tokenizer_json(), 2, tiny_llama.TEMPLATE)
  ids = tokenizers.chat(tokenizer, [("user", "hello caf\u00e9")])
  begin = len(ids)
  while len(ids) < begin + 8 and (len(ids) == begin or ids[-1] not in tokenizer.stops):
    ids.append(int(np.argmax(tiny_llama.forward(tiny_llama.tensors(), ids)[-1])))
  assert (code, out, err) == (0, tokenizer.decode(ids[begin:]) + "\n", "")


def test_seeds_and_raw_prompts(folder, capsys):
  flags = (f"--model={folder}", "--prompt=hello", "--raw", "--max_tokens=12", "--temperature=1.5", "--top_k=0")
  one, again, other = (_main(capsys, *flags, f"--seed={seed}")[1] for seed in (3, 3, 4))
  assert one == again != other and len(one) > 2
  assert generate.parse(["generate", "--prompt=a", "--top_k=0"]).top_k is None


def test_stats(folder, capsys):
  code, out, _ = _main(capsys, f"--model={folder}", "--stats")
  lines = out.splitlines()
  assert code == 0 and len(lines) == 2
  assert lines[0].startswith("prefill of 128 tokens: ") and lines[0].endswith(" tokens/s")  # half of the context of 256
  assert lines[1].startswith("decode: ") and "float32" in lines[1] and float(lines[1].split()[1]) > 0


@pytest.mark.parametrize("arguments, words", [
    ((), "no prompt; give --prompt"),
    (("--prompt=",), "no prompt"),
    (("--prompt",), "--prompt"),
    (("--prompt=x", "--temperatur=1"), "temperatur"),
    (("--prompt=x", "--temperature=-1"), "temperature"),
    (("--prompt=x", "--temperature=nan"), "temperature"),
    (("--prompt=x", "--top_p=0"), "top_p"),
    (("--prompt=x", "--top_p=1.5"), "top_p"),
    (("--prompt=x", "--top_k=-2"), "top_k"),
    (("--prompt=x", "--max_tokens=0"), "max_tokens"),
    (("--prompt=x", "--seed=-1"), "seed"),
    (("--prompt=x", "--dtype=int4"), "dtype"),
    (("What", "is"), "'What' is not a flag"),
    (("--prompt=x", "--model=/absent"), "there is no model '/absent'"),
])
def test_bad_command_lines(capsys, arguments, words):
  code, out, err = _main(capsys, *arguments)
  assert (code, out, err.count("\n")) == (2, "", 1) and err.startswith("error: ") and words in err


def test_models_that_cannot_answer(folder, tmp_path, capsys):
  code, _, err = _main(capsys, f"--model={folder}", "--prompt=x", "--max_tokens=300")
  assert code == 2 and "exceeds the model's context of 256" in err
  model = pretrained.load(folder)
  bare = pretrained.save(tmp_path / "bare", model.params, model.config)
  code, _, err = _main(capsys, f"--model={bare}", "--prompt=x")
  assert code == 2 and "has no tokenizer.json" in err
  own = pretrained.save(tmp_path / "own", model.params, model.config, tokenizers.byte_tokenizer())
  code, _, err = _main(capsys, f"--model={own}", "--prompt=x")
  assert code == 2 and "use --raw" in err


def test_defects_and_interruptions_have_codes_of_their_own(capsys, monkeypatch):
  for error, code in ((KeyboardInterrupt(), 130), (RuntimeError("odd"), 70), (UserError("bad"), 2)):
    monkeypatch.setattr(generate, "run", lambda options, error=error: (_ for _ in ()).throw(error))
    assert _main(capsys, "--prompt=x")[0] == code


def test_help_and_errors_come_without_loading_jax():
  command = [sys.executable, "-X", "importtime", "-m", "experiments.generate"]
  done = subprocess.run([*command, "--help"], cwd=ROOT, capture_output=True, text=True, check=False)
  assert done.returncode == 0 and "--[no]raw" in done.stdout and "streamed" in done.stdout
  assert " jax\n" not in done.stderr and "absl" in done.stderr


@pytest.mark.slow
def test_the_capital_of_japan(capsys, monkeypatch):
  monkeypatch.delenv("SAKANAJAX_CACHE")
  code, out, err = _main(capsys, "--prompt=What is the capital of Japan?", "--temperature=0", "--max_tokens=30")
  if code == 2 and "asset smollm2" in err:
    pytest.skip(f"out of reach: {err}")
  assert code == 0 and "Tokyo" in out
