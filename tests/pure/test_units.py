from __future__ import annotations

import pytest

from outcore.errors import BadSize
from outcore.units import GIB, format_bytes, format_seconds, parse_bytes


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("16GiB", 16 * GIB), ("16 GB", 16 * 10**9), ("0.5GiB", GIB // 2), (" 900 MiB ", 900 * 1024**2), (7, 7)],
)
def test_sizes_are_read(text: int | str, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize(
    "text", ["lots", "-1", "", "16 gibberish", "0", 0, -5, "1e3 GiB", "120%", "x%", 1.5, None, True]
)
def test_what_is_no_size_is_refused_in_one_sentence(text: object) -> None:
    with pytest.raises(BadSize) as caught:
        parse_bytes(text, of_bytes=100)  # type: ignore[arg-type]
    assert "write a size" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_share_needs_a_whole() -> None:
    assert parse_bytes("80%", of_bytes=1000) == 800
    with pytest.raises(BadSize):
        parse_bytes("80%")


def test_printed_quantities() -> None:
    assert format_bytes(1536) == "1.50 KiB"
    assert format_bytes(-1536) == "-1.50 KiB"
    assert format_seconds(0.0123) == "12.3 ms"
