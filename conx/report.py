"""Text for people: tables and sizes."""

from collections.abc import Sequence

__all__ = ["bytes_text", "table"]


def bytes_text(size: int) -> str:
    """A size with a unit, three or four digits.

    >>> bytes_text(90318300)
    '90.3 MB'
    """
    if size < 1000:
        return f"{size} B"
    value = float(size)
    for unit in ("kB", "MB", "GB", "TB"):
        value /= 1000
        if value < 999.95 or unit == "TB":
            break
    return f"{value:.1f} {unit}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns side by side, the head underlined. Numbers are aligned to the right.

    >>> print(table(["kind", "bytes"], [["raw", "7"], ["planes", "123"]]))
    kind    bytes
    ------  -----
    raw         7
    planes    123
    """
    every = [list(head), *map(list, rows)] if head else [list(row) for row in rows]
    if not every:
        return ""
    widths = [max(len(row[i]) for row in every if i < len(row)) for i in range(max(map(len, every)))]
    right = [
        bool(head) and all(row[i][:1].isdigit() or not row[i] for row in rows) and i > 0 for i in range(len(widths))
    ]
    lines = [
        "  ".join(
            cell.rjust(w) if r else cell.ljust(w) for cell, w, r in zip(row, widths, right, strict=False)
        ).rstrip()
        for row in every
    ]
    if head:
        lines.insert(1, "  ".join("-" * w for w in widths))
    return "\n".join(lines)
