// The modules that cost most on the chosen rank.

function moduleColumns(rows) {
  const top = (place) => Math.max(...rows.map((row) => row[place]), 1e-12);
  const tops = [2, 4, 5].map(top);
  return [
    { title: "Module", number: false, value: (row) => moduleName(words(row[0])), class: "name" },
    { title: "Kind", number: false, value: (row) => words(row[1]), class: "wide" },
    { title: "Time", value: (row) => row[2], show: (row) => [bar(row[2] / tops[0], "var(--compute)"), secondsText(row[2])] },
    { title: "Compute", value: (row) => row[3], show: (row) => (row[3] ? flopsText(row[3]) : "–"), class: "wide" },
    { title: "Rate", value: (row) => (row[2] ? row[3] / row[2] : 0), show: (row) => (row[3] ? rateText(row[3], row[2]) : "–"), class: "wide" },
    { title: "Sent", value: (row) => row[4], show: (row) => (row[4] ? [bar(row[4] / tops[1], "var(--transfer)"), bytesText(row[4])] : "–") },
    { title: "Activations", value: (row) => row[5], show: (row) => (row[5] ? [bar(row[5] / tops[2], "var(--c3)"), bytesText(row[5])] : "–"), class: "wide" },
  ];
}

function showModules() {
  const runs = report.runs.filter((run) => run.parts.some((part) => part.modules?.length));
  if (!runs.length) return;
  const place = element("div");
  let run = runs[runs.length - 1];
  const draw = () => {
    const part = partOf(run);
    const rows = part?.modules || [];
    const table = makeTable({ caption: `Modules, ${run.name}`, columns: moduleColumns(rows), rows, sort: 2, search: "Search a module" });
    const left = part?.detailed ? part.moduleCount - rows.length : 0;
    place.replaceChildren(rows.length ? table.node : withoutDetails(run), left > 0 ? element("p", { class: "quiet" }, `${plural(left, "faster module")} are left out.`) : "");
  };
  const switches = runs.length > 1 && element("fieldset", { class: "switch" }, element("legend", { class: "unseen" }, "Run"), runs.map((each) =>
    element("label", {}, element("input", { type: "radio", name: "module-run", checked: each === run, onchange: () => { run = each; draw(); } }), each.name)));
  section("modules", "Modules", "Time, bytes sent by this rank, and activations kept for the backward.", switches, place);
  choice.changed.push(draw);
}
