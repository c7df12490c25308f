// Tables: sorted by a click on a heading, searched, cut to the first rows until all are asked for.
// A column has a title, a value to sort by, and perhaps a text or a node to show; numbers stand right.

function makeTable({ caption, columns, rows = [], sort = null, most = 12, search = null, pick = null }) {
  const state = { sort, down: true, all: false, query: "" };
  const body = element("tbody");
  const more = element("button", { type: "button", class: "more", onclick: () => { state.all = !state.all; render(); } });
  const empty = element("p", { class: "quiet", hidden: true }, "Nothing found.");
  const headings = columns.map((column, place) => {
    const attributes = { scope: "col", class: column.class };
    if (sort === null) return element("th", attributes, column.title);
    return element("th", attributes, element("button", {
      type: "button", onclick: () => {
        state.down = state.sort === place ? !state.down : column.number !== false;
        state.sort = place;
        render();
      },
    }, column.title));
  });
  const field = search && element("input", {
    type: "search", placeholder: search, "aria-label": search, class: "search",
    oninput: () => { state.query = field.value.toLowerCase(); render(); },
  });

  // What stands after a bar has a width, so that bars line up.
  function cell(column, row) {
    const shown = column.show ? column.show(row) : String(column.value(row));
    const after = Array.isArray(shown) && column.number !== false;
    return after ? [shown[0], element("span", { class: "figure" }, shown[1])] : shown;
  }
  function render() {
    let found = rows;
    if (state.query) found = found.filter((row) => columns.some((c) => c.number === false && String(c.value(row)).toLowerCase().includes(state.query)));
    if (state.sort !== null) {
      const value = columns[state.sort].value;
      const order = (a, b) => (a < b ? -1 : a > b ? 1 : 0) * (state.down ? -1 : 1);
      found = [...found].sort((a, b) => order(value(a), value(b)));
    }
    headings.forEach((heading, place) => {
      if (place === state.sort) heading.setAttribute("aria-sort", state.down ? "descending" : "ascending");
      else heading.removeAttribute("aria-sort");
    });
    const shown = state.all ? found : found.slice(0, most);
    body.replaceChildren(...shown.map((row) => element("tr", pick ? { class: "picks", onclick: () => pick(row) } : {}, columns.map((column, place) =>
      element(place === 0 ? "th" : "td", { scope: place === 0 ? "row" : null, class: [column.class, column.number === false ? "" : "number"].join(" ") },
        cell(column, row))))));
    more.hidden = found.length <= most;
    more.textContent = state.all ? `Show the first ${most}` : `Show all ${countText(found.length)}`;
    empty.hidden = found.length > 0;
    return found;
  }

  columns.forEach((column, place) => column.number !== false && headings[place].classList.add("number"));
  const table = element("table", {}, element("caption", { class: "unseen" }, caption), element("thead", {}, element("tr", {}, headings)), body);
  const node = element("div", { class: "tabled" }, field, element("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": caption }, table), empty, more);
  render();
  return { node, set(next) { rows = next; render(); } };
}
