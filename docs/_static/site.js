// On phones a table is shown row by row: each cell then says which column it is of. Paths break where they may.
document.addEventListener("DOMContentLoaded", () => {
  for (const table of document.querySelectorAll("article table.docutils")) {
    const titles = [...table.querySelectorAll("thead th")].map((cell) => cell.textContent.trim());
    for (const row of table.querySelectorAll("tbody tr")) {
      [...row.cells].forEach((cell, column) => cell.setAttribute("data-title", titles[column] ?? ""));
    }
    table.classList.add("has-titles");
    if (table.classList.contains("autosummary")) continue;
    for (const code of table.querySelectorAll("code .pre")) {
      code.innerHTML = code.innerHTML.replace(/\/(?=\w)|(?<=\w)[._](?=\w)/g, "$&<wbr>");
    }
  }
});
