// The timeline of the chosen rank: lanes of all runs on one time axis.
// Wheel with Ctrl or on the focused chart zooms, drag pans; arrow keys go from span to span.

const LANES = ["compute", "transfer", "wait"];
const ROW = 22;

// Spans of a lane in rows, so that none overlaps another in its row; more than three rows are drawn over each other.
function spanRows(spans) {
  const ends = [];
  return spans.map((span) => {
    let row = ends.findIndex((end) => end <= span.start + 1e-12);
    if (row < 0) row = ends.length < 3 ? ends.length : 2;
    ends[row] = Math.max(ends[row] || 0, span.end);
    return { ...span, row };
  });
}

function timelineLanes(runs) {
  let top = 30;
  const lanes = [];
  for (const [run, part] of runs) {
    const spans = part.spans.map(([where, name, module, start, end, bytes, flops, line, count]) => (
      { lane: words(where), name: words(name), module: words(module), start, end, bytes, flops, line: words(line), count }));
    const names = [...LANES, ...new Set(spans.map((span) => span.lane))].filter((name, k, all) => all.indexOf(name) === k);
    if (runs.length > 1) top += 20;
    for (const name of names) {
      const own = spanRows(spans.filter((span) => span.lane === name));
      if (!own.length) continue;
      const height = (1 + Math.max(...own.map((span) => span.row))) * ROW;
      lanes.push({ run, name, top, height, spans: own, marks: part.memory?.marks || [], first: lanes.at(-1)?.run !== run });
      top += height + 6;
    }
    top += 4;
  }
  return { lanes, height: top + 4 };
}

const shade = (name) => [...name].reduce((sum, letter) => (sum * 31 + letter.charCodeAt(0)) % 997, 7) % 4;

function timelineDrawing(canvas, lanes, height) {
  const left = 74;
  return (width, view, chosen) => {
    const context = sized(canvas, width, height);
    const [ink, soft, line] = ["ink", "soft", "line"].map((name) => resolved(`var(--${name})`));
    const scale = (width - left - 4) / (view.end - view.begin);
    const x = (time) => left + (time - view.begin) * scale;
    context.font = "12px system-ui, sans-serif";
    context.fillStyle = soft;
    context.strokeStyle = line;
    const steps = roundSteps(view.begin, view.end, Math.max(2, width / 150));
    const [unit, per] = view.end >= 2 ? ["s", 1] : view.end >= 2e-3 ? ["ms", 1e3] : ["µs", 1e6];
    const digits = steps.length > 1 ? Math.max(0, Math.ceil(-Math.log10((steps[1] - steps[0]) * per) - 1e-9)) : 2;
    for (const time of steps) {
      context.fillRect(x(time), 20, 1, 4);
      context.globalAlpha = 0.5;
      context.fillRect(x(time), 24, 0.5, height);
      context.globalAlpha = 1;
      const label = `${(time * per).toFixed(Math.min(digits, 9))} ${unit}`;
      context.textAlign = x(time) + 40 > width ? "right" : x(time) < left + 20 ? "left" : "center";
      context.fillText(label, Math.min(x(time), width - 2), 14);
    }
    context.textAlign = "left";
    for (const row of lanes) {
      if (row.first && lanes.some((other) => other.run !== row.run)) {
        context.fillStyle = ink;
        context.font = "600 12px system-ui, sans-serif";
        context.fillText(row.run.name, 0, row.top - 6);
        context.font = "12px system-ui, sans-serif";
      }
      context.fillStyle = soft;
      context.fillText(row.name, 0, row.top + 15, left - 8);
    }
    context.save();
    context.beginPath();
    context.rect(left, 24, width - left, height);
    context.clip();
    for (const row of lanes) {
      const colour = resolved(lane(row.name));
      for (const span of row.spans) {
        if (span.end < view.begin || span.start > view.end) continue;
        const from = Math.max(x(span.start), left - 2);
        const wide = Math.max(Math.min(x(span.end), width + 2) - from - (x(span.end) - from > 3 ? 0.75 : 0), 0.75);
        const top = row.top + span.row * ROW;
        context.globalAlpha = 1 - 0.08 * shade(span.name + span.module.split(".").at(-1));
        context.fillStyle = colour;
        context.fillRect(from, top, wide, ROW - 2);
        context.globalAlpha = 1;
        if (span === chosen) {
          context.strokeStyle = ink;
          context.lineWidth = 2;
          context.strokeRect(from + 1, top + 1, Math.max(wide - 2, 1), ROW - 4);
        }
        if (wide > 46) {
          context.fillStyle = resolved("var(--on-lane)");
          const label = span.module ? `${span.name} · ${span.module}` : span.name;
          const most = Math.floor((wide - 10) / 6.2);
          context.fillText(label.length > most ? label.slice(0, Math.max(most - 1, 1)) + "…" : label, from + 5, top + 14);
        }
      }
    }
    context.strokeStyle = soft;
    context.setLineDash([3, 3]);
    for (const row of lanes) {
      for (const [time] of row.marks) {
        context.beginPath();
        context.moveTo(x(time), row.top - 3);
        context.lineTo(x(time), row.top + row.height + 3);
        context.stroke();
      }
    }
    context.restore();
    return { left, time: (place) => view.begin + (place - left) / scale, x };
  };
}

function spanRowsOfTip(span, run) {
  const seconds = span.end - span.start;
  return [
    ["module", moduleName(span.module)], ["time", secondsText(seconds)], ["starts at", secondsText(span.start)],
    span.bytes > 0 && ["sent", `${bytesText(span.bytes)}, ${bytesText(span.bytes / Math.max(seconds, 1e-12))}/s`],
    span.flops > 0 && ["compute", `${flopsText(span.flops)}, ${rateText(span.flops, seconds)}`],
    span.line && ["line", span.line], span.count > 1 && ["merged", plural(span.count, "short span")],
    report.runs.length > 1 && ["run", run.name],
  ];
}

function timelineChart(runs) {
  const { lanes, height } = timelineLanes(runs);
  const whole = Math.max(...runs.map(([, part]) => Math.max(part.seconds, part.spans.at(-1)[4])));
  const view = { begin: 0, end: whole };
  const canvas = element("canvas", { class: "spans" });
  const frame = element("div", {
    class: "chart timeline", tabindex: 0, role: "application", "aria-roledescription": "timeline",
    "aria-label": "Timeline of the step. Left and right go from span to span, up and down from lane to lane, plus and minus zoom, Shift with left and right pans, Home shows the whole step.",
  }, canvas);
  const paint = timelineDrawing(canvas, lanes, height);
  const chosen = { lane: 0, span: null };
  let drawing = null;
  let width = 0;
  const draw = () => { if (width) drawing = paint(width, view, chosen.span); };

  function look(begin, end) {
    const length = Math.min(Math.max(end - begin, whole * 1e-5), whole);
    view.begin = Math.min(Math.max(begin, 0), whole - length);
    view.end = view.begin + length;
    draw();
  }
  function zoom(times, around = (view.begin + view.end) / 2) {
    look(around - (around - view.begin) * times, around + (view.end - around) * times);
  }
  const pan = (part) => look(view.begin + part * (view.end - view.begin), view.end + part * (view.end - view.begin));
  function details(span, run, x, y) {
    tip.show(x, y, `${span.name} · ${span.lane}`, spanRowsOfTip(span, run));
  }
  function spanAt(x, y) {
    const row = lanes.find((each) => y >= each.top && y < each.top + each.height);
    if (!row || x < drawing.left) return null;
    const time = drawing.time(x);
    const slack = (drawing.time(1) - drawing.time(0)) * 1.5;
    const own = row.spans.filter((span) => span.row === Math.floor((y - row.top) / ROW));
    const span = own.find((each) => each.start <= time && time < each.end) || own.find((each) => each.start - slack <= time && time < each.end + slack);
    return span ? [span, row] : null;
  }
  function select(place, span) {
    chosen.lane = place;
    chosen.span = span;
    const length = view.end - view.begin;
    if (span.start < view.begin || span.end > view.end) look((span.start + span.end - length) / 2, (span.start + span.end + length) / 2);
    else draw();
    const box = frame.getBoundingClientRect();
    const middle = Math.min(Math.max(drawing.x((span.start + span.end) / 2), drawing.left), width);
    details(span, lanes[place].run, box.left + middle, box.top + lanes[place].top + ROW);
    say([`${span.name}, ${span.lane}`, ...spanRowsOfTip(span, lanes[place].run).filter(Boolean).map(([name, value]) => `${name} ${value}`)].join(", "));
  }
  function step(lanesBy, spansBy) {
    const place = Math.max(0, Math.min(lanes.length - 1, chosen.lane + (chosen.span ? lanesBy : 0)));
    const spans = lanes[place].spans;
    const time = chosen.span ? chosen.span.start : view.begin;
    let k = spans.indexOf(chosen.span);
    if (k >= 0) k += spansBy;
    else k = spans.findIndex((span) => span.end > time);
    select(place, spans[Math.max(0, Math.min(spans.length - 1, k < 0 ? spans.length - 1 : k))]);
  }

  let held = null;
  frame.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    held = { x: event.clientX, begin: view.begin, end: view.end };
    frame.setPointerCapture(event.pointerId);
  });
  frame.addEventListener("pointerup", () => { held = null; });
  frame.addEventListener("pointercancel", () => { held = null; });
  frame.addEventListener("pointermove", (event) => {
    if (held) {
      tip.hide();
      const moved = ((held.x - event.clientX) / (width - drawing.left)) * (held.end - held.begin);
      return look(held.begin + moved, held.end + moved);
    }
    const box = frame.getBoundingClientRect();
    const found = spanAt(event.clientX - box.left, event.clientY - box.top);
    if (found) return details(found[0], found[1].run, event.clientX, event.clientY);
    return tip.hide();
  });
  frame.addEventListener("pointerleave", () => tip.hide());
  frame.addEventListener("blur", () => tip.hide());
  frame.addEventListener("wheel", (event) => {
    const sideways = event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY);
    if (!sideways && !event.ctrlKey && !event.metaKey && document.activeElement !== frame) return;
    event.preventDefault();
    tip.hide();
    if (sideways) return pan((event.deltaX || event.deltaY) / 1000);
    return zoom(Math.exp(event.deltaY / 400), drawing.time(event.clientX - frame.getBoundingClientRect().left));
  }, { passive: false });
  frame.addEventListener("keydown", (event) => {
    const around = chosen.span ? (chosen.span.start + chosen.span.end) / 2 : undefined;
    const moves = {
      ArrowLeft: () => (event.shiftKey ? pan(-0.2) : step(0, -1)), ArrowRight: () => (event.shiftKey ? pan(0.2) : step(0, 1)),
      ArrowUp: () => step(-1, 0), ArrowDown: () => step(1, 0), "+": () => zoom(0.5, around), "=": () => zoom(0.5, around),
      "-": () => zoom(2, around), Home: () => look(0, whole), 0: () => look(0, whole),
    };
    if (!moves[event.key] || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    moves[event.key]();
  });
  onWidth(frame, (next) => { width = next; draw(); });
  const button = (label, title, act) => element("button", { type: "button", "aria-label": title, title, onclick: act }, label);
  const tools = element("div", { class: "tools" }, button("−", "Zoom out", () => zoom(2)), button("+", "Zoom in", () => zoom(0.5)),
    button("‹", "Earlier", () => pan(-0.4)), button("›", "Later", () => pan(0.4)), button("Whole step", "Show the whole step", () => look(0, whole)),
    element("span", { class: "quiet" }, "Drag to pan. Ctrl and wheel zoom; after a click the wheel alone does."));
  return { node: element("div", {}, tools, frame), draw };
}

function laneWords([run, part]) {
  const busy = Object.entries(part.busy).sort(([a], [b]) => LANES.indexOf(a) - LANES.indexOf(b)).map(([name, seconds]) => `${name} ${secondsText(seconds)} (${percentText(seconds / (part.seconds || 1))})`);
  const merged = part.spanCount > part.spans.length ? ` ${countText(part.spanCount)} spans are drawn as ${countText(part.spans.length)}.` : "";
  return element("figcaption", {}, `${report.runs.length > 1 ? run.name + ": " : ""}${busy.join(", ")} of ${secondsText(part.seconds)}.${merged}`);
}

function showTimeline() {
  if (!report.runs.some((run) => run.parts.some((part) => part.spans?.length))) return;
  const place = element("figure");
  section("timeline", "Timeline", "What the chosen rank computes, sends and waits for.", place);
  let chart = null;
  choice.changed.push(() => {
    const found = report.runs.map((run) => [run, partOf(run)]).filter(([, part]) => part);
    const drawable = found.filter(([, part]) => part.spans?.length);
    chart = drawable.length ? timelineChart(drawable) : null;
    place.replaceChildren(...drawable.map(laneWords), ...found.filter(([, part]) => !part.detailed).map(([run]) => withoutDetails(run)), chart ? chart.node : "");
  });
  redraws.push(() => chart && chart.draw());
}
