"use strict";
// Draws a figure as SVG. A figure has the schema of plotly.js; this draws what Forerun's plots use of it: bars, lines, markers,
// stacked areas, axes of numbers, logarithms and names, legends, notes, labels under the pointer, and zoom along x.
var Chart = (function () {
  var SVG = "http://www.w3.org/2000/svg", NARROW_PX = 560, NEAR_PX = 14, DARK = "#1a1a1a", WHITE = "#ffffff";
  var INK = "var(--ink)", GRID = "var(--grid)", PAPER = "var(--paper)";  // colours that the style of the page gives
  var DASHES = { dash: "8 4", dot: "2 3", dashdot: "8 3 2 3" };
  var SIGNS = { "/": ["M-2,2 l4,-4 M0,8 l8,-8 M6,10 l4,-4"], "\\": ["M-2,6 l4,4 M0,0 l8,8 M6,-2 l4,4"], "|": ["M4,0 v8"],
    "-": ["M0,4 h8"], "x": ["M0,0 l8,8 M8,0 l-8,8"], "+": ["M4,0 v8 M0,4 h8"], ".": ["M3,4 a1,1 0 1,0 2,0 a1,1 0 1,0 -2,0"] };
  var made = 0, pen = document.createElement("canvas").getContext("2d");

  function plain(text) {
    return String(text).replace(/<br>/g, "\n").replace(/<\/?extra>/g, "").replace(/&lt;/g, "<").replace(/&gt;/g, ">")
      .replace(/&quot;/g, '"').replace(/&#x27;/g, "'").replace(/&amp;/g, "&");
  }
  // Black and white of a figure are ink and paper of the page; all other colours can be seen on both.
  function shade(colour) { return { "#000000": INK, "#1a1a1a": INK, "#ffffff": PAPER }[colour] || colour; }
  function each(value, i) { return Array.isArray(value) ? value[i] : value; }
  function put(parent, name, attributes) {
    var made = document.createElementNS(SVG, name);
    for (var key in attributes) { made.setAttribute(key, attributes[key]); }
    parent.appendChild(made);
    return made;
  }
  function say(parent, text, x, y, attributes) {
    var lines = plain(text).split("\n").filter(Boolean), node = put(parent, "text", Object.assign({ x: x, y: y }, attributes));
    lines.forEach(function (line, i) {
      put(node, "tspan", { x: x, dy: i ? "1.15em" : "0" }).textContent = line;
    });
    return node;
  }
  function widthOf(text, size) {
    pen.font = size + "px system-ui, sans-serif";
    return Math.max.apply(null, plain(text).split("\n").map(function (line) { return pen.measureText(line).width; }));
  }
  function short(text, size, most) {
    return plain(text).split("\n").map(function (line) {
      if (widthOf(line, size) <= most) { return line; }
      while (line.length > 3 && widthOf(line + "…", size) > most) { line = line.slice(0, -1); }
      return line + "…";
    }).join("\n");
  }
  // Breaks lines that are too wide behind a space or a hyphen, while the label has at most so many lines.
  function broken(text, size, most, lines) {
    var out = plain(text).split("\n");
    for (var i = 0; i < out.length && out.length < lines; i += 1) {
      var line = out[i], at = line.length;
      if (widthOf(line, size) <= most) { continue; }
      while (at > 0 && !(/[ -]/.test(line[at - 1]) && widthOf(line.slice(0, at).trim(), size) <= most)) { at -= 1; }
      if (at > 0) { out.splice(i, 1, line.slice(0, at).trim(), line.slice(at)); }
    }
    return out.join("\n");
  }
  function number(value, digits) {
    if (typeof value !== "number") { return plain(value); }
    if (digits === undefined) { return value.toLocaleString("en", { maximumSignificantDigits: 6 }); }
    return value.toLocaleString("en", { maximumSignificantDigits: digits });
  }

  // -- axes ------------------------------------------------------------------------------------------------------------
  function namesOn(figure, side) {
    var said = figure.layout[side + "axis"], names = (said.categoryarray || []).slice();
    figure.data.forEach(function (trace) {
      trace[side].forEach(function (one) {
        if (typeof one === "string" || said.type === "category") { if (names.indexOf(String(one)) < 0) { names.push(String(one)); } }
      });
    });
    return names;
  }
  function extent(figure, side, sums) {
    var low = Infinity, high = -Infinity, bars = false;
    function take(value) { if (value < low) { low = value; } if (value > high) { high = value; } }
    figure.data.forEach(function (trace, t) {
      var lying = trace.orientation === "h", isLength = trace.type === "bar" && (lying ? side === "x" : side === "y");
      trace[side].forEach(function (value, i) {
        if (isLength) { bars = true; var from = sums[t][i]; take(from); take(from + value); }
        else if (trace.stackgroup && side === "y") { bars = true; take(0); take(sums[t][i] + value); }
        else if (trace.type === "bar") { var half = (trace.width || 0.8) / 2; take(value - half); take(value + half); }
        else { take(value); }
      });
    });
    return low > high ? [0, 1, false] : [low, high, bars];
  }
  function axisOf(figure, side, sums, view) {
    var said = figure.layout[side + "axis"], names = namesOn(figure, side), log = said.type === "log";
    var range = view || said.range, low, high;
    if (names.length) { low = -0.5; high = names.length - 0.5; if (!view && !said.range) { range = [low, high]; } }
    if (!range) {
      var found = extent(figure, side, sums);
      low = found[0]; high = found[1];
      if (log) { low = Math.log10(low); high = Math.log10(high); }
      var room = 0.06 * (high - low) || 0.5;
      range = [low - room, high + room];
      if (!log && (said.rangemode === "tozero" || found[2]) && low >= 0) { range[0] = 0; }
    }
    var places = {};
    names.forEach(function (name, i) { places[name] = i; });
    return { said: said, names: names, log: log, range: range, places: places,
      reversed: said.autorange === "reversed",
      value: function (raw) { return names.length ? places[String(raw)] : log ? Math.log10(raw) : raw; } };
  }
  function ticksOf(axis, most) {
    var low = axis.range[0], high = axis.range[1], said = axis.said, out = [];
    if (axis.names.length) { return axis.names.map(function (name, i) { return [i, name]; }); }
    if (said.tickvals) {
      said.tickvals.forEach(function (at, i) { out.push([axis.log ? Math.log10(at) : at, said.ticktext[i]]); });
      return out.filter(function (tick) { return tick[0] >= low - 1e-9 && tick[0] <= high + 1e-9; });
    }
    if (axis.log) {
      var digits = high - low > 2.5 ? [1] : [1, 2, 5];
      for (var power = Math.floor(low); power <= high; power += 1) {
        digits.forEach(function (digit) { out.push([Math.log10(digit) + power, number(digit * Math.pow(10, power))]); });
      }
      return out.filter(function (tick) { return tick[0] >= low && tick[0] <= high; });
    }
    var rough = (high - low) / most, size = Math.pow(10, Math.floor(Math.log10(rough)));
    var step = [1, 2, 5, 10].map(function (k) { return k * size; }).filter(function (k) { return k >= rough; })[0];
    for (var at = Math.ceil(low / step - 1e-9) * step; at <= high + 1e-9 * step; at += step) {
      out.push([at, number(Math.abs(at) < step / 1e6 ? 0 : at)]);
    }
    return out;
  }

  // -- marks -----------------------------------------------------------------------------------------------------------
  function startsOf(figure) {
    var below = {}, stacked = figure.layout.barmode === "stack";
    return figure.data.map(function (trace) {
      var lying = trace.orientation === "h", at = trace[lying ? "y" : "x"], length = trace[lying ? "x" : "y"];
      if (trace.type !== "bar" && !trace.stackgroup) { return []; }
      return length.map(function (value, i) {
        if (trace.base) { return each(trace.base, i); }
        if (!stacked && !trace.stackgroup) { return 0; }
        // Areas share their places along x, of which several may be equal; bars of one category stand on each other.
        var place = trace.stackgroup ? i : at[i], start = below[place] || 0;
        below[place] = start + value;
        return start;
      });
    });
  }
  function paint(defs, id, colour, sign) {
    if (!sign) { return colour; }
    var name = id + "-" + sign.charCodeAt(0) + colour.replace("#", "");
    if (!defs.querySelector("#" + name)) {
      var pattern = put(defs, "pattern", { id: name, width: 8, height: 8, patternUnits: "userSpaceOnUse" });
      put(pattern, "rect", { width: 8, height: 8, fill: colour });
      put(pattern, "path", { d: SIGNS[sign][0], stroke: WHITE, "stroke-width": 1.4, fill: "none", opacity: 0.75 });
    }
    return "url(#" + name + ")";
  }
  function symbol(name, x, y, size) {
    var r = size / 2, points = [];
    if (name === "diamond") { return "M" + x + "," + (y - r) + " l" + r + "," + r + " l" + -r + "," + r + " l" + -r + "," + -r + " z"; }
    if (name === "square") { return "M" + (x - r) + "," + (y - r) + " h" + size + " v" + size + " h" + -size + " z"; }
    if (name === "triangle-up") { return "M" + x + "," + (y - r) + " l" + r + "," + size + " h" + -size + " z"; }
    if (name === "x") { return "M" + (x - r) + "," + (y - r) + " l" + size + "," + size + " M" + (x + r) + "," + (y - r) + " l" + -size + "," + size; }
    if (name === "line-ns-open") { return "M" + x + "," + (y - r) + " v" + size; }
    if (name === "star") {
      for (var i = 0; i < 10; i += 1) {
        var far = i % 2 ? 0.45 * r : 1.2 * r, turn = Math.PI * i / 5;
        points.push((x + far * Math.sin(turn)).toFixed(1) + "," + (y - far * Math.cos(turn)).toFixed(1));
      }
      return "M" + points.join(" L") + " z";
    }
    return "M" + (x - r) + "," + y + " a" + r + "," + r + " 0 1,0 " + size + ",0 a" + r + "," + r + " 0 1,0 " + -size + ",0";
  }
  function words(trace, i, x, y) {
    var values = { x: x, y: y, text: trace.text ? trace.text[i] : "", customdata: trace.customdata ? trace.customdata[i] : "" };
    var name = trace.name ? plain(trace.name) : "";
    if (trace.hoverinfo === "skip") { return null; }
    if (trace.hoverinfo === "name") { return name; }
    if (!trace.hovertemplate) { return (name ? name + ": " : "") + number(trace.orientation === "h" ? y : x) + ", " + number(trace.orientation === "h" ? x : y); }
    var text = trace.hovertemplate.replace(/%\{(\w+)(?:\[(\d+)\])?(?::\.(\d)[~\w]*)?\}/g, function (_, key, place, digits) {
      var value = place === undefined ? values[key] : values[key][+place];
      return number(value, digits === undefined ? undefined : +digits);
    });
    return plain(text) + (trace.hovertemplate.indexOf("<extra>") < 0 && name ? "\n" + name : "");
  }

  function draw(box, figure, width, height, view) {
    var id = "chart" + (made += 1), layout = figure.layout, narrow = width < NARROW_PX, size = narrow ? 11 : 13;
    var sums = startsOf(figure), X = axisOf(figure, "x", sums, view), Y = axisOf(figure, "y", sums, null), marks = [];
    box.textContent = "";
    var shown = figure.data.filter(function (trace) { return trace.name && trace.showlegend !== false; });
    if (layout.showlegend !== false && (shown.length > 1 || layout.showlegend)) { legend(box, shown, size, id); }
    var svg = put(box, "svg", { "class": "chart", width: width, height: height, viewBox: "0 0 " + width + " " + height,
      "font-size": size, "font-family": "system-ui, -apple-system, 'Segoe UI', Roboto, Arial, sans-serif", fill: INK });
    var defs = put(svg, "defs", {});
    var yTicks = ticksOf(Y, Math.max(2, height / 60)), most = narrow ? 0.36 * width : 0.4 * width;
    var wide = Math.max.apply(null, [20].concat(yTicks.map(function (tick) { return Math.min(most, widthOf(tick[1], size - 1)); })));
    var yTitle = layout.yaxis.title.text, top = 12, bottom = height - (X.said.title.text ? 46 : 26);
    if (X.names.some(function (name) { return name.indexOf("<br>") >= 0; })) { bottom -= size; }
    var left = wide + 12 + (yTitle ? size + 8 : 0), right = width - (narrow ? 10 : 24);
    function px(value) { return left + (value - X.range[0]) / (X.range[1] - X.range[0]) * (right - left); }
    function py(value) {
      var share = (value - Y.range[0]) / (Y.range[1] - Y.range[0]);
      return Y.reversed ? top + share * (bottom - top) : bottom - share * (bottom - top);
    }
    put(put(defs, "clipPath", { id: id }), "rect", { x: left, y: top - 2, width: Math.max(1, right - left), height: Math.max(1, bottom - top + 4) });
    var free = -Infinity;
    ticksOf(X, Math.max(2, (right - left) / 80)).forEach(function (tick) {
      var x = px(tick[0]), half = widthOf(tick[1], size - 1) / 2 + 3;
      if (X.said.showgrid !== false && !X.names.length) { put(svg, "path", { d: "M" + x + "," + top + " V" + bottom, stroke: GRID }); }
      var middle = Math.min(Math.max(x, half), width - half);
      if (middle - half < free) { return; }
      free = middle + half;
      say(svg, tick[1], middle, bottom + size + 4, { "text-anchor": "middle", "font-size": size - 1 });
    });
    var above = Infinity;
    yTicks.sort(function (a, b) { return py(b[0]) - py(a[0]); }).forEach(function (tick) {
      var y = py(tick[0]), room = Y.names.length ? (bottom - top) / Y.names.length / (1.15 * (size - 1)) : 1;
      var label = short(broken(tick[1], size - 1, most, Math.floor(room)), size - 1, most), lines = label.split("\n").length;
      if (Y.said.showgrid !== false && !Y.names.length) { put(svg, "path", { d: "M" + left + "," + y + " H" + right, stroke: GRID }); }
      if (y + lines * size / 2 > above) { return; }
      above = y - lines * size / 2;
      say(svg, label, left - 7, y + size / 3 - (lines - 1) * 0.58 * size, { "text-anchor": "end", "font-size": size - 1 });
    });
    if (X.said.title.text) { say(svg, short(X.said.title.text, size, width - 10), (left + right) / 2, height - 6, { "text-anchor": "middle" }); }
    if (yTitle) {
      var middle = (top + bottom) / 2;
      say(svg, short(yTitle, size, bottom - top + 20), size, middle, { "text-anchor": "middle", transform: "rotate(-90 " + size + " " + middle + ")" });
    }
    if (X.said.zeroline || layout.xaxis.zeroline) { put(svg, "path", { d: "M" + px(0) + "," + top + " V" + bottom, stroke: INK }); }
    var inside = put(svg, "g", { "clip-path": "url(#" + id + ")" }), free_ = put(svg, "g", {});
    figure.data.forEach(function (trace, t) {
      var context = { svg: inside, defs: defs, id: id, X: X, Y: Y, px: px, py: py, marks: marks, size: size, layout: layout, clip: [left, right] };
      if (trace.type === "bar") { bars(context, trace, sums[t]); }
      else if (trace.stackgroup) { area(context, trace, sums[t]); }
      else { context.svg = trace.cliponaxis === false ? free_ : inside; lines(context, trace); }
    });
    (layout.annotations || []).forEach(function (note) {
      var x = px(X.value(note.x)), y = py(Y.value(note.y));
      put(free_, "path", { d: "M" + (x + note.ax) + "," + (y + note.ay) + " L" + x + "," + y, stroke: INK });
      say(free_, note.text, x + note.ax, y + note.ay + 4, { "text-anchor": note.ax < 0 ? "end" : "start", "font-weight": 600, stroke: PAPER, "stroke-width": 3, "paint-order": "stroke" });
    });
    return { svg: svg, marks: marks, left: left, right: right, top: top, bottom: bottom, X: X, px: px,
      at: function (x) { return X.range[0] + (x - left) / (right - left) * (X.range[1] - X.range[0]); } };
  }
  function bars(c, trace, starts) {
    var lying = trace.orientation === "h", look = trace.marker || {}, border = look.line || {}, drawn = [];
    var half = (trace.width || 1 - (c.layout.bargap === undefined ? 0.2 : c.layout.bargap)) / 2;
    trace.x.forEach(function (_, i) {
      var place = lying ? c.Y.value(trace.y[i]) : c.X.value(trace.x[i]), length = lying ? trace.x[i] : trace.y[i];
      var a = lying ? [c.px(starts[i]), c.py(place - half)] : [c.px(place - half), c.py(starts[i])];
      var b = lying ? [c.px(starts[i] + length), c.py(place + half)] : [c.px(place + half), c.py(starts[i] + length)];
      var x = Math.min(a[0], b[0]), y = Math.min(a[1], b[1]), w = Math.abs(a[0] - b[0]), h = Math.abs(a[1] - b[1]);
      if (x > c.clip[1] || x + w < c.clip[0]) { return; }
      var colour = each(look.color, i) || "#0072B2", sign = look.pattern ? each(look.pattern.shape, i) : "";
      var edge = each(border.width, i);
      put(c.svg, "rect", { x: x.toFixed(2), y: y.toFixed(2), width: Math.max(w, 0.4).toFixed(2), height: Math.max(h, 0.4).toFixed(2),
        fill: paint(c.defs, c.id, colour, sign), stroke: edge ? shade(each(border.color, i) || WHITE) : "none", "stroke-width": edge || 0 });
      c.marks.push({ kind: "box", x: x, y: y, w: w, h: h, say: words.bind(null, trace, i, trace.x[i], trace.y[i]) });
      var text = trace.text ? plain(trace.text[i]) : "", room = c.size - 1;
      while (text && room > 8 && widthOf(text, room) > w - 4) { room -= 1; }
      if (text && h > room && widthOf(text, room) <= w - 2) { drawn.push([text, x + w / 2, y + h / 2 + room / 3, room, trace.insidetextfont ? each(trace.insidetextfont.color, i) : on(colour), colour, sign]); }
    });
    drawn.forEach(function (one) {
      var wide = widthOf(one[0], one[3]) + 6;
      if (one[6]) { put(c.svg, "rect", { x: one[1] - wide / 2, y: one[2] - one[3], width: wide, height: one[3] + 4, rx: 2, fill: one[5] }); }
      say(c.svg, one[0], one[1], one[2], { "text-anchor": "middle", "font-size": one[3], fill: one[4] });
    });
  }
  function on(colour) {
    var part = [1, 3, 5].map(function (i) { return parseInt(colour.slice(i, i + 2), 16) / 255; });
    return 0.299 * part[0] + 0.587 * part[1] + 0.114 * part[2] > 0.6 ? DARK : WHITE;
  }
  function area(c, trace, starts) {
    var over = "", under = "", n = trace.x.length;
    for (var i = 0; i < n; i += 1) {
      var x = c.px(c.X.value(trace.x[i])).toFixed(2), next = c.px(c.X.value(trace.x[Math.min(i + 1, n - 1)])).toFixed(2);
      var low = c.py(starts[i]).toFixed(2), high = c.py(starts[i] + trace.y[i]).toFixed(2);
      over += (i ? " L" : "M") + x + "," + high + " L" + next + "," + high;
      under = " L" + next + "," + low + " L" + x + "," + low + under;
    }
    put(c.svg, "path", { d: over + under + " z", fill: paint(c.defs, c.id, trace.fillcolor, trace.fillpattern && trace.fillpattern.shape) });
    c.marks.push({ kind: "run", trace: trace, xs: trace.x.map(function (value) { return c.px(c.X.value(value)); }), held: true });
  }
  function lines(c, trace) {
    var mode = trace.mode || "lines", line = trace.line || {}, look = trace.marker || {}, path = "", last = null;
    var at = trace.x.map(function (value, i) { return [c.px(c.X.value(value)), c.py(c.Y.value(trace.y[i]))]; });
    if (mode.indexOf("lines") >= 0) {
      at.forEach(function (p) {
        if (last && line.shape === "hv") { path += " H" + p[0].toFixed(2); }
        if (last && line.shape === "vh") { path += " V" + p[1].toFixed(2); }
        path += (last ? " L" : "M") + p[0].toFixed(2) + "," + p[1].toFixed(2);
        last = p;
      });
      put(c.svg, "path", { d: path, fill: "none", stroke: shade(line.color || DARK), "stroke-width": line.width || 2, "stroke-dasharray": DASHES[line.dash] || "none" });
    }
    var has = mode.indexOf("markers") >= 0;
    at.forEach(function (p, i) {
      var open = /-open$/.test(look.symbol || "") || look.symbol === "x", colour = shade(look.color || line.color || DARK);
      if (has) {
        put(c.svg, "path", { d: symbol(look.symbol, p[0], p[1], look.size || 6), fill: open ? "none" : colour, opacity: look.opacity || 1,
          stroke: open ? colour : PAPER, "stroke-width": open ? (look.line && look.line.width) || 2 : 0.5 });
        c.marks.push({ kind: "dot", x: p[0], y: p[1], r: (look.size || 6) / 2, say: words.bind(null, trace, i, trace.x[i], trace.y[i]) });
      }
      if (mode.indexOf("text") >= 0) {
        var up = trace.textposition.indexOf("top") === 0;
        say(c.svg, trace.text[i], p[0], p[1] + (up ? -10 : c.size + 8), { "text-anchor": "middle", "font-size": c.size - 1 });
      }
    });
    if (!has && trace.hoverinfo !== "skip") {
      c.marks.push({ kind: "run", trace: trace, xs: at.map(function (p) { return p[0]; }), held: line.shape === "hv" });
    }
  }
  function legend(box, traces, size, id) {
    var list = document.createElement("div");
    list.className = "legend";
    traces.forEach(function (trace) {
      var item = document.createElement("span"), svg = put(item, "svg", { width: 26, height: 14, "aria-hidden": "true" }), look = trace.marker || {};
      var colour = shade(trace.fillcolor || each(look.color, 0) || (trace.line && trace.line.color) || DARK), defs = put(svg, "defs", {});
      var sign = trace.fillpattern ? trace.fillpattern.shape : look.pattern ? each(look.pattern.shape, 0) : "";
      if (trace.type === "bar" || trace.stackgroup) {
        if (look.pattern && Array.isArray(look.pattern.shape)) { sign = look.pattern.shape.filter(Boolean)[0] || ""; }
        put(svg, "rect", { x: 2, y: 1, width: 22, height: 12, fill: paint(defs, id + "l", colour, sign) });
      } else {
        if (trace.mode.indexOf("lines") >= 0) { put(svg, "path", { d: "M0,7 H26", stroke: shade(trace.line.color || colour), "stroke-width": 2, "stroke-dasharray": DASHES[trace.line.dash] || "none" }); }
        var open = /-open$/.test(look.symbol || "") || look.symbol === "x";
        if (trace.mode.indexOf("markers") >= 0) { put(svg, "path", { d: symbol(look.symbol, 13, 7, 9), fill: open ? "none" : colour, stroke: open ? colour : "none", "stroke-width": 2 }); }
      }
      item.appendChild(document.createTextNode(plain(trace.name).replace(/\n/g, " ")));
      list.appendChild(item);
    });
    list.style.fontSize = size + "px";
    box.appendChild(list);
  }

  // -- the pointer -----------------------------------------------------------------------------------------------------
  function pointed(shown, x, y) {
    var best = null, near = NEAR_PX, texts = [];
    shown.marks.forEach(function (mark) {
      if (mark.kind === "dot") {
        var far = Math.hypot(mark.x - x, mark.y - y) - mark.r;
        if (far < near) { near = far; best = mark; }
      }
    });
    if (!best) {
      shown.marks.forEach(function (mark) {
        if (mark.kind === "box" && x >= mark.x - 1 && x <= mark.x + mark.w + 1 && y >= mark.y - 1 && y <= mark.y + mark.h + 1) { best = mark; }
      });
    }
    if (best) { return best.say(); }
    shown.marks.forEach(function (mark) {
      if (mark.kind !== "run" || x < shown.left || x > shown.right) { return; }
      var i = 0;
      while (i + 1 < mark.xs.length && (mark.held ? mark.xs[i + 1] <= x : Math.abs(mark.xs[i + 1] - x) <= Math.abs(mark.xs[i] - x))) { i += 1; }
      var text = words(mark.trace, i, mark.trace.x[i], mark.trace.y[i]);
      if (text) { texts.push(text.replace(/^([^\n]*)\n(.*)$/, "$2: $1")); }
    });
    return texts.length ? texts.reverse().join("\n") : null;
  }

  function live(box, figure, height) {
    var shown = null, view = null, from = null, width = 0, tip = document.createElement("div"), tools = document.createElement("p");
    var fixed = figure.layout.xaxis.fixedrange || namesOn(figure, "x").length > 0;
    tip.className = "tip"; tools.className = "tools";
    function button(text, act) {
      var made = document.createElement("button");
      made.type = "button"; made.textContent = text; made.addEventListener("click", act);
      tools.appendChild(made);
      return made;
    }
    var whole = fixed ? null : button("Whole plot", function () { view = null; redraw(); });
    button("Save as PNG", savePng);
    button("Save as SVG", function () { give("data:image/svg+xml;charset=utf-8," + encodeURIComponent(alone()), ".svg"); });
    function redraw(wanted) {
      width = box.clientWidth;
      shown = draw(box, figure, Math.max(240, Math.floor(wanted || width)), height, view);
      box.appendChild(tools); box.appendChild(tip);
      tip.style.display = "none";
      if (whole) { whole.hidden = !view; }
      shown.svg.addEventListener("pointermove", move);
      shown.svg.addEventListener("pointerleave", function () { tip.style.display = "none"; });
      if (!fixed) {
        shown.svg.addEventListener("pointerdown", function (event) { from = place(event)[0]; });
        shown.svg.addEventListener("pointerup", zoom);
        shown.svg.addEventListener("dblclick", function () { view = null; redraw(); });
      }
    }
    function place(event) {
      var at = shown.svg.getBoundingClientRect();
      return [event.clientX - at.left, event.clientY - at.top];
    }
    function move(event) {
      var at = place(event), text = pointed(shown, at[0], at[1]);
      tip.style.display = text ? "block" : "none";
      if (!text) { return; }
      tip.textContent = text;
      tip.style.left = Math.max(0, Math.min(at[0] + 14, box.clientWidth - tip.offsetWidth - 2)) + "px";
      tip.style.top = shown.svg.offsetTop + Math.max(0, at[1] - tip.offsetHeight - 10) + "px";
    }
    function zoom(event) {
      var to = place(event)[0], ends = [from, to].map(function (x) { return Math.max(shown.left, Math.min(shown.right, x)); });
      if (from === null || Math.abs(ends[0] - ends[1]) < 8) { from = null; return; }
      view = [shown.at(Math.min.apply(null, ends)), shown.at(Math.max.apply(null, ends))];
      from = null;
      redraw();
    }
    function give(address, ending) {
      var link = document.createElement("a");
      link.href = address; link.download = (figure.name || "plot") + ending; link.click();
    }
    function alone() {  // the drawing as a file of its own, in the colours that it has here
      var style = getComputedStyle(box), copy = shown.svg.cloneNode(true), paper = document.createElementNS(SVG, "rect");
      paper.setAttribute("width", "100%"); paper.setAttribute("height", "100%"); paper.setAttribute("fill", "var(--paper)");
      copy.insertBefore(paper, copy.firstChild);
      return new XMLSerializer().serializeToString(copy).replace(/var\((--\w+)\)/g, function (_, name) { return style.getPropertyValue(name).trim(); });
    }
    function savePng() {
      var image = new Image();
      image.onload = function () {
        var canvas = document.createElement("canvas"), brush = canvas.getContext("2d");
        canvas.width = 2 * image.width; canvas.height = 2 * image.height;
        brush.drawImage(image, 0, 0, canvas.width, canvas.height);
        give(canvas.toDataURL("image/png"), ".png");
      };
      image.src = "data:image/svg+xml;charset=utf-8," + encodeURIComponent(alone());
    }
    new ResizeObserver(function () {
      if (box.clientWidth && Math.abs(box.clientWidth - width) > 1) { redraw(); }
    }).observe(box);
    redraw();
    return { redraw: redraw };
  }
  return { live: live };
})();
