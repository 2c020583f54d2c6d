"use strict";

const root = document.documentElement;
const prefersDark = matchMedia("(prefers-color-scheme: dark)").matches;
document.querySelector("#scheme").addEventListener("click", () => {
  const isDark = root.style.colorScheme ? root.style.colorScheme === "dark" : prefersDark;
  root.style.colorScheme = isDark ? "light" : "dark";
});

const words = ["failed", "missing", "n.a."];
const valueOf = (cell) => {
  const text = cell.textContent.trim();
  const number = parseFloat(text);
  return words.includes(text) ? "" : cell.tagName === "TD" && !Number.isNaN(number) ? number : text;
};

// Numbers by value, words by the alphabet, what is empty last either way.
const compare = (a, b, sign) => {
  if (a === "" || b === "") return (a === "") - (b === "");
  const difference = Number(a) - Number(b);
  return sign * (Number.isNaN(difference) ? a.localeCompare(b, "en", { numeric: true }) : difference);
};

// A first click sorts upwards, a second downwards, a third puts the rows back.
const NEXT = { none: "ascending", ascending: "descending", descending: "none" };

for (const table of document.querySelectorAll("table")) {
  const original = [...table.tBodies[0].rows];
  const headings = [...table.querySelectorAll("th[scope=col]")];
  headings.forEach((heading, column) => {
    const button = document.createElement("button");
    button.append(...heading.childNodes);
    heading.append(button);
    heading.ariaSort = "none";
    button.addEventListener("click", () => {
      const order = NEXT[heading.ariaSort];
      for (const other of headings) other.ariaSort = other === heading ? order : "none";
      const sign = { none: 0, ascending: 1, descending: -1 }[order];
      const sorted = original.toSorted((a, b) => sign && compare(valueOf(a.cells[column]), valueOf(b.cells[column]), sign));
      table.tBodies[0].append(...sorted);
    });
  });
}
