"""What a checkpoint must hold so that a run can continue from it; without, it is damaged, whatever its hashes say.

A hash only shows that a manifest is as somebody wrote it, so nothing in it is used before its kind is checked.
"""

from lockstep.checkpoint.checkpoint_contents import check_parts
from lockstep.checkpoint.checkpoint_store import Checkpoint
from lockstep.checkpoint.ledger import check_ledger_line
from lockstep.checkpoint.manifest import MANIFEST, CheckpointError
from lockstep.train.resume.progress import Progress


def check_resumable(found: Checkpoint) -> None:
    """Raise a CheckpointError, of one line, unless the checkpoint holds what a run saves, each of its kind."""
    manifest = found.manifest
    try:
        position = manifest.facts.get("position")
        if not isinstance(position, dict):
            raise ValueError("has no position")
        if Progress.from_json(position).step != manifest.step:
            raise ValueError("has the position of another step")
        if not isinstance(manifest.facts.get("fingerprint"), dict):
            raise ValueError("has no fingerprint")
        check_ledger_line(manifest)
        check_parts(found.values)
    except ValueError as error:
        raise CheckpointError(f"{found.path}: {MANIFEST} {error}") from None
