"""Collectives as a table: one by one, by module, and in all. Long lists are shortened in the middle."""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.comm.tracing.events import Collective

MOST = 32  # lines of a list
LONGEST = 40  # letters of a place or a module


def show(events: Sequence[Collective], title: str, *, times: bool = True) -> str:
    """All of it. Without times, what all ranks send and the least that they could are shown instead."""
    figures = ["sent", "received", *(("time", "waited") if times else ("by all", "at least"))]
    lines = [["#", "op", "place", "module", "kind", *figures]]
    for one in events:
        where = [_short(one.place) or "–", _short(one.module) or "–"]
        lines.append([str(one.number), one.op, *where, one.kind, *_figures([one], times)])
    head = f"{title}: {summarize_trace(events, times=times)}"
    if not events:
        return head
    parts = [head, "", *_table(_shortened(lines, "events"), right=(0, 5, 6, 7, 8))]
    by_module: dict[str, list[Collective]] = {}
    for one in events:
        by_module.setdefault(one.module, []).append(one)
    if set(by_module) != {""}:
        counts = slice(2 if any(one.is_meeting for one in events) else 1)
        lines = [["module", *("collectives", "meetings")[counts], *figures]]
        for name, those in by_module.items():
            lines.append([_short(name) or "outside of modules", *_counts(those)[counts], *_figures(those, times)])
        lines = _shortened(lines, "modules")
        lines.append(["in all", *_counts(events)[counts], *_figures(events, times)])
        parts += ["", *_table(lines, right=(1, 2, 3, 4, 5, 6))]
    return "\n".join(parts)


def summarize_trace(events: Sequence[Collective], *, times: bool) -> str:
    """In one line."""
    if not events:
        return "nothing was sent" if times else "nothing would be sent"
    collectives, meetings = _counts(events)
    sent, received, third, fourth = _figures(events, times)
    counts = _counted(collectives, "collective") + (f" and {_counted(meetings, 'meeting')}" if meetings != "0" else "")
    if times:
        return f"{counts}, {sent} sent, {received} received, {third} under way, the host waited {fourth}"
    return f"{counts}, this rank sends {sent} and receives {received}, all ranks send {third}, at least {fourth}"


def _counted(number: str, what: str) -> str:
    return f"{number} {what}" if number == "1" else f"{number} {what}s"


def _counts(events: Sequence[Collective]) -> list[str]:
    meetings = sum(one.is_meeting for one in events)
    return [str(len(events) - meetings), str(meetings)]


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


def _table(lines: list[list[str]], right: tuple[int, ...]) -> list[str]:
    """Columns as wide as need be, a line under the heads, numbers to the right."""
    widths = [max(len(line[k]) for line in lines if len(line) > 1) for k in range(len(lines[0]))]
    made = []
    for line in lines:
        if len(line) == 1:
            made.append(f"  {line[0]}")
            continue
        sides = [str.rjust if k in right else str.ljust for k in range(len(line))]
        cells = [side(text, width) for side, text, width in zip(sides, line, widths, strict=True)]
        made.append("  " + "  ".join(cells).rstrip())
    made.insert(1, "  " + "  ".join("─" * width for width in widths))
    return made


def _shortened(lines: list[list[str]], what: str) -> list[list[str]]:
    """The head and at most so many lines: the first ones and the last ones."""
    if len(lines) - 1 <= MOST + 4:
        return lines
    half = MOST // 2
    return [*lines[: half + 1], [f"… {len(lines) - 1 - 2 * half:,} more {what} …"], *lines[-half:]]


def _short(text: str) -> str:
    return text if len(text) <= LONGEST else "…" + text[1 - LONGEST :]


def _bytes(count: int) -> str:
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1000 or unit == "GiB":
            break
        size /= 1024
    return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.1f} {unit}"


def _millis(seconds: float) -> str:
    return f"{seconds * 1e3:,.2f} ms"
