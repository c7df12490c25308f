// Bytes between ranks as a heat map: rows send, columns receive; many ranks in blocks.

function heat(part) {
  const stops = isDark() ? [[30, 36, 46], [38, 84, 138], [86, 166, 210], [236, 240, 180]] : [[238, 243, 248], [150, 194, 222], [52, 120, 180], [14, 46, 98]];
  const place = Math.min(Math.max(part, 0), 1) * (stops.length - 1);
  const low = Math.min(Math.floor(place), stops.length - 2);
  return `rgb(${stops[low].map((value, k) => Math.round(value + (stops[low + 1][k] - value) * (place - low))).join(",")})`;
}

function trafficChart(run) {
  const { block, cells } = run.traffic;
  const count = Math.ceil(run.world / block);
  const bytes = new Map(cells.map(([source, target, value]) => [source * count + target, value]));
  const values = cells.map((cell) => cell[2]);
  const most = Math.max(...values);
  const least = Math.min(...values);
  const log = most / least > 50;
  const strength = (value) => (log ? 0.15 + (0.85 * Math.log(value / least)) / Math.log(most / least) : 0.15 + (0.85 * value) / most);
  const names = (place) => (block === 1 ? `rank ${place}` : ranksText([[place * block, Math.min((place + 1) * block, run.world) - 1]]));
  const canvas = element("canvas");
  const frame = element("div", {
    class: "chart traffic", tabindex: 0, role: "application", "aria-roledescription": "heat map",
    "aria-label": `Bytes between ranks, ${run.name}. Rows send, columns receive. Arrow keys go from cell to cell.`,
  }, canvas);
  const at = { row: 0, column: 0, shown: false };
  const margin = 40;
  let size = 0;
  let side = 0;

  function draw() {
    if (!side) return;
    const context = sized(canvas, side, side);
    size = (side - margin) / count;
    const gap = size > 6 ? 1 : 0;
    context.fillStyle = resolved("var(--panel)");
    context.fillRect(margin, margin, side - margin, side - margin);
    for (let row = 0; row < count; row += 1) {
      for (let column = 0; column < count; column += 1) {
        const value = bytes.get(row * count + column);
        if (value === undefined) continue;
        context.fillStyle = heat(strength(value));
        context.fillRect(margin + column * size, margin + row * size, size - gap, size - gap);
      }
    }
    context.fillStyle = resolved("var(--soft)");
    context.font = "12px system-ui, sans-serif";
    const every = Math.ceil(count / 8);
    for (let k = 0; k < count; k += every) {
      context.textAlign = "center";
      context.fillText(String(k * block), margin + (k + 0.5) * size, margin - 6);
      context.textAlign = "right";
      context.fillText(String(k * block), margin - 6, margin + (k + 0.5) * size + 4);
    }
    context.textAlign = "left";
    context.fillText("to", margin + 2, 12);
    context.fillText("from", 0, margin - 6);
    if (at.shown) {
      context.strokeStyle = resolved("var(--ink)");
      context.lineWidth = 2;
      context.strokeRect(margin + at.column * size, margin + at.row * size, size, size);
    }
  }
  function point(row, column, x, y, spoken) {
    Object.assign(at, { row, column, shown: true });
    draw();
    const value = bytes.get(row * count + column) || 0;
    tip.show(x, y, bytesText(value), [["from", names(row)], ["to", names(column)]]);
    if (spoken) say(`${bytesText(value)} from ${names(row)} to ${names(column)}`);
  }
  function rest() {
    at.shown = false;
    tip.hide();
    draw();
  }
  frame.addEventListener("pointermove", (event) => {
    const box = frame.getBoundingClientRect();
    const column = Math.floor((event.clientX - box.left - margin) / size);
    const row = Math.floor((event.clientY - box.top - margin) / size);
    if (row < 0 || column < 0 || row >= count || column >= count) return rest();
    return point(row, column, event.clientX, event.clientY);
  });
  frame.addEventListener("pointerleave", rest);
  frame.addEventListener("blur", rest);
  frame.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    if (!by) return;
    event.preventDefault();
    const inside = (value) => Math.max(0, Math.min(count - 1, value));
    const [row, column] = at.shown ? [inside(at.row + by[0]), inside(at.column + by[1])] : [at.row, at.column];
    const box = frame.getBoundingClientRect();
    point(row, column, box.left + margin + (column + 1) * size, box.top + margin + (row + 1) * size, true);
  });
  onWidth(frame, (width) => { side = width; draw(); });
  redraws.push(draw);

  const sums = Array.from({ length: count }, () => [0, 0]);
  cells.forEach(([source, target, value]) => { sums[source][0] += value; sums[target][1] += value; });
  const table = makeTable({
    caption: `Bytes sent and received, ${run.name}`, rows: sums.map((pair, place) => [place, ...pair]), sort: 1, most: 8, columns: [
      { title: block === 1 ? "Rank" : "Ranks", number: false, value: (row) => row[0], show: (row) => names(row[0]).replace(/^ranks? /, "") },
      { title: "Sent", value: (row) => row[1], show: (row) => bytesText(row[1]) },
      { title: "Received", value: (row) => row[2], show: (row) => bytesText(row[2]) },
    ],
  });
  const legend = element("div", { class: "ramp" }, element("span", {}, bytesText(log ? least : 0)), element("i", { style: `background:linear-gradient(90deg,${[0.15, 0.4, 0.7, 1].map(heat).join(",")})`, "aria-hidden": "true" }), element("span", {}, bytesText(most)), log && element("span", { class: "quiet" }, "logarithmic"));
  redraws.push(() => { legend.children[1].style.background = `linear-gradient(90deg,${[0.15, 0.4, 0.7, 1].map(heat).join(",")})`; });
  const between = block === 1 ? "one rank to another" : `one block of ${block} ranks to another`;
  const caption = `${report.runs.length > 1 ? run.name + ": " : ""}${bytesText(values.reduce((a, b) => a + b, 0))} between ${countText(run.world)} ranks; at most ${bytesText(most)} from ${between}.`;
  return element("figure", {}, element("figcaption", {}, caption), element("div", { class: "beside map" }, element("div", {}, frame, legend), table.node));
}

function showTraffic() {
  const runs = report.runs.filter((run) => run.traffic.cells.length);
  if (!runs.length) return;
  section("traffic", "Traffic", "Bytes that ranks send to each other in one step.", runs.map(trafficChart));
}
