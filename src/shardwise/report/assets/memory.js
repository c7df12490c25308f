// Memory over time of the chosen rank, a stacked area for each run on the same scales.

const MEMORY_HEIGHT = 270;

function memoryScale(parts) {
  const top = Math.max(...parts.map((part) => part.memory.peak), 1);
  const limits = parts.map((part) => part.capacity).filter((limit) => limit !== null && limit < 2.5 * top);
  const ends = parts.flatMap((part) => [part.memory.times.at(-1), part.seconds]);
  return { bytes: Math.max(top, ...limits) * 1.06, seconds: Math.max(...ends, 1e-9) };
}

// The index of the last point at or before a time.
function atTime(memory, time) {
  let low = 0;
  let high = memory.times.length - 1;
  while (low < high) {
    const middle = Math.ceil((low + high) / 2);
    if (memory.times[middle] <= time) low = middle;
    else high = middle - 1;
  }
  return low;
}

const totalAt = (memory, k) => memory.series.reduce((sum, [, values]) => sum + values[k], 0) * memory.unit;
const rounded = (text) => text.replace(/\.0+(?= )/, "");

// Each area reaches down to zero, and the next is drawn over it: so no seams show between them.
function memoryAreas(memory, x, y) {
  const base = memory.times.map(() => 0);
  const areas = memory.series.map(([name, values]) => {
    const points = memory.times.map((time, k) => {
      base[k] += values[k];
      const high = y(base[k] * memory.unit).toFixed(1);
      return `${x(time).toFixed(1)},${high} ${x(memory.times[k + 1] ?? time).toFixed(1)},${high}`;
    });
    const ends = `${x(memory.times.at(-1)).toFixed(1)},${y(0)} ${x(memory.times[0]).toFixed(1)},${y(0)}`;
    return drawn("polygon", { points: `${points.join(" ")} ${ends}`, fill: category(name) });
  });
  return areas.reverse();
}

function memoryAxes(scale, room, x, y) {
  const bytes = roundSteps(0, scale.bytes, 4, byteUnit(scale.bytes)).map((value) => drawn("g", { class: "tick" },
    drawn("line", { x1: room.left, x2: room.right, y1: y(value), y2: y(value) }),
    drawn("text", { x: room.left - 8, y: y(value) + 4, "text-anchor": "end" }, value ? rounded(bytesText(value)) : "0")));
  const times = roundSteps(0, scale.seconds, Math.max(2, room.right / 140)).map((time) => {
    const anchor = time === 0 ? "start" : x(time) > room.right - 24 ? "end" : "middle";
    const at = { x: x(time), y: room.bottom + 17, "text-anchor": anchor };
    return drawn("text", at, time ? rounded(secondsText(time)) : "0");
  });
  return [...bytes, ...times];
}

function memoryLimit(part, scale, room, y) {
  if (part.capacity === null) return [];
  const label = `capacity ${bytesText(part.capacity)}`;
  const start = room.left + 6;
  if (part.capacity > scale.bytes) return [drawn("text", { x: start, y: room.top + 10, class: "limit" }, `${label}, above`)];
  const at = y(part.capacity);
  return [drawn("line", { x1: room.left, x2: room.right, y1: at, y2: at, class: "limit" }),
    drawn("text", { x: start, y: at - 5, class: "limit" }, label)];
}

// Labels of marks on the first of two lines where they have room.
function memoryMarks(memory, x, room) {
  const until = [0, 0];
  return memory.marks.map(([time, text]) => {
    const at = x(time);
    const wide = text.length * 6.6;
    const before = at + 4 + wide > room.right;
    const start = before ? at - 4 - wide : at + 4;
    const line = start >= until[0] || start < until[1] ? 0 : 1;
    until[line] = start + wide + 8;
    const label = { x: at + (before ? -4 : 4), y: 12 + 15 * line, "text-anchor": before ? "end" : "start" };
    return drawn("g", { class: "mark" },
      drawn("line", { x1: at, x2: at, y1: 16 + 15 * line, y2: room.bottom }), drawn("text", label, text));
  });
}

function memoryPeak(memory, room, x, y) {
  const [left, top] = [x(memory.peakTime), y(memory.peak)];
  const before = left > room.right - 126;
  const at = { x: left + (before ? -8 : 8), y: top - 7, class: "peak", "text-anchor": before ? "end" : "start" };
  return [drawn("circle", { cx: left, cy: top, r: 4, class: "peak" }), drawn("text", at, `peak ${bytesText(memory.peak)}`)];
}

function memoryChart(run, part, scale) {
  const { memory } = part;
  const room = { left: 62, right: 0, top: 36, bottom: MEMORY_HEIGHT - 24 };
  const upright = (kind) => drawn("line", { class: kind, y1: room.top - 8, y2: room.bottom, visibility: "hidden" });
  const [cursor, echo] = [upright("cursor"), upright("echo")];
  const svg = drawn("svg", { height: MEMORY_HEIGHT, "aria-hidden": "true" });
  const legend = element("dl", { class: "legend" });
  const frame = element("div", {
    class: "chart memory", tabindex: 0, role: "slider",
    "aria-label": `Memory over time, ${run.name}, rank ${choice.rank}. Arrow keys move in time, P goes to the peak.`,
    "aria-valuemin": 0, "aria-valuemax": memory.times.length - 1,
    "aria-valuenow": memory.peakAt, "aria-valuetext": `peak, ${bytesText(memory.peak)}`,
  }, svg);
  let x = (time) => time;
  let at = memory.peakAt;

  function place(line, time) {
    line.setAttribute("visibility", time === null || time > scale.seconds ? "hidden" : "visible");
    for (const end of ["x1", "x2"]) line.setAttribute(end, x(time));
  }
  const readings = (k) =>
    memory.series.map(([name, values]) => [name, values[k] * memory.unit, category(name)]).reverse();
  function showLegend(k, title) {
    const row = (name, value, ...before) =>
      element("div", { class: before.length ? null : "sum" }, element("dt", {}, before, name), element("dd", {}, bytesText(value)));
    legend.replaceChildren(row(title, totalAt(memory, k)),
      ...readings(k).map(([name, value, colour]) => row(name, value, swatch(colour))));
  }
  function point(k) {
    at = k;
    const time = memory.times[k];
    const rows = readings(k).filter(([, value]) => value > 0);
    const title = `${bytesText(totalAt(memory, k))} at ${secondsText(time)}`;
    const box = frame.getBoundingClientRect();
    moment.point(time);
    place(cursor, time);
    tip.show(box.left + x(time), box.top + 30, title, rows.map(([name, value, colour]) => [name, bytesText(value), colour]));
    showLegend(k, `At ${secondsText(time)}`);
    frame.setAttribute("aria-valuenow", k);
    frame.setAttribute("aria-valuetext", `${title}: ${rows.map(([name, value]) => `${name} ${bytesText(value)}`).join(", ")}`);
  }
  function rest() {
    tip.hide();
    moment.point(null);
    place(cursor, null);
    at = memory.peakAt;
    showLegend(at, `At the peak, ${secondsText(memory.peakTime)}`);
  }
  function draw(width) {
    room.right = width - 4;
    x = (time) => room.left + (time / scale.seconds) * (room.right - room.left);
    const y = (bytes) => room.bottom - (bytes / scale.bytes) * (room.bottom - room.top);
    svg.setAttribute("viewBox", `0 0 ${width} ${MEMORY_HEIGHT}`);
    svg.setAttribute("width", width);
    svg.replaceChildren(...memoryAxes(scale, room, x, y), ...memoryAreas(memory, x, y), ...memoryMarks(memory, x, room),
      ...memoryLimit(part, scale, room, y), ...memoryPeak(memory, room, x, y), echo, cursor);
  }

  moment.shown.push((time) => place(echo, time));
  onPoint(frame, (event) => {
    const across = event.clientX - frame.getBoundingClientRect().left - room.left;
    point(atTime(memory, (across / (room.right - room.left)) * scale.seconds));
  });
  onLeave(frame, rest);
  frame.addEventListener("keydown", (event) => {
    const last = memory.times.length - 1;
    const far = Math.max(1, Math.round(last / 50));
    const next = {
      ArrowLeft: at - 1, ArrowRight: at + 1, ArrowDown: at - far, ArrowUp: at + far, PageDown: at - far, PageUp: at + far,
      Home: 0, End: last, p: memory.peakAt, P: memory.peakAt,
    }[event.key];
    if (next === undefined) return;
    event.preventDefault();
    point(Math.max(0, Math.min(last, next)));
  });
  showLegend(at, `At the peak, ${secondsText(memory.peakTime)}`);
  onWidth(frame, draw);
  const peak = `${bytesText(memory.peak)} at the peak, ${secondsText(memory.peakTime)} into the step.`;
  const of = `${report.runs.length > 1 ? `${run.name}, ` : ""}rank ${choice.rank}`;
  return element("figure", {}, element("figcaption", {}, capital(`${of}: ${peak}`)),
    element("div", { class: "beside" }, frame, legend));
}
