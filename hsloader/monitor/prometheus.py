"""The counters for Prometheus: the text of its exposition format, and a small server that the feeder runs if asked."""

from __future__ import annotations

import http.server
import socketserver
import threading
from collections.abc import Callable, Iterable
from typing import Any

from hsloader.monitor.counters import WAIT_CLASSES
from hsloader.monitor.header import Snapshot
from hsloader.monitor.stats import flat_stats

__all__ = ["MetricsServer", "exposition"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# Name in stats(), help.  Totals become counters with the suffix that Prometheus wants, the rest are gauges.
_TOTALS = {
    "batches": "Batches handed out to the training script",
    "samples": "Samples handed out",
    "tokens": "Tokens handed out, without padding",
    "rows": "Rows handed out, with padding",
    "read_bytes": "Bytes asked of the file system",
    "decoded_bytes": "Bytes decoded into batches",
    "read_seconds": "Thread-seconds in reads",
    "decode_seconds": "Thread-seconds in decoding",
    "buffer_seconds": "Thread-seconds that reads waited for the decoders",
    "transfer_seconds": "Seconds of host-to-device copies",
    "transfer_bytes": "Bytes copied to the device",
    "bad_samples": "Samples reported bad",
    "skipped_samples": "Bad samples that were left out",
    "bad_frames": "Chunks that failed their check",
    "restarts": "Feeders that died and were started again",
}
_GAUGES = {
    "epoch": "Epoch that is iterated",
    "position": "Batches of the epoch that were handed out",
    "epoch_batches": "Batches of the epoch on this rank",
    "ring_slots": "Batches that the ring holds",
    "ring_bytes": "Bytes of the ring",
    "ring_ready": "Batches that are read and not taken",
    "ring_reading": "Batches that are asked for and not read",
    "queued_reads": "Reads that wait for a thread",
    "queued_decodes": "Reads that wait for a decoder",
    "read_threads": "Read threads of the feeder",
    "decode_threads": "Decode threads of the feeder",
    "uptime_seconds": "Seconds since the loader opened",
}


def exposition(now: Snapshot) -> str:
    """All counters of one loader as text that Prometheus scrapes; rates are Prometheus' business."""
    labels = _labels(now)
    stats = flat_stats(now)
    lines: list[str] = []
    for name, text in _TOTALS.items():
        lines += _family(f"hsloader_{name}_total", "counter", text, labels, stats[name])
    for name, text in _GAUGES.items():
        lines += _family(f"hsloader_{name}", "gauge", text, labels, stats[name])
    lines += _histogram(now, labels, stats["data_wait_seconds"])
    return "\n".join(lines) + "\n"


def _family(name: str, kind: str, text: str, labels: str, value: float) -> Iterable[str]:
    return f"# HELP {name} {text}", f"# TYPE {name} {kind}", f"{name}{{{labels}}} {value:.17g}"


def _histogram(now: Snapshot, labels: str, total: float) -> Iterable[str]:
    name = "hsloader_data_wait_seconds"
    yield f"# HELP {name} Time that the training loop spent inside next()"
    yield f"# TYPE {name} histogram"
    count = 0
    for number, waits in enumerate(now.waits[: WAIT_CLASSES - 1]):
        count += waits
        yield f'{name}_bucket{{{labels},le="{2.0**number / 1e6:.6g}"}} {count}'
    count += now.waits[WAIT_CLASSES - 1]
    yield f'{name}_bucket{{{labels},le="+Inf"}} {count}'
    yield f"{name}_sum{{{labels}}} {total:.17g}"
    yield f"{name}_count{{{labels}}} {count}"


def _labels(now: Snapshot) -> str:
    values = {name: now.info.get(name, "") for name in ("rank", "job", "split", "dataset")}
    return ",".join(f'{name}="{_escaped(str(value))}"' for name, value in values.items())


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def server_bind(self) -> None:
        # HTTPServer's own asks the name service for this machine's name, which can take many seconds.
        socketserver.TCPServer.server_bind(self)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: a scraper that went away is no news, and stderr is kept for the feeder's last words."""


class MetricsServer:
    """Serves ``/metrics`` on all addresses of the machine until closed.  ``OSError`` if the port cannot be had."""

    def __init__(self, port: int, read: Callable[[], Snapshot]) -> None:
        class Handler(http.server.BaseHTTPRequestHandler):
            timeout = 10.0  # seconds for one that connects and asks nothing, which would keep a thread for good

            def do_GET(self) -> None:
                if self.path.split("?")[0] not in ("/metrics", "/"):
                    self.send_error(404)
                    return
                body = exposition(read()).encode("utf-8", "replace")
                self.send_response(200)
                self.send_header("Content-Type", CONTENT_TYPE)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class names it so
                """Say nothing."""

        self._server = _Server(("", port), Handler)
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, name="hsl-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._thread.join(5.0)
        self._server.server_close()
