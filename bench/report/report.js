"use strict";
// every cell has its place in its column; what is empty has none and goes last, whichever way
function sort(header) {
  const body = header.closest("table").tBodies[0], column = header.cellIndex;
  const sign = header.getAttribute("aria-sort") === "ascending" ? -1 : 1;
  for (const one of header.parentNode.cells) one.setAttribute("aria-sort", "none");
  header.setAttribute("aria-sort", sign < 0 ? "descending" : "ascending");
  const place = row => row.cells[column].dataset.order;
  const rows = Array.from(body.rows);
  rows.sort((a, b) => (place(a) === "") - (place(b) === "") || sign * (place(a) - place(b)));
  body.append(...rows);
}
for (const button of document.querySelectorAll("thead button"))
  button.addEventListener("click", () => sort(button.closest("th")));
// what is folded would not be on paper
addEventListener("beforeprint", () => document.querySelectorAll("details").forEach(one => { one.open = true; }));
