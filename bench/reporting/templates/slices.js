"use strict";
const root = document.documentElement, $ = (query) => document.querySelector(query);
const isDark = () => root.dataset.theme ? root.dataset.theme === "dark"
  : matchMedia("(prefers-color-scheme: dark)").matches;
function showTheme() { $("#theme").textContent = isDark() ? "Light" : "Dark"; }
try { const kept = localStorage.getItem("theme"); if (kept) root.dataset.theme = kept; }
catch { /* storage may be closed to files */ }
$("#theme").addEventListener("click", () => {
  root.dataset.theme = isDark() ? "light" : "dark";
  try { localStorage.setItem("theme", root.dataset.theme); } catch { /* not kept */ }
  showTheme();
});
showTheme();

// Sorting: down, up, and back to the order in which slices are ranked.
const heads = [...document.querySelectorAll("#all th")], body = $("#all tbody");
const ranked = body ? [...body.rows] : [];
heads.forEach((head, column) => head.querySelector("button")?.addEventListener("click", () => {
  const next = { none: "descending", descending: "ascending", ascending: "none" }[
    head.getAttribute("aria-sort") || "none"];
  for (const other of heads) other.removeAttribute("aria-sort");
  if (next !== "none") head.setAttribute("aria-sort", next);
  const key = (row) => {
    const text = row.cells[column].dataset.v, value = Number(text);
    return text === "" ? null : Number.isNaN(value) ? text : value;
  };
  const rows = [...ranked];
  if (next !== "none") {
    const sign = next === "ascending" ? 1 : -1;
    rows.sort((a, b) => {
      const [x, y] = [key(a), key(b)];
      if (x === null || y === null) return (x === null) - (y === null);
      return sign * (typeof x === "string" || typeof y === "string"
        ? String(x).localeCompare(String(y)) : x - y);
    });
  }
  body.append(...rows);
}));

// A link to a slice opens it.
function open() {
  const target = location.hash && document.getElementById(location.hash.slice(1));
  if (target?.tagName === "DETAILS") {
    target.open = true;
    target.scrollIntoView();
    target.querySelector("summary").focus({ preventScroll: true });
  }
}
addEventListener("hashchange", open);
open();
