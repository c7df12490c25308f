// Sharding plans compared, and notes.

function planVerdict(plan) {
  const [kind, text] = plan.fits === null ? ["unknown", "not known"] : plan.fits ? ["good", "fits"] : ["bad", "does not fit"];
  return element("span", { class: `badge ${kind}` }, text);
}

function showPlans() {
  if (!report.plans.length) return;
  const top = Math.max(...report.plans.map((plan) => Math.max(plan.peak || 0, plan.capacity || 0)), 1);
  const slow = Math.max(...report.plans.map((plan) => plan.seconds || 0), 1e-12);
  const table = makeTable({
    caption: "Plans", rows: report.plans, sort: 1, most: 30, columns: [
      { title: "Plan", number: false, value: (plan) => plan.name, show: (plan) => [plan.name, plan.chosen && element("span", { class: "badge chosen" }, "chosen"), element("small", { class: "narrow", "aria-hidden": "true" }, plan.reason)] },
      { title: "Step", value: (plan) => -(plan.seconds ?? Infinity), show: (plan) => (plan.seconds === null ? "–" : [bar(plan.seconds / slow, "var(--compute)"), secondsText(plan.seconds)]) },
      { title: "Peak", value: (plan) => plan.peak ?? -1, show: (plan) => (plan.peak === null ? "–" : [bar(plan.peak / top, plan.fits === false ? "var(--bad)" : "var(--c0)"), bytesText(plan.peak)]) },
      { title: "Capacity", value: (plan) => plan.capacity ?? -1, show: (plan) => (plan.capacity === null ? "–" : bytesText(plan.capacity)), class: "wide" },
      { title: "Memory", number: false, value: (plan) => String(plan.fits), show: planVerdict },
      { title: "Why", number: false, value: (plan) => plan.reason, class: "why" },
    ],
  });
  section("plans", "Plans", null, table.node);
}

function showNotes() {
  if (report.notes.length) section("notes", "Notes", null, element("ul", {}, report.notes.map((note) => element("li", {}, note))));
}
