// The data, elements, the tooltip. Names of the data become text nodes and attributes, never HTML.

const report = JSON.parse(document.getElementById("data").textContent);
const words = (place) => report.strings[place];

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

const element = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
const drawn = (tag, attributes = {}, ...children) =>
  fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

function section(id, title, lead, ...children) {
  const heading = element("h2", { id: id + "-title" }, title);
  const node = element("section", { id, "aria-labelledby": id + "-title" }, heading,
    lead && element("p", { class: "lead" }, lead), children);
  document.getElementById("sections").append(node);
  return node;
}

const moduleName = (path) => path || "(model)";

// A path that may break after its dots.
const breakable = (path) => path.split(/(?<=\.)/).flatMap((part, k) => (k ? [element("wbr"), part] : [part]));

const tip = {
  node: document.getElementById("tip"),
  show(x, y, title, rows) {
    this.node.replaceChildren(
      element("strong", {}, title),
      element("dl", {}, rows.filter(Boolean).map(([name, value, colour]) => [
        element("dt", {}, colour && swatch(colour), name), element("dd", {}, value),
      ])),
    );
    this.node.hidden = false;
    const box = this.node.getBoundingClientRect();
    const left = x + 14 + box.width > innerWidth - 8 ? x - 14 - box.width : x + 14;
    this.node.style.left = Math.max(8, Math.min(left, innerWidth - box.width - 8)) + "px";
    this.node.style.top = Math.max(8, Math.min(y + 14, innerHeight - box.height - 8)) + "px";
  },
  hide() {
    this.node.hidden = true;
  },
};
addEventListener("scroll", () => tip.hide(), { passive: true });
addEventListener("keydown", (event) => event.key === "Escape" && tip.hide());

addEventListener("pointerdown", () => tip.hide(), { capture: true });

// A finger leaves when it is lifted; what it has touched stays shown until the next touch.
function onLeave(node, act) {
  node.addEventListener("pointerleave", (event) => event.pointerType !== "touch" && act());
  node.addEventListener("blur", act);
}
function onPoint(node, act) {
  node.addEventListener("pointermove", act);
  node.addEventListener("pointerdown", act);
}

let waiting = 0;
function say(sentence) {
  clearTimeout(waiting);
  waiting = setTimeout(() => { document.getElementById("said").textContent = sentence; }, 150);
}

function swatch(colour) {
  return element("i", { class: "swatch", style: `background:${colour}`, "aria-hidden": "true" });
}

// Calls a function with the width of an element, now and whenever it changes.
function onWidth(node, draw) {
  let last = 0;
  new ResizeObserver(([entry]) => {
    const width = Math.floor(entry.contentRect.width);
    if (width > 0 && width !== last) draw((last = width));
  }).observe(node);
}

// A canvas as sharp as the screen, and its context in CSS pixels.
function sized(canvas, width, height) {
  const density = devicePixelRatio || 1;
  canvas.width = Math.round(width * density);
  canvas.height = Math.round(height * density);
  canvas.style.height = height + "px";
  const context = canvas.getContext("2d");
  context.scale(density, density);
  return context;
}

function bar(part, colour = "var(--accent)") {
  const width = Math.max(0, Math.min(1, part || 0)) * 100;
  return element("span", { class: "bar", "aria-hidden": "true" },
    element("i", { style: `width:${width}%;background:${colour}` }));
}
