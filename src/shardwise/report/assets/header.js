// The title, the verdict, the main numbers, and the peak of each group of ranks.

function runSums(run) {
  const counts = run.parts.map((part) => rankCount(part.ranks));
  const sum = (field) => run.parts.reduce((total, part, k) => total + part[field] * counts[k], 0);
  const seconds = Math.max(0, ...run.parts.map((part) => part.seconds));
  const ranks = counts.reduce((a, b) => a + b, 0) || 1;
  const peaks = run.parts.map((part) => part.peak).filter((peak) => peak !== null);
  return { seconds, ranks, peak: peaks.length ? Math.max(...peaks) : null, flops: sum("flops"), sent: sum("sent") };
}

function verdict(run) {
  const known = run.parts.filter((part) => free(part) !== null);
  const named = report.runs.length > 1 ? run.name + ": " : "";
  if (!known.length) return null;
  const over = known.filter((part) => free(part) < 0);
  if (over.length) {
    const worst = over.reduce((a, b) => (free(b) < free(a) ? b : a));
    const which = ranksText(joinedRuns(over.flatMap((part) => part.ranks)));
    const how = `${bytesText(worst.peak)} at the peak are ${bytesText(-free(worst))} more than the ${bytesText(worst.capacity)} of ${worst.device}.`;
    return element("p", { class: "verdict bad" }, element("b", {}, capital(named + "does not fit")), ` on ${which}: ${how}`);
  }
  const tight = known.reduce((a, b) => (free(b) / b.capacity < free(a) / a.capacity ? b : a));
  const rest = known.length < run.parts.length ? " The capacity of some devices is not known." : "";
  const left = `${bytesText(free(tight))} (${percentText(free(tight) / tight.capacity)}) stay free on the fullest ${tight.device}.`;
  return element("p", { class: "verdict good" }, element("b", {}, capital(named + "fits")), `: ${left}${rest}`);
}

function tile(title, values, note) {
  const [first, second] = values;
  const several = values.length > 1;
  const change = several && first.number && second.number ? second.number / first.number - 1 : null;
  return element("div", { class: "tile" }, element("h3", {}, title), values.map((value) => element("p", { class: several ? "value half" : "value" },
    value.text, several && element("small", {}, " " + value.name))),
    element("p", { class: "note" }, [change !== null && `${change >= 0 ? "+" : "−"}${Math.abs(change * 100).toFixed(1)}%`, note].filter(Boolean).join(" · ")));
}

function tiles() {
  const all = report.runs.map((run) => ({ name: run.name, ...runSums(run) }));
  const values = (pickNumber, show) => all.map((run) => ({ name: run.name, number: pickNumber(run), text: show(pickNumber(run), run) }));
  const main = all[0];
  return element("div", { class: "tiles" },
    main.peak !== null && tile("Peak memory", values((run) => run.peak || 0, bytesText), "of the fullest rank"),
    tile("Step", values((run) => run.seconds, secondsText), "of the slowest rank"),
    main.flops > 0 && tile("Compute", values((run) => run.flops / run.seconds / run.ranks, (rate) => flopsText(rate) + "/s"), "per rank"),
    tile("Sent", values((run) => run.sent, bytesText), main.ranks > 1 ? `by all ranks; ${bytesText(main.sent / main.ranks)} each` : "by this rank"));
}

// The fullest groups, as bars of their capacity.
function groupPeaks() {
  const run = report.runs[report.runs.length - 1];
  const known = run.parts.filter((part) => part.peak !== null);
  if (known.length < 2) return null;
  const top = Math.max(...known.map((part) => Math.max(part.peak, part.capacity || 0)));
  const sorted = [...known].sort((a, b) => b.peak - a.peak).slice(0, 8);
  const list = element("ul", { class: "groups", "aria-label": "Peak memory by group of ranks" }, sorted.map((part) => {
    const over = free(part) !== null && free(part) < 0;
    return element("li", {}, element("button", { type: "button", onclick: () => choose(part.ranks[0][0]) },
      element("span", { class: "who" }, ranksText(part.ranks, 2)),
      element("span", { class: "track" }, bar(part.peak / top, over ? "var(--bad)" : "var(--c0)"),
        part.capacity !== null && element("i", { class: "limit", style: `left:${(part.capacity / top) * 100}%` })),
      element("span", { class: over ? "what bad" : "what" }, element(over ? "b" : "span", {}, bytesText(part.peak)), part.capacity !== null && element("small", {}, ` of ${bytesText(part.capacity)}`))));
  }));
  const rest = known.length - sorted.length;
  return element("div", { class: "peaks" }, element("h3", {}, "Peak by group of ranks" + (report.runs.length > 1 ? `, ${run.name}` : "")),
    list, rest > 0 && element("p", { class: "quiet" }, `and ${plural(rest, "group")} with lower peaks`));
}

function showHeader() {
  const devices = new Map();
  for (const part of report.runs[0]?.parts || []) devices.set(part.device, (devices.get(part.device) || 0) + rankCount(part.ranks));
  const about = [...devices].map(([device, count]) => `${countText(count)} × ${device}`);
  if (report.runs.length) about.push(report.runs.map((run) => run.name).join(" and "));
  document.getElementById("top").append(
    element("div", { class: "titles" }, element("div", {}, element("h1", {}, report.title), element("p", { class: "quiet" }, about.join(" · "))), themeButton()),
    ...report.runs.map(verdict).filter(Boolean));
  if (report.runs.length) document.getElementById("top").append(tiles(), groupPeaks() || "");
}
