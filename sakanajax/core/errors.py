"""The exceptions that speak to the user."""


class UserError(Exception):
    """Bad input or a bad surrounding: one line that names the thing and the remedy.

    Binaries print it and exit with code 2. Everything else that is raised is a defect of ours.
    """


class Diverged(UserError):
    """The numbers of a run are no longer finite. A learning-rate trial that raises it loses; a full run stops."""
