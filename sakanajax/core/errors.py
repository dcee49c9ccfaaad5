"""The exceptions that speak to the user."""


def first_line(error: BaseException) -> str:
  """The first line of what an exception says, or its kind when it says nothing."""
  return next(iter(str(error).strip().splitlines()), type(error).__name__)


class UserError(Exception):
  """Bad input or a bad surrounding: one line that names the thing and the remedy.

  Binaries print it and exit with code 2. Everything else that is raised is a defect of ours.
  """


class Diverged(UserError):
  """The numbers of a run are no longer finite. A learning-rate trial that raises it loses; a full run stops."""
