// Sharding plans compared, and notes.

function planVerdict(plan) {
  if (plan.fits === null) return element("span", { class: "badge unknown" }, "not known");
  return element("span", { class: plan.fits ? "badge good" : "badge bad" }, plan.fits ? "fits" : "does not fit");
}

function planName(plan) {
  const chosen = plan.chosen && element("span", { class: "badge chosen" }, "chosen");
  const narrow = element("small", { class: "narrow", "aria-hidden": "true" }, planVerdict(plan), " " + plan.reason);
  return [plan.name, chosen, narrow];
}

function showPlans() {
  if (!report.plans.length) return;
  const top = Math.max(...report.plans.map((plan) => Math.max(plan.peak || 0, plan.capacity || 0)), 1);
  const slow = Math.max(...report.plans.map((plan) => plan.seconds || 0), 1e-12);
  const colour = (plan) => (plan.fits === false ? "var(--bad)" : "var(--c0)");
  const orNone = (value, show) => (value === null ? "–" : show());
  const table = makeTable({
    caption: "Plans", rows: report.plans, sort: 1, down: false, most: 30, columns: [
      { title: "Plan", number: false, value: (plan) => plan.name, show: planName },
      {
        title: "Step", value: (plan) => plan.seconds ?? Infinity,
        show: ({ seconds }) => orNone(seconds, () => [bar(seconds / slow, "var(--compute)"), secondsText(seconds)]),
      },
      {
        title: "Peak", value: (plan) => plan.peak ?? Infinity,
        show: (plan) => orNone(plan.peak, () => [bar(plan.peak / top, colour(plan)), bytesText(plan.peak)]),
      },
      {
        title: "Capacity", value: (plan) => plan.capacity ?? Infinity, class: "wide",
        show: (plan) => orNone(plan.capacity, () => bytesText(plan.capacity)),
      },
      { title: "Memory", number: false, value: (plan) => String(plan.fits), show: planVerdict, class: "wide" },
      { title: "Why", number: false, value: (plan) => plan.reason, class: "why" },
    ],
  });
  section("plans", "Plans", null, table.node);
}

function showNotes() {
  if (!report.notes.length) return;
  section("notes", "Notes", null, element("ul", {}, report.notes.map((note) => element("li", {}, note))));
}
