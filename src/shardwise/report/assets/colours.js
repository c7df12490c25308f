// Colours: of categories and lanes from the style, of ranks by their number. Canvases need them resolved.

const category = (name) => `var(--c${report.categories.includes(name) ? report.categories.indexOf(name) : 7})`;
const laneColour = (name) => `var(--${["compute", "transfer", "wait"].includes(name) ? name : "compute"})`;

const probe = element("i", { hidden: true });
document.body.append(probe);

function resolved(colour) {
  probe.style.color = colour;
  return getComputedStyle(probe).color;
}

// The steps of hue and lightness that pictures of layouts take from rank to rank.
function rankColour(rank) {
  const hue = ((0.66 + rank * 0.7007) % 1) * 360;
  const light = 0.52 + ((0.1734 + rank * 0.5225) % 1) * 0.32;
  return `oklch(${light.toFixed(3)} 0.13 ${hue.toFixed(1)})`;
}

function isDark() {
  const chosen = document.documentElement.style.colorScheme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

const redraws = [];
const redrawAll = () => redraws.forEach((redraw) => redraw());
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redrawAll);

function themeButton() {
  const label = () => (isDark() ? "Light colours" : "Dark colours");
  const button = element("button", {
    id: "theme", type: "button", onclick: () => {
      document.documentElement.style.colorScheme = isDark() ? "light" : "dark";
      button.textContent = label();
      redrawAll();
    },
  }, label());
  redraws.push(() => { button.textContent = label(); });
  return button;
}
