"""The Python of README.md runs as it stands, and its links lead somewhere."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SNIPPETS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize("number", range(len(SNIPPETS)))
def test_a_snippet_runs(number):
  exec(compile(SNIPPETS[number], f"README.md, snippet {number}", "exec"), {})


def test_there_are_snippets_of_every_method():
  assert any("sheaf_admm" in snippet for snippet in SNIPPETS) and any("twell" in snippet for snippet in SNIPPETS)


def test_links_and_named_files_exist():
  links = re.findall(r"\]\(([^)#]+)\)", README)
  named = re.findall(r"(?:configs|notebooks)/\w+\.\w+", README)
  assert links and named
  assert [path for path in {*links, *named} if "://" not in path and not (ROOT / path).exists()] == []
