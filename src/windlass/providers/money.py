"""Conversion of published prices to micros (millionths of the currency unit)."""

from decimal import ROUND_HALF_UP, Decimal, InvalidOperation


def to_micros(amount: object) -> int:
    """Rounded half up. Raises ValueError."""
    try:
        return int((Decimal(str(amount)) * 1_000_000).quantize(Decimal(1), rounding=ROUND_HALF_UP))
    except InvalidOperation as error:
        raise ValueError(f"{amount!r} is not a price") from error
