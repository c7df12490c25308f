// The page: the header, the sections that have data, the bar that leads to them.

showHeader();
for (const show of [
  showMemory, showTimeline, showDifferences, showModules, showModel, showTraffic, showPlans, showNotes,
]) show();

if (report.runs.length && report.runs[0].parts.length) {
  document.getElementById("bar").append(rankPicker());
  choose(firstRank());
}
document.getElementById("bar").append(element("ul", {}, [...document.querySelectorAll("main > section")].map((node) =>
  element("li", {}, element("a", { href: "#" + node.id }, node.querySelector("h2").textContent)))));
