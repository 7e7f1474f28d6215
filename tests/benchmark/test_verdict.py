"""The verdict and the recommended options: tables of what was measured and what is said."""

from __future__ import annotations

from typing import Any

import pytest

from hsloader.benchmark.results import Measurement, Need
from hsloader.benchmark.verdict import Rates, judge, rates_of, recommend, with_limits
from hsloader.reader import choices
from hsloader.reader.options import ReadOptions

GB = 1e9


def measured(part: Any, rate: float, state: Any = "", **settings: Any) -> Measurement:
    from_memory = settings.pop("from_memory", False)
    return Measurement(
        part=part,
        name="line",
        rate=rate * GB,
        size=1 << 30,
        seconds=1.0,
        state=state,
        settings=settings,
        from_memory=from_memory,
    )


def need(rate: float, gpus: int = 1) -> Need:
    return Need(bytes_a_token=50_000, tokens_a_second=rate * GB / 50_000, gpus=gpus)


def rates(disk: float, ratio: float, decode: dict[int, float], **more: Any) -> Rates:
    more = {name: value if isinstance(value, bool) else value * GB for name, value in more.items()}
    return Rates(disk=disk * GB, ratio=ratio, decode={n: rate * GB for n, rate in decode.items()}, **more)


@pytest.mark.parametrize(
    ("found", "wanted", "bound", "sentence"),
    [
        (
            rates(1.7, 1.45, {1: 2.3, 2: 4.4}),
            need(2.1),
            "disk",
            "you need 2.10 GB/s a GPU; disk gives 1.70 x 1.45 = 2.46 GB/s; decode 4.40 with 2 threads; "
            "headspace 1.17x; bound by disk",
        ),
        (
            rates(6.0, 1.5, {1: 2.3, 2: 4.4}, transfer=50.0),
            None,
            "decode",
            "disk gives 6.00 x 1.50 = 9.00 GB/s; decode 4.40 with 2 threads; transfer 50.0; bound by decode",
        ),
        (
            rates(1.0, 1.5, {1: 2.0}),
            need(1.0, gpus=3),
            "disk",
            "you need 1.00 GB/s a GPU, 3.00 for 3; disk gives 1.00 x 1.50 = 1.50 GB/s; decode 2.00 with 1 thread; "
            "headspace 0.50x; the GPU would wait 50 % of the time; bound by disk",
        ),
        (
            rates(40.0, 1.5, {64: 70.0}, transfer=50.0),
            need(7.0, gpus=8),
            "disk",  # eight links give 400
            "you need 7.00 GB/s a GPU, 56.0 for 8; disk gives 40.0 x 1.50 = 60.0 GB/s; decode 70.0 with 64 threads; "
            "transfer 50.0 a GPU; headspace 1.07x; bound by disk",
        ),
        (
            rates(4.0, 1.5, {8: 12.0}, pipeline=3.0, pipeline_cold=True),
            None,
            "disk",
            "disk gives 4.00 x 1.50 = 6.00 GB/s; decode 12.0 with 8 threads; the pipeline reached 3.00, 50 % of what "
            "disk allows; bound by disk",
        ),
        (
            rates(9.0, 1.5, {2: 4.0}, pipeline=0.76),
            need(0.01),
            "decode",
            "you need 0.01 GB/s a GPU; disk gives 9.00 x 1.50 = 13.5 GB/s; decode 4.00 with 2 threads; the pipeline, "
            "from memory, reached 0.76, 19 % of what decode allows; headspace 400.00x; bound by decode",
        ),
        (
            rates(0.0, 1.5, {2: 4.0}, pipeline=1.0),
            None,
            "pipeline",
            "the disk could not be measured; decode 4.00 with 2 threads; bound by pipeline",
        ),
        (
            rates(1.0, 1.5, {2: 4.0}, in_memory=True),
            need(1.0),
            "disk",
            "you need 1.00 GB/s a GPU; disk gives 1.00 x 1.50 = 1.50 GB/s; decode 4.00 with 2 threads; "
            "headspace 1.50x; bound by disk; after the first epoch the data come from memory",
        ),
        (Rates(), None, "disk", "the disk could not be measured; nothing could be measured"),
    ],
)
def test_the_verdict_is_one_sentence_with_its_numbers(
    found: Rates, wanted: Need | None, bound: str, sentence: str
) -> None:
    verdict = judge(found, wanted, ReadOptions())
    assert (verdict.bound, verdict.sentence) == (bound, sentence)


def test_reads_from_memory_and_warm_ones_are_no_rate_of_the_disk() -> None:
    found = rates_of(
        [
            measured("disk", 9.0, "cold", from_memory=True),
            measured("disk", 8.0, "warm"),
            measured("disk", 1.0, "cold"),
            measured("disk", 1.2, "mixed"),
            measured("pipeline", 5.0, "warm", mode="mmap", threads=2),
            measured("pipeline", 1.5, "cold", mode="mmap", threads=2),
        ],
        1.5,
        in_memory=False,
    )
    assert found.disk == 1.2 * GB
    assert found.pipeline == 1.5 * GB
    assert found.pipeline_cold


def test_each_line_has_its_limit() -> None:
    lines = [
        measured("disk", 1.0, "cold"),
        measured("disk", 0.5, "cold"),
        measured("disk", 10.0, "warm"),
        measured("decode", 1.0, threads=1),
        measured("decode", 4.0, threads=2),
        measured("pipeline", 1.2, "cold", mode="mmap", threads=2),
        measured("pipeline", 3.0, "warm", mode="mmap", threads=2),
        measured("stock", 0.3, "cold"),
        measured("transfer", 20.0),
    ]
    limited = with_limits(lines, rates_of(lines, 1.5, in_memory=False))
    assert [round((line.share or 0.0), 2) for line in limited] == [1.0, 0.5, 1.0, 0.5, 1.0, 0.8, 0.75, 0.2, 1.0]


def pipelines(**modes: float) -> list[Measurement]:
    return [measured("pipeline", rate, "cold", mode=mode, threads=4) for mode, rate in modes.items()]


@pytest.mark.parametrize(
    ("lines", "found", "wanted", "options"),
    [
        # The plainer mode where they are alike, the fastest else.
        (pipelines(mmap=1.0, pread=1.02, direct=1.01), Rates(), None, {"mode": "mmap"}),
        (pipelines(mmap=1.0, pread=1.3, direct=1.6), Rates(), None, {"mode": "direct"}),
        ([], Rates(), None, {"mode": "auto"}),
        # As few threads as decode what the disk gives ...
        ([], rates(1.0, 1.5, {1: 1.0, 2: 2.0, 4: 4.0}), None, {"threads": 2}),
        # ... or what training needs, with room to spare ...
        ([], rates(9.0, 1.5, {1: 2.0, 2: 4.0, 4: 8.0}), need(1.0), {"threads": 1}),
        ([], rates(9.0, 1.5, {1: 2.0, 2: 4.0, 4: 8.0}), need(1.9), {"threads": 2}),
        # ... all of them where nothing else is short; shared by the node's GPUs.
        ([], rates(9.0, 1.5, {1: 2.0, 2: 4.0, 4: 8.0}), None, {"threads": 4}),
        ([], rates(9.0, 1.5, {1: 2.0, 4: 8.0, 16: 30.0}), need(4.0, gpus=4), {"threads": 4}),
        # More reads at once only where the disk gives clearly more.
        (
            [measured("disk", rate, "cold", way="buffered", depth=depth) for depth, rate in ((4, 1.0), (16, 2.0))],
            Rates(),
            None,
            {"io_threads": 16},
        ),
        (
            [measured("disk", rate, "cold", way="buffered", depth=depth) for depth, rate in ((4, 1.9), (16, 2.0))],
            Rates(),
            None,
            {"io_threads": None},
        ),
    ],
)
def test_the_recommended_options(
    lines: list[Measurement], found: Rates, wanted: Need | None, options: dict[str, Any]
) -> None:
    chosen = recommend(lines, found, wanted)
    assert {name: getattr(chosen, name) for name in options} == options


@pytest.mark.parametrize(
    ("batch", "memory", "rate", "prefetch"),
    [
        (100 << 20, 0, None, None),  # what a loader takes by itself
        (100 << 20, 0, 0.5, None),  # half a second of data is less than that
        (100 << 20, 0, 2.0, 10 * (102 << 20)),  # half a second of data, in whole slots
        (100 << 20, 2400 << 20, 2.0, 600 << 20),  # a quarter of the memory
        (100 << 20, 1600 << 20, 2.0, None),  # which is no more than a loader takes
        (0, 0, 2.0, None),  # nobody said how large a batch is
    ],
)
def test_the_ring_holds_batches_and_hiccups(
    monkeypatch: pytest.MonkeyPatch, batch: int, memory: int, rate: float | None, prefetch: int | None
) -> None:
    monkeypatch.setattr(choices, "cpu_share", lambda: 2)
    wanted = None if rate is None else need(rate)
    assert recommend([], Rates(), wanted, batch_bytes=batch, memory=memory).prefetch == prefetch
