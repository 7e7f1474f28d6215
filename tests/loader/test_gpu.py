"""The loader on a GPU: the right bits, whatever is held, dropped, allocated or run beside it."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hsloader import DataLoader, ReadOptions, UniformNoise
from hsloader.errors import LoaderError
from tests.loader.making import PACKED, PADDED, RAW, assert_same, clone, write

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("cuda"),
    pytest.mark.filterwarnings("default"),
]

LARGE: dict[str, Any] = {**PACKED, "max_tokens": 4096}


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """200 samples of up to 600 tokens: batches of about 2 MB."""
    return write(tmp_path_factory.mktemp("gpu") / "data.hs", 200, longest=600, typical_length=300)


@pytest.fixture(autouse=True)
def _settled() -> Iterator[None]:
    yield
    torch.cuda.synchronize()


def cpu_batches(path: Path, **settings: Any) -> list[Any]:
    with DataLoader(path, **settings) as loader:
        return [clone(batch) for batch in loader]


@pytest.mark.parametrize(
    "settings",
    [
        LARGE,
        {**LARGE, "trainer": "speculators-0.4"},
        {**LARGE, "variant": "mtp"},
        PADDED,
        {**PADDED, "hidden_states_dtype": "float32"},
        RAW,
    ],
)
def test_batches_equal_those_of_the_cpu(large: Path, settings: dict[str, Any]) -> None:
    expected = cpu_batches(large, **settings)
    with DataLoader(large, device="cuda", **settings) as loader:
        for ours, theirs in zip(loader, expected, strict=True):
            tensors = ours.values() if isinstance(ours, dict) else (v for s in ours for v in s.values())
            assert all(v.is_cuda for v in tensors if isinstance(v, torch.Tensor))
            assert_same(ours, theirs)


def test_nothing_is_reused_too_early(large: Path) -> None:
    """Poison and compare: slow kernels, other allocations and held batches, over many iterations."""
    expected = cpu_batches(large, **LARGE)
    settings = {**LARGE, "read": ReadOptions(prefetch=3 * (4 << 20))}
    matrix = torch.randn(3000, 3000, device="cuda")
    results: list[tuple[Any, int]] = []
    kept: list[Any] = []
    with DataLoader(large, device="cuda", **settings) as loader:
        for epoch in range(20):
            loader.set_epoch(0)
            for number, batch in enumerate(loader):
                for _ in range(3):
                    torch.mm(matrix, matrix)  # the host runs ahead of the device
                # Checked on the device, late: after whatever could have overwritten it was issued.
                sums = {k: v.view(torch.int16).long().sum() for k, v in batch.items() if _is_states(v)}
                results.append((sums, number))
                if (epoch + number) % 5 == 0:
                    kept.append((batch, number))
                if len(kept) > 6:
                    kept.pop(0)
                scratch = [torch.empty(1 << 20, device="cuda").fill_(float("nan")) for _ in range(4)]
                del scratch, batch
            if epoch % 7 == 3:
                for _ in loader:
                    break  # a batch that was sent is dropped unseen
    torch.cuda.synchronize()
    for sums, number in results:
        for key, value in sums.items():
            assert value.item() == expected[number][key].view(torch.int16).long().sum().item(), (key, number)
    for batch, number in kept:
        assert_same(batch, expected[number])


def _is_states(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16


def test_batches_held_for_ever(large: Path) -> None:
    expected = cpu_batches(large, **LARGE)
    with DataLoader(large, device="cuda", **LARGE) as loader:
        kept = list(loader)
        list(loader)
    assert_same(kept, expected)


def test_a_stream_of_the_scripts_own(large: Path) -> None:
    expected = cpu_batches(large, **LARGE)
    stream = torch.cuda.Stream()
    with DataLoader(large, device="cuda", **LARGE) as loader:
        batches, got = iter(loader), []
        for number in range(len(expected)):
            if number % 2:
                with torch.cuda.stream(stream):
                    batch = next(batches)
                    got.append({k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in batch.items()})
                torch.cuda.current_stream().wait_stream(stream)
            else:
                got.append(clone(next(batches)))
        torch.cuda.synchronize()
    assert_same(got, expected)


def test_noise_is_equal_at_any_world_size(large: Path) -> None:
    settings = {**LARGE, "noise": UniformNoise(0.05), "device": "cuda"}
    state = torch.cuda.get_rng_state()
    with DataLoader(large, **settings) as loader:
        whole = [clone(batch) for batch in loader]
    assert torch.equal(torch.cuda.get_rng_state(), state)
    for rank in range(2):
        with DataLoader(large, rank=rank, world_size=2, **settings) as loader:
            share = [clone(batch) for batch in loader]
        assert_same(share, whole[rank::2][: len(share)])
    clean = cpu_batches(large, **LARGE)
    assert not torch.equal(whole[0]["hidden_states"].cpu(), clean[0]["hidden_states"])
    assert torch.equal(whole[0]["verifier_last_hidden_states"].cpu(), clean[0]["verifier_last_hidden_states"])


def test_graph_capture_is_refused(large: Path) -> None:
    with DataLoader(large, device="cuda", **LARGE) as loader:
        batches = iter(loader)
        batch = next(batches)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        static = batch["hidden_states"].clone()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            static.mul_(2)
            with pytest.raises(LoaderError, match="CUDA graph"):
                next(batches)
        next(batches)


@pytest.mark.parametrize("settings", [LARGE, {**LARGE, "trainer": "speculators-0.4"}, PADDED, RAW])
def test_pinned_cpu_batches(large: Path, settings: dict[str, Any]) -> None:
    expected = cpu_batches(large, **settings)
    with DataLoader(large, pin_memory=True, **settings) as loader:
        for ours, theirs in zip(loader, expected, strict=True):
            parts = ours if isinstance(ours, list) else [ours]
            tensors = [value for part in parts for value in part.values() if isinstance(value, torch.Tensor)]
            assert tensors
            assert all(tensor.is_pinned() and tensor.device.type == "cpu" for tensor in tensors)
            sent = [_sent(part) for part in parts]
            assert_same(sent if isinstance(ours, list) else sent[0], theirs)


def _sent(batch: dict[str, Any]) -> dict[str, Any]:
    return {k: v.to("cuda", non_blocking=True) if isinstance(v, torch.Tensor) else v for k, v in batch.items()}


def test_the_ring_says_which_gpu_it_is(large: Path) -> None:
    """As NVML writes it, so that ``hsloader top`` finds it whatever CUDA_VISIBLE_DEVICES hides."""
    with DataLoader(large, device="cuda", **LARGE) as loader:
        next(iter(loader))
        info = loader._connection.client.ring.info()  # type: ignore[union-attr]
    assert re.fullmatch(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", info["gpu"])


def test_memory_and_registrations_do_not_grow(large: Path) -> None:
    with DataLoader(large, device="cuda", **LARGE) as loader:
        for batch in loader:
            del batch
        torch.cuda.synchronize()
        reserved = torch.cuda.memory_reserved()
        torch.cuda.reset_peak_memory_stats()  # earlier tests of the process had their own
        for _ in range(5):
            for batch in loader:
                del batch
        torch.cuda.synchronize()
        assert torch.cuda.memory_reserved() <= reserved + (8 << 20)
        largest = loader._connection.client.slot_bytes  # type: ignore[union-attr]
        assert torch.cuda.max_memory_allocated() < torch.cuda.memory_allocated() + 8 * largest + (64 << 20)


def test_loaders_after_one_another_register_the_same_addresses(large: Path) -> None:
    for _ in range(5):
        with DataLoader(large, device="cuda", **LARGE) as loader:
            next(iter(loader))
        loader = DataLoader(large, device="cuda", **LARGE)
        next(iter(loader))
        del loader
        gc.collect()
