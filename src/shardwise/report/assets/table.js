// Tables: sorted by a click on a heading, searched, cut to the first rows until all are asked for.
// A column has a title, a value to sort by, and perhaps a text or nodes to show; numbers stand right.

function makeTable({ caption, columns, rows = [], sort = null, down = true, most = 12, search = null }) {
  const state = { sort, down, all: false, query: "" };
  const isNumber = (column) => column.number !== false;
  const kind = (column) => [column.class, isNumber(column) && "number"].filter(Boolean).join(" ");
  const body = element("tbody");
  const empty = element("p", { class: "quiet", hidden: true }, "Nothing found.");
  const more = element("button", {
    type: "button", class: "more", onclick: () => { state.all = !state.all; render(); },
  });
  const field = search && element("input", {
    type: "search", placeholder: search, "aria-label": search, class: "search",
    oninput: () => { state.query = field.value.toLowerCase(); render(); },
  });

  function sortBy(place) {
    state.down = state.sort === place ? !state.down : isNumber(columns[place]);
    state.sort = place;
    render();
  }
  const headings = columns.map((column, place) => element("th", { scope: "col", class: kind(column) },
    sort === null ? column.title : element("button", { type: "button", onclick: () => sortBy(place) }, column.title)));

  function foundRows() {
    const texts = columns.filter((column) => !isNumber(column));
    const hit = (row) => texts.some((column) => String(column.value(row)).toLowerCase().includes(state.query));
    const found = state.query ? rows.filter(hit) : [...rows];
    if (state.sort === null) return found;
    const { value } = columns[state.sort];
    const sign = state.down ? -1 : 1;
    return found.sort((a, b) => (value(a) < value(b) ? -sign : value(a) > value(b) ? sign : 0));
  }
  // What stands after a bar has a width, so that bars line up.
  function content(column, row) {
    const shown = column.show ? column.show(row) : String(column.value(row));
    if (!Array.isArray(shown) || !isNumber(column)) return shown;
    return [shown[0], element("span", { class: "figure" }, shown[1])];
  }
  function line(row) {
    const [first, ...rest] = columns;
    return element("tr", {}, element("th", { scope: "row", class: kind(first) }, content(first, row)),
      rest.map((column) => element("td", { class: kind(column) }, content(column, row))));
  }
  function render() {
    const found = foundRows();
    headings.forEach((heading, place) => {
      if (place === state.sort) heading.setAttribute("aria-sort", state.down ? "descending" : "ascending");
      else heading.removeAttribute("aria-sort");
    });
    body.replaceChildren(...(state.all ? found : found.slice(0, most)).map(line));
    more.hidden = found.length <= most;
    more.textContent = state.all ? `Show the first ${most}` : `Show all ${countText(found.length)}`;
    empty.hidden = found.length > 0;
  }

  const frame = element("div", { class: "scroll", role: "region", "aria-label": caption }, element("table", {},
    element("caption", { class: "unseen" }, caption), element("thead", {}, element("tr", {}, headings)), body));
  onWidth(frame, () => { // what scrolls must be reached by keyboard
    if (frame.scrollWidth > frame.clientWidth) frame.setAttribute("tabindex", 0);
    else frame.removeAttribute("tabindex");
  });
  render();
  return {
    node: element("div", { class: "tabled" }, field, frame, empty, more),
    set(next) {
      rows = next;
      render();
    },
  };
}
