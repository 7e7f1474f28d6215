"""Asks processes of its own: one line of JSON there, one back."""

from __future__ import annotations

import json
from typing import Any

from hsloader._launch import Child

__all__ = ["ask", "hear", "tell"]


def ask(child: Child, request: dict[str, Any], seconds: float) -> dict[str, Any]:
    """``tell`` and ``hear``."""
    tell(child, request, seconds)
    return hear(child, seconds)


def tell(child: Child, request: dict[str, Any], seconds: float) -> None:
    """Send a request: ``TimeoutError`` if it is not taken within ``seconds``, ``OSError`` if the child is gone."""
    try:
        child.channel.settimeout(seconds)
        child.channel.sendall(json.dumps(request).encode() + b"\n")
    except TimeoutError:
        raise TimeoutError(f"the {child.name} took no request for {seconds:.0f} s") from None
    except OSError:
        raise _ended(child) from None


def hear(child: Child, seconds: float) -> dict[str, Any]:
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
        raise TimeoutError(f"the {child.name} gave no answer for {seconds:.0f} s") from None
    except ConnectionError:
        raise _ended(child) from None
    answer: dict[str, Any] = json.loads(data)
    return answer


def _ended(child: Child) -> OSError:
    child.wait(2.0)
    return OSError(f"the {child.ending()}")
