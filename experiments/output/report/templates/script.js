"use strict";

const scheme = document.querySelector("#scheme");
scheme.addEventListener("click", () => {
  const root = document.documentElement;
  const dark = getComputedStyle(root).colorScheme === "dark" ||
    (root.style.colorScheme === "" && matchMedia("(prefers-color-scheme: dark)").matches);
  root.style.colorScheme = dark ? "light" : "dark";
});

const wide = matchMedia("(min-width: 75rem)");
const unfold = () => { document.querySelector("#contents").open = wide.matches; };
wide.addEventListener("change", unfold);
unfold();

const valueOf = (row, column) => {
  const cell = row.cells[column];
  return cell.dataset.value ?? cell.textContent.trim();
};

// Numbers by value, words by the alphabet, what is empty last either way.
const compare = (sign) => ([a], [b]) => {
  if (a === "" || b === "") return (a === "") - (b === "");
  const difference = Number(a) - Number(b);
  return sign * (Number.isNaN(difference) ? a.localeCompare(b, "en", { numeric: true }) : difference);
};

// A first click sorts upwards, a second downwards, a third puts the rows back.
const NEXT = { none: "ascending", ascending: "descending", descending: "none" };

for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0];
  const original = [...body.rows];
  const headings = table.querySelectorAll("th[data-column]");
  for (const heading of headings) {
    heading.querySelector("button").addEventListener("click", () => {
      const order = NEXT[heading.ariaSort];
      for (const other of headings) other.ariaSort = "none";
      heading.ariaSort = order;
      const keyed = original.map((row) => [valueOf(row, heading.dataset.column), row]);
      if (order !== "none") keyed.sort(compare(order === "ascending" ? 1 : -1));
      body.append(...keyed.map(([, row]) => row));
    });
  }
}
