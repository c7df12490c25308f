// The model as a tree; each parameter with its boxes, coloured by the rank that holds them.

const MOST_CHILDREN = 16; // of a module, until more are asked for

// The two dims to draw: those that are cut, then the first ones. The first of them goes down, the second across.
function drawnDims(shape, boxes) {
  const cut = shape.map((size, dim) => dim).filter((dim) => boxes.some(([, , , sizes]) => sizes[dim] !== shape[dim]));
  const rest = shape.map((size, dim) => dim).filter((dim) => !cut.includes(dim));
  return [...cut, ...rest].slice(0, 2).sort((a, b) => a - b);
}

function boxWords([runs, holders, offsets, sizes, boxes]) {
  const ranges = sizes.map((size, dim) => `${countText(offsets[dim])}–${countText(offsets[dim] + size - 1)}`);
  return [`${ranksText(runs)}${holders > 1 ? ` (${countText(holders)})` : ""}`, [
    ["elements", ranges.length ? ranges.join(" × ") : "scalar"], boxes > 1 && ["boxes", countText(boxes)],
    boxes === 1 && holders > 1 && ["copies", countText(holders)],
  ]];
}

function boxPicture(name, shape, layout, placed) {
  const [wide, high] = [136, 48];
  const dims = drawnDims(shape, layout.boxes);
  const [down, across] = dims.length === 2 ? dims : [null, dims[0]];
  const part = (value, dim) => (dim === null || dim === undefined || !shape[dim] ? null : value[dim] / shape[dim]);
  const svg = drawn("svg", { class: "boxes", viewBox: `0 0 ${wide} ${high}`, width: wide, height: high, role: "img", "aria-label": `${name}: ${placed || plural(layout.count, "box")}` });
  const height = down === null ? 18 : high;
  svg.append(drawn("rect", { x: 0.5, y: (high - height) / 2 + 0.5, width: wide - 1, height: height - 1, class: "empty" }));
  layout.boxes.forEach((box, place) => {
    const [runs, holders, offsets, sizes] = box;
    const x = (part(offsets, across) ?? 0) * wide;
    const y = (part(offsets, down) ?? 0) * height + (high - height) / 2;
    const width = (part(sizes, across) ?? 1) * wide;
    const tall = (part(sizes, down) ?? 1) * height;
    const everywhere = box[4] === 1 && holders > 1;
    const rect = drawn("rect", { x, y, width: Math.max(width - (width > 4 ? 0.8 : 0), 0.4), height: Math.max(tall - (tall > 4 ? 0.8 : 0), 0.4), style: `fill:${everywhere ? "var(--shared)" : rankColour(box[4] > 1 ? place : runs[0][0])}` });
    rect.addEventListener("pointermove", (event) => tip.show(event.clientX, event.clientY, ...boxWords(box)));
    rect.addEventListener("pointerleave", () => tip.hide());
    svg.append(rect);
    if (width > 30 && tall > 13) {
      const label = everywhere ? `${countText(holders)} copies` : runs.length === 1 && runs[0][0] === runs[0][1] ? String(runs[0][0]) : runs.length === 1 ? `${runs[0][0]}–${runs[0][1]}` : "";
      svg.append(drawn("text", { class: everywhere && "shared", x: x + width / 2, y: y + tall / 2 + 3.5, "text-anchor": "middle" }, label));
    }
  });
  return svg;
}

function parameterRow([name, shape, dtype, bytes, place, placed], path) {
  const layout = report.layouts[place];
  return element("li", { class: "parameter" }, boxPicture(name, shape, layout, placed), element("div", {},
    element("p", { class: "name" }, path === undefined ? name : [path, name].filter(Boolean).join(".")),
    element("p", { class: "quiet" }, [shape.map(countText).join(" × ") || "scalar", dtype, bytesText(bytes)].join(" · ")),
    element("p", { class: "quiet" }, placed || plural(layout.count, "box"), layout.left > 0 && `; the first ${layout.boxes.length} boxes are drawn`)));
}

function modelTree() {
  const root = { path: "", label: "", kind: "", parameters: [], children: new Map(), bytes: 0, count: 0 };
  for (const [path, kind, parameters] of report.modules) {
    let node = root;
    for (const label of path ? path.split(".") : []) {
      if (!node.children.has(label)) node.children.set(label, { path: node.path ? `${node.path}.${label}` : label, label, kind: "", parameters: [], children: new Map(), bytes: 0, count: 0 });
      node = node.children.get(label);
    }
    node.kind = kind;
    node.parameters = parameters;
  }
  const add = (node) => {
    node.bytes = node.parameters.reduce((sum, parameter) => sum + parameter[3], 0);
    node.count = node.parameters.length;
    for (const child of node.children.values()) {
      add(child);
      node.bytes += child.bytes;
      node.count += child.count;
    }
  };
  add(root);
  return root;
}

// Children are made when a node is opened for the first time.
function treeNode(node, open) {
  const inside = element("ul");
  const summary = element("summary", {}, element("span", { class: "name" }, node.label || "(model)"), element("span", { class: "kind" }, node.kind),
    element("span", { class: "size" }, node.count ? `${plural(node.count, "parameter")}, ${bytesText(node.bytes)}` : "no parameters"));
  const details = element("details", { open }, summary, inside);
  const make = () => {
    if (!details.open || inside.childElementCount) return;
    const children = [...node.children.values()];
    const items = (some) => some.map((child) => element("li", {}, treeNode(child, false)));
    inside.append(...node.parameters.map((parameter) => parameterRow(parameter)), ...items(children.slice(0, MOST_CHILDREN)));
    const rest = children.slice(MOST_CHILDREN);
    if (!rest.length) return;
    const more = element("li", {}, element("button", { type: "button", class: "more", onclick: () => more.replaceWith(...items(rest)) }, `Show ${countText(rest.length)} more`));
    inside.append(more);
  };
  details.addEventListener("toggle", make);
  make();
  return details;
}

function showModel() {
  if (!report.modules.length) return;
  const root = modelTree();
  const tree = element("div", { class: "tree" }, treeNode(root, true));
  const found = element("ul", { class: "tree found", hidden: true });
  const count = element("p", { class: "quiet", role: "status" });
  const field = element("input", {
    type: "search", class: "search", placeholder: "Search a parameter", "aria-label": "Search a parameter", oninput: () => {
      const query = field.value.trim().toLowerCase();
      tree.hidden = query !== "";
      found.hidden = query === "";
      count.textContent = "";
      if (!query) return found.replaceChildren();
      const hits = report.modules.flatMap(([path, , parameters]) => parameters.filter((parameter) => `${path}.${parameter[0]}`.toLowerCase().includes(query)).map((parameter) => [parameter, path]));
      count.textContent = hits.length > 40 ? `The first 40 of ${countText(hits.length)} parameters` : plural(hits.length, "parameter");
      return found.replaceChildren(...hits.slice(0, 40).map(([parameter, path]) => parameterRow(parameter, path)));
    },
  });
  section("model", "Model", `${plural(root.count, "parameter")}, ${bytesText(root.bytes)}. Each picture shows the boxes of a parameter, coloured by rank; what all ranks have is grey.`, field, count, tree, found);
}
