// Bytes between ranks as a heat map: rows send, columns receive; many ranks in blocks.

const HEAT = {
  light: [[238, 243, 248], [150, 194, 222], [52, 120, 180], [14, 46, 98]],
  dark: [[30, 36, 46], [38, 84, 138], [86, 166, 210], [236, 240, 180]],
};
const FAINTEST = 0.15; // of the scale: any byte at all can be seen
const MARGIN = 40;

function heat(part) {
  const stops = isDark() ? HEAT.dark : HEAT.light;
  const place = Math.min(Math.max(part, 0), 1) * (stops.length - 1);
  const low = Math.min(Math.floor(place), stops.length - 2);
  const mixed = stops[low].map((value, k) => Math.round(value + (stops[low + 1][k] - value) * (place - low)));
  return `rgb(${mixed.join(",")})`;
}

// Logarithmic where amounts differ much.
function heatScale(values) {
  const [least, most] = [Math.min(...values), Math.max(...values)];
  const log = most / least > 50;
  const part = (value) => (log ? Math.log(value / least) / Math.log(most / least) : value / most);
  return { most, least: log ? least : 0, log, strength: (value) => FAINTEST + (1 - FAINTEST) * part(value) };
}

function heatMap(run, blockName, scale, count) {
  const { block, cells } = run.traffic;
  const bytes = new Map(cells.map(([source, target, value]) => [source * count + target, value]));
  const canvas = element("canvas");
  const frame = element("div", {
    class: "chart traffic", tabindex: 0, role: "application", "aria-roledescription": "heat map",
    "aria-label": `Bytes between ranks, ${run.name}. Rows send, columns receive. Arrow keys go from cell to cell.`,
  }, canvas);
  const at = { row: 0, column: 0, shown: false };
  let side = 0;
  let size = 0;

  function labels(context) {
    context.fillStyle = resolved("var(--soft)");
    context.font = "12px system-ui, sans-serif";
    for (let k = 0; k < count; k += Math.ceil(count / 8)) {
      context.textAlign = "center";
      context.fillText(String(k * block), MARGIN + (k + 0.5) * size, MARGIN - 6);
      context.textAlign = "right";
      context.fillText(String(k * block), MARGIN - 6, MARGIN + (k + 0.5) * size + 4);
    }
    context.textAlign = "left";
    context.fillText("to", MARGIN + 2, 12);
    context.fillText("from", 0, MARGIN - 6);
  }
  function draw() {
    if (!side) return;
    const context = sized(canvas, side, side);
    size = (side - MARGIN) / count;
    const gap = size > 6 ? 1 : 0;
    context.fillStyle = resolved("var(--panel)");
    context.fillRect(MARGIN, MARGIN, side - MARGIN, side - MARGIN);
    for (const [row, column, value] of cells) {
      context.fillStyle = heat(scale.strength(value));
      context.fillRect(MARGIN + column * size, MARGIN + row * size, size - gap, size - gap);
    }
    labels(context);
    if (!at.shown) return;
    context.strokeStyle = resolved("var(--ink)");
    context.lineWidth = 2;
    context.strokeRect(MARGIN + at.column * size, MARGIN + at.row * size, size, size);
  }
  function point(row, column, x, y) {
    Object.assign(at, { row, column, shown: true });
    draw();
    const amount = bytesText(bytes.get(row * count + column) || 0);
    tip.show(x, y, amount, [["from", blockName(row)], ["to", blockName(column)]]);
    return `${amount} from ${blockName(row)} to ${blockName(column)}`;
  }
  function rest() {
    at.shown = false;
    tip.hide();
    draw();
  }
  onPoint(frame, (event) => {
    const box = frame.getBoundingClientRect();
    const column = Math.floor((event.clientX - box.left - MARGIN) / size);
    const row = Math.floor((event.clientY - box.top - MARGIN) / size);
    if (row < 0 || column < 0 || row >= count || column >= count) rest();
    else point(row, column, event.clientX, event.clientY);
  });
  onLeave(frame, rest);
  frame.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    if (!by) return;
    event.preventDefault();
    const inside = (value) => Math.max(0, Math.min(count - 1, value));
    const [row, column] = at.shown ? [inside(at.row + by[0]), inside(at.column + by[1])] : [at.row, at.column];
    const box = frame.getBoundingClientRect();
    say(point(row, column, box.left + MARGIN + (column + 1) * size, box.top + MARGIN + (row + 1) * size));
  });
  onWidth(frame, (width) => {
    side = width;
    draw();
  });
  redraws.push(draw);
  return frame;
}

function heatLegend(scale) {
  const ramp = element("i", { "aria-hidden": "true" });
  const paint = () => {
    ramp.style.background = `linear-gradient(90deg,${[FAINTEST, 0.4, 0.7, 1].map(heat).join(",")})`;
  };
  paint();
  redraws.push(paint);
  return element("div", { class: "ramp" }, element("span", {}, bytesText(scale.least)), ramp,
    element("span", {}, bytesText(scale.most)), scale.log && element("span", { class: "quiet" }, "logarithmic"));
}

function trafficFigure(run) {
  const { block, cells } = run.traffic;
  const count = Math.ceil(run.world / block);
  const blockName = (place) => ranksText([[place * block, Math.min((place + 1) * block, run.world) - 1]]);
  const scale = heatScale(cells.map((cell) => cell[2]));
  const rows = Array.from({ length: count }, (none, place) => [place, 0, 0]);
  cells.forEach(([source, target, value]) => {
    rows[source][1] += value;
    rows[target][2] += value;
  });
  const name = (row) => blockName(row[0]).replace(/^ranks? /, "");
  const table = makeTable({
    caption: `Bytes sent and received, ${run.name}`, rows, sort: 1, most: 8, columns: [
      { title: block === 1 ? "Rank" : "Ranks", number: false, value: (row) => row[0], show: name },
      { title: "Sent", value: (row) => row[1], show: (row) => bytesText(row[1]) },
      { title: "Received", value: (row) => row[2], show: (row) => bytesText(row[2]) },
    ],
  });
  const total = bytesText(cells.reduce((sum, cell) => sum + cell[2], 0));
  const between = block === 1 ? "one rank to another" : `one block of ${block} ranks to another`;
  const most = `at most ${bytesText(scale.most)} from ${between}`;
  const caption = `${runLabel(run)}${total} between ${plural(run.world, "rank")}; ${most}.`;
  const map = element("div", { style: `flex-basis:${Math.min(520, MARGIN + 60 * count)}px` },
    heatMap(run, blockName, scale, count), heatLegend(scale));
  return element("figure", {}, element("figcaption", {}, caption), element("div", { class: "map" }, map, table.node));
}

function showTraffic() {
  const runs = report.runs.filter((run) => run.traffic.cells.length);
  if (!runs.length) return;
  const figures = element("div", { class: "columns" }, runs.map(trafficFigure));
  section("traffic", "Traffic", "Bytes that ranks send to each other in one step.", figures);
}
