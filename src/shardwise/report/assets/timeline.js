// The timeline of the chosen rank: lanes of all runs on one time axis.
// Wheel with Ctrl or on the focused chart zooms, drag pans; arrow keys go from span to span.

function spanFacts(span, run) {
  const seconds = span.end - span.start;
  return [
    ["module", moduleName(span.module)], ["time", secondsText(seconds)], ["starts at", secondsText(span.start)],
    span.bytes > 0 && ["sent", `${bytesText(span.bytes)}, ${bytesText(span.bytes / Math.max(seconds, 1e-12))}/s`],
    span.flops > 0 && ["compute", `${flopsText(span.flops)}, ${rateText(span.flops, seconds)}`],
    span.line && ["line", span.line], span.merged > 1 && ["merged", plural(span.merged, "span")],
    report.runs.length > 1 && ["run", run.name],
  ];
}

function timelineChart(runs) {
  const { lanes, height } = timelineLanes(runs);
  const whole = Math.max(...runs.map(([, part]) => Math.max(part.seconds, 1e-9, ...part.spans.map((span) => span[4]))));
  const view = { begin: 0, end: whole };
  const canvas = element("canvas", { class: "spans" });
  const frame = element("div", {
    class: "chart timeline", tabindex: 0, role: "application", "aria-roledescription": "timeline",
    "aria-label": "Timeline of the step. Left and right go from span to span, up and down from lane to lane, "
      + "plus and minus zoom, Shift with left and right pans, Home shows the whole step.",
  }, canvas);
  const echo = element("i", { class: "echo", hidden: true, style: "top:24px" });
  frame.append(echo);
  const chosen = { lane: 0, span: null };
  let drawing = null;
  let width = 0;
  const draw = () => { if (width) drawing = drawTimeline(canvas, lanes, width, height, view, chosen.span); };

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
    tip.show(x, y, `${span.name} · ${span.lane}`, spanFacts(span, run));
  }
  function spanAt(x, y) {
    const row = lanes.find((each) => y >= each.top && y < each.top + each.height);
    if (!row || x < LANE_LEFT) return null;
    const time = drawing.time(x);
    const slack = (drawing.time(1) - drawing.time(0)) * 1.5;
    const own = row.spans.filter((span) => span.row === Math.floor((y - row.top) / ROW));
    const within = (more) => own.find((each) => each.start - more <= time && time < each.end + more);
    const span = within(0) || within(slack);
    return span ? [span, row] : null;
  }
  function select(place, span) {
    chosen.lane = place;
    chosen.span = span;
    const half = (view.end - view.begin) / 2;
    const center = (span.start + span.end) / 2;
    if (span.start < view.begin || span.end > view.end) look(center - half, center + half);
    else draw();
    const box = frame.getBoundingClientRect();
    const middle = Math.min(Math.max(drawing.x(center), LANE_LEFT), width);
    details(span, lanes[place].run, box.left + middle, box.top + lanes[place].top + ROW);
    const facts = spanFacts(span, lanes[place].run).filter(Boolean).map(([name, value]) => `${name} ${value}`);
    say([span.name, span.lane, ...facts].join(", "));
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

  moment.shown.push((time) => {
    echo.hidden = time === null || time < view.begin || time > view.end;
    if (!echo.hidden) echo.style.left = drawing.x(time) + "px";
  });

  let held = null;
  frame.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    held = { x: event.clientX, begin: view.begin, end: view.end };
    frame.setPointerCapture(event.pointerId);
  });
  frame.addEventListener("pointerup", () => { held = null; });
  frame.addEventListener("pointercancel", () => { held = null; });
  onPoint(frame, (event) => {
    if (held && event.clientX !== held.x) {
      tip.hide();
      const moved = ((held.x - event.clientX) / (width - LANE_LEFT)) * (held.end - held.begin);
      return look(held.begin + moved, held.end + moved);
    }
    const box = frame.getBoundingClientRect();
    const found = spanAt(event.clientX - box.left, event.clientY - box.top);
    moment.point(event.clientX - box.left >= LANE_LEFT ? drawing.time(event.clientX - box.left) : null);
    if (found) return details(found[0], found[1].run, event.clientX, event.clientY);
    return tip.hide();
  });
  onLeave(frame, () => {
    tip.hide();
    moment.point(null);
  });
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
  const tools = element("div", { class: "tools" },
    button("−", "Zoom out", () => zoom(2)), button("+", "Zoom in", () => zoom(0.5)),
    button("‹", "Earlier", () => pan(-0.4)), button("›", "Later", () => pan(0.4)),
    button("Whole step", "Show the whole step", () => look(0, whole)),
    element("span", { class: "quiet" }, "Drag to pan. Ctrl and wheel zoom; after a click the wheel alone does."));
  return { node: element("div", {}, tools, frame), draw };
}

function laneSentence([run, part]) {
  const order = ([one], [other]) => LANES.indexOf(one) - LANES.indexOf(other);
  const share = (seconds) => percentText(seconds / (part.seconds || 1));
  const busy = Object.entries(part.busy).sort(order)
    .map(([name, seconds]) => `${name} ${secondsText(seconds)} (${share(seconds)})`);
  const [all, shown] = [part.spanCount, part.spans.length];
  const merged = all > shown ? ` ${countText(all)} spans are drawn as ${countText(shown)}.` : "";
  const text = `${runLabel(run)}${busy.join(", ")} of ${secondsText(part.seconds)}.${merged}`;
  return element("figcaption", {}, capital(text));
}

function showTimeline() {
  if (!report.runs.some((run) => run.parts.some((part) => part.spans?.length))) return;
  const place = element("figure");
  section("timeline", "Timeline", "What the chosen rank computes, sends and waits for.", place);
  let chart = null;
  choice.changed.push(() => {
    const found = report.runs.map((run) => [run, partOf(run)]).filter(([, part]) => part);
    const drawable = found.filter(([, part]) => part.spans?.length);
    const missing = found.filter(([, part]) => !part.detailed).map(([run]) => withoutDetails(run));
    chart = drawable.length ? timelineChart(drawable) : null;
    place.replaceChildren(...drawable.map(laneSentence), ...missing, chart ? chart.node : "");
  });
  redraws.push(() => chart && chart.draw());
}
