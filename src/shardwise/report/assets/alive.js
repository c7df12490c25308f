// The memory section: the charts, and what is alive at the peak.

function aliveTable(run, { memory }) {
  const top = Math.max(...memory.alive.map((row) => row[3]), 1);
  const kind = (row) => words(row[0]);
  const title = report.runs.length > 1 ? `Alive at the peak, ${run.name}` : "Alive at the peak";
  const table = makeTable({
    caption: title, rows: memory.alive, sort: 4, most: 8, search: "Search a module, line or category", columns: [
      {
        title: "Module", number: false, value: (row) => moduleName(words(row[1])), class: "name",
        show: (row) => breakable(moduleName(words(row[1]))),
      },
      { title: "Category", number: false, value: kind, show: (row) => [swatch(category(kind(row))), kind(row)] },
      { title: "Line", number: false, value: (row) => words(row[2]), class: "name wide" },
      { title: "Tensors", value: (row) => row[4], show: (row) => countText(row[4]), class: "wide" },
      {
        title: "Bytes", value: (row) => row[3],
        show: (row) => [bar(row[3] / top, category(kind(row))), bytesText(row[3])],
      },
    ],
  });
  const [left, bytes] = memory.aliveRest;
  const note = `Not shown: ${countText(left)} smaller, ${bytesText(bytes)} together.`;
  const rest = left > 0 && element("p", { class: "quiet" }, note);
  return element("div", { class: "alive" }, element("h3", {}, title), table.node, rest);
}

function withoutDetails(run) {
  const ranks = run.parts.filter((part) => part.detailed).map((part) => part.ranks[0][0]).join(", ");
  const text = `${runLabel(run)}of rank ${choice.rank}, the page has only the sums. Ranks with details: ${ranks}.`;
  return element("p", { class: "quiet" }, capital(text));
}

function showMemory() {
  if (!report.runs.some((run) => run.parts.some((part) => part.memory?.times.length))) return;
  const place = element("div");
  section("memory", "Memory", "What is in memory during the step, by category.", place);
  choice.changed.push(() => {
    const found = report.runs.map((run) => [run, partOf(run)]).filter(([, part]) => part && part.peak !== null);
    const drawable = found.filter(([, part]) => part.memory?.times.length);
    const scale = drawable.length && memoryScale(drawable.map(([, part]) => part));
    const tables = drawable.filter(([, part]) => part.memory.alive.length).map((pair) => aliveTable(...pair));
    place.replaceChildren(
      ...found.map(([run, part]) => (part.memory?.times.length ? memoryChart(run, part, scale) : withoutDetails(run))),
      element("div", { class: "columns" }, tables));
  });
}
