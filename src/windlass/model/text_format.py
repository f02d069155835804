"""Numbers as short texts, for commands and reports."""


def duration(seconds: float | None) -> str | None:
    """Format as 0.4 s, 12 s, 3 min, 5 h or 2 d."""
    if seconds is None:
        return None
    if seconds < 10:
        return f"{max(seconds, 0.0):.1f} s"
    for limit, unit, unit_s in ((120, "s", 1), (7_200, "min", 60), (172_800, "h", 3_600)):
        if seconds < limit:
            return f"{seconds / unit_s:.0f} {unit}"
    return f"{seconds / 86_400:.0f} d"
