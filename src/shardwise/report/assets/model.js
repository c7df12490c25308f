// The model as a tree; each parameter with its boxes, coloured by the rank that holds them.

const MOST_CHILDREN = 16; // of a module, until more are asked for
const MOST_FOUND = 40; // parameters

// The two dims to draw: those that are cut, then the first ones. The first of them goes down, the second across.
function drawnDims(shape, boxes) {
  const dims = shape.map((size, dim) => dim);
  const cut = dims.filter((dim) => boxes.some(([, , , sizes]) => sizes[dim] !== shape[dim]));
  const rest = dims.filter((dim) => !cut.includes(dim));
  return [...cut, ...rest].slice(0, 2).sort((a, b) => a - b);
}

function boxTip([runs, holders, offsets, sizes, boxes]) {
  const ranges = sizes.map((size, dim) => `${countText(offsets[dim])}–${countText(offsets[dim] + size - 1)}`);
  return [ranksText(runs), [
    ["elements", ranges.join(" × ") || "scalar"],
    boxes > 1 && ["boxes", countText(boxes)],
    boxes === 1 && holders > 1 && ["copies", countText(holders)],
  ]];
}

function boxLabel([runs, holders, , , boxes]) {
  if (boxes === 1 && holders > 1) return `${countText(holders)} copies`;
  if (runs.length > 1) return "";
  const [[first, last]] = runs;
  return first === last ? String(first) : `${first}–${last}`;
}

function boxPicture(shape, layout, description) {
  const [wide, high] = [136, 48];
  const dims = drawnDims(shape, layout.boxes);
  const [down, across] = dims.length === 2 ? dims : [undefined, dims[0]];
  const height = down === undefined ? 18 : high;
  const above = (high - height) / 2;
  const part = (values, dim, whole) => (shape[dim] ? values[dim] / shape[dim] : whole);
  const less = (length) => Math.max(length > 4 ? length - 0.8 : length, 0.4); // a gap between boxes
  const svg = drawn("svg", {
    class: "boxes", viewBox: `0 0 ${wide} ${high}`, width: wide, height: high, role: "img", "aria-label": description,
  }, drawn("rect", { x: 0.5, y: above + 0.5, width: wide - 1, height: height - 1, class: "empty" }));
  layout.boxes.forEach((box, place) => {
    const [runs, holders, offsets, sizes, boxes] = box;
    const x = part(offsets, across, 0) * wide;
    const y = part(offsets, down, 0) * height + above;
    const [width, tall] = [part(sizes, across, 1) * wide, part(sizes, down, 1) * height];
    const shared = boxes === 1 && holders > 1;
    const colour = shared ? "var(--shared)" : rankColour(boxes > 1 ? place : runs[0][0]);
    const rect = drawn("rect", { x, y, width: less(width), height: less(tall), style: `fill:${colour}` });
    onPoint(rect, (event) => tip.show(event.clientX, event.clientY, ...boxTip(box)));
    onLeave(rect, () => tip.hide());
    svg.append(rect);
    if (width < 30 || tall < 13) return;
    const at = { x: x + width / 2, y: y + tall / 2 + 3.5, "text-anchor": "middle", class: shared && "shared" };
    svg.append(drawn("text", at, boxLabel(box)));
  });
  return svg;
}

function parameterItem([name, shape, dtype, bytes, place, placed], path = "") {
  const layout = report.layouts[place];
  const description = placed || plural(layout.count, "shard");
  const facts = [shape.map(countText).join(" × ") || "scalar", dtype, bytesText(bytes)].join(" · ");
  return element("li", { class: "parameter" }, boxPicture(shape, layout, `${name}: ${description}`), element("div", {},
    element("p", { class: "name" }, breakable(path ? `${path}.${name}` : name)),
    element("p", { class: "quiet" }, facts),
    element("p", { class: "quiet" }, description,
      layout.left > 0 && `; ${layout.boxes.length} of ${countText(layout.boxes.length + layout.left)} boxes are drawn`)));
}

function treeOf(modules) {
  const make = (path, label) => ({ path, label, kind: "", parameters: [], children: new Map(), bytes: 0, count: 0 });
  const root = make("", "");
  for (const [path, kind, parameters] of modules) {
    let node = root;
    for (const label of path ? path.split(".") : []) {
      if (!node.children.has(label)) node.children.set(label, make(node.path ? `${node.path}.${label}` : label, label));
      node = node.children.get(label);
    }
    Object.assign(node, { kind, parameters });
  }
  const addUp = (node) => {
    const children = [...node.children.values()];
    children.forEach(addUp);
    node.bytes = node.parameters.reduce((sum, parameter) => sum + parameter[3], 0);
    node.bytes += children.reduce((sum, child) => sum + child.bytes, 0);
    node.count = node.parameters.length + children.reduce((sum, child) => sum + child.count, 0);
  };
  addUp(root);
  return root;
}

// What is inside is made when a node is opened for the first time.
function treeNode(node, open = false) {
  const inside = element("ul");
  const size = node.count ? `${plural(node.count, "parameter")}, ${bytesText(node.bytes)}` : "no parameters";
  const details = element("details", { open }, element("summary", {},
    element("span", { class: "name" }, moduleName(node.label)),
    element("span", { class: "kind" }, node.kind),
    element("span", { class: "size" }, size)), inside);
  const make = () => {
    if (!details.open || inside.childElementCount) return;
    const items = [...node.children.values()].map((child) => () => element("li", {}, treeNode(child)));
    inside.append(...node.parameters.map((parameter) => parameterItem(parameter)));
    inside.append(...items.slice(0, MOST_CHILDREN).map((item) => item()));
    const rest = items.slice(MOST_CHILDREN);
    if (!rest.length) return;
    const more = element("li", {}, element("button", {
      type: "button", class: "more", onclick: () => more.replaceWith(...rest.map((item) => item())),
    }, `Show ${countText(rest.length)} more`));
    inside.append(more);
  };
  details.addEventListener("toggle", make);
  make();
  return details;
}

function foundParameters(query) {
  return report.modules.flatMap(([path, , parameters]) => parameters
    .filter(([name]) => `${path}.${name}`.toLowerCase().includes(query))
    .map((parameter) => [parameter, path]));
}

function showModel() {
  if (!report.modules.length) return;
  const root = treeOf(report.modules);
  const tree = element("div", { class: "tree" }, treeNode(root, true));
  const found = element("ul", { class: "tree found", hidden: true });
  const count = element("p", { class: "quiet", role: "status" });
  const field = element("input", {
    type: "search", class: "search", placeholder: "Search a parameter", "aria-label": "Search a parameter",
    oninput: () => {
      const query = field.value.trim().toLowerCase();
      const hits = query ? foundParameters(query) : [];
      tree.hidden = query !== "";
      found.hidden = query === "";
      found.replaceChildren(...hits.slice(0, MOST_FOUND).map((hit) => parameterItem(...hit)));
      const first = hits.length > MOST_FOUND ? `The first ${MOST_FOUND} of ` : "";
      count.textContent = query ? first + plural(hits.length, "parameter") : "";
    },
  });
  const lead = `${plural(root.count, "parameter")}, ${bytesText(root.bytes)}. Each picture shows the boxes of a `
    + "parameter, coloured by rank; boxes that several ranks hold are grey.";
  section("model", "Model", lead, field, count, tree, found);
}
