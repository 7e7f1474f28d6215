"""hsloader info DST: what a dataset holds, from its manifest and metadata; no payload is read."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hsloader.cli import output
from hsloader.cli.common import Json, Traceback, clear_errors

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hsloader.store.dataset import Dataset
    from hsloader.store.fields import Field

__all__ = ["info", "provenance_facts"]


@clear_errors
def info(
    dst: Annotated[Path, typer.Argument(metavar="DST", help="The dataset.")],
    as_json: Json = False,
    traceback: Traceback = False,
) -> int:
    """Show what a dataset holds.

    Counts, sizes, fields, where it came from, what was set aside.
    """
    from hsloader.store.dataset import open_dataset

    with open_dataset(dst) as dataset:
        document = _document(dataset)
    if as_json:
        output.print_json(document)
    else:
        _print(document)
    return 0


def _document(dataset: Dataset) -> dict[str, Any]:
    """``Dataset.metadata`` with the sizes of each field and what the segments say was set aside."""
    document = dataset.metadata
    stored = dict.fromkeys(dataset.fields, 0)
    quarantine: list[dict[str, Any]] = []
    for segment in dataset.segments:
        quarantine += segment.meta.quarantine
        for name, array in segment.meta.arrays.items():
            stored[name] += sum(shard.size for shard in array.shards)
    for name, field in dataset.fields.items():
        document["fields"][name] |= {"stored_bytes": stored[name], "source_dtype": field.source_dtype}
        document["fields"][name] |= _before(field, list(dataset.fields.values()), document["tokens"])
    document["raw_bytes"] = sum(field["raw_bytes"] for field in document["fields"].values())
    document["quarantine"] = quarantine
    document["unfinished"] = _unfinished(dataset)
    document["lengths"] = _spread(dataset)
    return document


def _before(field: Field, fields: Sequence[Field], tokens: int) -> dict[str, Any]:
    """The bytes of a field's values as the sources had them, and its codec: fp8 where they were rounded to it."""
    from hsloader.conversion.fp8 import is_encoded, made_scales, source_row_bytes

    if field.name in made_scales(fields):
        return {"raw_bytes": 0}
    raw = source_row_bytes([field]) * tokens
    return {"raw_bytes": raw, "codec": "fp8"} if is_encoded(field) else {"raw_bytes": raw}


def _unfinished(dataset: Dataset) -> int:
    """Samples that a conversion has planned and not converted yet: it was interrupted, or it runs."""
    from hsloader.conversion.journal import Journal

    try:
        return Journal(dataset.path).unfinished({entry.number for entry in dataset.manifest.segments})
    except (OSError, ValueError, LookupError, TypeError):  # a journal says nothing about what is in the dataset
        return 0


def _spread(dataset: Dataset) -> dict[str, Any]:
    """The shortest, median and longest sample, and how many there are for each doubling (fewest, most, samples)."""
    import numpy as np

    lengths = dataset.lengths
    if not len(lengths):
        return {"shortest": 0, "median": 0, "longest": 0, "histogram": []}
    doublings, counts = np.unique(np.frexp(lengths.astype(np.float64))[1], return_counts=True)
    return {
        "shortest": int(lengths.min()),
        "median": int(np.median(lengths)),
        "longest": int(lengths.max()),
        "histogram": [
            (1 << (k - 1), (1 << k) - 1, n) for k, n in zip(doublings.tolist(), counts.tolist(), strict=True)
        ],
    }


def provenance_facts(provenance: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What is known of where states come from, as labelled values; what is not known is left out but for the norm."""
    norm = {
        "pre": "before the final norm",
        "post": "after the final norm",
        "unknown": "unknown whether before or after the final norm",
    }
    layers = provenance.get("layer_ids")
    written = provenance.get("layer_ids_as_written")
    text = ""
    if layers:
        text = f"after layer {', '.join(map(str, layers))} (counted from 0)"
        if written and list(written) != list(layers):
            text += f"; written as {', '.join(map(str, written))} ({provenance.get('layer_convention')})"
    return [
        ("producer", output.printable(provenance.get("producer") or "")),
        ("layout", output.printable(provenance.get("source_layout") or "")),
        ("model", output.printable(provenance.get("model") or "")),
        ("tokenizer", output.printable(provenance.get("tokenizer") or "")),
        ("states", text or "layers unknown"),
        ("last state", norm.get(str(provenance.get("norm_state")), "")),
        *(("note", output.printable(note)) for note in provenance.get("notes") or ()),
    ]


def _missing_text(number: int) -> str:
    if not number:
        return ""
    return (
        f"{output.count(number, 'more sample')} planned: the conversion still runs, or was interrupted (type it again)"
    )


def _print(document: Mapping[str, Any]) -> None:
    raw, stored = document["raw_bytes"], document["stored_bytes"]
    output.line(output.path_text(document["path"]), style="bold")
    output.facts(
        [
            ("samples", output.count(document["samples"])),
            ("unfinished", _missing_text(document["unfinished"])),
            ("tokens", output.count(document["tokens"])),
            ("values", output.bytes_text(raw)),
            ("on disk", f"{output.bytes_text(stored)} ({output.ratio_text(raw, stored)})"),
            ("segments", output.count(document["segments"])),
            *provenance_facts(document["provenance"]),
            ("fingerprint", document["fingerprint"]),
        ]
    )
    output.heading("fields")
    rows = [
        (
            name,
            field["dtype"],
            "[tokens" + "".join(f", {n}" for n in field["shape"]) + "]",
            f"fp8, lossy (was {field['source_dtype']})" if field["codec"] == "fp8" else field["codec"],
            output.bytes_text(field["raw_bytes"]) if field["raw_bytes"] else "",
            "->",
            output.bytes_text(field["stored_bytes"]),
            output.ratio_text(field["raw_bytes"], field["stored_bytes"]),
        )
        for name, field in document["fields"].items()
    ]
    output.columns(rows, right=(4, 6))
    lengths = document["lengths"]
    output.histogram(
        "tokens a sample", lengths["histogram"], lengths["shortest"], lengths["longest"], lengths["median"]
    )
    quarantine = [(str(item.get("name", "")), str(item.get("reason", ""))) for item in document["quarantine"]]
    output.listing(f"set aside when it was converted: {output.count(len(quarantine), 'sample')}", quarantine)
    output.next_command("hsloader", "verify", output.path_text(document["path"]), why="check every byte")
