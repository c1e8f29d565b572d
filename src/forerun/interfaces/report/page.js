"use strict";
// Draws the figures of the page, lets tables be sorted, and says on the body how many figures are drawn (data-plots) and
// what went wrong (data-error).
(function () {
  var PRINT_PX = 680, SIZES = { "s": 1, "ms": 1e-3, "us": 1e-6, "min": 60, "h": 3600, "d": 86400, "days": 86400 };
  var figures = JSON.parse(document.getElementById("figures").textContent), charts = [];

  window.addEventListener("error", function (event) { failed(event.message); });
  window.addEventListener("unhandledrejection", function (event) { failed(String(event.reason)); });
  document.addEventListener("securitypolicyviolation", function (event) {
    failed("the page's policy forbids " + event.violatedDirective + " " + event.blockedURI);
  });

  function failed(message) {
    document.body.setAttribute("data-error", (document.body.getAttribute("data-error") || "") + message + "; ");
  }

  function drawAll(width) { charts.forEach(function (chart) { chart.redraw(width); }); }

  window.addEventListener("beforeprint", function () { drawAll(PRINT_PX); });
  window.addEventListener("afterprint", function () { drawAll(); });

  // What a cell sorts by: its number, in the unit of all such cells, or its text.
  function keyOf(cell) {
    var text = cell.textContent.trim(), match = /^[$x+≥ ]*(-?[\d,]*\.?\d+) ?([a-z]+)?/i.exec(text);
    return match ? parseFloat(match[1].replace(/,/g, "")) * (SIZES[match[2]] || 1) : text;
  }

  function order(a, b) {
    if (typeof a === "number" && typeof b === "number") { return a - b; }
    return typeof a === typeof b ? (a < b ? -1 : a > b ? 1 : 0) : typeof a === "number" ? -1 : 1;
  }

  function sortable(table) {
    var heads = [].slice.call(table.querySelectorAll("thead th")), body = table.tBodies[0];
    if (body.rows.length < 3) { return; }
    heads.forEach(function (head, column) {
      if (!head.textContent) { return; }
      var button = document.createElement("button");
      button.type = "button";
      button.className = "sort";
      button.textContent = head.textContent;
      head.textContent = "";
      head.appendChild(button);
      button.addEventListener("click", function () {
        var up = head.getAttribute("aria-sort") !== "ascending";
        var rows = [].slice.call(body.rows).map(function (row) { return [keyOf(row.cells[column]), row]; });
        rows.sort(function (a, b) { return up ? order(a[0], b[0]) : order(b[0], a[0]); });
        rows.forEach(function (row) { body.appendChild(row[1]); });
        heads.forEach(function (each) { each.removeAttribute("aria-sort"); });
        head.setAttribute("aria-sort", up ? "ascending" : "descending");
      });
    });
  }

  [].forEach.call(document.querySelectorAll(".table table"), sortable);
  figures.forEach(function (figure, number) {
    try {
      charts.push(Chart.live(document.getElementById("plot-" + number), figure, figure.height));
    } catch (error) { failed(String(error)); }
  });
  document.body.setAttribute("data-plots", charts.length + " of " + figures.length);
})();
