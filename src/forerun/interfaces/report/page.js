"use strict";
// Draws the figures of the page, and says on the body how many are drawn (data-plots) and what went wrong (data-error).
(function () {
  var NARROW_PX = 560, PRINT_PX = 680;
  var figures = JSON.parse(document.getElementById("figures").textContent);
  var zooming = ["zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d"];
  var drawn = 0;

  window.addEventListener("error", function (event) { failed(event.message); });
  window.addEventListener("unhandledrejection", function (event) { failed(String(event.reason)); });
  document.addEventListener("securitypolicyviolation", function (event) {
    failed("the page's policy forbids " + event.violatedDirective + " " + event.blockedURI);
  });

  function failed(message) {
    document.body.setAttribute("data-error", (document.body.getAttribute("data-error") || "") + message + "; ");
  }

  function element(number) { return document.getElementById("plot-" + number); }

  // A narrow page gives a plot less margin, and the legend more height.
  function layoutFor(number, width) {
    var box = element(number), layout = JSON.parse(JSON.stringify(figures[number].layout));
    var narrow = width < NARROW_PX;
    if (box.basePx === undefined) { box.basePx = parseFloat(box.style.height); }
    layout.width = width;
    layout.height = box.basePx + (narrow && layout.showlegend !== false ? 24 * Math.ceil(figures[number].data.length / 2) : 0);
    if (narrow) {
      layout.font = Object.assign({}, layout.font, { size: 11 });
      layout.margin = Object.assign({}, layout.margin, { l: 8, r: 8 });
      if (layout.title) { layout.title = { text: "" }; }
    }
    box.style.height = layout.height + "px";
    return layout;
  }

  // plotly's own buttons would offer to send the figure to a server.
  function configFor(layout) {
    var fixed = layout.xaxis.fixedrange && layout.yaxis.fixedrange;
    return {
      displaylogo: false,
      displayModeBar: layout.width >= NARROW_PX,
      showSendToCloud: false,
      plotlyServerURL: "",
      modeBarButtons: fixed ? [["toImage"]] : [["toImage"], zooming]
    };
  }

  function draw(number, width) {
    var layout = layoutFor(number, width);
    return Plotly.react(element(number), figures[number].data, layout, configFor(layout));
  }

  function drawAll(width) {
    figures.forEach(function (_, number) { draw(number, width || element(number).clientWidth); });
  }

  var waiting = null;
  window.addEventListener("resize", function () {
    clearTimeout(waiting);
    waiting = setTimeout(drawAll, 150);
  });
  window.addEventListener("beforeprint", function () { drawAll(PRINT_PX); });
  window.addEventListener("afterprint", function () { drawAll(); });

  figures.forEach(function (_, number) {
    draw(number, element(number).clientWidth).then(function () {
      drawn += 1;
      document.body.setAttribute("data-plots", drawn + " of " + figures.length);
    }, function (error) { failed(String(error)); });
  });
  if (!figures.length) { document.body.setAttribute("data-plots", "0 of 0"); }
})();
