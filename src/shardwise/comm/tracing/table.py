"""Collectives as tables of at most 100 columns: in the order of the calls, by module, and in all.

The first table is in the order of the calls, which says what follows what; of many calls, it shows the costliest. The
second one has the costliest modules first. What is left out is summed up in a line.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shardwise.comm.tracing.events import Collective

MOST = 32  # lines of a table
WIDTH = 100  # columns
LEAST = 8  # letters of a place or a module, however little room there is
Row = tuple[list[str], Sequence[Collective]]  # the first cells, and what the figures are of


def show(events: Sequence[Collective], title: str, *, times: bool = True) -> str:
    """All of it. Without times, what all ranks send and the least that they could are shown instead."""
    figures = ["sent", "received", *(("time", "waited") if times else ("by all", "at least"))]
    head = f"{title}: {summarize_trace(events, times=times)}"
    if not events:
        return _wrapped(head)
    cost = _waited if times else _sent
    rows: list[Row] = [([str(e.number), e.op, e.place or "–", e.module or "–", e.kind], [e]) for e in events]
    parts = [_wrapped(head), ""]
    parts += _table(["#", "op", "place", "module", "kind", *figures], _costliest(rows, cost), times, 5, 1)
    by_module: dict[str, list[Collective]] = {}
    for one in events:
        by_module.setdefault(one.module, []).append(one)
    if set(by_module) != {""}:
        counts = slice(2 if any(one.is_meeting for one in events) else 1)
        rows = [([name or "outside of modules", *_counts(those)[counts]], those) for name, those in by_module.items()]
        rows.sort(key=lambda row: -cost(row[1]))
        shown = _costliest(rows, cost, totals=slice(1, None))
        shown.append((["in all", *_counts(events)[counts]], events))
        parts += ["", *_table(["module", *("collectives", "meetings")[counts], *figures], shown, times, 1, 0)]
    return "\n".join(parts)


def summarize_trace(events: Sequence[Collective], *, times: bool) -> str:
    """In one line."""
    if not events:
        return "nothing was sent" if times else "nothing would be sent"
    collectives, meetings = _counts(events)
    if times:
        sent, received, third, fourth = _figures(events, times)
        met = f" and {_counted(meetings, 'meeting')}" if meetings != "0" else ""
        counts = _counted(collectives, "collective") + met
        return f"{counts}, {sent} sent, {received} received, {third} under way, the host waited {fourth}"
    data = [one for one in events if not one.is_meeting]
    said = _counted(collectives, "collective")
    if data:
        sent, received, third, fourth = _figures(data, times)
        said += f", this rank sends {sent} and receives {received}, all ranks send {third}"
        said += f", at least {fourth} for these layouts"
    if meetings != "0":
        small = _figures([one for one in events if one.is_meeting], times)[0]
        said += f"; {_counted(meetings, 'meeting')} to agree, for which this rank sends {small} more"
    return said


def _wrapped(text: str) -> str:
    """Lines that fit, broken after commas and semicolons."""
    lines = [""]
    for part in text.replace(", ", ",\0").replace("; ", ";\0").split("\0"):
        if lines[-1] and len(lines[-1]) + 1 + len(part) > WIDTH:
            lines.append("  " + part)
        else:
            lines[-1] += " " * bool(lines[-1]) + part
    return "\n".join(lines)


def _counted(number: str, what: str) -> str:
    return f"{number} {what}" if number == "1" else f"{number} {what}s"


def _counts(events: Sequence[Collective]) -> list[str]:
    meetings = sum(one.is_meeting for one in events)
    return [str(len(events) - meetings), str(meetings)]


def _sent(events: Sequence[Collective]) -> float:
    return float(sum(one.in_all or one.sent for one in events))


def _waited(events: Sequence[Collective]) -> float:
    return sum(one.waited or one.seconds for one in events)


def _figures(events: Sequence[Collective], times: bool) -> list[str]:
    sides = [_bytes(sum(one.sent for one in events)), _bytes(sum(one.received for one in events))]
    if times:
        return [*sides, _millis(sum(one.seconds for one in events)), _millis(sum(one.waited for one in events))]
    if not any(one.known for one in events):
        return ["?"] * 4
    more = "" if all(one.known for one in events) else " + ?"
    everybody = more if all(one.in_all is not None or not one.known for one in events) else " + ?"
    totals = [_bytes(sum(one.in_all or 0 for one in events)), _bytes(sum(one.least or 0 for one in events))]
    return [*(side + more for side in sides), *(total + everybody for total in totals)]


def _costliest(
    rows: Sequence[Row], cost: Callable[[Sequence[Collective]], float], totals: slice = slice(0)
) -> list[Row]:
    """At most so many rows, in their order: the costliest, and a last one that sums up the others."""
    if len(rows) <= MOST + 4:
        return list(rows)
    kept = set(sorted(range(len(rows)), key=lambda k: -cost(rows[k][1]))[:MOST])
    rest = [one for k, row in enumerate(rows) if k not in kept for one in row[1]]
    cells = [""] * len(rows[0][0])
    cells[max(0, len(cells) - 4)] = f"{len(rows) - MOST:,} more"
    cells[totals] = _counts(rest)[: len(cells[totals])]
    return [*(row for k, row in enumerate(rows) if k in kept), (cells, rest)]


def _table(heads: list[str], rows: Sequence[Row], times: bool, words: int, wide: int) -> list[str]:
    """Columns as wide as need be, a line under the heads, numbers to the right.

    The first ``words`` columns are text, but for a number in front. Where the table does not fit, the columns from
    ``wide`` to the one before the last of them are shortened, longest first.
    """
    lines = [heads, *([*cells, *_figures(events, times)] for cells, events in rows)]
    widths = [max(len(line[k]) for line in lines) for k in range(len(heads))]
    elastic = range(wide, max(words - 1, wide + 1))
    if heads[0] == "#" and sum(widths) + 2 * len(widths) > WIDTH:  # a place is a line, and then a function
        lines = [[*line[:2], line[2].partition(" in ")[0], *line[3:]] for line in lines]
        widths[2] = max(len(line[2]) for line in lines)
    while sum(widths) + 2 * len(widths) > WIDTH and max(widths[k] for k in elastic) > LEAST:
        widths[max(elastic, key=lambda k: widths[k])] -= 1
    texts = range(1 if heads[0] == "#" else 0, words)
    made = []
    for line in lines:
        cells = [
            _short(text, width, ends=heads[k] != "op").ljust(width) if k in texts else text.rjust(width)
            for k, (text, width) in enumerate(zip(line, widths, strict=True))
        ]
        made.append("  " + "  ".join(cells).rstrip())
    made.insert(1, "  " + "  ".join("─" * width for width in widths))
    return made


def _short(text: str, width: int, *, ends: bool) -> str:
    """The text, or its end, which says more of a place or a module than its beginning does; or its beginning."""
    if len(text) <= width:
        return text
    return "…" + text[len(text) - width + 1 :] if ends else text[: width - 1] + "…"


def _bytes(count: int) -> str:
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1000 or unit == "GiB":
            break
        size /= 1024
    return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.1f} {unit}"


def _millis(seconds: float) -> str:
    return f"{seconds * 1e3:,.2f} ms"
