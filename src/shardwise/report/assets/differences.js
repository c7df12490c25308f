// The first two runs compared, for the chosen rank.

function differenceRows(first, second) {
  const rows = [["Step", first.seconds, second.seconds, secondsText]];
  const peakOf = (part, name) => {
    const series = part.memory?.series.find(([each]) => each === name);
    return series ? series[1][part.memory.peakAt] * part.memory.unit : 0;
  };
  for (const name of new Set([...LANES, ...Object.keys(first.busy), ...Object.keys(second.busy)])) {
    rows.push([`  ${name}`, first.busy[name] || 0, second.busy[name] || 0, secondsText]);
  }
  if (first.peak !== null && second.peak !== null) {
    rows.push(["Peak memory", first.peak, second.peak, bytesText]);
    for (const name of report.categories) {
      const pair = [peakOf(first, name), peakOf(second, name)];
      if (pair[0] || pair[1]) rows.push([`  ${name}`, ...pair, bytesText]);
    }
  }
  rows.push(["Sent", first.sent, second.sent, bytesText], ["Received", first.received, second.received, bytesText]);
  const rate = (part) => part.flops / (part.seconds || 1);
  rows.push(["Compute", rate(first), rate(second), (value) => flopsText(value) + "/s"]);
  return rows.filter(([, a, b]) => a || b);
}

function differenceBar(part) {
  const wide = Math.min(Math.abs(part) / 0.5, 1) * 50;
  const style = `width:${wide}%;${part < 0 ? "right:50%" : "left:50%"}`;
  return element("span", { class: "swing", "aria-hidden": "true" }, element("i", { style, class: part < 0 ? "less" : "more" }));
}

function showDifferences() {
  if (report.runs.length < 2) return;
  const [one, other] = report.runs;
  const change = (row) => (row[1] ? row[2] / row[1] - 1 : null);
  const sign = (value) => (value < 0 ? "−" : "+");
  const table = makeTable({
    caption: `${one.name} and ${other.name}`, most: 40, columns: [
      { title: "", number: false, value: (row) => row[0], show: (row) => (row[0].startsWith("  ") ? element("span", { class: "under" }, row[0].trim()) : row[0]) },
      { title: one.name, value: (row) => row[1], show: (row) => row[3](row[1]) },
      { title: other.name, value: (row) => row[2], show: (row) => row[3](row[2]) },
      { title: "Difference", value: (row) => row[2] - row[1], class: "wide", show: (row) => (row[2] === row[1] ? "0" : sign(row[2] - row[1]) + row[3](Math.abs(row[2] - row[1]))) },
      { title: "", value: change, show: (row) => (change(row) === null ? "–" : [differenceBar(change(row)), change(row) === 0 ? "0%" : `${sign(change(row))}${Math.abs(change(row) * 100).toFixed(1)}%`]) },
    ],
  });
  section("differences", capital(`${one.name} and ${other.name}`), "The two runs of the chosen rank compared.", table.node);
  choice.changed.push(() => {
    const parts = [partOf(one), partOf(other)];
    table.set(parts[0] && parts[1] ? differenceRows(...parts) : []);
  });
}
