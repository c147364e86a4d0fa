"""How much faster a generation is evaluated on more processes: the wing recipe, a panel method in torch.

    python bench/search_scaling.py --processes 1 2 4 8 16

For each number of processes, the real command searches for three generations of the same designs; the time is that of
evaluating the last two, including the exchange of the results. The digests must be equal.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from lockstep.events.jsonl import read_jsonl

SETTINGS = ("max_generations=3", "network=null", "wing.pictures=no")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--designs", type=int, default=2048, help="designs per generation")
    options = parser.parse_args()
    print(f"wing, {options.designs} designs per generation")
    print(f"{'processes':>9} {'s':>8} {'speed-up':>9} {'of ideal':>9}  digest")
    first_s = None
    for processes in options.processes:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "lockstep", "train", "wing", *SETTINGS, "--run", folder, "--quiet"]
            subprocess.run([*command, f"population_size={options.designs}", "-n", str(processes)], check=True)
            events = list(read_jsonl(Path(folder) / "events.jsonl"))
        seconds = statistics.median([event["evaluate_s"] for event in events if "generation" in event][1:])
        first_s = seconds * processes if first_s is None else first_s
        ratio = first_s / seconds
        print(f"{processes:>9} {seconds:8.3f} {ratio:9.2f} {ratio / processes:9.3f}  {events[-1]['digest'][:16]}")


if __name__ == "__main__":
    main()
