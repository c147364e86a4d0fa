"""A report is kept whatever letters it has."""

import json
from pathlib import Path

from lockstep.supervision.incidents import keep_incident


def test_letters_of_no_encoding_are_spelt_out(tmp_path: Path) -> None:
    path = keep_incident(tmp_path, "crash", "no such file: caf\udce9 →", {"cause": "\udce9"})
    assert path.read_text() == "no such file: caf\\udce9 →\n"
    assert json.loads(path.with_suffix(".json").read_text())["cause"] == "\udce9"
