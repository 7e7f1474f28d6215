"""Asks processes of its own: one line of JSON there, one back."""

from __future__ import annotations

import json
from typing import Any

from hsloader._launch import Child

__all__ = ["ask", "hear", "tell"]


def ask(child: Child, request: dict[str, Any], seconds: float, name: str) -> dict[str, Any]:
    """``tell`` and ``hear``."""
    tell(child, request, name)
    return hear(child, seconds, name)


def tell(child: Child, request: dict[str, Any], name: str) -> None:
    """Send a request; ``OSError`` with the child's last words if it is gone (``name`` says what it is)."""
    try:
        child.channel.settimeout(10.0)
        child.channel.sendall(json.dumps(request).encode() + b"\n")
    except OSError:
        raise _ended(child, name) from None


def hear(child: Child, seconds: float, name: str) -> dict[str, Any]:
    """The answer; ``TimeoutError`` after ``seconds``, ``OSError`` as ``tell``."""
    data = b""
    try:
        child.channel.settimeout(seconds)
        while not data.endswith(b"\n"):
            more = child.channel.recv(65536)
            if not more:
                raise ConnectionResetError
            data += more
    except TimeoutError:
        raise TimeoutError(f"the {name} gave no answer for {seconds:.0f} s") from None
    except ConnectionError:
        raise _ended(child, name) from None
    answer: dict[str, Any] = json.loads(data)
    return answer


def _ended(child: Child, name: str) -> OSError:
    child.wait(2.0)
    return OSError(f"the {name} ended: {child.ending()}")
