"""The shape of the house: which way imports run, what nobody imports, what every file keeps to."""

from __future__ import annotations

import ast
from collections.abc import Iterator
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
PACKAGES = ("sakanajax", "pallas_kernels", "experiments")
SOURCES = sorted(p for top in (*PACKAGES, "configs", "tests") for p in (ROOT / top).rglob("*.py"))
TOP_LEVEL = (
    "README.md", "WORKSPACE.md", "LICENSE", "CHANGELOG.md", "Makefile", "setup.cfg", "pyproject.toml", ".gitignore",
    ".ci/run", "constraints-3.11.txt", "constraints-3.12.txt",
    "sakanajax", "pallas_kernels", "experiments", "tests", "configs",
)
COMPAT = "pallas_kernels/_compat.py"
PICKLERS = ("pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "shelve", "marshal")
BANNED = (*PICKLERS, "tensorflow", "flax.nnx", "jax._src", "jax.core")
# Loaded inside the function that needs them, so that importing the shared layers stays light.
HEAVY = (
    "orbax", "tensorflow_datasets", "matplotlib", "tqdm", "networkx", "PIL", "tensorboardX", "jax_triton", "gguf", "safetensors",
    "tokenizers",
)
LEAF_MAY_IMPORT = ("jax", "jaxlib", "numpy", "triton", "jax_triton", "pallas_kernels")


def relative(path: pathlib.Path) -> str:
  return path.relative_to(ROOT).as_posix()


def module_name(path: pathlib.Path) -> str:
  """`sakanajax/core/files.py` -> `sakanajax.core.files`; a package's `__init__.py` -> the package."""
  return relative(path).removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def within(name: str, prefixes: tuple[str, ...]) -> bool:
  """True when `name` is one of `prefixes` or lies below one of them."""
  return any(name == p or name.startswith(p + ".") for p in prefixes)


def dotted(node: ast.AST) -> str:
  """`jax._src.core` for the attribute chain of that form, else the empty string."""
  if isinstance(node, ast.Name):
    return node.id
  if isinstance(node, ast.Attribute) and (base := dotted(node.value)):
    return f"{base}.{node.attr}"
  return ""


def imports_of(tree: ast.AST, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
  """Yields (line, absolute dotted name) for every import below `tree`; `from a import b` yields `a.b`."""
  for node in ast.walk(tree):
    if isinstance(node, ast.Import):
      yield from ((node.lineno, alias.name) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
      parts = module.split(".") if is_package else module.split(".")[:-1]
      base = ".".join(parts[: len(parts) - node.level + 1]) if node.level else ""
      base = ".".join(part for part in (base, node.module) if part)
      yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
    elif isinstance(node, ast.Call) and dotted(node.func).split(".")[-1] in ("import_module", "__import__"):
      if node.args and isinstance(node.args[0], ast.Constant) and isinstance(node.args[0].value, str):
        yield node.lineno, node.args[0].value


def uses_of(tree: ast.AST, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
  """Imports, and the attribute chains that reach into a module without importing it (`jax.core.Tracer`)."""
  yield from imports_of(tree, module, is_package)
  yield from ((node.lineno, name) for node in ast.walk(tree) if isinstance(node, ast.Attribute) and (name := dotted(node)))


def at_import_time(tree: ast.Module) -> ast.Module:
  """The module without the bodies of its functions and without `if TYPE_CHECKING:` blocks."""

  class Outside(ast.NodeTransformer):

    def visit_FunctionDef(self, node):
      return None

    visit_AsyncFunctionDef = visit_Lambda = visit_FunctionDef

    def visit_If(self, node):
      return None if dotted(node.test).endswith("TYPE_CHECKING") else self.generic_visit(node)

  return Outside().visit(ast.parse(ast.unparse(tree)))


def unit(name: str) -> tuple[int, str] | None:
  """(layer, unit) of one of our modules: 0 kernels, 1 core, 2 nn, 3 one paper each, 4 experiments; None for others'."""
  parts = name.split(".")
  if parts[0] == "pallas_kernels":
    return 0, "pallas_kernels"
  if parts[0] == "experiments":
    return 4, "experiments"
  if parts[0] != "sakanajax" or len(parts) == 1 or parts[1].startswith("__"):
    return None
  return {"core": 1, "nn": 2}.get(parts[1], 3), f"sakanajax.{parts[1]}"


def wrong_way(module: str, imported: str) -> bool:
  """True when `module` imports upwards or sideways."""
  here, there = unit(module), unit(imported)
  if there is None:
    return False
  if here is None:
    return module == "sakanajax"
  return here[1] != there[1] and there[0] >= here[0]


def read(path: pathlib.Path) -> ast.Module:
  return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def findings(check) -> list[str]:
  """Runs `check(path, tree, module, is_package)` over all sources and returns `file:line what` lines."""
  return [
      f"{relative(path)}:{line} {what}"
      for path in SOURCES
      for line, what in check(path, read(path), module_name(path), path.name == "__init__.py")
  ]


def files() -> list[pathlib.Path]:
  """Tracked and to-be-tracked files; in a copy without git, everything outside hidden folders."""
  if shutil.which("git") and (ROOT / ".git").exists():
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode == 0:
      return [path for name in done.stdout.split("\0") if name and (path := ROOT / name).is_file()]
  paths = (p for p in ROOT.rglob("*") if p.is_file())
  return [p for p in paths if not any(part.startswith(".") or part == "__pycache__" for part in p.relative_to(ROOT).parts)]


def test_imports_run_one_way():
  def check(path, tree, module, is_package):
    return (x for x in imports_of(tree, module, is_package) if wrong_way(module, x[1]))

  assert findings(check) == []


@pytest.mark.parametrize("module,imported,wrong", [
    ("pallas_kernels.twell.api", "sakanajax.core.files", True),
    ("sakanajax.core.files", "sakanajax.nn.layer", True),
    ("sakanajax.core.files", "pallas_kernels.twell.api", False),
    ("sakanajax.nn.lora", "sakanajax.core.trees", False),
    ("sakanajax.nn.lora", "sakanajax.repo.rope", True),
    ("sakanajax.sheaf_admm.admm", "sakanajax.twell.ffn", True),
    ("sakanajax.sheaf_admm.admm", "sakanajax.sheaf_admm.maps", False),
    ("sakanajax.sheaf_admm.admm", "experiments.launch", True),
    ("experiments.sheaf_admm", "sakanajax.sheaf_admm.admm", False),
    ("sakanajax", "sakanajax.core", True),
    ("sakanajax.core.result", "sakanajax.__version__", False),
])
def test_the_direction_is_understood(module, imported, wrong):
  assert wrong_way(module, imported) == wrong


def test_every_form_of_import_is_seen():
  text = "from . import a\nfrom ..nn import b\nimport c.d as e\ndef f():\n  import_module('g')\n  from h import i"
  seen = {name for _, name in imports_of(ast.parse(text), "sakanajax.core.x", is_package=False)}
  assert seen == {"sakanajax.core.a", "sakanajax.nn.b", "c.d", "g", "h.i"}
  light = at_import_time(ast.parse(text + "\nif TYPE_CHECKING:\n  import j"))
  assert {name for _, name in imports_of(light, "sakanajax.core.x", is_package=False)} == seen - {"g", "h.i"}


def test_nobody_imports_what_is_banned():
  def check(path, tree, module, is_package):
    banned = [name for name in BANNED if not (relative(path) == COMPAT and name.startswith("jax."))]
    return (x for x in uses_of(tree, module, is_package) if within(x[1], tuple(banned)))

  assert findings(check) == []


def test_numpy_never_unpickles():
  def check(path, tree, module, is_package):
    for node in ast.walk(tree):
      if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
        if not (isinstance(node.value, ast.Constant) and node.value.value is False):
          yield node.value.lineno, "allow_pickle"

  assert findings(check) == []


def test_shared_layers_import_heavy_things_late():
  def check(path, tree, module, is_package):
    if within(module, ("sakanajax.core", "sakanajax.nn", "pallas_kernels")):
      yield from (x for x in imports_of(at_import_time(tree), module, is_package) if within(x[1], HEAVY))

  assert findings(check) == []


def test_kernels_are_a_leaf():
  allowed = (*sys.stdlib_module_names, *LEAF_MAY_IMPORT)

  def check(path, tree, module, is_package):
    if within(module, ("pallas_kernels",)):
      yield from (x for x in imports_of(tree, module, is_package) if x[1].split(".")[0] not in allowed)

  assert findings(check) == []


def test_import_is_light():
  program = (
      "import sys, time; start = time.perf_counter(); import sakanajax; "
      "print(time.perf_counter() - start, 'jax' in sys.modules, 'numpy' in sys.modules, sakanajax.__version__)"
  )
  lines = [
      subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
      for _ in range(3)
  ]
  assert min(float(line[0]) for line in lines) < 0.1
  assert lines[0][1:3] == ["False", "False"]


def test_every_package_folder_has_an_init():
  folders = {path.parent for path in SOURCES if path.relative_to(ROOT).parts[0] in PACKAGES}
  assert [relative(folder) for folder in sorted(folders) if not (folder / "__init__.py").is_file()] == []


def test_top_level_is_complete():
  assert [name for name in TOP_LEVEL if not (ROOT / name).exists()] == []


def test_no_file_is_too_long():
  lengths = {relative(path): len(path.read_text(encoding="utf-8").splitlines()) for path in SOURCES}
  assert {name: length for name, length in lengths.items() if length > 450} == {}


def test_files_hold_no_machine_paths_and_no_unfinished_marks():
  paths = r"(?<![\w.$})~-])/(?:work|root|home|Users|mnt)/\w"
  marks = r"\b(?:TO" + r"DO|FIX" + r"ME|XX" + r"X|HA" + r"CK)\b"
  pattern, found = re.compile(f"{paths}|{marks}"), []
  for path in files():
    try:
      text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
      continue
    found += [f"{relative(path)}:{n} {m[0]}" for n, line in enumerate(text.splitlines(), 1) if (m := pattern.search(line))]
  assert found == []
