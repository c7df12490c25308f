// The first two runs compared, for the chosen rank.

// Rows of a name, two numbers, the function that writes them, and whether the row is a part of the one above.
function differenceRows(first, second) {
  const rows = [["Step", first.seconds, second.seconds, secondsText]];
  for (const name of new Set([...LANES, ...Object.keys(first.busy), ...Object.keys(second.busy)])) {
    rows.push([name, first.busy[name] || 0, second.busy[name] || 0, secondsText, true]);
  }
  const atPeak = ({ memory }, name) => {
    const series = memory?.series.find(([each]) => each === name);
    return series ? series[1][memory.peakAt] * memory.unit : 0;
  };
  if (first.peak !== null && second.peak !== null) {
    rows.push(["Peak memory", first.peak, second.peak, bytesText]);
    const known = [first, second].every((part) => report.categories.some((name) => atPeak(part, name)));
    for (const name of known ? report.categories : []) rows.push([name, atPeak(first, name), atPeak(second, name), bytesText, true]);
  }
  const rate = (part) => part.flops / (part.seconds || 1);
  rows.push(["Sent", first.sent, second.sent, bytesText], ["Received", first.received, second.received, bytesText]);
  if (first.flops && second.flops) rows.push(["Compute", rate(first), rate(second), (value) => flopsText(value) + "/s"]);
  return rows.filter(([, one, other]) => one || other);
}

// A bar to the left for less and to the right for more; half as much more fills it.
function differenceBar(part) {
  const wide = Math.min(Math.abs(part) / 0.5, 1) * 50;
  const style = `width:${wide}%;${part < 0 ? "right:50%" : "left:50%"}`;
  return element("span", { class: "swing", "aria-hidden": "true" },
    element("i", { style, class: part < 0 ? "less" : "more" }));
}

const signed = (value, show) => (value === 0 ? "0" : (value < 0 ? "−" : "+") + show(Math.abs(value)));
const changeText = (part) => signed(part, (size) => (size * 100).toFixed(1) + "%");

function showDifferences() {
  if (report.runs.length < 2) return;
  const [one, other] = report.runs;
  const change = (row) => (row[1] ? row[2] / row[1] - 1 : null);
  const table = makeTable({
    caption: `${one.name} and ${other.name}`, most: 40, columns: [
      {
        title: "", number: false, value: (row) => row[0],
        show: ([name, , , , under]) => (under ? element("span", { class: "under" }, name) : name),
      },
      { title: one.name, value: (row) => row[1], show: (row) => row[3](row[1]) },
      { title: other.name, value: (row) => row[2], show: (row) => row[3](row[2]) },
      {
        title: "Difference", value: (row) => row[2] - row[1], class: "wide",
        show: (row) => signed(row[2] - row[1], row[3]),
      },
      {
        title: "", value: change,
        show: (row) => (change(row) === null ? "–" : [differenceBar(change(row)), changeText(change(row))]),
      },
    ],
  });
  const title = capital(`${one.name} and ${other.name}`);
  section("differences", title, "The two runs of the chosen rank compared.", table.node);
  choice.changed.push(() => {
    const parts = [partOf(one), partOf(other)];
    table.set(parts[0] && parts[1] ? differenceRows(...parts) : []);
  });
}
