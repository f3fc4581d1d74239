"use strict";
// numbers by size, words by the alphabet; what says nothing goes last, whichever way
function compare(a, b) {
  const x = Number(a), y = Number(b);
  return Number.isNaN(x) || Number.isNaN(y) ? a.localeCompare(b) : x - y;
}
function sort(header) {
  const table = header.closest("table"), body = table.tBodies[0];
  const down = header.getAttribute("aria-sort") === "ascending", column = header.cellIndex;
  for (const one of table.tHead.rows[0].cells) one.setAttribute("aria-sort", "none");
  header.setAttribute("aria-sort", down ? "descending" : "ascending");
  const key = row => row.cells[column].dataset.key;
  const rows = Array.from(body.rows);
  rows.sort((a, b) => {
    if (key(a) === "" || key(b) === "") return (key(a) === "") - (key(b) === "");
    return down ? compare(key(b), key(a)) : compare(key(a), key(b));
  });
  body.append(...rows);
}
for (const button of document.querySelectorAll("thead button"))
  button.addEventListener("click", () => sort(button.closest("th")));
// what is folded would not be on paper
addEventListener("beforeprint", () => document.querySelectorAll("details").forEach(one => { one.open = true; }));
