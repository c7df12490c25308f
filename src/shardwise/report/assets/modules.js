// The modules that cost most on the chosen rank.

function moduleColumns(rows) {
  const top = (place) => Math.max(...rows.map((row) => row[place]), 1e-12);
  const barred = (place, colour, show) => {
    const most = top(place);
    return (row) => (row[place] ? [bar(row[place] / most, colour), show(row[place])] : "–");
  };
  return [
    {
      title: "Module", number: false, value: (row) => moduleName(words(row[0])), class: "name",
      show: (row) => breakable(moduleName(words(row[0]))),
    },
    { title: "Kind", number: false, value: (row) => words(row[1]), class: "wide" },
    { title: "Time", value: (row) => row[2], show: barred(2, "var(--compute)", secondsText) },
    { title: "Compute", value: (row) => row[3], show: (row) => (row[3] ? flopsText(row[3]) : "–"), class: "wide" },
    {
      title: "Rate", value: (row) => (row[2] ? row[3] / row[2] : 0), class: "wide",
      show: (row) => (row[3] ? rateText(row[3], row[2]) : "–"),
    },
    { title: "Sent", value: (row) => row[4], show: barred(4, "var(--transfer)", bytesText) },
    { title: "Activations", value: (row) => row[5], show: barred(5, "var(--c3)", bytesText), class: "wide" },
  ];
}

function showModules() {
  const runs = report.runs.filter((run) => run.parts.some((part) => part.modules?.length));
  if (!runs.length) return;
  const place = element("div");
  let run = runs.at(-1);

  function draw() {
    const part = partOf(run);
    const rows = part?.modules || [];
    const caption = `Modules, ${run.name}`;
    const table = makeTable({ caption, columns: moduleColumns(rows), rows, sort: 2, search: "Search a module" });
    const left = part?.detailed ? part.moduleCount - rows.length : 0;
    place.replaceChildren(rows.length ? table.node : withoutDetails(run));
    if (left > 0) place.append(element("p", { class: "quiet" }, `${plural(left, "faster module")} not shown.`));
  }
  const option = (each) => element("label", {}, element("input", {
    type: "radio", name: "module-run", checked: each === run, onchange: () => { run = each; draw(); },
  }), each.name);
  const switches = runs.length > 1
    && element("fieldset", { class: "switch" }, element("legend", { class: "unseen" }, "Run"), runs.map(option));
  const lead = "Time, bytes sent by this rank, and activations kept for the backward.";
  section("modules", "Modules", lead, switches, place);
  choice.changed.push(draw);
}
