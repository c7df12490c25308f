// The chosen rank: a list of groups of alike ranks, a field for a number, and whoever wants to know.

const world = Math.max(0, ...report.runs.map((run) => run.world));
const choice = { rank: 0, changed: [] };

// The name of a run, where there are several.
const runLabel = (run) => (report.runs.length > 1 ? run.name + ": " : "");
const holds = (part, rank) => part.ranks.some(([first, last]) => first <= rank && rank <= last);
const partOf = (run, rank = choice.rank) => run.parts.find((part) => holds(part, rank));
const free = (part) => (part.capacity === null || part.peak === null ? null : part.capacity - part.peak);

function fullest(run) {
  const share = (part) => (part.peak || 0) / (part.capacity || 1);
  return run.parts.reduce((best, part) => (share(part) > share(best) ? part : best), run.parts[0]);
}

// The rank to begin with: one that all runs have, for a trace has only one; of those, the fullest of the first run.
function firstRank() {
  const size = (run) => run.parts.reduce((sum, part) => sum + rankCount(part.ranks), 0);
  const known = report.runs.filter((run) => run.parts.length);
  const fewest = known.reduce((best, run) => (size(run) < size(best) ? run : best), known[0]);
  return fullest(fewest).ranks[0][0];
}

// The moment that is pointed at in one chart, shown in all charts of time.
const moment = {
  shown: [],
  point(time) {
    this.shown.forEach((show) => show(time));
  },
};

function choose(rank) {
  choice.rank = rank;
  moment.shown = [];
  choice.changed.forEach((tell) => tell());
  const part = partOf(report.runs[0]);
  const peak = part && part.peak !== null ? `: peak ${bytesText(part.peak)}` : "";
  if (part) say(`Rank ${rank}, of ${ranksText(part.ranks)}${peak}`);
}

function rankPicker() {
  const run = report.runs.reduce((most, each) => (each.parts.length > most.parts.length ? each : most));
  const groups = element("select", {
    id: "group", "aria-label": "Group of alike ranks", onchange: () => choose(Number(groups.value)),
  });
  for (const part of run.parts) {
    const peak = part.peak === null ? "" : ` · ${bytesText(part.peak)}`;
    groups.append(element("option", { value: part.ranks[0][0] }, ranksText(part.ranks) + peak));
  }
  const field = element("input", {
    id: "rank", type: "number", min: 0, max: world - 1, step: 1, inputmode: "numeric",
    "aria-label": `Rank, 0 to ${world - 1}`,
    oninput: () => {
      const rank = Number(field.value);
      const known = field.value !== "" && report.runs.some((each) => partOf(each, rank));
      field.setAttribute("aria-invalid", String(!known));
      if (known) choose(rank);
    },
    onblur: () => show(),
  });
  function show() {
    const part = partOf(run);
    if (part) groups.value = part.ranks[0][0];
    if (document.activeElement !== field) {
      field.value = choice.rank;
      field.setAttribute("aria-invalid", "false");
    }
  }
  choice.changed.push(show);
  const label = element("label", { for: "rank" }, "Rank");
  return element("div", { class: "picker" }, label, field, run.parts.length > 1 && groups);
}
