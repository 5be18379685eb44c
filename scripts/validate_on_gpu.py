"""Settle the rehearsal's rules on a real card: run the museum there and compare.

``python scripts/validate_on_gpu.py --output docs/gpu-validations/h200.json`` runs every exhibit of
``tests/rehearsal/museum`` on the card: each faulty program must raise the class the rehearsal raises (or stay silent
where the rehearsal says so), each mended twin must pass. With ``--audit`` it then runs the audit of the adapters. It is
one script of under eight minutes: exhibits run in worker processes, one process for all that leave the card usable and
one for each that poisons it (device-side assertions), and one deadline bounds them all. The card's own words are kept
beside each verdict, for a reader to compare.

Needs a CUDA build of torch and the repository; nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import queue
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests" / "rehearsal")]


def run_exhibit(name: str) -> dict[str, Any]:
    """Run one exhibit's faulty program and its twin on the card; what each raised."""
    import torch
    from museum import EXHIBITS

    exhibit = next(e for e in EXHIBITS if e.__name__ == name)
    expected = exhibit.error.__name__ if exhibit.error is not None else None
    record: dict[str, Any] = {"exhibit": name, "rule": exhibit.rule, "expected": expected}
    for half in ("mended", "faulty"):  # the twin first: a device-side assertion poisons what follows
        torch.manual_seed(0)
        try:
            getattr(exhibit, half)()
            torch.cuda.synchronize()
            record[half] = None
        except Exception as error:
            record[half] = {
                "class": type(error).__name__,
                "bases": [base.__name__ for base in type(error).__mro__],
                "message": str(error)[:300],
            }
    raised = record["faulty"]
    record["agrees"] = record["mended"] is None and (
        raised is None if expected is None else raised is not None and expected in raised["bases"]
    )
    return record


def work(names: list[str]) -> None:
    """Worker: run exhibits and print one JSON line each."""
    for name in names:
        sys.stdout.write(json.dumps(run_exhibit(name)) + "\n")
        sys.stdout.flush()


def in_worker(names: list[str], deadline: float, each: float) -> list[dict[str, Any]]:
    """Run exhibits in fresh processes; one that ends its process, or hangs, is noted and the rest goes on without it.

    ``deadline`` is the monotonic time by which all must be over, ``each`` the longest silence of one exhibit (seconds).
    """
    records: list[dict[str, Any]] = []
    left = list(names)
    while left:
        seconds = deadline - time.monotonic()
        if seconds <= 5:
            records.extend({"exhibit": name, "agrees": False, "problem": "no time left"} for name in left)
            break
        lines, problem = _lines([sys.executable, __file__, "--work", ",".join(left)], deadline, each)
        records.extend(map(json.loads, lines))
        left = left[len(lines) :]
        if left:
            records.append({"exhibit": left.pop(0), "agrees": False, "problem": problem})
    return records


def _lines(command: list[str], deadline: float, each: float) -> tuple[list[str], str]:
    """The JSON lines of a worker, and why there are no more of them."""
    with tempfile.TemporaryFile("w+") as errors:
        worker = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        arrived: queue.Queue[str | None] = queue.Queue()

        def read() -> None:
            assert worker.stdout is not None
            for line in worker.stdout:
                arrived.put(line)
            arrived.put(None)

        threading.Thread(target=read, daemon=True).start()
        lines: list[str] = []
        while True:
            silence = min(each, deadline - time.monotonic())
            try:
                line = arrived.get(timeout=max(silence, 0.0))
            except queue.Empty:
                worker.kill()
                worker.wait()
                return lines, f"no answer within {silence:.0f} s"
            if line is None:
                break
            if line.startswith("{"):
                lines.append(line)
        code = worker.wait()
        errors.seek(0)
        return lines, f"the process ended with {code}: {errors.read()[-500:]}"


def audit(output: Path, seconds: float) -> dict[str, Any]:
    """Run the audit of the adapters with an explicit device path on this card, within a deadline."""
    target = output.with_name(output.stem + "-audit.json")
    command = [
        *(sys.executable, str(ROOT / "scripts" / "audit_gpu_paths.py")),
        *("--dataset-dir", "data", "--output", str(target), "--timeout-seconds", "60"),
        *("--only-explicit-device-packages", "--include-concept-demos", "--shards", "1", "--shard-index", "0"),
    ]
    try:
        done = subprocess.run(command, cwd=ROOT, timeout=seconds, check=False)
        return {"output": target.name, "exit_code": done.returncode}
    except subprocess.TimeoutExpired:
        return {"output": target.name, "exit_code": None, "problem": f"stopped after {seconds:.0f} s; resume it"}


def main() -> int:
    """Run everything, write the record, print what disagrees; exit 1 on any disagreement."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "gpu-validations" / "validation.json")
    parser.add_argument("--audit", action="store_true", help="also run the audit of the adapters")
    parser.add_argument("--seconds", type=float, default=460.0, help="time for everything")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options.work.split(","))
        return 0
    import torch
    from museum import EXHIBITS

    if not torch.cuda.is_available():
        sys.stderr.write("error: this needs a CUDA card and a CUDA build of torch; none is visible here.\n")
        return 2
    start = time.monotonic()
    properties = torch.cuda.get_device_properties(0)
    # On the card of this machine, faults of a smaller or older card cannot show.
    capable = (properties.major, properties.minor) >= (8, 9)
    skipped = {e.__name__: "needs compute capability below 8.9" for e in EXHIBITS if e.rule == "KRN-3" and capable}
    if properties.major >= 9:
        skipped |= {e.__name__: "the back-end of sm_90 takes another path" for e in EXHIBITS if e.rule == "SDP-2"}
    chosen = [e for e in EXHIBITS if e.__name__ not in skipped]
    deadline = start + options.seconds
    alone = [e.__name__ for e in chosen if e.poisons or e.rule == "DEV-8"]
    # An exhibit that leaves the card unusable has a process of its own; the first line waits for torch and the card.
    records = in_worker([e.__name__ for e in chosen if e.__name__ not in alone], deadline, 60.0)
    for name in alone:
        records.extend(in_worker([name], deadline, 60.0))
    disagreements = [record for record in records if not record["agrees"]]
    result: dict[str, Any] = {
        "card": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "exhibits": len(records),
        "agree": len(records) - len(disagreements),
        "skipped": skipped,
        "records": records,
    }
    if options.audit:
        result["audit"] = audit(options.output, max(options.seconds - (time.monotonic() - start), 30.0))
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(result, indent=2) + "\n")
    for record in disagreements:
        sys.stdout.write(f"{record['exhibit']}: {json.dumps(record)[:400]}\n")
    sys.stdout.write(f"{result['agree']} of {result['exhibits']} exhibits agree on {result['card']}\n")
    return int(bool(disagreements))


if __name__ == "__main__":
    raise SystemExit(main())
