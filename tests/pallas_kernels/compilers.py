"""The compilers for absent devices: without them tests are skipped, or fail if SAKANAJAX_NEED_COMPILERS is set."""

import os

import pytest


def need(get):
  """Returns get(), or skips the test with the remedy when a compiler is missing."""
  try:
    return get()
  except NotImplementedError as error:
    if os.environ.get("SAKANAJAX_NEED_COMPILERS"):
      raise
    pytest.skip(str(error))
