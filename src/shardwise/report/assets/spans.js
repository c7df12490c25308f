// The drawing of the timeline: lanes of all runs, the time axis, spans with their names.

const LANES = ["compute", "transfer", "wait"];
const ROW = 22;
const LANE_LEFT = 74;
const MOST_ROWS = 3;

// Spans of a lane in rows, so that none overlaps another in its row; the last row takes whatever is left.
function spanRows(spans) {
  const ends = [];
  return spans.map((span) => {
    let row = ends.findIndex((end) => end <= span.start + 1e-12);
    if (row < 0) row = Math.min(ends.length, MOST_ROWS - 1);
    ends[row] = Math.max(ends[row] || 0, span.end);
    return { ...span, row };
  });
}

function namedSpan([lane, name, module, start, end, bytes, flops, line, merged]) {
  return { lane: words(lane), name: words(name), module: words(module), start, end, bytes, flops, line: words(line), merged };
}

function timelineLanes(runs) {
  const lanes = [];
  let top = 30;
  for (const [run, part] of runs) {
    const spans = part.spans.map(namedSpan);
    if (runs.length > 1) top += 20;
    for (const name of new Set([...LANES, ...spans.map((span) => span.lane)])) {
      const own = spanRows(spans.filter((span) => span.lane === name));
      if (!own.length) continue;
      const height = (1 + Math.max(...own.map((span) => span.row))) * ROW;
      const title = runs.length > 1 && lanes.at(-1)?.run !== run ? run.name : "";
      lanes.push({ run, name, title, top, height, spans: own, marks: part.memory?.marks || [] });
      top += height + 6;
    }
    top += 4;
  }
  return { lanes, height: top + 4 };
}

// Neighbours with different names differ in shade.
const shade = (name) => [...name].reduce((sum, letter) => (sum * 31 + letter.charCodeAt(0)) % 997, 7) % 4;

function drawTimes(context, view, x, width, height) {
  const steps = roundSteps(view.begin, view.end, Math.max(2, width / 150));
  const [unit, per] = view.end >= 2 ? ["s", 1] : view.end >= 2e-3 ? ["ms", 1e3] : ["µs", 1e6];
  const step = steps.length > 1 ? steps[1] - steps[0] : view.end - view.begin;
  const digits = Math.min(9, Math.max(0, Math.ceil(-Math.log10(step * per) - 1e-9)));
  for (const time of steps) {
    context.globalAlpha = 1;
    context.fillRect(x(time), 20, 1, 4);
    context.textAlign = x(time) + 40 > width ? "right" : x(time) < LANE_LEFT + 20 ? "left" : "center";
    context.fillText(`${(time * per).toFixed(digits)} ${unit}`, Math.min(x(time), width - 2), 14);
    context.globalAlpha = 0.5;
    context.fillRect(x(time), 24, 0.5, height);
  }
  context.globalAlpha = 1;
  context.textAlign = "left";
}

function drawSpans(context, lane, colours, view, x, width, chosen) {
  for (const span of lane.spans) {
    if (span.end < view.begin || span.start > view.end) continue;
    const from = Math.max(x(span.start), LANE_LEFT - 2);
    const length = Math.min(x(span.end), width + 2) - from;
    const wide = Math.max(length > 3 ? length - 0.75 : length, 0.75);
    const top = lane.top + span.row * ROW;
    context.globalAlpha = 1 - 0.08 * shade(span.name + span.module.split(".").at(-1));
    context.fillStyle = colours.lane;
    context.fillRect(from, top, wide, ROW - 2);
    context.globalAlpha = 1;
    if (span === chosen) {
      context.strokeStyle = colours.ink;
      context.lineWidth = 2;
      context.strokeRect(from + 1, top + 1, Math.max(wide - 2, 1), ROW - 4);
    }
    if (wide <= 46) continue;
    const label = span.module ? `${span.name} · ${span.module}` : span.name;
    const most = Math.max(Math.floor((wide - 10) / 6.2), 2);
    context.fillStyle = colours.label;
    context.fillText(label.length > most ? label.slice(0, most - 1) + "…" : label, from + 5, top + 14);
  }
}

// Draws the view, and gives the way from times to pixels and back.
function drawTimeline(canvas, lanes, width, height, view, chosen) {
  const context = sized(canvas, width, height);
  const [ink, soft, label] = ["--ink", "--soft", "--on-lane"].map((name) => resolved(`var(${name})`));
  const scale = (width - LANE_LEFT - 4) / (view.end - view.begin);
  const x = (time) => LANE_LEFT + (time - view.begin) * scale;
  context.font = "12px system-ui, sans-serif";
  context.fillStyle = soft;
  drawTimes(context, view, x, width, height);
  for (const lane of lanes) context.fillText(lane.name, 0, lane.top + 15, LANE_LEFT - 8);
  context.fillStyle = ink;
  context.font = "600 12px system-ui, sans-serif";
  for (const lane of lanes) context.fillText(lane.title, 0, lane.top - 6);
  context.font = "12px system-ui, sans-serif";
  context.beginPath();
  context.rect(LANE_LEFT, 24, width - LANE_LEFT, height);
  context.clip();
  for (const lane of lanes) {
    drawSpans(context, lane, { lane: resolved(laneColour(lane.name)), ink, label }, view, x, width, chosen);
    context.fillStyle = soft;
    for (const [time] of lane.marks) {
      for (let y = lane.top - 3; y < lane.top + lane.height + 3; y += 6) context.fillRect(x(time), y, 1, 3);
    }
  }
  return { x, time: (place) => view.begin + (place - LANE_LEFT) / scale };
}
