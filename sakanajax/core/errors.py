"""The one exception that speaks to the user."""


class UserError(Exception):
    """Bad input or a bad surrounding: one line that names the thing and the remedy.

    Binaries print it and exit with code 2. Everything else that is raised is a defect of ours.
    """
