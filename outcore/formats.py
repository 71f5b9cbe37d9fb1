"""Formats quantities. This file is below `errors`, whose messages contain sizes; other code uses `outcore.units`."""

from __future__ import annotations


def two_digits(number: float) -> str:
    """Formats a number that is known to two digits only: `two_digits(1234.5) == "1200"`."""
    return f"{float(f'{number:.2g}'):.0f}" if 10 <= number < float("inf") else f"{number:.2g}"


def format_bytes(num_bytes: float) -> str:
    """Formats bytes in binary units: `format_bytes(1536) == "1.50 KiB"`."""
    sign, size = ("-" if num_bytes < 0 else ""), abs(float(num_bytes))
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{sign}{int(size)} B" if unit == "B" else f"{sign}{size:.2f} {unit}"
        size /= 1024
    return f"{sign}{size:.2f} TiB"


def format_seconds(seconds: float) -> str:
    """Formats a time: `format_seconds(0.0123) == "12.3 ms"`."""
    if abs(seconds) >= 100:
        return f"{seconds:.0f} s"
    if abs(seconds) >= 1:
        return f"{seconds:.2f} s"
    if abs(seconds) >= 1e-3:
        return f"{seconds * 1e3:.1f} ms"
    return f"{seconds * 1e6:.0f} µs"


def format_rate(bytes_per_s: float) -> str:
    """Formats a rate: `format_rate(55.4e9) == "55.4 GB/s"`. Rates are decimal, as in vendors' data and in papers."""
    if bytes_per_s >= 1e9:
        return f"{bytes_per_s / 1e9:.1f} GB/s"
    return f"{bytes_per_s / 1e6:.0f} MB/s"
