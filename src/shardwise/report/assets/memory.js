// Memory over time of the chosen rank, a stacked area for each run on the same scales; what is alive at the peak.

function memoryScale(parts) {
  const peaks = parts.map((part) => part.memory.peak);
  const top = Math.max(...peaks, 1);
  const limits = parts.map((part) => part.capacity).filter((limit) => limit !== null && limit < 2.5 * top);
  const ends = parts.flatMap((part) => [part.memory.times.at(-1) || 0, part.seconds]);
  return { bytes: Math.max(top, ...limits) * 1.06, seconds: Math.max(...ends, 1e-9) };
}

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

// Each area reaches down to zero, and the next is drawn over it: so no seams show between them.
function memoryAreas(memory, x, y) {
  const base = memory.times.map(() => 0);
  return memory.series.map(([name, values]) => {
    const points = [];
    memory.times.forEach((time, k) => {
      const next = k + 1 < memory.times.length ? memory.times[k + 1] : time;
      base[k] += values[k];
      const high = y(base[k] * memory.unit).toFixed(1);
      points.push(`${x(time).toFixed(1)},${high} ${x(next).toFixed(1)},${high}`);
    });
    const ends = `${x(memory.times.at(-1)).toFixed(1)},${y(0)} ${x(memory.times[0]).toFixed(1)},${y(0)}`;
    return drawn("polygon", { points: `${points.join(" ")} ${ends}`, fill: category(name) });
  }).reverse();
}

function memoryLimit(part, scale, room, y) {
  if (part.capacity === null) return [];
  if (part.capacity > scale.bytes) return [drawn("text", { x: room.left + 6, y: room.top + 10, class: "limit" }, `capacity ${bytesText(part.capacity)}, above`)];
  const at = y(part.capacity);
  return [drawn("line", { x1: room.left, x2: room.right, y1: at, y2: at, class: "limit" }),
    drawn("text", { x: room.left + 6, y: at - 5, class: "limit" }, `capacity ${bytesText(part.capacity)}`)];
}

// Labels of marks on the first of two lines where they have room.
function memoryMarks(memory, x, room) {
  const until = [0, 0];
  return memory.marks.map(([time, text]) => {
    const wide = text.length * 6.6;
    const before = x(time) + 4 + wide > room.right;
    const start = before ? x(time) - 4 - wide : x(time) + 4;
    const line = start >= until[0] || start < until[1] ? 0 : 1;
    until[line] = start + wide + 8;
    const label = { x: x(time) + (before ? -4 : 4), y: 12 + 15 * line, "text-anchor": before ? "end" : "start" };
    return drawn("g", { class: "mark" }, drawn("line", { x1: x(time), x2: x(time), y1: 16 + 15 * line, y2: room.bottom }), drawn("text", label, text));
  });
}

function memoryChart(run, part, scale) {
  const memory = part.memory;
  const height = 270;
  const room = { left: 62, right: 0, top: 36, bottom: height - 24 };
  const svg = drawn("svg", { height, "aria-hidden": "true" });
  const cursor = drawn("line", { class: "cursor", y1: room.top - 8, y2: room.bottom, visibility: "hidden" });
  const legend = element("dl", { class: "legend" });
  const frame = element("div", {
    class: "chart memory", tabindex: 0, role: "slider", "aria-label": `Memory over time, ${run.name}, rank ${choice.rank}. Arrow keys move in time, P goes to the peak.`,
    "aria-valuemin": 0, "aria-valuemax": memory.times.length - 1,
  }, svg);
  let x = (time) => time;
  let at = memory.peakAt;

  function readings(k) {
    return memory.series.map(([name, values]) => [name, values[k] * memory.unit, category(name)]).reverse();
  }
  function showLegend(k, title) {
    legend.replaceChildren(element("div", { class: "sum" }, element("dt", {}, title), element("dd", {}, bytesText(totalAt(memory, k)))),
      ...readings(k).map(([name, value, colour]) => element("div", {}, element("dt", {}, swatch(colour), name), element("dd", {}, bytesText(value)))));
  }
  function point(k, spoken) {
    at = k;
    const place = x(memory.times[k]);
    cursor.setAttribute("x1", place);
    cursor.setAttribute("x2", place);
    cursor.setAttribute("visibility", "visible");
    const rows = readings(k).filter(([, value]) => value > 0).map(([name, value, colour]) => [name, bytesText(value), colour]);
    const title = `${bytesText(totalAt(memory, k))} at ${secondsText(memory.times[k])}`;
    const box = frame.getBoundingClientRect();
    tip.show(box.left + place, box.top + 30, title, rows);
    showLegend(k, `At ${secondsText(memory.times[k])}`);
    frame.setAttribute("aria-valuenow", k);
    frame.setAttribute("aria-valuetext", title + ": " + rows.map(([name, value]) => `${name} ${value}`).join(", "));
    if (spoken) say(title);
  }
  function rest() {
    tip.hide();
    at = memory.peakAt;
    cursor.setAttribute("visibility", "hidden");
    showLegend(at, `At the peak, ${secondsText(memory.peakTime)}`);
  }
  function draw(width) {
    room.right = width - 4;
    x = (time) => room.left + (time / scale.seconds) * (room.right - room.left);
    const y = (bytes) => room.bottom - (bytes / scale.bytes) * (room.bottom - room.top);
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.setAttribute("width", width);
    const top = [x(memory.peakTime), y(memory.peak)];
    const side = top[0] > width - 130 ? ["end", -8] : ["start", 8];
    svg.replaceChildren(
      ...roundSteps(0, scale.bytes, 4, byteUnit(scale.bytes)).map((value) => drawn("g", { class: "tick" },
        drawn("line", { x1: room.left, x2: room.right, y1: y(value), y2: y(value) }),
        drawn("text", { x: room.left - 8, y: y(value) + 4, "text-anchor": "end" }, value ? bytesText(value).replace(/\.0+(?= )/, "") : "0"))),
      ...roundSteps(0, scale.seconds, Math.max(2, width / 140)).map((time) => drawn("text", { x: x(time), y: room.bottom + 17, class: "tick", "text-anchor": time ? "middle" : "start" }, time ? secondsText(time).replace(/\.0+(?= )/, "") : "0")),
      drawn("g", { class: "areas" }, memoryAreas(memory, x, y)),
      ...memoryMarks(memory, x, room),
      ...memoryLimit(part, scale, room, y),
      drawn("circle", { cx: top[0], cy: top[1], r: 4, class: "peak" }),
      drawn("text", { x: top[0] + side[1], y: top[1] - 7, class: "peak", "text-anchor": side[0] }, `peak ${bytesText(memory.peak)}`),
      cursor);
  }

  frame.addEventListener("pointermove", (event) => {
    const box = frame.getBoundingClientRect();
    const time = ((event.clientX - box.left - room.left) / (room.right - room.left)) * scale.seconds;
    point(atTime(memory, time));
  });
  frame.addEventListener("pointerleave", rest);
  frame.addEventListener("blur", rest);
  frame.addEventListener("keydown", (event) => {
    const last = memory.times.length - 1;
    const far = Math.max(1, Math.round(last / 50));
    const moves = { ArrowLeft: at - 1, ArrowRight: at + 1, PageUp: at + far, PageDown: at - far, ArrowUp: at + far, ArrowDown: at - far, Home: 0, End: last, p: memory.peakAt, P: memory.peakAt };
    if (!(event.key in moves)) return;
    event.preventDefault();
    point(Math.max(0, Math.min(last, moves[event.key])), true);
  });
  showLegend(at, `At the peak, ${secondsText(memory.peakTime)}`);
  onWidth(frame, draw);
  const caption = `${report.runs.length > 1 ? run.name + ", " : ""}rank ${choice.rank}: ${bytesText(memory.peak)} at the peak, ${secondsText(memory.peakTime)} into the step.`;
  return element("figure", {}, element("figcaption", {}, caption), element("div", { class: "beside" }, frame, legend));
}

function aliveTable(run, part) {
  const memory = part.memory;
  const top = Math.max(...memory.alive.map((row) => row[3]), 1);
  const table = makeTable({
    caption: `Alive at the peak, ${run.name}`, rows: memory.alive, sort: 4, most: 8, search: "Search a module, line or category", columns: [
      { title: "Module", number: false, value: (row) => moduleName(words(row[1])), class: "name" },
      { title: "Category", number: false, value: (row) => words(row[0]), show: (row) => [swatch(category(words(row[0]))), words(row[0])] },
      { title: "Line", number: false, value: (row) => words(row[2]), class: "name wide" },
      { title: "Tensors", value: (row) => row[4], show: (row) => countText(row[4]), class: "wide" },
      { title: "Bytes", value: (row) => row[3], show: (row) => [bar(row[3] / top, category(words(row[0]))), bytesText(row[3])] },
    ],
  });
  const [left, bytes] = memory.aliveRest;
  return element("div", { class: "alive" }, element("h3", {}, "Alive at the peak" + (report.runs.length > 1 ? `, ${run.name}` : "")),
    table.node, left > 0 && element("p", { class: "quiet" }, `${plural(left, "smaller entry").replace("entrys", "entries")} with ${bytesText(bytes)} are left out.`));
}

const withoutDetails = (run) =>
  element("p", { class: "quiet" }, `${run.name}: of rank ${choice.rank} the page has only the sums. Ranks with details: ` +
    run.parts.filter((part) => part.detailed).map((part) => part.ranks[0][0]).join(", ") + ".");

function showMemory() {
  if (!report.runs.some((run) => run.parts.some((part) => part.memory))) return;
  const place = element("div");
  section("memory", "Memory", "What is in memory during the step, by category.", place);
  const draw = () => {
    const found = report.runs.map((run) => [run, partOf(run)]).filter(([, part]) => part && part.peak !== null);
    const drawable = found.filter(([, part]) => part.memory && part.memory.times.length);
    const scale = drawable.length && memoryScale(drawable.map(([, part]) => part));
    place.replaceChildren(
      ...found.map(([run, part]) => (part.memory && part.memory.times.length ? memoryChart(run, part, scale) : withoutDetails(run))),
      element("div", { class: "columns" }, drawable.filter(([, part]) => part.memory.alive.length).map(([run, part]) => aliveTable(run, part))));
  };
  choice.changed.push(draw);
}
