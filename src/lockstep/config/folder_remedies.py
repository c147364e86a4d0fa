"""What messages about a run folder tell the user to do: a command has options for it, a script has arguments."""

from typing import NamedTuple


class FolderRemedies(NamedTuple):
    """What to write, where the run was started in this way."""

    another_folder: str
    force: str
    accept_drift: str
    shared_folder: str


IN_COMMAND = FolderRemedies("choose another folder with --run", "--force", "--accept-drift", "--shared-folder")
IN_SCRIPT = FolderRemedies(
    "give Run or Trainer another folder", 'resume="force"', 'resume="accept-drift"', "shared_folder=True to Run"
)
