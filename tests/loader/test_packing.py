"""Small tensors in one block: each where it belongs, on the host and on the device."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from hsloader.device.packing import Packing, Part  # noqa: E402

PARTS = {
    "alike": [Part("a", torch.int64, (1, 5)), Part("b", torch.int64, (1, 5))],
    "mixed": [
        Part("ids", torch.int64, (2, 3)),
        Part("mask", torch.bool, (2, 3)),
        Part("positions", torch.int64, (2, 3)),
        Part("scale", torch.bfloat16, (7,)),
        Part("weights", torch.float32, (2, 3)),
        Part("others", torch.float32, (2, 3)),
        Part("lengths", torch.int64, (0,)),
    ],
    "floats": [Part("a", torch.float32, (3,)), Part("b", torch.float32, (3,))],
    "one": [Part("a", torch.uint8, (3,))],
    "none": [],
}


@pytest.mark.parametrize("name", PARTS)
def test_what_is_put_into_a_place_on_the_host_comes_out_on_the_device(name: str) -> None:
    packing = Packing(PARTS[name])
    host = torch.full((packing.bytes + 64,), 7, dtype=torch.uint8)  # as one that was made for a larger batch
    places = packing.on_host(host)
    for number, (part, place) in enumerate(zip(packing.parts, places, strict=True)):
        assert place.shape == part.shape
        place[...] = (np.arange(place.size) + 10 * number).reshape(place.shape)
    block = torch.empty(packing.shape, dtype=packing.dtype)
    block.copy_(packing.staged(host))
    tensors = packing.on_device(block)
    assert list(tensors) and set(tensors) == {part.name for part in packing.parts} if packing.parts else not tensors
    for part, place in zip(packing.parts, places, strict=True):
        tensor = tensors[part.name]
        assert (tensor.dtype, tensor.shape) == (part.dtype, part.shape)
        bits = tensor.view(torch.uint16).numpy() if part.dtype == torch.bfloat16 else tensor.numpy()
        assert bits.tolist() == place.tolist()
    assert host[packing.bytes :].tolist() == [7] * 64


def test_a_tensor_that_autograd_has_saved_does_not_mind_writes_to_its_neighbours() -> None:
    """As a script's change of its mask between forward and backward: the ids are the embedding's, which saved them."""
    for name in ("alike", "mixed"):
        packing = Packing(PARTS[name])
        tensors = packing.on_device(torch.zeros(packing.shape, dtype=packing.dtype))
        saved, *others = tensors.values()
        weight = torch.ones(3, 2, requires_grad=True)
        out = torch.nn.functional.embedding(saved, weight).sum()
        for other in others:
            other.fill_(1)
        out.backward()
        assert weight.grad is not None
        assert weight.grad[0, 0] == saved.numel()
        assert not saved.any()


def test_tensors_of_one_block_can_be_written_to_in_a_graph() -> None:
    packing = Packing(PARTS["floats"])
    tensors = packing.on_device(torch.zeros(packing.shape, dtype=packing.dtype))
    weight = torch.ones(3, requires_grad=True)
    tensors["a"].add_(weight)
    tensors["a"].sum().backward()
    assert weight.grad.tolist() == [1, 1, 1]
    assert tensors["b"].tolist() == [0, 0, 0]


@pytest.mark.parametrize("name", PARTS)
def test_every_tensor_is_aligned_as_kernels_expect(name: str) -> None:
    packing = Packing(PARTS[name])
    block = torch.empty(packing.shape, dtype=packing.dtype)
    starts = [tensor.data_ptr() - block.data_ptr() for tensor in packing.on_device(block).values() if tensor.numel()]
    assert [start % 16 for start in starts] == [0] * len(starts)
