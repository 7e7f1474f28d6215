"""bfloat16 in zarr: registered whichever is imported first, bits in and bits out."""

from __future__ import annotations

import math
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import numpy as np
import pytest
import zarr
import zarr.dtype

import hsloader.store.bfloat16
from hsloader.store.bfloat16 import BFloat16Bits, register

CHECK = """
from zarr.dtype import data_type_registry
assert data_type_registry.contents["bfloat16"].__name__ == {name!r}
assert not [finder for finder in sys.meta_path if type(finder).__module__.startswith("hsloader")]
assert zarr.__spec__.loader is zarr.__loader__ and type(zarr.__loader__).__name__ == "SourceFileLoader"
"""

ORDERS = {
    "hsloader first": "import sys, hsloader\nassert 'zarr' not in sys.modules\nimport zarr",
    "zarr first": "import sys, zarr, hsloader",
    "a submodule of zarr": "import sys, hsloader\nimport zarr.storage, zarr",
    "asked whether zarr exists": (
        "import sys, hsloader, importlib.util\nassert importlib.util.find_spec('zarr')\nimport zarr"
    ),
    "hsloader twice": (
        "import sys, hsloader\nfor name in [*sys.modules]:\n    if name.startswith('hsloader'): del sys.modules[name]\n"
        "import hsloader, zarr\nsys.meta_path[:] = [f for f in sys.meta_path if 'hsloader' not in type(f).__module__]"
    ),
}


def run(code: str) -> str:
    """Run ``code`` in a fresh Python at the repository's root; what it wrote."""
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("order", ORDERS)
def test_the_type_is_registered_in_any_order_of_imports(order: str) -> None:
    run(ORDERS[order] + CHECK.format(name="BFloat16Bits"))


def test_another_holder_of_the_name_stays() -> None:
    holder = "import sys, zarr\nfrom zarr.dtype import UInt16, data_type_registry\nclass Native(UInt16): pass\n"
    hold = "data_type_registry.register('bfloat16', Native)\nimport hsloader\n"
    entry = "from hsloader.store.bfloat16 import BFloat16Bits\nassert BFloat16Bits is Native\n"
    run(holder + hold + entry + CHECK.format(name="Native"))


def test_a_zarr_that_differs_can_still_be_imported(tmp_path: Path) -> None:
    (tmp_path / "zarr.py").write_text("fine = True\n", "utf-8")
    code = f"import sys, hsloader\nsys.path.insert(0, {str(tmp_path)!r})\nimport zarr\nassert zarr.fine"
    assert "registering the type failed" in run(code)


def test_the_entry_point_names_the_class() -> None:
    text = (Path(__file__).resolve().parents[2] / "pyproject.toml").read_text("utf-8")
    assert '[project.entry-points."zarr.data_type"]\nbfloat16 = "hsloader.store.bfloat16:BFloat16Bits"' in text
    entry = EntryPoint("bfloat16", "hsloader.store.bfloat16:BFloat16Bits", "zarr.data_type")
    assert entry.load() is BFloat16Bits
    register()
    assert zarr.dtype.data_type_registry.contents["bfloat16"] is BFloat16Bits


@pytest.mark.parametrize(
    ("bits", "json"),
    [
        (0x0000, 0.0),
        (0x3F80, 1.0),
        (0xC049, -3.140625),
        (0x0001, 2.0**-133),
        (0x7FC0, "NaN"),
        (0x7FC1, "0x7fc1"),
        (0xFFFF, "0xffff"),
        (0x7F81, "0x7f81"),
        (0x7F80, "Infinity"),
        (0xFF80, "-Infinity"),
    ],
)
def test_fill_values_go_to_json_and_back(bits: int, json: object) -> None:
    data_type = BFloat16Bits()
    assert data_type.to_json_scalar(np.uint16(bits), zarr_format=3) == json
    assert data_type.from_json_scalar(json, zarr_format=3) == bits


def test_negative_zero_keeps_its_sign() -> None:
    data_type = BFloat16Bits()
    assert math.copysign(1, data_type.to_json_scalar(0x8000, zarr_format=3)) == -1
    assert data_type.from_json_scalar(-0.0, zarr_format=3) == 0x8000


def test_numbers_are_rounded_to_the_nearest_and_bits_are_taken() -> None:
    cast = BFloat16Bits().cast_scalar
    assert cast(np.uint16(0x7FC1)) == cast(0x7FC1) == 0x7FC1
    assert cast(1.0) == cast(np.float32(1.0)) == 0x3F80
    assert cast(1 + 2**-8) == 0x3F80  # a tie, to even
    assert cast(1 + 3 * 2**-8) == 0x3F82
    assert cast(3.4e38) == cast(1e300) == 0x7F80
    assert cast(math.nan) == 0x7FC0
    with pytest.raises(TypeError):
        cast("1.0")
    for wrong in ("0x7fc", "nan", True, None, "0x12345"):
        with pytest.raises(TypeError):
            BFloat16Bits().from_json_scalar(wrong, zarr_format=3)


def test_uint16_arrays_stay_uint16_and_v2_has_no_bfloat16(tmp_path: Path) -> None:
    assert hsloader.store.bfloat16.__doc__
    array = zarr.create_array(tmp_path / "plain", shape=(4,), dtype="uint16")
    assert array.metadata.to_dict()["data_type"] == "uint16"
    with pytest.raises(ValueError, match="v2 has no bfloat16"):
        BFloat16Bits().to_json(2)


def test_a_bfloat16_array_goes_through_zarr(tmp_path: Path) -> None:
    bits = np.array([0x8000, 0x7FC1, 0xFFFF, 0x0001, 0x7F80, 0], "<u2")
    array = zarr.create_array(tmp_path / "a", shape=(6,), chunks=(3,), dtype=BFloat16Bits(), fill_value=0)
    array[:] = bits
    again = zarr.open_array(tmp_path / "a")
    assert again.metadata.to_dict()["data_type"] == "bfloat16"
    assert again.dtype == np.dtype("<u2")
    assert np.asarray(again[:]).tobytes() == bits.tobytes()
