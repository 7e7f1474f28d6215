"""hsloader beside what people would otherwise use: the same samples, one process a contender, cold and warm.

    pip install -r benchmarks/requirements.txt
    python benchmarks/suite.py --folder DISK [--samples 40] [--short 2000] [--contenders ours ...] [--repeats 3]

Each contender converts the samples once. A run reads two epochs, the first from a cold page cache, the second from
what that left in it; each setting is run once, then the best ones ``--repeats`` times; figures are medians. Pages are
dropped of the suite's own files only, with posix_fadvise, and mincore is asked whether that worked. Results: a table,
``--json`` FILE, ``--plot`` FILE.svg.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from source_data import write_source  # noqa: E402 - found only with the path above
from suite_table import plot, table  # noqa: E402

from hsloader.benchmark.disk import RawData, measure_disk, plan_disk  # noqa: E402
from hsloader.benchmark.machine import describe_machine  # noqa: E402
from hsloader.benchmark.residency import drop, resident_share  # noqa: E402
from hsloader.benchmark.scratch import ScratchFile  # noqa: E402
from hsloader.benchmark.timing import Deadline  # noqa: E402

CONTENDERS = (
    "ours",
    "stock_pt",
    "safetensors_files",
    "mosaic",
    "lit",
    "webdataset_tars",
    "hf_datasets",
    "zarr_python",
    "zarr_zarrs",
    "tensorstore_arrays",
    "annbatch_rows",
)
SETS = {
    "long": {"tokens": 1750, "hidden": 7168, "spread": 0.2, "batch": 1},
    "short": {"tokens": 150, "hidden": 2048, "spread": 0.5, "batch": 32},
}
TIMEOUT = 600.0


def child(name: str, action: str, asked: dict[str, Any], home: Path) -> dict[str, Any]:
    """Run one measurement in a process of its own; its answer, with the peak of its memory (PSS without file pages)."""
    line = [sys.executable, str(HERE / "measure_one.py"), name, action, json.dumps(asked)]
    quiet = {"HOME": str(home), "HF_HOME": str(home), "HF_HUB_OFFLINE": "1", "TMPDIR": str(home), "DO_NOT_TRACK": "1"}
    with (home / "errors").open("w+") as errors:
        running = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=errors, text=True, env={**os.environ, **quiet})
        peak, until = 0, time.monotonic() + TIMEOUT
        while running.poll() is None:
            if time.monotonic() > until:
                kill(running.pid)
                raise TimeoutError(f"{name} {action} {asked}: not done after {TIMEOUT:.0f} s")
            peak = max(peak, memory(running.pid))
            time.sleep(0.2)
        assert running.stdout is not None
        lines = [text for text in running.stdout.read().splitlines() if text.startswith("{")]
        if running.returncode or not lines:
            errors.seek(0)
            raise RuntimeError(f"{name} {action} {asked}: status {running.returncode}\n{errors.read()[-2000:]}")
    answer: dict[str, Any] = json.loads(lines[-1])
    return {**answer, "memory": peak}


def tree(pid: int) -> list[int]:
    """A process and all below it."""
    import psutil

    try:
        process = psutil.Process(pid)
        return [pid, *(each.pid for each in process.children(recursive=True))]
    except psutil.NoSuchProcess:
        return []


def kill(pid: int) -> None:
    """End a process that we started, with its children."""
    for each in tree(pid):
        with contextlib.suppress(OSError):
            os.kill(each, 9)


def memory(pid: int) -> int:
    """Bytes of anonymous and shared memory of a process tree, each page once; file pages are not counted."""
    total = 0
    for each in tree(pid):
        with contextlib.suppress(OSError), open(f"/proc/{each}/smaps_rollup") as file:
            for text in file:
                if text.startswith(("Pss_Anon:", "Pss_Shmem:")):
                    total += int(text.split()[1]) * 1024
    return total


def files_below(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def make_cold(folder: Path) -> None:
    """Drop our files from the page cache; refuses to go on if that failed."""
    held = 0.0
    for path in files_below(folder):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)  # what is not on the disk yet cannot be dropped
            drop(fd)
            held += resident_share(fd) * os.fstat(fd).st_size
        finally:
            os.close(fd)
    whole = sum(path.stat().st_size for path in files_below(folder))
    if held > 0.05 * whole:
        raise RuntimeError(f"{folder}: {held / 1e6:.0f} MB stay in the page cache, so nothing cold can be measured")


def make_warm(folder: Path) -> None:
    for path in files_below(folder):
        with path.open("rb", buffering=0) as file:
            while file.read(8 << 20):
                pass


def quiet_machine(patience: float) -> float:
    """Wait until the load of the last minute is under 0.7, at most ``patience`` seconds; the load then."""
    until = time.monotonic() + patience
    while os.getloadavg()[0] > 0.7 and time.monotonic() < until:
        time.sleep(2.0)
    return os.getloadavg()[0]


def measure(name: str, source: Path, folder: Path, options: argparse.Namespace, batch: int) -> dict[str, Any]:
    """Everything about one contender on one set of samples."""
    try:
        module: Any = importlib.import_module(f"contenders.{name}")
    except ImportError as error:
        return {"name": name, "holds": "", "missing": f"not installed: {error}"}
    found: dict[str, Any] = {"name": module.NAME, "holds": module.HOLDS}
    if hasattr(module, "MISSING"):
        return {**found, "missing": module.MISSING}
    raw = sum(path.stat().st_size for path in source.glob("*.pt"))
    target, home = folder / "target", folder / "home"
    for each in (target, home):
        shutil.rmtree(each, ignore_errors=True)
        each.mkdir(parents=True)
    try:
        if hasattr(module, "convert"):
            make_warm(source)
            made = child(name, "convert", {"source": str(source), "target": str(target)}, home)
            found["conversion_rate"] = raw / made["seconds"]
        else:
            target = source
        found["stored"] = sum(path.stat().st_size for path in files_below(target))
        found["raw"] = raw
        asked = {"target": str(target), "batch": batch}

        def run(settings: dict[str, Any]) -> dict[str, Any]:
            make_cold(target)
            return child(name, "read", {**asked, "settings": settings}, home)

        sweep = [(run(settings), settings) for settings in module.SETTINGS]
        found["sweep"] = [
            {"settings": settings, "cold": result["cold"]["rate"], "warm": result["warm"]["rate"]}
            for result, settings in sweep
        ]
        best = {state: max(sweep, key=lambda pair: pair[0][state]["rate"])[1] for state in ("cold", "warm")}
        runs: dict[str, list[dict[str, Any]]] = {"cold": [], "warm": []}
        for _ in range(options.repeats):
            for settings in [best["cold"], *([best["warm"]] if best["warm"] != best["cold"] else [])]:
                result = run(settings)
                for state, kept in runs.items():
                    if best[state] == settings:
                        kept.append({**result[state], "memory": result["memory"]})
        for state, results in runs.items():
            median = {key: statistics.median(result[key] for result in results) for key in results[0]}
            found[state] = {**median, "settings": best[state], "rates": [result["rate"] for result in results]}
        return found
    except (RuntimeError, TimeoutError) as error:
        return {**found, "failed": str(error)}
    finally:
        for each in (folder / "target", home):
            shutil.rmtree(each, ignore_errors=True)


def disk_rate(folder: Path) -> dict[str, float]:
    """GB/s of the raw disk: the best of a few ways, on a nameless scratch file."""
    with ScratchFile(folder) as scratch:
        scratch.fill(1 << 30, 20.0, lambda size: None)
        plans = [plan for plan in plan_disk(64 << 20, direct=scratch.direct >= 0) if plan.state == "cold"][:8]
        lines = measure_disk(RawData.of(scratch), plans, Deadline(20.0), most=1 << 30, seconds=1.5)
    return {line.name: line.rate for line in lines if not line.from_memory}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="a folder on the disk to use")
    parser.add_argument("--samples", type=int, default=40, help="of the long set, about 100 MB each; 0: leave it out")
    parser.add_argument("--short", type=int, default=2000, help="samples of the short set, about 2.4 MB each")
    parser.add_argument("--hidden", type=int, help="another hidden size, for a quick try")
    parser.add_argument("--contenders", nargs="+", default=CONTENDERS, choices=CONTENDERS)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--patience", type=float, default=60.0, help="seconds to wait for an idle machine each time")
    parser.add_argument("--json", type=Path, help="write (and extend) results here")
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    results: dict[str, Any] = {"machine": describe_machine(options.folder), "sets": {}}
    if options.json and options.json.exists():
        results = json.loads(options.json.read_text())
    with tempfile.TemporaryDirectory(prefix="hsloader-suite-", dir=options.folder) as scratch:
        for kind, shape in SETS.items():
            count = options.samples if kind == "long" else options.short
            if not count:
                continue
            source = Path(scratch) / kind
            hidden = options.hidden or shape["hidden"]
            size = write_source(source, samples=count, tokens=shape["tokens"], hidden=hidden, spread=shape["spread"])
            held = results["sets"].setdefault(kind, {"contenders": {}})
            held |= {"samples": count, "bytes": size, "hidden": hidden, "tokens": shape["tokens"]}
            held["disk"] = disk_rate(options.folder)
            for name in options.contenders:
                load = quiet_machine(options.patience)
                print(f"{kind}: {name} (load {load:.1f})", file=sys.stderr, flush=True)
                found = measure(name, source, Path(scratch) / "work", options, shape["batch"])
                held["contenders"][name] = {**found, "load": load}
                if options.json:
                    options.json.write_text(json.dumps(results, indent=1))
            shutil.rmtree(source)
    print(table(results))
    if options.plot:
        plot(results, options.plot)


if __name__ == "__main__":
    main()
