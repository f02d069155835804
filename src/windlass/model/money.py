"""Money: integer micros of a currency. Decimals are parsed from and printed as text, never as floats."""

from decimal import Decimal, InvalidOperation

MICROS = 1_000_000
_CENTS = 10_000
# Significant digits of amounts below a cent.
_DIGITS = 3


def to_micros(amount: Decimal | str) -> int:
    """Micros of an amount such as "9.20". Raises ValueError if it is not an amount or has more than six decimals."""
    try:
        micros = Decimal(amount) * MICROS
        whole = int(micros)
    except (InvalidOperation, OverflowError, ValueError):
        raise ValueError(f"{amount!r} is not an amount of money") from None
    if whole != micros:
        raise ValueError(f"{amount} has more than six decimals")
    return whole


def amount(micros: int) -> str:
    """The amount as text: 9.20, 1204.00, 0.0123, 0.000012. Small amounts have three significant digits."""
    sign, micros = ("-", -micros) if micros < 0 else ("", micros)
    decimals = 2
    if 0 < micros < _CENTS:
        decimals = min(6, 6 - len(str(micros)) + _DIGITS)
    elif micros < MICROS:
        decimals = 4 if micros % _CENTS else 2
    step = 10 ** (6 - decimals)
    rounded = (micros + step // 2) // step
    whole, part = divmod(rounded, 10**decimals)
    return f"{sign}{whole}.{part:0{decimals}}"


def with_currency(micros: int, currency: str) -> str:
    return f"{currency} {amount(micros)}"
