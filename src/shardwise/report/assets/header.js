// The title, the verdict, the main numbers, and the peak of each group of ranks.

function runSums(run) {
  const counts = run.parts.map((part) => rankCount(part.ranks));
  const sum = (field) => run.parts.reduce((total, part, k) => total + part[field] * counts[k], 0);
  const seconds = Math.max(0, ...run.parts.map((part) => part.seconds));
  const ranks = counts.reduce((a, b) => a + b, 0) || 1;
  const peaks = run.parts.map((part) => part.peak).filter((peak) => peak !== null);
  const peak = peaks.length ? Math.max(...peaks) : null;
  return { name: run.name, seconds, ranks, peak, flops: sum("flops"), sent: sum("sent") };
}

function misfit(over) {
  const worst = over.reduce((a, b) => (free(b) < free(a) ? b : a));
  const which = ranksText(joinedRuns(over.flatMap((part) => part.ranks)));
  const [peak, more, capacity] = [worst.peak, -free(worst), worst.capacity].map(bytesText);
  return ` on ${which}: ${peak} at the peak are ${more} more than the ${capacity} of ${worst.device}.`;
}

function verdict(run) {
  const known = run.parts.filter((part) => free(part) !== null);
  if (!known.length) return null;
  const over = known.filter((part) => free(part) < 0);
  if (over.length) {
    const answer = element("b", {}, capital(runLabel(run) + "does not fit"));
    return element("p", { class: "verdict bad" }, answer, misfit(over));
  }
  const share = (part) => free(part) / part.capacity;
  const tight = known.reduce((a, b) => (share(b) < share(a) ? b : a));
  const left = `: ${bytesText(free(tight))} (${percentText(share(tight))}) stay free on the fullest ${tight.device}.`;
  const rest = known.length < run.parts.length ? " The capacity of some devices is not known." : "";
  return element("p", { class: "verdict good" }, element("b", {}, capital(runLabel(run) + "fits")), left + rest);
}

// One number of all runs, null where it is not known; of two, with the difference.
function tile(title, runs, number, show, note) {
  const several = runs.length > 1;
  const text = (run) => (number(run) === null ? "–" : show(number(run)));
  const values = runs.map((run) => element("p", { class: several ? "value half" : "value" }, text(run),
    several && element("small", {}, " " + run.name)));
  const comparable = several && number(runs[0]) && number(runs[1]) !== null;
  const change = comparable ? number(runs[1]) / number(runs[0]) - 1 : null;
  const notes = [change === null ? "" : change === 0 ? "no difference" : changeText(change), note];
  return element("div", { class: "tile" }, element("h3", {}, title), values,
    element("p", { class: "note" }, notes.filter(Boolean).join(" · ")));
}

function tiles() {
  const runs = report.runs.map(runSums);
  const [main] = runs;
  const rate = (run) => (run.flops ? run.flops / (run.seconds || 1) / run.ranks : null);
  const each = runs.some((run) => run.ranks !== main.ranks);  // a trace is of one rank, an estimate of all
  const all = main.ranks > 1 ? `by all ranks; ${bytesText(main.sent / main.ranks)} each` : "by this rank";
  return element("div", { class: "tiles" },
    main.peak !== null && tile("Peak memory", runs, (run) => run.peak, bytesText, "of the fullest rank"),
    tile("Step", runs, (run) => run.seconds, secondsText, "of the slowest rank"),
    main.flops > 0 && tile("Compute", runs, rate, (value) => flopsText(value) + "/s", "per rank"),
    tile("Sent", runs, (run) => (each ? run.sent / run.ranks : run.sent), bytesText, each ? "per rank" : all));
}

function groupPeak(part, top) {
  const over = free(part) !== null && free(part) < 0;
  const known = part.capacity !== null;
  return element("li", {}, element("button", { type: "button", onclick: () => choose(part.ranks[0][0]) },
    element("span", { class: "who" }, ranksText(part.ranks, 2)),
    element("span", { class: "track" }, bar(part.peak / top, over ? "var(--bad)" : "var(--c0)"),
      known && element("i", { class: "limit", style: `left:${(part.capacity / top) * 100}%` })),
    element("span", { class: over ? "what bad" : "what" }, element(over ? "b" : "span", {}, bytesText(part.peak)),
      known && element("small", {}, ` of ${bytesText(part.capacity)}`))));
}

// The fullest groups, as bars beside their capacity.
function groupPeaks() {
  const run = report.runs.at(-1);
  const known = run.parts.filter((part) => part.peak !== null);
  if (known.length < 2) return null;
  const top = Math.max(...known.map((part) => Math.max(part.peak, part.capacity || 0)), 1);
  const shown = [...known].sort((a, b) => b.peak - a.peak).slice(0, 8);
  const rest = known.length - shown.length;
  const title = report.runs.length > 1 ? `Peak by group of ranks, ${run.name}` : "Peak by group of ranks";
  return element("div", { class: "peaks" }, element("h3", {}, title),
    element("ul", { class: "groups", "aria-label": title }, shown.map((part) => groupPeak(part, top))),
    rest > 0 && element("p", { class: "quiet" }, `and ${plural(rest, "group")} with lower peaks`));
}

function showHeader() {
  const devices = new Map();
  for (const part of report.runs[0]?.parts || []) {
    devices.set(part.device, (devices.get(part.device) || 0) + rankCount(part.ranks));
  }
  const about = [...devices].map(([device, count]) => `${countText(count)} × ${device}`);
  if (report.runs.length) about.push(report.runs.map((run) => run.name).join(" and "));
  const titles = element("div", {}, element("h1", {}, report.title), element("p", { class: "quiet" }, about.join(" · ")));
  const top = document.getElementById("top");
  fill(top, {}, [element("div", { class: "titles" }, titles, themeButton()), report.runs.map(verdict)]);
  if (report.runs.length) fill(top, {}, [tiles(), groupPeaks()]);
}
