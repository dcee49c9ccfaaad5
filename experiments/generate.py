"""Text from a language model, streamed to standard output as it is drawn.

  python -m experiments.generate --prompt="What is the capital of Japan?" [--model=smollm2] [--max_tokens=200]
      [--temperature=0.7] [--top_k=50] [--top_p=0.95] [--seed=0] [--raw] [--dtype=float32] [--stats]

--model is the asset smollm2 (SmolLM2-135M-Instruct, 93 MB, fetched at the first call), a Llama-family .gguf file, or a
folder with config.json, *.safetensors and tokenizer.json. The prompt is put as a question in the model's chat format;
--raw continues it as it stands. --temperature=0 always takes the most probable token. --stats reports the speed of
reading 512 tokens and of drawing one after the other, and needs no prompt. The same command draws the same text.

Exit codes: 0 ok; 2 bad input, in one line; 70 a defect of ours, with a traceback; 130 interrupted.
"""

from __future__ import annotations

import itertools
import os
import re
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from experiments.protocol import BAD_INPUT, DEFECT, INTERRUPTED, OK
from sakanajax.core import assets
from sakanajax.core.errors import UserError

DTYPES = ("float32", "bfloat16")
_MULTIPLE = 64  # lengths are rounded up to it, so that few programs are compiled


class Options(NamedTuple):
  """The flags, checked."""

  prompt: str | None
  model: str
  max_tokens: int
  temperature: float
  top_k: int | None
  top_p: float
  seed: int
  raw: bool
  dtype: str
  stats: bool


class Speed(NamedTuple):
  """What `measure` found."""

  prompt: int  # tokens read at once
  prefill: float  # tokens per second while reading them
  decode: float  # tokens per second while drawing one after the other


def main(argv: Sequence[str]) -> int:
  """Does what the command line `argv` (program name first) asks for and returns the exit code."""
  try:
    run(parse(argv))
    return OK
  except UserError as error:
    print(f"error: {error}", file=sys.stderr)
    return BAD_INPUT
  except KeyboardInterrupt:
    print("\ninterrupted", file=sys.stderr)
    return INTERRUPTED
  except BrokenPipeError:  # the reader, such as head, has seen enough
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return OK
  except Exception:  # pylint: disable=broad-except
    traceback.print_exc()
    return DEFECT


def parse(argv: Sequence[str]) -> Options:
  """Returns the options of a command line; raises UserError for whatever is wrong with it."""
  from absl import flags

  values = flags.FlagValues()
  define = {"flag_values": values}
  flags.DEFINE_string("prompt", None, "what to answer, or with --raw to continue", **define)
  flags.DEFINE_string("model", "smollm2", "smollm2, a .gguf file, or a folder of safetensors", **define)
  flags.DEFINE_integer("max_tokens", 200, "most tokens to draw", lower_bound=1, **define)
  flags.DEFINE_float("temperature", 0.7, "0: always the most probable token", lower_bound=0.0, **define)
  flags.DEFINE_integer("top_k", 50, "draw from so many tokens; 0: all", lower_bound=0, **define)
  flags.DEFINE_float("top_p", 0.95, "draw from this share of the probability", 0.0, 1.0, **define)
  flags.DEFINE_integer("seed", 0, "of all draws", lower_bound=0, upper_bound=2**31 - 1, **define)
  flags.DEFINE_boolean("raw", False, "no chat format", **define)
  flags.DEFINE_enum("dtype", "float32", DTYPES, "of weights and activations", **define)
  flags.DEFINE_boolean("stats", False, "report tokens per second", **define)
  if any(re.match(r"--?(help|helpshort|h)$", argument) for argument in argv[1:]):
    print(f"{__doc__}\n{values}")
    sys.exit(OK)
  try:
    rest = values(list(argv))
  except flags.Error as error:
    raise UserError(re.sub(r"\s+", " ", str(error))) from error
  if len(rest) > 1:
    raise UserError(f"{rest[1]!r} is not a flag; put the prompt in quotes: --prompt=\"...\"")
  options = Options(**{name: getattr(values, name) for name in Options._fields})
  if not options.prompt and not options.stats:
    raise UserError("no prompt; give --prompt=\"...\"")
  if not options.top_p > 0 or options.temperature != options.temperature:
    raise UserError(f"--top_p={options.top_p} must be above 0 and --temperature={options.temperature} a number")
  return options._replace(top_k=options.top_k or None)


def run(options: Options) -> None:
  """Loads the model, streams the text and reports the speed."""
  import jax

  if not jax.config.jax_compilation_cache_dir:  # the second call starts sooner
    jax.config.update("jax_compilation_cache_dir", str(assets.cache_dir() / "xla"))
  from sakanajax.nn import pretrained

  model = pretrained.load(options.model, options.dtype)
  if options.prompt:
    for text in generate(model, options):
      print(text, end="", flush=True)
    print(flush=True)
  if options.stats:
    speed = measure(model)
    print(f"prefill of {speed.prompt} tokens: {speed.prefill:.1f} tokens/s\ndecode: {speed.decode:.1f} tokens/s "
          f"({options.dtype}, {jax.devices()[0].device_kind})")


def generate(model: Any, options: Options) -> Iterator[str]:
  """Yields the text that follows the prompt, whole characters only.

  Raises:
    UserError: a model without tokenizer or chat format, a prompt that leaves no room in the context.
  """
  import jax

  from sakanajax.nn import sampling, tokenizers

  tokenizer, context = model.tokenizer, model.config.context
  if tokenizer is None:
    raise UserError(f"{options.model} has no tokenizer.json; put the model's own beside its config.json")
  prompt = options.prompt or ""
  ids = tokenizer.encode(prompt) if options.raw else tokenizers.chat(tokenizer, [("user", prompt)])
  if len(ids) + options.max_tokens > context:
    raise UserError(f"the prompt has {len(ids)} tokens, which with --max_tokens={options.max_tokens} exceeds the "
                    f"model's context of {context}; shorten one of them")
  tokens, mask = sampling.pad_left([ids], multiple=_MULTIPLE)
  drawn = sampling.stream(
      model.layer, model.params, tokens, options.max_tokens, jax.random.key(options.seed), mask=mask,
      stop=tokenizer.stops, max_len=_rounded(tokens.shape[1] + options.max_tokens),
      temperature=options.temperature, top_k=options.top_k, top_p=options.top_p,
  )
  return tokenizers.stream(tokenizer, (int(token[0]) for token in drawn))


def measure(model: Any, prompt: int = 512, steps: int = 64) -> Speed:
  """Times one prefill of `prompt` tokens and `steps` tokens drawn greedily after it, both compiled before.

  Both are shortened for a model whose context is too short. The time to the first token counts as the prefill.
  """
  import jax
  import numpy as np

  from sakanajax.nn import sampling

  prompt = min(prompt, model.config.context // 2)
  steps = min(steps, model.config.context // 2)
  tokens = np.random.default_rng(0).integers(0, model.config.vocab, (1, prompt), np.int32)
  for _ in range(2):  # the first time compiles
    start = time.perf_counter()
    drawn = sampling.stream(
        model.layer, model.params, tokens, steps + 1, jax.random.key(0), max_len=_rounded(prompt + steps + 1),
        temperature=0.0,
    )
    next(drawn)
    first = time.perf_counter()
    count = sum(1 for _ in itertools.islice(drawn, steps))
    end = time.perf_counter()
  return Speed(prompt, prompt / (first - start), count / (end - first))


def _rounded(length: int) -> int:
  return -(-length // _MULTIPLE) * _MULTIPLE


if __name__ == "__main__":
  sys.exit(main(sys.argv))
